"""What a race showed, in words: who was faster by which clock, and whether the answers are the same.

A race is one run of each arm, so a ratio near 1 is no win; two answers of a few tokens have no rate to compare.
"""

from __future__ import annotations

from os.path import commonprefix

from dflash_mlx.app.messages import Arm, RaceDone
from dflash_mlx.app.text import note_line, rate

EQUAL = 0.02
"""Rates that differ by no more than this are said to be equal."""
CLOCKS = ("generation only", "prefill-inclusive")


def headline(race: RaceDone) -> str:
    """Who was faster, by both clocks."""
    if race.dflash.numbers.mode != "dflash":
        return "No winner: both runs were plain"
    winners = [_winner(dflash, plain) for dflash, plain in _rates(race)]
    if None in winners:
        return "No winner: the answers are too short to have a rate"
    first, second = winners
    if first == second:
        return f"{first} is faster by both clocks" if first else "Equally fast by both clocks"
    return "The two clocks do not agree on who is faster"


def comparison(race: RaceDone) -> tuple[str, ...]:
    """A line for each clock with both rates and their ratio; or why there were no drafts to compare."""
    if race.dflash.numbers.mode != "dflash":
        return (note_line(race.dflash.numbers.notes) or "the second run used no drafts, and said no reason",)
    return tuple(f"{name}: {_compared(*pair)}" for name, pair in zip(CLOCKS, _rates(race), strict=True))


def verdict(race: RaceDone) -> str:
    """Whether the answers are the same, with a shape that needs no colour."""
    if race.index is None:
        return {"identical": "✓ identical", "near-tie": "≈ near-tie"}.get(race.verdict, "✗ a bug in dflash_mlx")
    token = f"token {race.index + 1:,}"
    if race.verdict == "near-tie":
        return f"≈ near-tie at {token}"
    return f"✗ differs at {token}: a bug in dflash_mlx, please report it"


def first_difference(race: RaceDone) -> int | None:
    """Characters that both answers begin with, if they do not say the same."""
    plain, dflash = race.plain.text, race.dflash.text
    return None if plain == dflash else len(commonprefix([plain, dflash]))  # noqa: RUF071 (characters are meant)


def said_after(arm: Arm, seconds: float) -> str:
    """What an arm had written this long after its start."""
    return "".join(text for at, text in arm.pieces if at <= seconds)


def lasted(arm: Arm) -> float:
    """Seconds from an arm's start to its last word."""
    return max(arm.numbers.total_s or 0.0, arm.pieces[-1][0] if arm.pieces else 0.0)


def _rates(race: RaceDone) -> tuple[tuple[float | None, float | None], ...]:
    """(dflash, plain) by each clock."""
    plain, dflash = race.plain.numbers, race.dflash.numbers
    return (dflash.decode_tps, plain.decode_tps), (dflash.request_tps, plain.request_tps)


def _winner(dflash: float | None, plain: float | None) -> str | None:
    """Name of the faster arm, "" if they are equal, None if that is not known."""
    if not dflash or not plain:
        return None
    if max(dflash, plain) <= (1 + EQUAL) * min(dflash, plain):
        return ""
    return "dflash" if dflash > plain else "plain"


def _compared(dflash: float | None, plain: float | None) -> str:
    if not dflash or not plain:
        return "not known, the answer is too short"
    both = f"dflash {rate(dflash)}, plain {rate(plain)} tok/s"
    winner = _winner(dflash, plain)
    if not winner:
        return f"equal within {EQUAL:.0%} ({both})"
    return f"{winner} {max(dflash, plain) / min(dflash, plain):.2f}x as fast ({both})"
