"""What goes wrong with a kernel: before it runs, and while it runs."""

from __future__ import annotations


class CompileError(Exception):
    """The kernel is not Metal: what the compiler or the lint said, by line of `kernel` (the body) or `header`."""


class SimulatorError(Exception):
    """A kernel did what Metal leaves undefined, or a launch asked for what this project does not allow.

    kind: one of KINDS.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"[{kind}] {message}")
        self.kind = kind


# By the runtime's number for it (`runtime/state.h`).
KINDS = {
    1: "out-of-bounds",
    2: "uninitialised-read",
    3: "data-race",
    4: "simd-divergence",
    5: "barrier-divergence",
    6: "deadlock",
    7: "resource-limit",
    8: "runaway",
    9: "misaligned",
    10: "undefined-arithmetic",
    11: "internal",
    12: "unwritten-output",
}
