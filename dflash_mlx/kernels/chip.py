"""The chip as the gate sees it: which generation, and whether Metal kernels run at all, found out by running one.

Generations are those of `applegpu_g<generation><class>`: 13 is M1, 14 M2, 15 M3, 16 M4, 17 M5.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from dflash_mlx.kernels.operation import Launch, MetalKernel, on_metal

NO_METAL = "no Metal on this machine"
ON_CPU = "MLX's default device is the CPU"
MATRIX_CLOSED_FROM = 17
_SMALL_THREADGROUPS = (13, 14)  # pipelines of M1 and M2 may be limited to 832 or 448 threads
_PROBE = MetalKernel(
    "dflash_probe", ("a",), ("b",), "uint i = thread_position_in_grid.x; b[i] = a[i] + 1.0f;", header=""
)


@dataclass(frozen=True)
class Chip:
    """architecture: "applegpu_g16s", say, or the CPU's. system: its name and version. closed: why no kernel runs."""

    name: str
    architecture: str
    system: str
    closed: str | None = None

    @property
    def generation(self) -> int | None:
        """None where the architecture does not say."""
        found = re.match(r"applegpu_g(\d+)", self.architecture)
        return int(found[1]) if found else None

    @property
    def threads(self) -> int:
        """That a threadgroup of any pipeline may have here; every `Launch` stays at or below 448."""
        return 448 if self.generation in _SMALL_THREADGROUPS else 1024

    @property
    def matrix_closed(self) -> str | None:
        """Why kernels with simdgroup matrices start closed, or None: a peer's stalled an M5 for 105 seconds."""
        if self.generation is None:
            return f"matrix kernels start closed on a chip that is not known ({self.architecture})"
        if self.generation >= MATRIX_CLOSED_FROM:
            return f"matrix kernels start closed on generation {self.generation} (M5) and newer"
        return None

    @property
    def remark(self) -> str | None:
        """What to know about kernels on this chip."""
        if self.generation in _SMALL_THREADGROUPS:
            return f"no bfloat16 arithmetic of its own; some pipelines take at most {self.threads} threads"
        return None


def this_chip() -> Chip:
    """The chip that MLX's default device is on."""
    closed = ON_CPU if mx.default_device() == mx.Device(mx.cpu) and not why_no_metal() else why_no_metal()
    device = mx.cpu if closed else mx.gpu
    info = mx.device_info(device)
    version = platform.mac_ver()[0] or platform.release()
    return Chip(
        name=str(info.get("device_name", "unknown")),
        architecture=str(info.get("architecture", platform.machine())),
        system=f"{'macOS' if platform.system() == 'Darwin' else platform.system()} {version}",
        closed=closed,
    )


@cache
def why_no_metal() -> str | None:
    """Why a tiny kernel does not run here, or None. Once per process."""
    if not mx.is_available(mx.gpu):
        return NO_METAL
    try:
        with mx.stream(mx.gpu):  # the default may be the CPU now and not later
            (out,) = on_metal(_PROBE, Launch((mx.zeros(32),), ((32,),), (mx.float32,), (32, 1, 1), (32, 1, 1)))
            right = mx.all(out == 1).item()
    except (RuntimeError, ValueError) as error:
        text = str(error).strip().partition("\n")[0]
        return NO_METAL if "No Metal" in text else f"Metal kernels do not run here ({text[:160]})"
    return None if right else "a Metal kernel gave wrong numbers"
