"""Counts and clocks of one request, with the field's published definitions.

Counts are pooled over cycles and additive across requests. Unknown is None, never zero or infinity.
Sources: vLLM and NVIDIA AIPerf (mean acceptance length = 1 + accepted / steps, draft acceptance rate =
accepted / drafted). A rate needs two tokens: decode_tps = (emitted - 1) / decode_s. All work of the draft is in
decode_s, its work on the prompt included: generation-only rates show what speculation costs and gives.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Stats:
    """What the cycles did. Everything is counted after truncation, so it describes what the caller received."""

    cycles: int = 0
    plain_steps: int = 0  # cycles without drafts: plain decoding, measuring, resting, or no room for one
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # the prefill token included
    host_syncs: int = 0  # device-to-host reads after prefill
    rechecked: int = 0  # near-ties that a single row decided again, if that was asked for
    histogram: Counter[int] = field(default_factory=Counter)  # accepted drafts per cycle that drafted -> cycles
    blocks: Counter[int] = field(default_factory=Counter)  # tokens verified in a cycle that drafted -> cycles

    def record(self, *, drafted: int, accepted: int, emitted: int) -> None:
        self.cycles += 1
        self.plain_steps += drafted == 0
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        if drafted:
            self.histogram[accepted] += 1
            self.blocks[drafted + 1] += 1

    def retract(self, *, drafted: int, accepted: int, emitted: int, delivered: int) -> None:
        """The last cycle delivered fewer tokens than it made; one that delivered none did not happen."""
        self.emitted -= emitted
        self.accepted -= accepted
        if drafted:
            self.histogram = self.histogram - Counter([accepted])
            self.blocks = self.blocks - Counter([drafted + 1])
        self.cycles -= 1
        self.drafted -= drafted
        self.plain_steps -= drafted == 0
        if delivered:
            self.record(drafted=drafted, accepted=min(accepted, delivered), emitted=delivered)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per cycle that drafted, the correction or bonus included."""
        drafting = self.cycles - self.plain_steps
        return 1 + self.accepted / drafting if drafting else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclass
class Track:
    """What a draft gave in its latest cycles, over requests, since it was last judged."""

    latest: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=64))  # (drafted, accepted) per cycle
    found: str | None = None  # what an examination said
    is_certain: bool = False  # and whether it names the cause

    @property
    def cycles(self) -> int:
        return len(self.latest)

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in tuple(self.latest))  # another thread may append

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in tuple(self.latest))


@dataclass
class Timings:
    """Clocks of one request in seconds of `perf_counter`."""

    prompt_tokens: int = 0  # processed by this request, cached ones excluded
    draft_prefill_s: float = 0.0  # the draft's share of prefill: counted as decoding, like all of the draft
    emitted: int = 0
    clock: Callable[[], float] = time.perf_counter
    start: float | None = None  # when it was asked for; None is now
    prefilled: float | None = None  # target prefill done and first token known
    first: float | None = None  # first token emitted
    last: float | None = None  # latest token emitted

    def __post_init__(self) -> None:
        self._start = self.clock() if self.start is None else self.start

    def mark_prefilled(self) -> float:
        self.prefilled = self.clock()
        return self.prefilled

    def mark_burst(self) -> None:
        """The tokens of a commit become visible now; the caller counts them in `emitted` one by one."""
        now = self.clock()
        if self.first is None:
            self.first = now
        self.last = now

    @property
    def prefill_s(self) -> float | None:
        """The target's prefill and the first token; without the draft's share."""
        return None if self.prefilled is None else self.prefilled - self._start - self.draft_prefill_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self._start

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last one, and the draft's work on the prompt."""
        return None if self.first is None or self.last is None else self.last - self.first + self.draft_prefill_s

    @property
    def total_s(self) -> float | None:
        return None if self.last is None else self.last - self._start

    @property
    def prompt_tps(self) -> float | None:
        return self.prompt_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tps(self) -> float | None:
        """Generation only."""
        return (self.emitted - 1) / self.decode_s if self.decode_s and self.emitted > 1 else None

    @property
    def request_tps(self) -> float | None:
        """Prefill included."""
        return self.emitted / self.total_s if self.total_s and self.emitted > 1 else None
