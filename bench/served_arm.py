"""An arm that is a server: the same prompts as text, the harness's own clock, and what it says of its drafts."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .measured import Cycles, Measured, Reported, ids_sha256
from .record import Limits, Prompt
from .served import Said, of_counters, of_response
from .server import Answer, Server, ServerError, ask

ASKED: dict[str, dict[str, Any]] = {
    "vllm": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "sglang": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
    },
    "llamacpp": {"cache_prompt": False},
}
"""By `owned_by` of the model: what else a request asks for, so that every burst says how many tokens it has, and no
part of a prompt comes from a cache (with `_SALTED`, by a salt of its own)."""

_SALTED = ("vllm", "sglang")


def text_prompt(
    name: str, category: str, text: str, task: Any = "text", expected: str | None = None, tests: str | None = None
) -> Prompt:
    """A prompt for servers, which have the tokenizer: `ids` are the text's bytes, which only order and hash it."""
    return Prompt(name, category, tuple(text.encode()), text, task, expected, tests)


@dataclass(frozen=True)
class Served:
    """One model of a server.

    engine: as it names itself in its list of models, or None. extra: goes into every request as it is.
    alone: whether no other request is made at the same time, so that counters of the server are those of this one.
    """

    server: Server
    model: str
    name: str
    engine: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = True
    clock: Callable[[], float] = time.perf_counter
    exact: bool = False

    @classmethod
    def of(cls, server: Server, model: str | None, name: str, **more: Any) -> Served:
        """The model of that name, or the only one.

        Raises:
            ServerError: the server cannot be reached, has no such model, or several.
        """
        try:
            listed = {each["id"]: each.get("owned_by") for each in server.models()}
        except ServerError:
            if model is None:
                raise
            listed = {}  # not every server can list them; what else is wrong the first request shows
        if model is None and len(listed) == 1:
            model = next(iter(listed))
        if model is None:
            raise ServerError(
                f"{server.base_url} has {len(listed)} models: {', '.join(sorted(listed)) or 'none'}. One of them is "
                "measured: name it with --model."
            )
        return cls(server, model, name, listed.get(model), **more)

    def describe(self) -> str:
        """For a record; without the key."""
        said = f"{self.model} of {self.server.base_url}"
        return said + (f" ({self.engine})" if self.engine else "")

    def body(self, prompt: Prompt, limits: Limits) -> dict[str, Any]:
        """What is sent."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": limits.max_tokens,
            "temperature": limits.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        options = (("top_p", limits.top_p), ("top_k", limits.top_k), ("ignore_eos", limits.ignore_eos))
        body |= {name: value for name, value in options if value}
        if limits.seed is not None:
            body["seed"] = limits.seed
        if self.engine in _SALTED:
            body["cache_salt"] = secrets.token_hex(8)
        return body | ASKED.get(self.engine or "", {}) | dict(self.extra)

    def run(self, prompt: Prompt, limits: Limits) -> Measured:
        before = self.server.counters() if self.alone else None
        answer = ask(self.server, self.body(prompt, limits), self.clock)
        after = self.server.counters() if before else None
        return self.measured(prompt, limits, answer, of_counters(before, after))

    def measured(self, prompt: Prompt, limits: Limits, answer: Answer, counted: Said | None = None) -> Measured:
        """counted: what counters say, where the response says nothing."""
        generated, notes = _generated(self.server, answer), []
        if _count(answer.usage.get("completion_tokens")) is None:
            notes.append(f"tokens are the {answer.chunks} chunks with text: the server does not say how many there are")
        if answer.reasoned:
            notes.append("the first token is one of the reasoning")
        if limits.ignore_eos and generated < limits.max_tokens:
            notes.append(f"the server does not honour ignore_eos: {generated} of {limits.max_tokens} tokens")
        asked = _count(answer.usage.get("prompt_tokens"))
        if asked is None:
            notes.append("the server does not say how many tokens the prompt has")
        said = of_response(answer.parts, generated, self.alone) or counted
        if said is not None:
            notes += [f"acceptance: {said.definition}", *said.doubts(generated)]
            if said.drafted is None:
                notes.append(
                    f"mean acceptance length {1 + said.accepted / said.cycles:.2f}; it does not say its drafts"
                )
        details = answer.usage.get("prompt_tokens_details")
        return Measured(
            prompt=prompt.name,
            arm=self.name,
            prompt_tokens=asked or 0,
            prompt_sha256=ids_sha256(prompt.ids),
            generated=generated,
            output_sha256=hashlib.sha256(answer.text.encode()).hexdigest(),
            first_s=answer.end_s if answer.first_s is None else answer.first_s,
            end_s=answer.end_s,
            text=answer.text,
            finish_reason=answer.finish_reason,
            cached_tokens=(_count(details.get("cached_tokens")) or 0) if isinstance(details, dict) else 0,
            block_size=said.block_size if said else None,
            cycles=_bursts(answer, generated),
            reported=said.reported(generated) if said else Reported(generated=generated),
            mode="server",
            notes=tuple(notes),
        )


def _generated(server: Server, answer: Answer) -> int:
    """Tokens by the server's word, else chunks with text.

    Raises:
        ServerError: an answer without any.
    """
    generated = _count(answer.usage.get("completion_tokens")) or answer.chunks
    if generated < 1:
        raise ServerError(
            f"{server.base_url} gave an answer without text and counted no token ({answer.finish_reason}). There is "
            "nothing to measure: try the prompt by hand, and look at the chat template."
        )
    return generated


def _bursts(answer: Answer, generated: int) -> Cycles | None:
    """Without the first one, unless the server says that it has several tokens."""
    known: Sequence[int] = [count for count in answer.counted if count is not None]
    if not answer.at_s:
        return None
    if len(known) < len(answer.at_s) or any(after <= before for before, after in pairwise([0, *known])):
        return Cycles(tuple(answer.at_s[1:]))
    emitted = [after - before for before, after in pairwise([0, *known])]
    emitted[-1] += generated - known[-1]  # an end marker is counted and has no text
    skip = 1 if emitted[0] == 1 else 0
    return Cycles(tuple(answer.at_s[skip:]), tuple(emitted[skip:]))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
