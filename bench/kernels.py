"""Every kernel: is it right, what does it read, and on Metal, how fast is it beside MLX's own operations.

    python -m bench.kernels [--json FILE] [name ...]

Per operation and number of rows:

    right     the gate's check: errors against float32, repeated runs, row counts (dflash_mlx/kernels/numerics.py)
    read      bytes that its SIMD-groups have to fetch, counted by the tests' simulator at a small size, and how many
              times the floor that is in the kernel's contract
    time      of one step and of stock's, where there is Metal: dependent steps, operands that no cache holds at once,
              the order A B B A, medians (dflash_mlx/kernels/race.py)

On Metal kernels run in this process, without the watchdog of `load`'s races: each is named before it starts, and one
that hangs has to be interrupted (Ctrl-C, or kill -9 where it is stuck in the driver).

Without Metal nothing is timed and the check runs in the simulator. Where the simulator cannot run (it needs x86-64
Linux), what is read is null.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.kernels.numerics import arrays_of, why_wrong
from dflash_mlx.kernels.operation import Arrays, Call, Case, Operation, Runner, on_metal
from dflash_mlx.kernels.race import chain, operands
from dflash_mlx.kernels.registry import OPERATIONS

ROUNDS = 5  # of A B B A
NO_METAL = "not timed: no Metal"
CLASSES = (4, 8, 16)  # of rows, by the most of each, in operations that race them on their own


def _case(operation: str, dtype: str, **sizes: int) -> Case:
    return Case(operation, dtype, tuple(sizes.items()))


# What is counted: small, since every thread runs on a CPU.
SMALL: dict[str, Case] = {
    case.operation: case
    for case in (
        _case("accept", "int32"),
        _case("gdn_prework", "bfloat16", Hk=2, Hv=4, Dv=128, W=4, Dk=128),
        _case("gdn_verify", "bfloat16", Hk=2, Hv=4, Dv=32, Dk=128),
        # Not bfloat16: MLX's CPU adds such products up in bfloat16, so that its ids are those of rounded logits.
        _case("lm_head_topk", "float16", vocab=512, hidden=256, bits=4, group=64, k=8, mask=0, cap=0, lse=0, rows=16),
        _case("qk_norm_rope", "bfloat16", heads=4, kv_heads=2, dim=128, rotary=128, normed=1, table=0),
        _case("qmm_small_m", "bfloat16", n=128, k=512, group_size=64, bits=4, rows=16),
        _case("sdpa_rows", "bfloat16", head_dim=128, heads=4, kv_heads=2, capacity=160, mode=1, window=0),
    )
}
# What is timed: layers of an 8B model; the gated-delta ones are those of Qwen3.5.
LAYER: dict[str, Case] = {
    case.operation: case
    for case in (
        _case("accept", "int32"),
        _case("gdn_prework", "bfloat16", Hk=16, Hv=32, Dv=128, W=4, Dk=128),
        _case("gdn_verify", "bfloat16", Hk=16, Hv=32, Dv=128, Dk=128),
        _case(
            "lm_head_topk", "bfloat16", vocab=151936, hidden=4096, bits=4, group=64, k=8, mask=0, cap=0, lse=0, rows=16
        ),
        _case("qk_norm_rope", "bfloat16", heads=32, kv_heads=8, dim=128, rotary=128, normed=1, table=0),
        _case("qmm_small_m", "bfloat16", n=4096, k=4096, group_size=64, bits=4, rows=16),
        _case("sdpa_rows", "bfloat16", head_dim=128, heads=32, kv_heads=8, capacity=4096, mode=1, window=0),
    )
}


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(OPERATIONS)} (default: all)")
    words.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if a kernel is wrong, fails or could not be checked; 2 for wrong usage."""
    args = parser().parse_args(argv)
    unknown = [name for name in args.names if name not in OPERATIONS]
    if unknown:
        parser().error(f"no kernel is named {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    if args.json:
        try:
            args.json.open("a").close()  # minutes of measuring come before it is written
        except OSError as error:
            parser().error(f"--json {args.json} cannot be written: {error.strerror}")
    from . import machine

    rows = []
    for name in dict.fromkeys(args.names or OPERATIONS):
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = measure(OPERATIONS[name])
        rows += found
        for row in found:
            print(line(row), flush=True)
    notes = [note for note in (None if mx.metal.is_available() else NO_METAL, _no_counts()) if note]
    print("\n".join(notes))
    if args.json:
        result = {
            "schema": "dflash-kernels-1",
            "command": "python -m bench.kernels",
            "machine": machine.card(),
            "notes": notes,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["wrong"] is not None for row in rows))


def measure(operation: Operation) -> list[dict[str, Any]]:
    """One row per width, of every class. wrong, counted, timed: null for nothing wrong, not counted, not timed."""
    case = LAYER[operation.name] if mx.metal.is_available() else SMALL[operation.name]
    return [row for one in _of_every_class(case) for row in _measured(operation, one)]


def _of_every_class(case: Case) -> list[Case]:
    """The case, where it is of one class of rows as one of each."""
    sizes = case.size
    if "rows" not in sizes:
        return [case]
    return [replace(case, sizes=tuple({**sizes, "rows": most}.items())) for most in CLASSES]


def _measured(operation: Operation, case: Case) -> list[dict[str, Any]]:
    metal = mx.metal.is_available()
    wrong = _wrong(operation, case, on_metal if metal else _simulator())
    return [
        {
            "operation": operation.name,
            "rows": rows,
            "checked": {"dtype": case.dtype, **case.size},
            "wrong": wrong,
            "counted": counted(operation, SMALL[operation.name], rows),
            "timed": timed(operation, case, rows) if metal and wrong is None else None,
        }
        for rows in operation.widths(case)
    ]


def _wrong(operation: Operation, case: Case, run: Runner | None) -> str | None:
    if run is None:
        return "not checked: nothing runs it here"
    try:
        return why_wrong(operation, case, run, lambda seconds: nullcontext())
    except Exception as error:  # one that does not compile must not hide the numbers of the others
        return f"it failed here ({type(error).__name__}: {str(error).strip()[:2000]})"


def counted(operation: Operation, case: Case, rows: int) -> dict[str, Any] | None:
    """Bytes read and written, matrix products, and the contract's floor; None where nothing can count."""
    run: Any = _simulator()
    if run is None:
        return None
    call = operation.sample(case, rows, 0, False)
    operation.launch(run, *call.arguments, **call.options)
    floor = operation.floor(*call.arguments, **call.options)
    fetched = _added(counts.fetched for counts in run.counts)
    return {
        "sizes": case.size,
        "fetched": fetched,
        "floor": floor,
        "times_floor": sum(fetched.values()) / sum(floor.values()),
        "loaded": sum(counts.loaded for counts in run.counts),
        "stored": _added(counts.stored for counts in run.counts),
        "matrix_operations": sum(counts.matrix_operations for counts in run.counts),
        "launches": len(run.counts),
    }


def timed(operation: Operation, case: Case, rows: int) -> dict[str, Any]:
    """Medians of a step's time in microseconds, with their range, kernel and stock."""

    def stock(call: Call) -> Arrays:
        return (operation.stock or operation.reference)(*call.arguments, **call.options)

    def kernel(call: Call) -> Arrays:
        return operation.launch(on_metal, *call.arguments, **call.options)

    calls, steps = operands(operation, case, rows), 0

    def counting(call: Call) -> Arrays:
        nonlocal steps
        steps += 1
        return stock(call)

    arms: dict[str, Callable[[Call], Arrays]] = {"stock": stock, "kernel": kernel}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for compute in (counting, kernel):
        chain(compute, calls)  # compiled and allocated before the clock runs
    for _ in range(ROUNDS):
        for name in ("stock", "kernel", "kernel", "stock"):
            started = time.perf_counter()
            chain(arms[name], calls)
            times[name].append((time.perf_counter() - started) / steps * 1e6)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "sizes": case.size,
        "operand_bytes": sum(array.nbytes for array in arrays_of(calls[0])),
        "copies": len(calls),
        "us": median,
        "range_us": {name: [min(values), max(values)] for name, values in times.items()},
        "speedup": median["stock"] / median["kernel"],
    }


def line(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    parts = [f"{row['operation']:13s} {row['rows']:3d} rows", "right" if row["wrong"] is None else row["wrong"]]
    if row["counted"]:
        count = row["counted"]
        parts.append(f"reads {sum(count['fetched'].values())} bytes, {count['times_floor']:.2f} times the floor")
    if row["timed"]:
        us, speedup = row["timed"]["us"], row["timed"]["speedup"]
        parts.append(f"{us['kernel']:.1f} us, stock {us['stock']:.1f} us, {speedup:.2f} times as fast")
    return " | ".join(parts)


def _simulator() -> Runner | None:
    from tests.kernels.simulator import Simulator, why_unavailable

    return None if why_unavailable() else Simulator()


def _no_counts() -> str | None:
    from tests.kernels.simulator import why_unavailable

    reason = why_unavailable()
    return f"bytes not counted: {reason}" if reason else None


def _added(parts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total


if __name__ == "__main__":
    sys.exit(main())
