"""A real BLAS for mlx's Linux CPU wheel.

The wheel links a reference BLAS: a block of 6 tokens costs 590 ms there and 131 ms with OpenBLAS on one core,
against 122 and 92 ms for one token (SmolLM2-135M float32, 2 vCPU Xeon, 2026-11-29), so without it speculation
cannot pay. `bind()` points libmlx.so's three CBLAS pointers at an OpenBLAS of this machine, checks products
against numpy, and takes it back if they are wrong; `release()` restores the pointers. On macOS, with a GPU,
or where mlx has a real BLAS already it says so and touches nothing. The binding is the process's, not a
model's. Reads no environment variables.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash_mlx import elf, openblas
from dflash_mlx.openblas import OpenBlas

TOLERANCE = 1e-3  # relative; float32 sums of 37 terms differ by about 1e-7


@dataclass(frozen=True)
class BlasStatus:
    """Which BLAS mlx's CPU backend calls."""

    active: bool  # whether bind() replaced mlx's own
    library: str
    version: str | None
    threads: int | None
    note: str  # one sentence for the user
    fast: bool  # whether it is known to be a real BLAS: ours, or one that mlx had already (Accelerate, OpenBLAS)


class _Unsuitable(Exception):
    """Why mlx's BLAS stays; the text completes the note."""

    def __init__(self, reason: str, *, fast: bool = False) -> None:
        super().__init__(reason)
        self.fast = fast  # it stays because it is a real one


@dataclass
class _Binding:
    """The process's state: what to tell, and while bound the library and each slot's former content."""

    status: BlasStatus | None = None  # None until bind() or release()
    blas: OpenBlas | None = None
    former: dict[int, int] = field(default_factory=dict)  # slot address -> function address


_lock = threading.Lock()
_now = _Binding()


def bind(threads: int | None = None) -> BlasStatus:
    """Make mlx's CPU matrix products call OpenBLAS, if this machine has one and needs one.

    Args:
        threads: for OpenBLAS; None lets `openblas.default_threads` choose. A second call may change it.
    Returns:
        What runs now. An unsuitable machine is no error; the note says why nothing changed.
    Raises:
        ValueError: `threads` is less than 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"`threads` has to be at least 1, got {threads}.")
    with _lock:
        if _now.blas is not None and _now.status is not None:
            if threads is not None:
                _now.status = _active(_now.blas, threads)
            return _now.status
        try:
            _now.status = _bind(threads)
        except (elf.LayoutError, OSError) as error:
            _restore()
            _now.status = _inactive(f"it cannot be replaced here ({error})")
        except _Unsuitable as error:
            _restore()
            _now.status = _inactive(str(error), fast=error.fast)
        return _now.status


def status() -> BlasStatus:
    """What runs now."""
    return _now.status or _inactive("nobody asked to replace it", fast=_own_is_real())


def release() -> BlasStatus:
    """Give mlx its own BLAS back."""
    with _lock:
        if _now.blas is not None:
            _restore()
            _now.status = _inactive("the replacement was released")
    return status()


def _bind(threads: int | None) -> BlasStatus:
    """Find, replace, check; the caller holds the lock and restores after an error."""
    if mx.default_device() != mx.Device(mx.cpu):
        raise _Unsuitable(f"the default device is {mx.default_device()}, not the CPU")
    slots = _reference_slots()
    blas, refused = openblas.find()
    if blas is None:
        raise _Unsuitable(refused)
    for symbol, addresses in slots.items():
        for address in addresses:
            _now.former[address] = elf.read_slot(address)
            elf.write_slot(address, blas.address(symbol))
    status = _active(blas, threads)
    if (error := _error_against_numpy()) > TOLERANCE:
        raise _Unsuitable(f"{blas.label} {blas.version} gave wrong products (relative error {error:.1e})")
    _now.blas = blas
    return status


def _active(blas: OpenBlas, threads: int | None) -> BlasStatus:
    """Set the threads and describe the binding."""
    cores = openblas.usable_cores()
    count = blas.set_threads(threads or openblas.default_threads(cores))
    plural = "thread" if count == 1 else "threads"
    version = f" {blas.version}" if blas.version else ""
    note = f"CPU matrix products run on {blas.label}{version}, {count} {plural} (usable cores: {cores})."
    return BlasStatus(True, blas.label, blas.version, count, note, True)


def _inactive(reason: str, *, fast: bool = False) -> BlasStatus:
    return BlasStatus(False, "mlx's own", None, None, f"mlx's own BLAS runs: {reason}.", fast)


def _restore() -> None:
    """Put every former address back."""
    for address, value in _now.former.items():
        elf.write_slot(address, value)
    _now.former.clear()
    _now.blas = None


@functools.cache
def _own_is_real() -> bool:
    """Whether mlx came with, or was preloaded with, a real BLAS; asked while unbound."""
    try:
        _reference_slots()
    except _Unsuitable as error:
        return error.fast
    except (elf.LayoutError, OSError):
        pass
    return False


def _reference_slots() -> dict[str, list[int]]:
    """The CBLAS slots of mlx's libraries in this process, by symbol.

    Raises:
        _Unsuitable: another platform, or mlx does not call a reference BLAS.
        LayoutError: a slot is not where or what it should be.
    """
    if sys.platform == "darwin":
        raise _Unsuitable("on macOS that is Apple's Accelerate, nothing to replace", fast=True)
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        here = f"{sys.platform} {platform.machine()}"
        raise _Unsuitable(f"it can be replaced on Linux x86-64 and aarch64, this is {here}")
    package = os.path.realpath(Path(str(mx.__file__)).parent)  # core.*.so lies in it, libmlx.so in its lib/
    loaded = {os.path.realpath(mapped.path) for mapped in elf.mappings()}
    slots: dict[str, list[int]] = {}
    for path in sorted(path for path in loaded if path.startswith(package + os.sep) and path.endswith(".so")):
        for symbol, addresses in elf.import_slots(path, openblas.SYMBOLS).items():
            _check_reference(path, symbol)
            for address in addresses:
                _check_slot(path, symbol, elf.read_slot(address))
            slots.setdefault(symbol, []).extend(addresses)
    if "cblas_sgemm" not in slots:
        raise _Unsuitable("it is not called through a shared library")
    return slots


def _check_slot(path: str, symbol: str, value: int) -> None:
    """A slot that holds neither the symbol nor the linker's stub for it is not what we take it for."""
    mapped = elf.mapping_at(value)
    stub = mapped is not None and os.path.realpath(mapped.path) == path  # lazily bound, not called yet
    if not stub and value != _resolve(path, symbol):
        raise elf.LayoutError(f"the pointer for {symbol} in {os.path.basename(path)} leads somewhere else")


def _check_reference(path: str, symbol: str) -> None:
    """Leave a real BLAS alone: a preloaded one, or the one that an mlx built from source was linked with."""
    home = elf.mapping_at(_resolve(path, symbol) or 0)
    if home is None:
        raise _Unsuitable(f"its {symbol} cannot be traced to a library")
    name = os.path.basename(os.path.realpath(home.path))
    is_openblas = openblas.address_of(ctypes.CDLL(home.path), "openblas_get_config")  # Debian calls it libblas too
    if is_openblas or not name.startswith(("libblas", "libcblas", "librefblas")):
        raise _Unsuitable(f"that is {name} already, not the reference BLAS", fast=True)


def _resolve(path: str, symbol: str) -> int | None:
    """What the linker finds for a symbol of `path`: the global namespace (a preloaded BLAS) comes first."""
    return openblas.address_of(ctypes.CDLL(None), symbol) or openblas.address_of(ctypes.CDLL(path), symbol)


def _error_against_numpy() -> float:
    """Largest relative error of small products through each of the three functions, plain and transposed."""
    worst = 0.0
    rng = np.random.default_rng(0)
    for dtype, kind in ((np.float32, mx.float32), (np.float64, mx.float64), (np.complex64, mx.complex64)):
        phase = 1 + 0.5j if kind == mx.complex64 else 1
        left = (phase * rng.standard_normal((5, 37))).astype(dtype)
        right = (phase * rng.standard_normal((37, 19))).astype(dtype)
        exact = np.matmul(left, right)
        mine = mx.array(left, dtype=kind)  # without dtype mx.array makes float32 of float64
        for other in (mx.array(right, dtype=kind), mx.array(np.ascontiguousarray(right.T), dtype=kind).T):
            product = np.array(mx.matmul(mine, other, stream=mx.cpu))
            error = float(np.abs(product - exact).max() / np.abs(exact).max())
            worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst
