"""Kernels that a gate opens, and what the user is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.kernels.operation import Case

if TYPE_CHECKING:
    from dflash_mlx.kernels.gate import Gate

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Use:
    """What an operation runs on: `opened` of `cases` on its kernel; the first reason of the others."""

    operation: str
    opened: int
    cases: int
    reason: str | None

    def __str__(self) -> str:
        if not self.cases or self.opened == self.cases:
            return self.operation
        return f"{self.operation} ({f'{self.opened} of {self.cases} shapes; ' if self.opened else ''}{self.reason})"


class Gated(Kernels):
    """Kernels that run where the gate opens them. names: the only ones that may; None is all."""

    def __init__(self, gate: Gate, names: frozenset[str] | None) -> None:
        super().__init__(gate.chip.closed is None, lambda operation, case: gate.closed(operation, case, names))
        self.gate, self.names = gate, names

    def prepare(self, cases: Iterable[Case], progress: Progress | None = None) -> None:
        self.gate.prepare(cases, self.names, progress)

    def serving(self, cases: Iterable[Case]) -> Kernels:
        return self if any(use.opened for use in self.gate.uses(cases, self.names)) else STOCK

    def notes(self, cases: Iterable[Case]) -> tuple[str, ...]:
        if self.gate.chip.closed is not None:
            return () if self.names is None else (f"no kernel is used: {self.gate.chip.closed}",)
        called = list(cases)
        uses = {use.operation: use for use in self.gate.uses(called, self.names)}
        if self.names is not None:  # of the others nobody asked anything
            uses = {name: uses.get(name) or self._unused(name, called) for name in sorted(self.names)}
        opened, stock = ([str(use) for use in uses.values() if bool(use.opened) is on] for on in (True, False))
        parts = [f"{kind}: {', '.join(texts)}" for kind, texts in (("kernels", opened), ("stock", stock)) if texts]
        return (*(["; ".join(parts)] if parts else []), *filter(None, [self.gate.file.note]))

    def _unused(self, name: str, cases: Sequence[Case]) -> Use:
        case = next((case for case in cases if case.operation == name), None)
        operation = self.gate.operations.get(name)
        closed = None if case is None or operation is None else self.gate.closed(operation, case, self.names)
        return Use(name, 0, 1, closed or "this pair does not call it")
