"""What may use its kernel on this machine: wishes, rules about chips, and verdicts of races.

`load` has the cases of a pair raced (`Gate.prepare`), once per chip, system, MLX version and kernel; everything else
only looks verdicts up. Where nothing opens for a pair (`Kernels.serving`), or nothing may open at all, no kernels are
wired in: mlx_lm's modules run, and a cycle costs what it cost before there were kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx

from dflash_mlx.demo import default_cache_dir
from dflash_mlx.demo.lock import exclusive
from dflash_mlx.kernels.chip import Chip, this_chip
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.kernels.gated import Gated, Progress, Use
from dflash_mlx.kernels.operation import Case, Operation
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.race_file import Conditions, RaceFile, digest
from dflash_mlx.kernels.race_watch import Raced, race_all

UNRACED = "not raced here yet, which dflash_mlx.load does"

Race = Callable[[Sequence[Case]], Generator[Raced]]


def parse_wish(wish: str | Kernels) -> frozenset[str] | None:
    """The operations that may open: None for all ("auto"), none for "off".

    Raises:
        ValueError: no such operation; names the legal ones.
    """
    names = [name.strip() for name in wish.split(",")] if isinstance(wish, str) else []
    if isinstance(wish, Kernels) or names == ["auto"]:
        return None
    if names == ["off"]:
        return frozenset()
    legal = sorted(all_operations())
    if not names or any(name not in legal for name in names):
        raise ValueError(
            f"`kernels` has to be 'auto', 'off', or one or more of {', '.join(legal)}, separated by "
            f"commas, got {wish!r}."
        )
    return frozenset(names)


def all_operations() -> Mapping[str, Operation]:
    """By name. Imported when they are asked for: where no kernel runs, none is read."""
    from dflash_mlx.kernels.registry import OPERATIONS

    return OPERATIONS


def select(wish: str | Kernels, gate: Gate | None = None) -> Kernels:
    """What `kernels=` of the library means here.

    Raises:
        ValueError: as `parse_wish`.
    """
    if isinstance(wish, Kernels):
        return wish
    names = parse_wish(wish)
    return STOCK if names is not None and not names else (gate or this_gate()).kernels_for(names)


def this_gate() -> Gate:
    """The gate of this machine, whose verdicts are in the user's cache folder."""
    return _gate(this_chip(), default_cache_dir() / "kernels.json")


@cache
def _gate(chip: Chip, path: Path) -> Gate:
    return Gate(chip, RaceFile(path))


class Gate:
    """Looks verdicts up, and has them found.

    Args:
        race: judges cases in a process of its own.
    """

    def __init__(
        self,
        chip: Chip,
        file: RaceFile,
        race: Race = race_all,
        operations: Mapping[str, Operation] | None = None,
        mlx: str = mx.__version__,  # type: ignore[attr-defined]
    ) -> None:
        self.chip, self.file = chip, file
        self._race, self._operations, self._mlx = race, operations, mlx
        self._kernels: dict[frozenset[str] | None, Gated] = {}
        self._held: dict[Case, Verdict] | None = None

    @property
    def operations(self) -> Mapping[str, Operation]:
        return all_operations() if self._operations is None else self._operations

    def kernels_for(self, names: frozenset[str] | None) -> Gated:
        """One object per wish, since views of models are kept for it."""
        return self._kernels.setdefault(names, Gated(self, names))

    def rule(self, operation: Operation, names: frozenset[str] | None) -> str | None:
        """Why an operation is closed whatever races say, or None."""
        if self.chip.closed is not None:
            return self.chip.closed
        if names is not None and operation.name not in names:
            return "not among the kernels that were asked for"
        return self.chip.matrix_closed if operation.matrix and names is None else None

    def closed(self, operation: Operation, case: Case, names: frozenset[str] | None) -> str | None:
        """Why this case of an operation is on stock, or None."""
        return self._closed(operation, case, names, self._hung())

    def _closed(
        self, operation: Operation, case: Case, names: frozenset[str] | None, hung: Mapping[str, str | None]
    ) -> str | None:
        rule = self.rule(operation, names) or self.too_new(operation, case) or hung.get(operation.name)
        if rule is not None:
            return rule
        verdict = self.held.get(case)
        return UNRACED if verdict is None else verdict.reason

    def _hung(self) -> dict[str, str | None]:
        """The operations that are closed at every size, since one of them took too long; with the reason."""
        return {case.operation: verdict.reason for case, verdict in self.held.items() if verdict.scope == "kernel"}

    def too_new(self, operation: Operation, case: Case) -> str | None:
        """Why a case is not for this chip, or None. An unknown chip is a new one."""
        newest, generation = operation.newest(case), self.chip.generation
        if newest is None or (generation is not None and generation <= newest):
            return None
        return f"MLX's own kernels are as good for so few rows from generation {newest + 1} on"

    @property
    def held(self) -> dict[Case, Verdict]:
        """The verdicts that hold under the present conditions."""
        if self._held is None:  # set when it is whole: another thread would find kernels that were never raced
            self._held = self._read()
        return self._held

    def _read(self) -> dict[Case, Verdict]:
        found = {}
        for (conditions, case), verdict in self.file.read().items():
            operation = self.operations.get(case.operation)
            if operation is not None and conditions == self.conditions(operation):
                found[case] = verdict
        return found

    def conditions(self, operation: Operation) -> Conditions:
        return Conditions(self.chip.architecture, self.chip.system, self._mlx, digest(operation))

    def prepare(
        self, cases: Iterable[Case], names: frozenset[str] | None = None, progress: Progress | None = None
    ) -> None:
        """Race the cases that nothing is known of. One process at a time: two would slow each other.

        An exception that `progress` raises ends it; what was found until then is kept.
        """
        missing = self._missing(dict.fromkeys(cases), names)
        if not missing:
            return
        tell = progress or (lambda message, share: None)
        try:
            with self._alone(tell):
                self.held.update(self._read() | self.held)
                missing = self._missing(missing, names)
                if missing:
                    self._raced(missing, tell)
        finally:  # also of what was found before an interrupt
            for kernels in self._kernels.values():
                kernels.reasons.clear()
                kernels.views.clear()  # modules keep what was decided for them

    def _missing(self, cases: Iterable[Case], names: frozenset[str] | None) -> list[Case]:
        known, hung = ((self.operations.get(case.operation), case) for case in cases), self._hung()
        return [one for operation, one in known if operation and self._closed(operation, one, names, hung) is UNRACED]

    def _raced(self, cases: list[Case], tell: Progress) -> None:
        tell(f"Racing kernels on this machine, once: {cases[0].operation}", 0.0)
        with contextlib.closing(self._race(cases)) as found:
            for done, raced in enumerate(found, 1):
                self.held[raced.case] = raced.verdict
                if raced.verdict.scope != "moment":
                    conditions = self.conditions(self.operations[raced.case.operation])
                    self.file.add({(conditions, raced.case): raced.verdict})
                tell(f"Racing kernels on this machine, once: {raced.case.operation}", done / len(cases))

    @contextlib.contextmanager
    def _alone(self, tell: Progress) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a disk that cannot be written has no lock, and keeps no verdicts
                self.file.path.parent.mkdir(parents=True, exist_ok=True)
                lock = self.file.path.with_suffix(".lock")
                stack.enter_context(exclusive(lock, tell, "Waiting for another process to race kernels"))
            yield

    def uses(self, cases: Iterable[Case], names: frozenset[str] | None = None) -> list[Use]:
        """What the operations of these cases run on; cases that are not for this chip are left out."""
        found: dict[str, Use] = {}
        hung = self._hung()
        for case in dict.fromkeys(cases):
            operation = self.operations.get(case.operation)
            if operation is not None and self.too_new(operation, case) is None:
                reason = self._closed(operation, case, names, hung)
                use = found.get(operation.name, Use(operation.name, 0, 0, None))
                opened, reasons = use.opened + (reason is None), use.reason or reason
                found[operation.name] = replace(use, opened=opened, cases=use.cases + 1, reason=reasons)
        return list(found.values())
