"""A kernel against stock on this machine: faster by a margin at both of its widths, or it stays closed.

What misleads is avoided: every step needs the one before it (a queue of independent steps hides latency), operands
rotate over copies that no cache holds at once, and the order is A B B A, so that a chip that slows down slows both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from dflash_mlx.kernels.numerics import LAUNCH_S, Guard, arrays_of, launched, map_arrays, why_wrong
from dflash_mlx.kernels.operation import Arrays, Call, Case, Operation, Runner

MARGIN = 1.15
CHAIN_S = 20.0
_ROUNDS = 5  # of A B B A
_STEPS = 12
_COPIES = 3
_MOST_COPIES = 24
_CACHE_BYTES = 256 * 2**20  # more than the system cache of any chip (M3 Ultra: 96 MB)

# What MLX, Metal and C++ say where memory is missing at the moment.
_NO_MEMORY = ("unable to allocate", "insufficient memory", "out of memory", "outofmemory", "bad_alloc")

Compute = Callable[[Call], Arrays]
Scope = Literal["shape", "kernel", "moment"]


@dataclass(frozen=True)
class Verdict:
    """What a race found.

    reason:   why the kernel is closed, None if it is open.
    speedups: over stock, by number of rows.
    scope:    of the reason. "shape": this case. "kernel": every case, for one that hangs is not tried at another size.
              "moment": nothing about the kernel (no memory was left), so it is not remembered.
    """

    reason: str | None
    speedups: tuple[tuple[int, float], ...] = ()
    scope: Scope = "shape"


def judge(
    operation: Operation, case: Case, run: Runner, guard: Guard, clock: Callable[[], float] = time.perf_counter
) -> Verdict:
    """Check the numbers, then race. Whatever goes wrong closes the kernel."""
    try:
        wrong = why_wrong(operation, case, run, guard)
        if wrong is not None:
            return Verdict(f"numerics: {wrong}")
        return _race(operation, case, run, guard, clock)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Verdict:
    text = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, MemoryError) or says_no_memory(text):
        return Verdict(f"there was no memory to race it ({type(error).__name__}: {text})", scope="moment")
    if isinstance(error, ValueError) and "threadgroup" in text.lower():
        return Verdict(f"this chip takes no threadgroup of that size ({text})")
    return Verdict(f"it failed here ({type(error).__name__}: {text})")


def says_no_memory(text: str) -> bool:
    """Whether an error is about memory that others have at the moment."""
    return any(words in text.lower() for words in _NO_MEMORY)


def _race(operation: Operation, case: Case, run: Runner, guard: Guard, clock: Callable[[], float]) -> Verdict:
    speedups = []
    for rows in operation.widths(case):
        calls = operands(operation, case, rows)
        launched(operation, calls[0], run, guard)
        started = clock()
        launched(operation, calls[0], run, guard)
        took = clock() - started
        if took > LAUNCH_S:
            text = f"a launch took {took:.1f} s, and more than {LAUNCH_S:.0f} s may freeze the screen"
            return Verdict(text, scope="kernel")
        speedups.append((rows, _speedup(operation, calls, run, guard, clock)))
    slow = next(((rows, speedup) for rows, speedup in speedups if not speedup >= MARGIN), None)
    if slow is None:
        return Verdict(None, tuple(speedups))
    rows, speedup = slow
    return Verdict(f"{speedup:.2f} times as fast as stock at {rows} rows, below {MARGIN}", tuple(speedups))


def operands(operation: Operation, case: Case, rows: int) -> list[Call]:
    """Copies of the operands, evaluated: so many that no cache holds them all."""
    calls: list[Call] = []
    held = 0
    while len(calls) < _COPIES or (held < _CACHE_BYTES and len(calls) < _MOST_COPIES):
        call = operation.sample(case, rows, len(calls), False)
        arrays = arrays_of(call)
        mx.eval(arrays)
        held += sum(array.nbytes for array in arrays)
        calls.append(call)
    return calls


def _speedup(
    operation: Operation, calls: Sequence[Call], run: Runner, guard: Guard, clock: Callable[[], float]
) -> float:
    def stock(call: Call) -> Arrays:
        return (operation.stock or operation.reference)(*call.arguments, **call.options)

    def kernel(call: Call) -> Arrays:
        return operation.launch(run, *call.arguments, **call.options)

    times: dict[Compute, list[float]] = {stock: [], kernel: []}
    for compute in (stock, kernel):  # what is compiled or allocated first is not measured
        with guard(CHAIN_S):
            chain(compute, calls)
    for _ in range(_ROUNDS):
        for compute in (stock, kernel, kernel, stock):
            with guard(CHAIN_S):
                started = clock()
                chain(compute, calls)
                times[compute].append(clock() - started)
    theirs, ours = statistics.median(times[stock]), statistics.median(times[kernel])
    return theirs / ours if ours > 0 else 0.0


def chain(compute: Compute, calls: Sequence[Call]) -> None:
    """Steps that each need the one before, over operands in turn; all results are evaluated.

    The link is one small launch in both arms, which makes them a little more alike than they are.
    """
    results: list[mx.array] = []
    previous: mx.array | None = None
    for step in range(max(_STEPS, len(calls))):
        call = calls[step % len(calls)]
        outputs = compute(call if previous is None else linked(call, previous))
        results.extend(outputs)
        previous = outputs[0]
    mx.eval(results)


def linked(call: Call, previous: mx.array) -> Call:
    """The same values, of which one array cannot be had before `previous`: the smallest, a floating one if any."""
    arrays = arrays_of(call)
    floating = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    chosen = min(floating or arrays, key=lambda array: array.nbytes)
    return map_arrays(call, lambda array: _after(array, previous) if array is chosen else array)


@mx.compile
def _after(array: mx.array, previous: mx.array) -> mx.array:
    first = previous.reshape(-1)[:1]
    return (array + mx.where(first == first, 0, 1).astype(array.dtype)).reshape(array.shape)
