"""How a rate went, as a row of blocks, with its lowest and highest value in words."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mlx.app.text import rate
from dflash_mlx.app.widgets.facts import Fact

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], cells: int) -> str:
    """The newest `cells` values, a block each: the lowest of them is the lowest block, the highest the full one."""
    shown = list(values)[max(len(values) - cells, 0) :]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    if span <= 0:
        return LEVELS[len(LEVELS) // 2] * len(shown)
    return "".join(LEVELS[round((value - low) / span * (len(LEVELS) - 1))] for value in shown)


def rate_history(rates: Sequence[float], cells: int) -> tuple[Fact, ...]:
    """Generation-only tok/s so far; nothing before there are two stretches of it."""
    shown = list(rates)[max(len(rates) - cells, 0) :]
    if len(shown) < 2:
        return ()
    lowest, highest = rate(min(shown)), rate(max(shown))
    return (Fact("generation rate", sparkline(shown, cells), f"{lowest} to {highest} tok/s"),)
