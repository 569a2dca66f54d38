"""The running numbers of one request, from the engine's own counts and clocks: no message, no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from dflash_mlx.app.backend import Response
from dflash_mlx.app.messages import Numbers

RECENT_CYCLES = 64
STRETCH_S = 0.5
"""Of tokens that one rate is made of: shorter ones show the cycles' own scatter."""
RECENT_RATES = 60


@dataclass(frozen=True)
class Place:
    """Where in its cycle a response stands."""

    first: bool
    last: bool


class Tally:
    """Takes the responses of one request, one by one.

    Args:
        asked_mode: what the user wants.
        asked_at: `clock()` when the user asked.
        active_gb: what MLX holds now.
    """

    def __init__(
        self, asked_mode: str, asked_at: float, clock: Callable[[], float], active_gb: Callable[[], float | None]
    ) -> None:
        self.newest: Response | None = None
        self._asked_mode = asked_mode
        self._asked_at = asked_at
        self._clock = clock
        self._active_gb = active_gb
        self._read: float | None = None
        self._prompt = self._cached = 0
        self._cycle = -1
        self._in_cycle = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_CYCLES)
        self._rates: deque[float] = deque(maxlen=RECENT_RATES)
        self._stretch: tuple[float, int] | None = None  # (seconds since the question, tokens) at its start

    def prefill(self, done: int, total: int, cached: int) -> None:
        """`done` of `total` prompt tokens have been read, on top of `cached` ones."""
        self._prompt, self._cached = cached + total, cached
        self._read = done / max(total, 1)

    def add(self, response: Response) -> Place:
        """Count one response."""
        first = response.cycle != self._cycle
        if first:
            self._cycle, self._in_cycle = response.cycle, 0
            if response.cycle > 0:  # cycle 0 is the token that prefill gave
                self._recent.append((response.accepted, response.drafted))
        self._in_cycle += 1
        self.newest = response
        last = self._in_cycle > response.accepted
        if last:
            self._measure(response)
        return Place(first, last)

    def numbers(self) -> Numbers:
        """As of the newest response, or of the reading before it. No rate before two tokens."""
        newest = self.newest
        numbers = Numbers(
            asked_mode=self._asked_mode,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            active_gb=self._active_gb(),
        )
        if newest is None:
            waited = None if self._read is None else self._clock() - self._asked_at
            return replace(numbers, reading=self._read, prefill_s=waited)
        numbers = replace(
            numbers,
            mode=newest.mode,
            resting=newest.mode == "dflash" and self._rests(),
            block_size=newest.block_size,
            newest_block=self._newest_block(),
            recomputed_tokens=newest.recomputed_tokens,
            generation_tokens=newest.generation_tokens,
            recent=tuple(self._recent),
            rates=tuple(self._rates),
            peak_gb=newest.peak_memory,
            notes=tuple(newest.notes),
        )
        if newest.stats is not None:
            numbers = replace(
                numbers,
                cycles=newest.stats.cycles,
                plain_steps=newest.stats.plain_steps,
                tokens_per_cycle=newest.stats.mean_acceptance_length,
                acceptance_rate=newest.stats.draft_acceptance_rate,
            )
        if newest.timings is not None:
            enough = newest.generation_tokens >= 2
            numbers = replace(
                numbers,
                ttft_s=newest.timings.ttft_s,
                total_s=newest.timings.total_s,
                prompt_tps=newest.timings.prompt_tps,
                decode_tps=newest.timings.decode_tps if enough else None,
                request_tps=newest.timings.request_tps if enough else None,
            )
        return numbers

    def final(self) -> Numbers:
        """As `numbers`, of a request that has ended: nothing is being read."""
        return replace(self.numbers(), reading=None, prefill_s=None)

    def _measure(self, response: Response) -> None:
        """A cycle is complete: its tokens came together, so the stretch may end here."""
        at = None if response.timings is None else response.timings.total_s
        if at is None:
            return
        if self._stretch is None:
            self._stretch = (at, response.generation_tokens)
            return
        start, tokens = self._stretch
        if at - start >= STRETCH_S:
            self._rates.append((response.generation_tokens - tokens) / (at - start))
            self._stretch = (at, response.generation_tokens)

    def _rests(self) -> bool:
        """Whether the newest cycle had no drafts."""
        drafted = self._drafted()
        return bool(drafted) and drafted[-1] == 0

    def _newest_block(self) -> int | None:
        return next((drafted + 1 for drafted in reversed(self._drafted()) if drafted), None)

    def _drafted(self) -> list[int]:
        """Drafts of the latest cycles. One that the token limit left no room for says nothing."""
        drafted = [drafted for _, drafted in self._recent]
        return drafted[:-1] if self.newest is not None and self.newest.finish_reason == "length" else drafted
