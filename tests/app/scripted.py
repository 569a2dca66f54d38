"""A scripted model behind the real engine thread: the same contract, no MLX.

`Script` says what each turn does; `FakeEngine` is the production thread over it, so pilots exercise the messages,
the cancelling and the coalescing that users get.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflash_mlx.app.backend import Backend, Pair, Progress, TooLarge
from dflash_mlx.app.engine import EngineThread
from dflash_mlx.app.jobs import Ask, Job, LoadModel, Race
from dflash_mlx.app.messages import Event

BLOCK_SIZE = 4
LARGEST_BLOCK = 16
PREFILL_STEP_SIZE = 7


@dataclass
class FakeStats:
    cycles: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    host_syncs: int = 0
    rechecked: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    blocks: Counter[int] = field(default_factory=Counter)

    @property
    def mean_acceptance_length(self) -> float | None:
        drafting = self.cycles - self.plain_steps
        return 1 + self.accepted / drafting if drafting else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclass
class FakeTimings:
    """Fixed clock: prefill 0.5 s, then 0.1 s per cycle, so that pictures do not change."""

    tokens: int = 0
    cycles: int = 0
    prompt_tps: float | None = 80.0
    draft_prefill_s: float = 0.0

    @property
    def prefill_s(self) -> float | None:
        return 0.5

    @property
    def decode_s(self) -> float | None:
        return 0.1 * self.cycles if self.tokens else None

    @property
    def ttft_s(self) -> float | None:
        return 0.5 if self.tokens else None

    @property
    def total_s(self) -> float | None:
        return 0.5 + 0.1 * self.cycles if self.tokens else None

    @property
    def decode_tps(self) -> float | None:
        return (self.tokens - 1) / (0.1 * self.cycles) if self.cycles else 1e6  # a rate of one token is nonsense

    @property
    def request_tps(self) -> float | None:
        return self.tokens / (0.5 + 0.1 * self.cycles) if self.tokens else None


@dataclass
class FakeResponse:
    text: str
    finish_reason: str | None
    generation_tokens: int
    cycle: int
    accepted: int
    drafted: int
    stats: FakeStats
    timings: FakeTimings
    mode: str = "dflash"
    block_size: int = BLOCK_SIZE
    notes: tuple[str, ...] = ()
    peak_memory: float = 0.25
    recomputed_tokens: int = 0
    token: int = 0
    from_draft: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pipelined: bool = False
    draft_vocabulary: int | None = None


@dataclass
class Answer:
    """One turn of the script."""

    text: str = "Hello."
    reasoning: str | None = None
    """Comes before the text, between markers, as a model that thinks writes it."""
    depths: tuple[int | None, ...] = (3, 1, 0, 2)
    """Accepted drafts of cycle 1, 2, ...; repeated. None is a plain step."""
    cycle_s: float = 0.0
    """Time one cycle takes."""
    gate: threading.Event | None = None
    """Wait for it before the first cycle."""
    finish: str = "stop"
    mode: str = "dflash"
    fail_after: int | None = None
    """Raise `error` after this many tokens."""
    error: Exception = field(default_factory=lambda: RuntimeError("scripted"))
    refuse: Exception | None = None
    """Raised before anything runs, as for an argument that is out of range."""
    notes: tuple[str, ...] = ()
    prefill_chunks: int = 1
    on_prefill: Callable[[int], None] = lambda chunk: None

    def written(self, *, opened: bool = False) -> str:
        """All that the model writes; `opened`: the prompt has the opening marker already."""
        if self.reasoning is None:
            return self.text
        return f"{'' if opened else THINK}{self.reasoning}{THOUGHT}{self.text}"


@dataclass
class Verdict:
    """What the comparison after a race says."""

    kind: Literal["identical", "near-tie", "bug"] = "identical"
    index: int | None = None
    explanation: str = "All tokens are the same."


THINK, THOUGHT = "<think>", "</think>"
TOOL_CALL, CALLED = "<tool_call>", "</tool_call>"


@dataclass
class FakeTokenizer:
    """One token per character, roles as control characters; the template is real enough to check history.

    switch: the template knows `enable_thinking`, and without it closes an empty block of reasoning.
    opens:  it opens a block of reasoning otherwise.
    """

    has_chat_template: bool = True
    switch: bool = False
    opens: bool = False
    has_thinking = True
    think_start, think_end = THINK, THOUGHT
    think_start_tokens = tuple(map(ord, THINK))
    tool_call_start, tool_call_end = TOOL_CALL, CALLED
    structural_markers = ()
    added_tokens_decoder: Mapping[int, Any] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset({0})

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, enable_thinking: bool = True
    ) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}</s>" for message in conversation)
        if add_generation_prompt:
            text += "<assistant>" + (THINK if self.opens and enable_thinking else "")
            text += f"{THINK}{THOUGHT}" if self.switch and not enable_thinking else ""
        return [ord(c) for c in text]

    def rfind_think_start(self, tokens: Sequence[int]) -> int:
        return "".join(map(chr, tokens)).rfind(THINK)

    def rfind_think_end(self, tokens: Sequence[int]) -> int:
        return "".join(map(chr, tokens)).rfind(THOUGHT)


class FakeCache:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.stable: int | None = None

    def reuse(self, ids: list[int], stable: int | None = None) -> int:
        self.stable = stable
        shared = 0
        for ours, theirs in zip(self.tokens, ids[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        self.tokens = self.tokens[:shared]
        return shared


@dataclass
class FakeDraft:
    name: str = "fake-draft"
    block_size: int = BLOCK_SIZE


@dataclass
class Script:
    """What the fake library does, and a record of what was asked of it."""

    answers: list[Answer] = field(default_factory=lambda: [Answer()])
    load_steps: tuple[tuple[str, float | None], ...] = (("Reading weights", 0.5),)
    load_gate: threading.Event | None = None
    load_error: Exception | None = None
    prepare_error: Exception | None = None
    """Raised before the pair that is loaded is freed."""
    prepare_gate: threading.Event | None = None
    load_warnings: tuple[str, ...] = ()
    draft: FakeDraft | None = field(default_factory=FakeDraft)
    tokenizer: Callable[[], FakeTokenizer] = FakeTokenizer
    context_length: int | None = 8192
    target_gb: float | None = 0.2
    draft_gb: float | None = 0.05
    memory_gb: float | None = 16.0
    active_gb: float | None = 0.25
    verdict: Verdict = field(default_factory=Verdict)
    """Of every race. Its arms give `answers` like two turns: the plain one first."""
    loads: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(model, options) of every load that began."""
    prepared: list[tuple[str, bool]] = field(default_factory=list)
    """(model, whether it was insisted on) of every load beside a pair that is there."""
    compared: list[dict[str, Any]] = field(default_factory=list)
    warmed_up: int = 0
    freed: int = 0
    prompts: list[str] = field(default_factory=list)
    """Each prompt as it reached the model: only what the cache did not hold."""
    reused: list[int] = field(default_factory=list)
    samplers: list[dict[str, Any]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    """Tokens that had been yielded when each generator was closed."""
    caches: list[FakeCache] = field(default_factory=list)
    streams_cleared: int = 0
    threads: set[int] = field(default_factory=set)

    def backend(self) -> Backend:
        return Backend(
            self._load,
            self._stream,
            self._sampler,
            self._make_cache,
            self._clear,
            self._compare,
            self._warm_up,
            self._free,
            lambda: self.active_gb,
            self.memory_gb,
            (ValueError,),
            PREFILL_STEP_SIZE,
            {"dflash_mlx": "0.1", "mlx": None},
            self._prepare,
        )

    def _compare(
        self, model: object, ids: list[int], expected: list[int], got: list[int], *, policy: object, kernels: str
    ) -> Verdict:
        self.compared.append(
            {"prompt": "".join(map(chr, ids)), "expected": expected, "got": got, "policy": policy, "kernels": kernels}
        )
        return self.verdict

    def _warm_up(self, pair: Pair, ids: Sequence[int], kernels: str) -> None:
        self.warmed_up += 1

    def _free(self) -> None:
        self.freed += 1

    def _clear(self) -> None:
        self.streams_cleared += 1
        self.threads.add(threading.get_ident())

    def _sampler(self, **options: Any) -> object:
        self.samplers.append(options)
        return object()

    def _make_cache(self, model: object, draft: object) -> FakeCache:
        self.caches.append(FakeCache())
        return self.caches[-1]

    def _prepare(self, path: str, options: Mapping[str, Any], progress: Progress, insist: bool) -> None:
        self.prepared.append((path, insist))
        progress("Looking", None)
        while self.prepare_gate is not None and not self.prepare_gate.wait(0.01):
            progress("Fetching", 0.1)
        if self.prepare_error is not None and not (insist and isinstance(self.prepare_error, TooLarge)):
            raise self.prepare_error

    def _load(self, path: str, options: Mapping[str, Any], progress: Progress) -> Pair:
        self.threads.add(threading.get_ident())
        self.loads.append((path, dict(options)))
        for text, fraction in self.load_steps:
            progress(text, fraction)
        while self.load_gate is not None and not self.load_gate.wait(0.01):
            progress(*self.load_steps[-1])
        for text in self.load_warnings:
            warnings.warn(text, stacklevel=2)
        if self.load_error is not None:
            raise self.load_error
        return Pair(
            "target",
            self.tokenizer(),
            self.draft,
            LARGEST_BLOCK if self.draft else None,
            self.context_length,
            self.target_gb,
            self.draft_gb if self.draft else None,
        )

    def _stream(
        self, model: object, tokenizer: object, prompt: list[int], max_tokens: int, draft: object, **options: Any
    ) -> Generator[FakeResponse, None, None]:
        self.options.append(options)
        answer = self.answers[min(len(self.options), len(self.answers)) - 1]
        if answer.refuse is not None:
            raise answer.refuse
        if options["mode"] == "plain":
            answer = replace(answer, mode="plain", depths=(None,))
        return self._respond(answer, prompt, max_tokens, options)

    def _respond(
        self, answer: Answer, prompt: list[int], max_tokens: int, options: dict[str, Any]
    ) -> Generator[FakeResponse, None, None]:
        self.threads.add(threading.get_ident())
        cache: FakeCache = options.get("prompt_cache") or FakeCache()
        before = cache.tokens + prompt
        self.reused.append(len(cache.tokens))
        self.prompts.append("".join(map(chr, prompt)))
        for chunk in range(1, answer.prefill_chunks + 1):
            answer.on_prefill(chunk)
            options["prompt_progress_callback"](len(prompt) * chunk // answer.prefill_chunks, len(prompt))
        cache.tokens += prompt
        yielded = 0
        try:
            opened = "".join(map(chr, before)).endswith(THINK)
            for response in responses(answer, max_tokens, opened=opened):
                response.prompt_tokens, response.cached_tokens = len(prompt), len(before) - len(prompt)
                if answer.fail_after is not None and yielded >= answer.fail_after:
                    raise answer.error
                yielded += 1
                cache.tokens += [ord(c) for c in response.text]
                yield response
        finally:
            self.closed.append(yielded)


def responses(answer: Answer, max_tokens: int, *, opened: bool = False) -> Generator[FakeResponse, None, None]:
    """One response per character, in cycles of the scripted depths; the accepted ones of a cycle come first."""
    stats, timings = FakeStats(), FakeTimings()
    written = answer.written(opened=opened)
    text = written[:max_tokens] if max_tokens >= 0 else written
    finish = answer.finish if len(text) == len(written) else "length"
    position, cycle = 0, 0
    if answer.gate is not None:
        answer.gate.wait(10)
    while position < len(text):
        depth = answer.depths[(cycle - 1) % len(answer.depths)] if cycle else 0
        block = text[position : position + (depth or 0) + 1]
        drafted = BLOCK_SIZE - 1 if cycle and depth is not None and answer.mode == "dflash" else 0
        accepted = len(block) - 1
        if cycle:
            if answer.cycle_s:
                time.sleep(answer.cycle_s)
            stats.cycles += 1
            stats.plain_steps += drafted == 0
            stats.drafted += drafted
            stats.accepted += accepted
            if drafted:
                stats.histogram[accepted] += 1
                stats.blocks[drafted + 1] += 1
            timings.cycles += 1
        for index, character in enumerate(block):
            position += 1
            timings.tokens = position
            yield FakeResponse(
                character,
                finish if position == len(text) else None,
                position,
                cycle,
                accepted,
                drafted,
                stats,
                timings,
                answer.mode,
                BLOCK_SIZE if answer.mode == "dflash" else 1,
                answer.notes,
                token=ord(character),
                from_draft=index < accepted,
            )
        cycle += 1


class FakeEngine(EngineThread):
    """The production thread over a script; remembers what was asked and what was cancelled."""

    def __init__(self, post: Callable[[Event], None], script: Script) -> None:
        super().__init__(post, script.backend)
        self.script = script
        self.submitted: list[Job] = []

    def submit(self, job: Job) -> None:
        self.submitted.append(job)
        super().submit(job)

    @property
    def asked(self) -> list[Ask]:
        return [job for job in self.submitted if isinstance(job, Ask)]

    @property
    def loaded(self) -> list[LoadModel]:
        return [job for job in self.submitted if isinstance(job, LoadModel)]

    @property
    def raced(self) -> list[Race]:
        return [job for job in self.submitted if isinstance(job, Race)]
