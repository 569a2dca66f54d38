"""Finding an OpenBLAS that can stand in for mlx's BLAS, and how many threads it should run.

Looks for PyPI's scipy-openblas32 first (symbols with the prefix `scipy_`), then for the system's
libopenblas.so.0. The system's may be years older than the processor and then runs a generic kernel: Debian
12's 0.3.21 takes a Sapphire Rapids Xeon for a "Prescott" and needs 109 ms per token where 0.3.34 needs 94
(SmolLM2-135M float32, one thread, 2026-11-29), 3.4 ms against 0.9 for a 64x576x1536 product. Only builds with
32-bit integers (LP64) are taken, since mlx passes those; nothing enters the global namespace.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# The CBLAS functions that libmlx.so (0.32) calls.
SYMBOLS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
SYSTEM_NAME = "libopenblas.so.0"
WHEEL = "scipy_openblas32"

# Decoding reads every weight once per token: past a few cores memory is the limit, and idle threads spin.
MAX_THREADS = 8


@dataclass(frozen=True)
class OpenBlas:
    """A loaded OpenBLAS with 32-bit integers."""

    label: str
    path: str
    prefix: str
    library: ctypes.CDLL
    config: str  # its own description, e.g. "OpenBLAS 0.3.34 DYNAMIC_ARCH NO_AFFINITY Haswell MAX_THREADS=64"

    @property
    def version(self) -> str | None:
        match = re.search(r"OpenBLAS\s+([\w.]+)", self.config)
        return match[1] if match else None

    def address(self, symbol: str) -> int:
        """Address of a CBLAS function."""
        return address_of(self.library, self.prefix + symbol) or 0

    def set_threads(self, count: int) -> int:
        """Ask for `count` threads; returns what the library runs, since a build without threads stays at one."""
        self.library[f"{self.prefix}openblas_set_num_threads"](ctypes.c_int(count))
        return int(self.library[f"{self.prefix}openblas_get_num_threads"]())


def find() -> tuple[OpenBlas | None, str]:
    """The OpenBLAS to use, or None; and a sentence on what was tried, for the note."""
    refused = []
    for label, path, prefix in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        found = _accept(label, path, prefix, library)
        if isinstance(found, OpenBlas):
            return found, ""
        refused.append(found)
    install = f"install it with `pip install {WHEEL.replace('_', '-')}`"
    return None, "; ".join([*refused, f"no OpenBLAS was found ({SYSTEM_NAME} or {WHEEL}): {install}"])


def address_of(library: ctypes.CDLL, symbol: str) -> int | None:
    """Address of a function of `library` or of what it depends on; None when there is none."""
    try:
        return ctypes.cast(library[symbol], ctypes.c_void_p).value
    except AttributeError:
        return None


def usable_cores() -> int:
    """Physical cores that this process may run on, no more than its container's quota."""
    if sys.platform != "linux":  # nothing below is there; MLX's own BLAS runs anyway
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = _physical_cores(Path("/proc/cpuinfo"), allowed) or len(allowed)
    quota = _cgroup_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, cores if quota is None else min(cores, quota))


def default_threads(cores: int) -> int:
    """One thread up to two cores, else one per core up to MAX_THREADS.

    OpenBLAS threads spin while they wait for each other, so any other load hurts when there is no spare core.
    Median ms per token with 1 / 2 threads on 2 vCPUs: idle 98 / 67, beside one busy process 94-178 / 122-151,
    beside two 205-261 / 504-2016 (SmolLM2-135M float32, scipy-openblas32 0.3.34, Xeon, A B B A, 2026-11-29).
    """
    return 1 if cores <= 2 else min(cores, MAX_THREADS)


def _candidates() -> list[tuple[str, str, str]]:
    """(label, path, symbol prefix) in the order to try."""
    candidates = []
    spec = importlib.util.find_spec(WHEEL)  # not imported: that would load it into the global namespace
    for root in (spec.submodule_search_locations or []) if spec else []:
        libraries = sorted(Path(root, "lib").glob("libscipy_openblas*.so"))
        candidates += [(WHEEL.replace("_", "-"), str(path), "scipy_") for path in libraries]
    return [*candidates, ("the system's OpenBLAS", SYSTEM_NAME, "")]


def _accept(label: str, path: str, prefix: str, library: ctypes.CDLL) -> OpenBlas | str:
    """The library if it is OpenBLAS with 32-bit integers, else the sentence that says why not."""
    needed = [*SYMBOLS, "openblas_get_config", "openblas_set_num_threads", "openblas_get_num_threads"]
    missing = [prefix + name for name in needed if address_of(library, prefix + name) is None]
    if missing:
        return f"{label} ({path}) lacks {missing[0]}"
    describe = library[f"{prefix}openblas_get_config"]
    describe.restype = ctypes.c_char_p
    config = describe().decode("ascii", "replace")
    if "USE64BITINT" in config:
        return f"{label} ({path}) takes 64-bit integers, mlx passes 32-bit ones"
    return OpenBlas(label, path, prefix, library, config)


def _physical_cores(cpuinfo: Path, allowed: set[int]) -> int:
    """Distinct (package, core) pairs among the allowed processors; 0 where the kernel does not say (aarch64)."""
    cores = set()
    for block in cpuinfo.read_text(encoding="ascii", errors="replace").split("\n\n"):
        entry = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        if "core id" in entry and int(entry["processor"]) in allowed:
            cores.add((entry.get("physical id"), entry["core id"]))
    return len(cores)


def _cgroup_quota(path: Path) -> int | None:
    """Whole cores that a cgroup v2 limit leaves, rounded up; None without a limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else -(-int(quota) // int(period))
