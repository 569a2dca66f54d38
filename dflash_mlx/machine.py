"""How much memory a model may use on this machine, without importing MLX (`mx.device_info` knows it exactly)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_LARGE = 36 * 2**30
_CPU_SHARE = 0.9  # the rest is the system's


@dataclass(frozen=True)
class Machine:
    """memory, usable: bytes that it has, and that a model may use. metal: whether a GPU of Apple's computes.

    chunk: prompt tokens per forward, as `dflash_mlx.cpu.prefill_step_size`.
    """

    memory: int
    usable: int
    metal: bool

    @property
    def chunk(self) -> int:
        return 2048 if self.metal else 256

    @classmethod
    def mac(cls, memory: int, wired_limit: int = 0) -> Machine:
        """A Mac with Apple silicon. wired_limit: bytes of `sysctl iogpu.wired_limit_mb`, 0 where it was not set.

        Without that Metal recommends (recommendedMaxWorkingSetSize) two thirds of the memory, of 36 GB and more three
        quarters: 10922 MiB of 16 GB, 21845 of 32, 49152 of 64, 73728 of 96 in llama.cpp's logs (llama.cpp issues 1870
        and 3213, pull request 2011; ollama issue 434). Some newer systems grant more, so this errs on the safe side.
        """
        default = memory * 3 // 4 if memory >= _LARGE else memory * 2 // 3
        return cls(memory, wired_limit or default, True)

    @classmethod
    def other(cls, memory: int) -> Machine:
        """A CPU."""
        return cls(memory, int(memory * _CPU_SHARE), False)


@cache
def this_machine() -> Machine:
    memory = _memory()
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Machine.mac(memory, _wired_limit())
    return Machine.other(memory)


def _memory() -> int:
    """Bytes of the machine, or of the container it is in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]  # on a Mac `sysctl hw.memsize`
    for path, read in ((_CGROUP, _first_number), (_MEMINFO, _mem_total)):
        try:
            limits.append(read(path.read_text("ascii")))
        except (OSError, ValueError, IndexError):  # not there, or "max"
            continue
    return min(limits)


def _first_number(text: str) -> int:
    return int(text)


def _mem_total(text: str) -> int:
    """Of the line `MemTotal:  24612345 kB`; a container that has an lxcfs says less there than the kernel does."""
    return 1024 * int(text.split("MemTotal:")[1].split()[0])


def _wired_limit() -> int:
    """Bytes; 0 where the user did not set it or it cannot be asked."""
    command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
