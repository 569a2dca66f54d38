"""A terminal that is closed under a program (SIGHUP): to write to it would be an error wherever something is said."""

from __future__ import annotations

import os


def terminals() -> list[int]:
    """The standard descriptors that are terminals. Ask before the hang-up: then none is one any more."""
    return [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]


def let_go(descriptors: list[int]) -> None:
    """From now on what is written there goes nowhere, and nothing is read."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
