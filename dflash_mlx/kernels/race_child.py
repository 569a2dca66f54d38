"""`python -m dflash_mlx.kernels.race_child`: judges kernels in a process of its own, which may hang or be killed.

Reads {"cases": [[operation, dtype, {size: n}], ...]} from stdin and writes one JSON object a line: {"case": i} before
each, {"begin": seconds} and {"end": true} around work on the GPU, which must not take longer, and {"verdict": ...}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, get_args

from dflash_mlx.kernels.operation import Case, Operation, Runner, on_metal
from dflash_mlx.kernels.race import Scope, Verdict, judge


def plain_case(case: Case) -> list[Any]:
    return [case.operation, case.dtype, case.size]


def case_of(plain: Sequence[Any]) -> Case:
    """Raises ValueError, TypeError: it is not what `plain_case` makes."""
    operation, dtype, sizes = plain
    if not isinstance(operation, str) or not isinstance(dtype, str):
        raise TypeError(f"a case begins with two names, got {plain!r}")
    return Case(operation, dtype, tuple((str(name), int(size)) for name, size in sizes.items()))


def plain_verdict(verdict: Verdict) -> dict[str, Any]:
    speedups = {str(rows): speedup for rows, speedup in verdict.speedups}
    return {"reason": verdict.reason, "speedups": speedups, "scope": verdict.scope}


def verdict_of(plain: dict[str, Any]) -> Verdict:
    """Raises ValueError, TypeError, KeyError, AttributeError: it is not what `plain_verdict` makes."""
    reason, speedups, scope = plain["reason"], plain["speedups"], plain["scope"]
    if reason is not None and not isinstance(reason, str):
        raise TypeError(f"a reason is a text or null, got {reason!r}")
    if scope not in get_args(Scope):
        raise ValueError(f"a scope is one of {', '.join(get_args(Scope))}, got {scope!r}")
    return Verdict(reason, tuple((int(rows), float(speedup)) for rows, speedup in speedups.items()), scope)


def judge_all(
    cases: Sequence[Case],
    operations: Mapping[str, Operation],
    say: Callable[[dict[str, Any]], None],
    run: Runner = on_metal,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Say what is done, while it is done."""

    @contextlib.contextmanager
    def guard(limit_s: float) -> Iterator[None]:
        say({"begin": limit_s})
        yield
        say({"end": True})

    for index, case in enumerate(cases):
        say({"case": index})
        say({"verdict": plain_verdict(judge(operations[case.operation], case, run, guard, clock))})


def main(stdin: TextIO, stdout: TextIO) -> None:
    from dflash_mlx.kernels.registry import OPERATIONS

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=stdout, flush=True)

    judge_all([case_of(case) for case in json.load(stdin)["cases"]], OPERATIONS, say)


if __name__ == "__main__":
    words = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no message
    main(sys.stdin, words)
