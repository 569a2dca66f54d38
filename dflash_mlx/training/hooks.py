"""What a training calls: to evaluate, to export, to show how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.training.prepare import Prepared


@dataclass(frozen=True)
class Snapshot:
    """A draft in the middle of its training, as it would be loaded: it takes features as they are.

    evaluation: what was last said about it, a record of the log; None before.
    """

    draft: DraftModel
    prepared: Prepared
    step: int
    evaluation: Mapping[str, Any] | None = None


class Evaluation(Protocol):
    """What an evaluation found."""

    @property
    def score(self) -> float:
        """More is better."""
        ...

    def record(self, *, best: bool) -> dict[str, Any]:
        """For the log, with its kind and step."""
        ...


@dataclass(frozen=True)
class Hooks:
    """What a training calls.

    export: writes a draft to a folder, or replaces the one there. evaluate: may take as long as it likes, and changes
    nothing; held_out: positions that it measures on. progress: gets every record of the log, and one per step that is
    not in it. tell: sentences for the user. begin: gets what is about to be trained, before anything is written.
    """

    export: Callable[[Snapshot, Path], None]
    evaluate: Callable[[Snapshot], Evaluation] | None = None
    progress: Callable[[Mapping[str, Any]], None] = lambda record: None
    tell: Callable[[str], None] = lambda line: None
    begin: Callable[[Prepared], None] = lambda prepared: None
    held_out: int = 0
