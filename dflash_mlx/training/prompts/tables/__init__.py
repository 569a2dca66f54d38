"""Word lists of the built-in prompts, in our own words: one text file per kind.

`;` and line breaks separate entries, `#` begins a comment, `[name]` a section.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path


@lru_cache
def lines(name: str) -> list[str]:
    """The lines of a table, without comments."""
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@lru_cache
def entries(name: str) -> list[str]:
    """The entries of a table without sections."""
    return [entry for found in sections(name).values() for entry in found]


@lru_cache
def sections(name: str) -> dict[str, tuple[str, ...]]:
    """The entries of each section; "" holds what comes before the first."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in lines(name):
        if heading := re.fullmatch(r"\[(.+)\]", line):
            current = heading[1]
            continue
        found.setdefault(current, []).extend(entry.strip() for entry in line.split(";") if entry.strip())
    return {key: tuple(values) for key, values in found.items()}


@lru_cache
def rows(name: str) -> list[tuple[str, ...]]:
    """The lines of a table with columns, which `|` separates."""
    return [tuple(part.strip() for part in line.split("|")) for line in lines(name)]
