"""Which implementation every operation uses, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dflash_mlx.kernels.operation import Arrays, Case, Operation, Runner, on_metal

Decide = Callable[[Operation, Case], str | None]  # why the kernel is closed for this case, or None


class Kernels:
    """What runs the operations.

    wired:   whether operations are called at all; where not, targets run mlx_lm's own modules untouched.
    decide:  why a kernel is closed for a case, or None.
    runner:  executes launches.
    reasons: what was decided so far, by operation and case; None is "kernel".
    views:   of models, in which modules call these kernels: `view`.
    """

    def __init__(self, wired: bool, decide: Decide, runner: Runner = on_metal) -> None:
        self.wired, self.decide, self.runner = wired, decide, runner
        self.reasons: dict[Case, str | None] = {}
        self.views: dict[int, Any] = {}

    def prepare(self, cases: Iterable[Case], progress: Callable[[str, float | None], None] | None = None) -> None:
        """Find out what may open for these cases, if that takes work."""

    def serving(self, cases: Iterable[Case]) -> Kernels:
        """What runs a pair that calls these cases: `STOCK` where none of them is open and asking would only cost."""
        return self

    def notes(self, cases: Iterable[Case]) -> tuple[str, ...]:
        """What the user should know of how these cases run."""
        return ()

    def closed(self, operation: Operation, *arguments: Any, **options: Any) -> str | None:
        """Why these arguments go to the reference, or None."""
        outside = operation.why_not(*arguments, **options)
        if outside is not None:
            return outside
        case = operation.case(*arguments, **options)
        if case not in self.reasons:
            self.reasons[case] = self.decide(operation, case)
        return self.reasons[case]

    def run(self, operation: Operation, *arguments: Any, **options: Any) -> Arrays:
        """The operation's result, from its kernel where that is open, else from its reference."""
        if self.wired and self.closed(operation, *arguments, **options) is None:
            return operation.launch(self.runner, *arguments, **options)
        return operation.reference(*arguments, **options)


STOCK = Kernels(False, lambda operation, case: "no kernel is wanted")


def references() -> Kernels:
    """Every operation wired in, none on its kernel: for tests."""
    return Kernels(True, lambda operation, case: "references only")


def through(runner: Runner) -> Kernels:
    """Every operation on its kernel where the contract allows, ungated: for tests."""
    return Kernels(True, lambda operation, case: None, runner)
