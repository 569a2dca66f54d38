"""Plain decoding as it was measured on this machine: what a speed-up is a multiple of. None of it is estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dflash_mlx.app.messages import Numbers, RaceDone

How: TypeAlias = Literal["a plain turn", "a race"]

ENOUGH_TOKENS = 32
"""Of an answer: the rate of a shorter one says more about the clock than about the model."""
FLAT_TOKENS = 1024
"""Up to here the length of the context is taken not to matter to the rate; beyond, up to a factor of two."""


@dataclass(frozen=True)
class Baseline:
    """Plain decoding of one answer."""

    decode_tps: float
    """Generation only."""
    request_tps: float | None
    """Prefill-inclusive."""
    how: How
    context_tokens: int
    """Prompt and answer together."""

    @classmethod
    def of_turn(cls, numbers: Numbers) -> Baseline | None:
        """From a finished turn; None if it was not plain, or too short."""
        return _measured(numbers, "a plain turn")

    @classmethod
    def of_race(cls, race: RaceDone) -> Baseline | None:
        """From the plain arm of a race; None if its answer was too short."""
        return _measured(race.plain.numbers, "a race")

    def fits(self, numbers: Numbers) -> bool:
        """Whether a turn's context is about as long. Plain decoding slows down as the context grows."""
        shorter, longer = sorted(max(n, FLAT_TOKENS) for n in (self.context_tokens, context_tokens(numbers)))
        return longer <= 2 * shorter


def context_tokens(numbers: Numbers) -> int:
    """Positions that a turn has used: prompt and answer together."""
    return numbers.prompt_tokens + numbers.generation_tokens


def speedup(numbers: Numbers, baseline: Baseline | None) -> float | None:
    """Generation-only rate of a dflash turn over that of plain decoding; None where they cannot be compared."""
    if baseline is None or numbers.mode != "dflash" or not numbers.decode_tps or not baseline.fits(numbers):
        return None
    return numbers.decode_tps / baseline.decode_tps


def _measured(numbers: Numbers, how: How) -> Baseline | None:
    if numbers.mode != "plain" or not numbers.decode_tps or numbers.generation_tokens < ENOUGH_TOKENS:
        return None
    return Baseline(numbers.decode_tps, numbers.request_tps, how, context_tokens(numbers))
