"""An operation whose cost, errors and results a test sets, and chips and processes to gate it on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels.chip import Chip
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.gate import Gate
from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Runner
from dflash_mlx.kernels.race import Verdict, judge
from dflash_mlx.kernels.race_child import judge_all
from dflash_mlx.kernels.race_file import RaceFile
from dflash_mlx.kernels.race_watch import Ending, Raced, race_all

M4 = Chip("Apple M4", "applegpu_g16g", "macOS 26.1")
M5 = Chip("Apple M5", "applegpu_g17g", "macOS 26.1")
CASE = Case("double", "bfloat16", (("width", 32),))
KERNEL = MetalKernel("dflash_double", ("x",), ("y",), "y[0] = x[0];", "")


@dataclass
class Clock:
    """Seconds that pass only when something costs them."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Double:
    """y = 2x + 1 of [rows, 32], with everything that a kernel can get wrong.

    stock_s, kernel_s: of a call, by number of rows. change: spoils the kernel's result: (y, how often it was called).
    ids: an integer result beside it, which the kernel may get wrong by so much.
    """

    clock: Clock = field(default_factory=Clock)
    stock_s: Callable[[int], float] = lambda rows: 1e-3
    kernel_s: Callable[[int], float] = lambda rows: 5e-4
    change: Callable[[mx.array, int], mx.array] = lambda y, calls: y
    wrong_ids: int = 0
    matrix: bool = False
    body: str = KERNEL.body
    calls: int = 0

    def reference(self, x: mx.array) -> Arrays:
        self.clock.now += self.stock_s(len(x))
        return self._twice(x), mx.arange(len(x))

    @staticmethod
    def _twice(x: mx.array) -> mx.array:
        return x * 2 + 1

    def launch(self, run: Runner, x: mx.array) -> Arrays:
        self.calls += 1
        self.clock.now += self.kernel_s(len(x))
        y, ids = run(KERNEL, Launch((x,), (x.shape,), (x.dtype,), (32, 1, 1), (32, 1, 1)))
        return self.change(y, self.calls), ids + self.wrong_ids

    def run(self, kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        """In the place of Metal: a rounding at the end only."""
        (x,) = launch.inputs
        return [self._twice(x.astype(mx.float32)).astype(x.dtype), mx.arange(len(x))]

    @property
    def operation(self) -> Operation:
        def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
            x = mx.random.normal((rows, dict(case.sizes)["width"]), key=mx.random.key(seed)).astype(mx.bfloat16)
            return Call((x * 1000 if hard else x,))

        return Operation(
            name="double",
            kernels=(MetalKernel("dflash_double", ("x",), ("y",), self.body, ""),),
            why_not=lambda x: None,
            reference=self.reference,
            launch=self.launch,
            case=lambda x: CASE,
            sample=sample,
            first_rows=lambda call, rows: Call((call.arguments[0][:rows],)),
            floor=lambda x: {"x": x.nbytes},
            matrix=self.matrix,
        )

    def judged(self) -> Verdict:
        return judge(self.operation, CASE, self.run, unwatched, self.clock)

    def race(self, cases: Sequence[Case]) -> Iterator[Raced]:
        """As `race_all`, in this process."""
        yield from (Raced(case, self.judged()) for case in cases)

    def gate(self, path: Path, chip: Chip = M4, **others: Any) -> Gate:
        return Gate(chip, RaceFile(path), **{"race": self.race, "operations": {"double": self.operation}, **others})


@contextlib.contextmanager
def unwatched(limit_s: float) -> Iterator[None]:
    yield


@dataclass
class FakeChild:
    """A child that says these lines; None is a time in which it says nothing, "" its end."""

    lines: list[str | None]
    ended: Ending = field(default_factory=lambda: Ending(-11))
    killed: int = 0
    waited: list[float] = field(default_factory=list)

    def read(self, timeout_s: float) -> str | None:
        self.waited.append(timeout_s)
        return self.lines.pop(0)

    def end(self) -> Ending:
        self.killed += 1
        return self.ended


def said(double: Double, cases: Sequence[Case]) -> list[str | None]:
    """What a child that judges them says."""
    lines: list[str | None] = []
    operations = dict.fromkeys([case.operation for case in cases], double.operation)
    judge_all(cases, operations, lambda message: lines.append(json.dumps(message)), double.run, double.clock)
    return lines


def watched(cases: Sequence[Case], *children: FakeChild) -> tuple[list[Raced], list[list[Case]]]:
    """What `race_all` makes of these children, one after the other, and what each was asked."""
    waiting, asked = list(children), list[list[Case]]()

    def start(left: Sequence[Case]) -> FakeChild:
        asked.append(list(left))
        return waiting.pop(0)

    return list(race_all(cases, start)), asked


class Marked(nn.Module):
    """In the place of an MLP: calls it, and wants `CASE` raced."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def __call__(self, x: mx.array) -> mx.array:
        return self.original(x)

    def cases(self) -> list[Case]:
        return [CASE]


def mark(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    return Marked(module) if type(module).__name__ == "MLP" else None
