"""Whether a kernel computes what it promises, on this machine: the half of the gate that no speed buys.

Against the operation's reference in the stored dtype ("stock"), both measured from the reference over float32 copies:
the kernel may be at most twice as far off. The same call gives the same bits again, and rows do not depend on how many
there are. Whole numbers (ids, counts, flags) have to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import mlx.core as mx

from dflash_mlx.kernels.operation import Arrays, Call, Case, Operation, Runner

Guard = Callable[[float], AbstractContextManager[None]]
"""Called around the work of kernels with the seconds that it may take at most."""

LAUNCH_S = 1.0
FIRST_S = 10.0  # of the first launch at a size, which compiles the kernel (40-56 ms are usual)
_ERROR = 2.0
_REPEATS = 3
_FLOOR = 64 * 2.0**-23  # of the largest value: two float32 sums in different orders are this far apart
_FEWER = (2, 3, 5, 8, 13)  # rows
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def why_wrong(operation: Operation, case: Case, run: Runner, guard: Guard) -> str | None:
    """The first promise that the kernel breaks, in words, or None."""
    for rows in operation.widths(case):
        for seed, hard in ((0, False), (1, True)):
            call = operation.sample(case, rows, seed, hard)
            outside = operation.why_not(*call.arguments, **call.options)
            if outside is not None:
                return f"the gate's sample of {rows} rows is outside its contract: {outside}"
            found = _why_wrong(operation, call, run, guard)
            if found is not None:
                return f"{found} ({rows} rows of {'hard' if hard else 'random'} values)"
    return None


def _why_wrong(operation: Operation, call: Call, run: Runner, guard: Guard) -> str | None:
    whole = launched(operation, call, run, guard, FIRST_S)
    for _ in range(_REPEATS - 1):
        if not all(map(same_bits, whole, launched(operation, call, run, guard))):
            return "the same call gives other bits again"
    found = _too_far(operation, call, whole)
    return found or _varying_row(operation, call, whole, run, guard)


def launched(operation: Operation, call: Call, run: Runner, guard: Guard, limit_s: float = LAUNCH_S) -> Arrays:
    """The kernel's results, evaluated under the guard."""
    mx.eval(arrays_of(call))
    with guard(limit_s):
        results = operation.launch(run, *call.arguments, **call.options)
        mx.eval(results)
    return results


def _too_far(operation: Operation, call: Call, results: Arrays) -> str | None:
    exact = call_in_float32(call)
    stock = operation.reference(*call.arguments, **call.options)
    truth = operation.reference(*exact.arguments, **exact.options)
    if len(results) != len(stock):
        return f"it gives {len(results)} results and stock {len(stock)}"
    for index, (ours, theirs, true) in enumerate(zip(results, stock, truth, strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"result {index} is {ours.dtype}{list(ours.shape)}, and stock's {theirs.dtype}{list(theirs.shape)}"
        if not mx.issubdtype(ours.dtype, mx.floating):
            if not mx.array_equal(ours, theirs):
                return f"result {index} differs from stock's, and whole numbers have to be equal"
        else:
            found = _farther(ours, theirs, true)
            if found is not None:
                return f"result {index} {found}"
    return None


def _farther(ours: mx.array, stock: mx.array, true: mx.array) -> str | None:
    """Whether `ours` is more than twice as far from `true` as `stock`, by its worst and by its typical element."""
    ours, stock, true = (array.astype(mx.float32) for array in (ours, stock, true))
    finite = mx.isfinite(stock) & mx.isfinite(true)
    if not mx.all(mx.where(finite, mx.isfinite(ours), _alike(ours, stock))):
        return "is not a number where stock's is, or the other way round"
    true = mx.where(finite, true, 0)
    scale = _FLOOR * mx.abs(true).max()
    for kind, measure in (("at worst", lambda e: mx.abs(e).max()), ("typically", lambda e: mx.sqrt((e * e).mean()))):
        error, allowed = (measure(mx.where(finite, values - true, 0)) for values in (ours, stock))
        if (error > _ERROR * allowed + scale).item():
            return f"is {kind} {error.item():.3g} from a float32 computation, and stock {allowed.item():.3g}"
    return None


def _alike(ours: mx.array, stock: mx.array) -> mx.array:
    """Where stock is no finite number: the same infinity, or NaN for NaN."""
    return (mx.isnan(ours) & mx.isnan(stock)) | (ours == stock)


def _varying_row(operation: Operation, call: Call, whole: Arrays, run: Runner, guard: Guard) -> str | None:
    if operation.first_rows is None:
        return None
    for rows in _FEWER:
        try:
            fewer = operation.first_rows(call, rows)
        except (ValueError, IndexError):  # it has not so many
            continue
        if operation.why_not(*fewer.arguments, **fewer.options) is not None:
            continue
        for part, all_rows in zip(launched(operation, fewer, run, guard, FIRST_S), whole, strict=True):
            first = first_part(all_rows, part.shape)
            if first is not None and not same_bits(part, first):
                return f"the first {rows} rows alone give other bits than among more"
    return None


def first_part(whole: mx.array, shape: Sequence[int]) -> mx.array | None:
    """The corner of this shape; None where an axis is longer than the whole's, so that nothing can be compared."""
    if len(whole.shape) != len(shape) or any(few > all_ for few, all_ in zip(shape, whole.shape, strict=True)):
        return None
    return whole[tuple(slice(size) for size in shape)]


def same_bits(one: mx.array, other: mx.array) -> bool:
    """NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    unsigned = _UNSIGNED[one.dtype.size]
    return bool(mx.array_equal(mx.contiguous(one).view(unsigned), mx.contiguous(other).view(unsigned)).item())


def arrays_of(call: Call) -> list[mx.array]:
    found: list[mx.array] = []
    map_arrays(call, lambda array: found.append(array) or array)  # type: ignore[func-returns-value]
    return found


def call_in_float32(call: Call) -> Call:
    """The call over float32 copies of its floating arrays."""

    def wide(array: mx.array) -> mx.array:
        return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array

    return map_arrays(call, wide)


def map_arrays(call: Call, change: Callable[[mx.array], mx.array]) -> Call:
    """The call with other arrays, also where they are in tuples, lists, dicts and dataclasses."""

    def walk(value: Any) -> Any:
        if isinstance(value, mx.array):
            return change(value)
        if type(value) in (tuple, list):
            return type(value)(walk(item) for item in value)
        if type(value) is dict:
            return {name: walk(item) for name, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{part.name: walk(getattr(value, part.name)) for part in fields(value) if part.init})
        return value

    return Call(walk(call.arguments), walk(call.options))
