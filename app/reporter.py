"""Turns a stream of responses into few messages: text at most 20 times a second, numbers at most 10.

A post costs the engine thread little, but every post costs the UI a layout; at DFlash speed one per token
would make the screen the bottleneck. Rates are the engine's own: waiting here changes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_mlx.app.backend import Response
from dflash_mlx.app.messages import Chunk, CycleTick, Event, Part, PrefillProgress, Reason
from dflash_mlx.app.parts import Origins, merged
from dflash_mlx.app.tally import Tally
from dflash_mlx.report import Answer

TEXT_INTERVAL_S = 0.05
TICK_INTERVAL_S = 0.1
_NEVER = float("-inf")


class TurnReporter:
    """Posts the events of one turn, but the last.

    Invariant: the parts of all chunks, joined, are the texts of all responses, joined; also of a turn that was
    cancelled or failed, once it has ended.

    Args:
        tally: counts the responses.
        answer: collects what was said; its segments know whether the prompt opened a reasoning block.
    """

    def __init__(
        self, turn: int, emit: Callable[[Event], None], clock: Callable[[], float], tally: Tally, answer: Answer
    ) -> None:
        self.turn = turn
        self.tally = tally
        self.answer = answer
        self._emit = emit
        self._clock = clock
        self._origins = Origins()
        self._parts: list[Part] = []
        self._n_tokens = 0
        self._text_at = self._tick_at = self._prefill_at = _NEVER

    def prefill(self, done: int, total: int, cached: int) -> None:
        """Report prompt reading: `done` of `total` tokens after `cached` ones. The end is always reported."""
        self.tally.prefill(done, total, cached)
        now = self._clock()
        if done >= total or now - self._prefill_at >= TICK_INTERVAL_S:
            self._prefill_at = now
            self._emit(PrefillProgress(self.turn, done, total, cached))
            self._emit(CycleTick(self.turn, self.tally.numbers()))

    def add(self, response: Response) -> bool:
        """Take one response; True if it is the first of its cycle."""
        place = self.tally.add(response)
        self._n_tokens += 1
        self._origins.came("draft" if response.from_draft else "target", len(response.text))
        taken: Any = response  # of a GenerationResponse it reads no more than `Response` has
        known = len(self.answer.parts)
        self.answer.add(taken)
        self._parts += self._origins.cut(self.answer.parts[known:])
        # A cycle brings accepted + 1 tokens: post when it is complete, not one token now and the rest later.
        if place.last:
            now = self._clock()
            if now - self._text_at >= TEXT_INTERVAL_S:
                self._flush(now)
            if now - self._tick_at >= TICK_INTERVAL_S:
                self._tick_at = now
                self._emit(CycleTick(self.turn, self.tally.numbers()))
        return place.first

    def end(self, reason: Reason | None) -> None:
        """Send what is left, text that could have become a marker too. reason: None if the turn failed."""
        known = len(self.answer.parts)
        self.answer.finish(reason)
        self._parts += self._origins.cut(self.answer.parts[known:])
        self._flush(self._clock())

    def _flush(self, now: float) -> None:
        if not self._parts:
            return
        parts, self._parts = merged(self._parts), []
        n_tokens, self._n_tokens = self._n_tokens, 0
        self._text_at = now
        self._emit(Chunk(self.turn, parts, n_tokens))
