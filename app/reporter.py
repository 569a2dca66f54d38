"""Turns a stream of responses into few messages: text at most 20 times a second, numbers at most 10.

A post costs the engine thread little, but every post costs the UI a layout; at DFlash speed one per token
would make the screen the bottleneck. Rates are the engine's own: waiting here changes none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from dflash_mlx.app.backend import Response
from dflash_mlx.app.messages import Chunk, CycleTick, Event, Numbers, PrefillProgress, Reason, TurnDone

TEXT_INTERVAL_S = 0.05
TICK_INTERVAL_S = 0.1
RECENT_CYCLES = 64
_NEVER = float("-inf")


class TurnReporter:
    """Posts the events of one turn.

    Invariant: the texts of all chunks, joined, are the texts of all responses, joined.
    """

    def __init__(
        self, turn: int, emit: Callable[[Event], None], clock: Callable[[], float], asked_mode: str = "auto"
    ) -> None:
        self.turn = turn
        self._asked_mode = asked_mode
        self._emit = emit
        self._clock = clock
        self._text: list[str] = []
        self._n_tokens = 0
        self._cycle = -1
        self._in_cycle = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_CYCLES)
        self._prompt = self._cached = 0
        self._last: Response | None = None
        self._text_at = self._tick_at = self._prefill_at = _NEVER

    def prefill(self, done: int, total: int, cached: int) -> None:
        """Report prompt reading: `done` of `total` tokens after `cached` ones. The end is always reported."""
        self._prompt, self._cached = cached + total, cached
        now = self._clock()
        if done >= total or now - self._prefill_at >= TICK_INTERVAL_S:
            self._prefill_at = now
            self._emit(PrefillProgress(self.turn, done, total, cached))

    def add(self, response: Response) -> bool:
        """Take one response; True if it is the first of its cycle."""
        first = response.cycle != self._cycle
        if first:
            self._cycle, self._in_cycle = response.cycle, 0
            if response.cycle > 0:  # cycle 0 is the token that prefill gave
                self._recent.append((response.accepted, response.drafted))
        self._in_cycle += 1
        self._last = response
        self._n_tokens += 1
        if response.text:
            self._text.append(response.text)
        # A cycle brings accepted + 1 tokens: post when it is complete, not one token now and the rest later.
        if self._in_cycle > response.accepted:
            now = self._clock()
            if now - self._text_at >= TEXT_INTERVAL_S:
                self._flush(now)
            if now - self._tick_at >= TICK_INTERVAL_S:
                self._tick_at = now
                self._emit(CycleTick(self.turn, self.numbers()))
        return first

    def finish(self, reason: Reason) -> None:
        """Send what is left, then the closing message."""
        self._flush(self._clock())
        self._emit(TurnDone(self.turn, reason, self.numbers()))

    def numbers(self) -> Numbers:
        """The numbers as of the newest response. No rate before two tokens."""
        last = self._last
        if last is None:
            return Numbers(asked_mode=self._asked_mode, prompt_tokens=self._prompt, cached_tokens=self._cached)
        numbers = Numbers(
            asked_mode=self._asked_mode,
            mode=last.mode,
            resting=last.mode == "dflash" and self._rests(),
            block_size=last.block_size,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            recomputed_tokens=last.recomputed_tokens,
            generation_tokens=last.generation_tokens,
            recent=tuple(self._recent),
            peak_gb=last.peak_memory,
            notes=tuple(last.notes),
        )
        if last.stats is not None:
            numbers = replace(
                numbers,
                cycles=last.stats.cycles,
                plain_steps=last.stats.plain_steps,
                tokens_per_cycle=last.stats.mean_acceptance_length,
                acceptance_rate=last.stats.draft_acceptance_rate,
            )
        if last.timings is not None:
            enough = last.generation_tokens >= 2
            numbers = replace(
                numbers,
                ttft_s=last.timings.ttft_s,
                total_s=last.timings.total_s,
                prompt_tps=last.timings.prompt_tps,
                decode_tps=last.timings.decode_tps if enough else None,
                request_tps=last.timings.request_tps if enough else None,
            )
        return numbers

    def _rests(self) -> bool:
        """Whether the newest cycle had no drafts. One that the token limit left no room for says nothing."""
        cycles = list(self._recent)
        if self._last is not None and self._last.finish_reason == "length":
            cycles = cycles[:-1]
        return bool(cycles) and cycles[-1][1] == 0

    def _flush(self, now: float) -> None:
        if not self._text:
            return
        text, self._text = "".join(self._text), []
        n_tokens, self._n_tokens = self._n_tokens, 0
        self._text_at = now
        self._emit(Chunk(self.turn, text, n_tokens))
