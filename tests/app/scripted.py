"""A scripted model behind the real engine thread: the same contract, no MLX.

`Script` says what each turn does; `FakeEngine` is the production thread over it, so pilots exercise the messages,
the cancelling and the coalescing that users get.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.app.backend import Backend, Pair, Progress
from dflash_mlx.app.engine import EngineThread
from dflash_mlx.app.jobs import Ask, Job
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


@dataclass
class Answer:
    """One turn of the script."""

    text: str = "Hello."
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


class FakeTokenizer:
    """One token per character, roles as control characters; the template is real enough to check history."""

    has_chat_template = True

    def apply_chat_template(self, conversation: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}</s>" for message in conversation)
        return [ord(c) for c in text + ("<assistant>" if add_generation_prompt else "")]


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
    load_warnings: tuple[str, ...] = ()
    draft: FakeDraft | None = field(default_factory=FakeDraft)
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
            (ValueError,),
            PREFILL_STEP_SIZE,
        )

    def _clear(self) -> None:
        self.streams_cleared += 1
        self.threads.add(threading.get_ident())

    def _sampler(self, **options: Any) -> object:
        self.samplers.append(options)
        return object()

    def _make_cache(self, model: object, draft: object) -> FakeCache:
        self.caches.append(FakeCache())
        return self.caches[-1]

    def _load(self, path: str, options: Mapping[str, Any], progress: Progress) -> Pair:
        self.threads.add(threading.get_ident())
        for text, fraction in self.load_steps:
            progress(text, fraction)
        while self.load_gate is not None and not self.load_gate.wait(0.01):
            progress(*self.load_steps[-1])
        for text in self.load_warnings:
            warnings.warn(text, stacklevel=2)
        if self.load_error is not None:
            raise self.load_error
        return Pair("target", FakeTokenizer(), self.draft, LARGEST_BLOCK if self.draft else None)

    def _stream(
        self, model: object, tokenizer: object, prompt: list[int], max_tokens: int, draft: object, **options: Any
    ) -> Generator[FakeResponse, None, None]:
        self.options.append(options)
        answer = self.answers[min(len(self.options), len(self.answers)) - 1]
        if answer.refuse is not None:
            raise answer.refuse
        return self._respond(answer, prompt, max_tokens, options)

    def _respond(
        self, answer: Answer, prompt: list[int], max_tokens: int, options: dict[str, Any]
    ) -> Generator[FakeResponse, None, None]:
        self.threads.add(threading.get_ident())
        cache: FakeCache = options["prompt_cache"]
        self.reused.append(len(cache.tokens))
        self.prompts.append("".join(map(chr, prompt)))
        for chunk in range(1, answer.prefill_chunks + 1):
            answer.on_prefill(chunk)
            options["prompt_progress_callback"](len(prompt) * chunk // answer.prefill_chunks, len(prompt))
        cache.tokens += prompt
        yielded = 0
        try:
            for response in responses(answer, max_tokens):
                if answer.fail_after is not None and yielded >= answer.fail_after:
                    raise answer.error
                yielded += 1
                cache.tokens += [ord(c) for c in response.text]
                yield response
        finally:
            self.closed.append(yielded)


def responses(answer: Answer, max_tokens: int) -> Generator[FakeResponse, None, None]:
    """One response per character, in cycles of the scripted depths."""
    stats, timings = FakeStats(), FakeTimings()
    text = answer.text[:max_tokens]
    finish = answer.finish if len(answer.text) <= max_tokens else "length"
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
            timings.cycles += 1
        for character in block:
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
