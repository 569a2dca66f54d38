"""Apple's chips: how fast they read memory, and their generation. By name, without importing MLX."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache

_GIB = 2**30
# GB/s as Apple's specifications state them: the pages of each year's Macs; M5 by its press release of October 2025, M5
# Pro and Max by that of March 2026. Where a chip is sold in two widths, the lesser one comes with the memory sizes
# (GiB) that are given here.
_BANDWIDTHS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "M1": (68, 68, ()),
    "M1 Pro": (200, 200, ()),
    "M1 Max": (400, 400, ()),
    "M1 Ultra": (800, 800, ()),
    "M2": (100, 100, ()),
    "M2 Pro": (200, 200, ()),
    "M2 Max": (400, 400, ()),
    "M2 Ultra": (800, 800, ()),
    "M3": (100, 100, ()),
    "M3 Pro": (150, 150, ()),
    "M3 Max": (300, 400, (36, 96)),
    "M3 Ultra": (819, 819, ()),
    "M4": (120, 120, ()),
    "M4 Pro": (273, 273, ()),
    "M4 Max": (410, 546, (36,)),
    "M5": (153, 153, ()),
    "M5 Pro": (307, 307, ()),
    "M5 Max": (460, 614, (36,)),
}
NAMES = tuple(_BANDWIDTHS)


@dataclass(frozen=True)
class AppleChip:
    """bandwidth: GB/s by Apple's specifications. generation: 13 is M1, 14 M2, and so on, as Metal counts."""

    name: str
    bandwidth: int
    generation: int


def apple_chip(name: str, memory: int) -> AppleChip | None:
    """The chip of this name ("Apple M4 Max", "m4 max") in a machine with so many bytes; None if it is not known."""
    found = re.fullmatch(r"(?:apple\s+)?m(\d)(?:\s+(pro|max|ultra))?", name.strip().lower())
    if not found:
        return None
    short = f"M{found[1]}" + (f" {found[2].capitalize()}" if found[2] else "")
    if short not in _BANDWIDTHS:
        return None
    lesser, full, sizes = _BANDWIDTHS[short]
    return AppleChip(short, lesser if round(memory / _GIB) in sizes else full, 12 + int(found[1]))


@cache
def name_here() -> str | None:
    """The name of this machine's chip, on a Mac."""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
