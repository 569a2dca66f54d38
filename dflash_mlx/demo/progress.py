"""How the long steps say where they are: a message and a fraction, or None when nobody knows."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float | None], None]


def silent(message: str, fraction: float | None) -> None:
    """Report nothing."""
