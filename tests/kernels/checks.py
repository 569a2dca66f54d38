"""What every kernel's tests ask: the same bits under every schedule, both references met, no byte read twice.

On a Mac the kernels run on Metal; elsewhere in the simulator, which is also what counts bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.kernels.operation import Call, Operation, Runner, on_metal
from tests.kernels.simulator import Counts, Simulator, why_unavailable

SEEDS = (0, 1, 2)  # orders of threads and threadgroups; on Metal, repetitions
SLACK = 1.1  # bytes fetched, over the contract's floor


def runner(seed: int = 0) -> Runner:
    """Metal where there is one, else the simulator with this seed; where there is neither, the test is skipped."""
    return on_metal if mx.metal.is_available() else simulator(seed)


def simulator(seed: int = 0) -> Simulator:
    """The simulator; the test is skipped where it cannot run."""
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    return Simulator(seed)


def check(
    operation: Operation, call: Call, expected: Sequence[np.ndarray | None] = (), *, rtol: float, atol: float
) -> list[mx.array]:
    """Launch under every seed, demand equal bits, and compare with the MLX reference and with `expected`.

    expected: by output, numpy in float64, written independently of the reference; None leaves one out.
    rtol, atol: as in numpy.allclose; both 0 for integers and exact results.
    Returns the outputs.
    """
    runs = [list(operation.launch(runner(seed), *call.arguments, **call.options)) for seed in SEEDS]
    for seed, run in zip(SEEDS[1:], runs[1:], strict=True):
        for index, (one, other) in enumerate(zip(runs[0], run, strict=True)):
            same_bits(one, other, f"{operation.name}: output {index} under seeds {SEEDS[0]} and {seed}")
    reference = operation.reference(*call.arguments, **call.options)
    for index, (output, wanted) in enumerate(zip(runs[0], reference, strict=True)):
        what = f"{operation.name}: output {index}"
        assert (output.shape, output.dtype) == (wanted.shape, wanted.dtype), what
        close(numbers(output), numbers(wanted), rtol, atol, f"{what} beside the MLX reference")
    for index, (output, value) in enumerate(zip(runs[0], expected, strict=False)):
        if value is not None:
            close(numbers(output), value, rtol, atol, f"{operation.name}: output {index} beside numpy")
    return runs[0]


def check_bytes(operation: Operation, call: Call) -> list[Counts]:
    """Demand that the kernel reads at most SLACK times what its contract says it has to. Returns the counts."""
    run = simulator()
    operation.launch(run, *call.arguments, **call.options)
    floor = operation.floor(*call.arguments, **call.options)
    fetched = [(c.kernel, name, amount) for c in run.counts for name, amount in c.fetched.items()]
    total, least = sum(amount for *_, amount in fetched), sum(floor.values())
    assert total <= SLACK * least, f"{operation.name} reads {total} bytes, floor {least}: {fetched}, {floor}"
    return run.counts


def check_first_rows(operation: Operation, call: Call, rows: Sequence[int]) -> None:
    """Demand that a call with fewer rows gives the same bits for those rows, along the axis whose length changes."""
    assert operation.first_rows is not None, operation.name
    whole = operation.launch(runner(), *call.arguments, **call.options)
    for count in rows:
        part = operation.first_rows(call, count)
        outputs = operation.launch(runner(), *part.arguments, **part.options)
        for index, (few, many) in enumerate(zip(outputs, whole, strict=True)):
            same_bits(few, _cut(many, few.shape), f"{operation.name}: output {index}, {count} rows against all")


def same_bits(one: mx.array, other: mx.array, what: str) -> None:
    """Demand equal shapes, dtypes and bits."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype), what
    different = np.flatnonzero(bits(one) != bits(other))
    assert different.size == 0, f"{what}: {different.size} of {one.size} differ, the first at {different[0]}"


def close(got: np.ndarray, wanted: np.ndarray, rtol: float, atol: float, what: str) -> None:
    """numpy.allclose with the worst place in the message; NaN is equal to NaN."""
    assert got.shape == np.shape(wanted), f"{what}: shape {got.shape}, wanted {np.shape(wanted)}"
    near = np.isclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
    if not near.all():
        error = np.where(near, 0, np.nan_to_num(np.abs(got - wanted), nan=np.inf))
        worst = np.unravel_index(np.argmax(error), error.shape)
        raise AssertionError(
            f"{what}: {int((~near).sum())} of {got.size} are off, the worst at {tuple(map(int, worst))}: "
            f"{got[worst]}, wanted {np.asarray(wanted)[worst]}"
        )


def numbers(array: mx.array) -> np.ndarray:
    """The values: float64 for floating arrays, as they are for others."""
    if mx.issubdtype(array.dtype, mx.floating):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    return np.array(array)


def bits(array: mx.array) -> np.ndarray:
    """The values as unsigned integers, flat, so that -0 and NaN compare too."""
    view = np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))
    return view.view(f"u{view.dtype.itemsize}").ravel()


def _cut(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    return array[tuple(slice(size) for size in shape)]
