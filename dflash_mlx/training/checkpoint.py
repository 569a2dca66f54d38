"""Where a training is: one file, which a rename replaces.

So at any moment, also after a kill between any two writes, there is the last one whole or the one before; never none.
The weights of the best evaluation lie beside it, in a file of their own since they change less often.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.errors import DFlashError
from dflash_mlx.files import FULL, save_weights, whole_file

FORMAT = "1"
_STATE, _BEST = "state.safetensors", "best.safetensors"
_DRAFT, _OPTIMISER = "draft.", "optimiser."
_ENTRY = "training"


class TrainingError(DFlashError):
    """A run cannot be continued, or its folder cannot be used; says what to do."""


def by_name(tree: Any) -> dict[str, mx.array]:
    """The arrays of a tree of parameters or of an optimiser's state, under dotted names."""
    return dict(tree_flatten(tree))


@dataclass(frozen=True)
class State:
    """How far a training is. step: steps done. blocks: learned from. seconds: of training, without evaluation.

    evaluated: the step of the last evaluation, -1 before the first. best: `score` and `record` of the best one, and
    the `measure` that it is a score of; None before the first. skipped: steps that came to nothing, and in_a_row, the
    last ones. window: sums since the last line of the log. scales: of the features, as `FeatureScales.to_json`.
    """

    step: int = 0
    blocks: int = 0
    seconds: float = 0.0
    evaluated: int = -1
    best: dict[str, Any] | None = None
    skipped: int = 0
    in_a_row: int = 0
    window: dict[str, Any] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """draft: its parameters. optimiser: `Optimiser.state`."""

    state: State
    draft: Mapping[str, mx.array]
    optimiser: Mapping[str, mx.array]


class Checkpoints:
    """The last state of a training, and its best weights, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the last one.

        Raises:
            TrainingError: it cannot be written; the last one stays.
        """
        arrays = {_DRAFT + name: value for name, value in checkpoint.draft.items()}
        arrays |= {_OPTIMISER + name: value for name, value in checkpoint.optimiser.items()}
        entry = json.dumps({"format": FORMAT, **asdict(checkpoint.state)})
        self._write(_STATE, arrays, {_ENTRY: entry}, f"The checkpoint of step {checkpoint.state.step}")

    def load(self) -> Checkpoint | None:
        """The last one, or None if there is none yet.

        Raises:
            TrainingError: it is damaged, or of another version.
        """
        path = self.folder / _STATE
        if not path.exists():
            return None
        arrays, metadata = _read(path)
        try:
            entry = json.loads(metadata[_ENTRY])
            if (made := entry.pop("format")) != FORMAT:
                raise ValueError(f"format {made}, this version reads {FORMAT}")
            state = State(**entry)
        except (KeyError, ValueError, TypeError) as error:
            raise _damaged(path, error) from error
        parts = {
            prefix: {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
            for prefix in (_DRAFT, _OPTIMISER)
        }
        return Checkpoint(state, parts[_DRAFT], parts[_OPTIMISER])

    def save_best(self, draft: Mapping[str, mx.array], step: int) -> None:
        """Replace the best weights. Raises TrainingError as `save`."""
        self._write(_BEST, draft, {}, f"The best weights, of step {step},")

    def load_best(self) -> dict[str, mx.array] | None:
        """None if there are none. Raises TrainingError as `load`."""
        path = self.folder / _BEST
        return _read(path)[0] if path.exists() else None

    @property
    def has_state(self) -> bool:
        return (self.folder / _STATE).exists()

    @property
    def has_best(self) -> bool:
        return (self.folder / _BEST).exists()

    def clear_leftovers(self) -> None:
        """Delete what a killed process left half-written."""
        for path in self.folder.glob(".*.safetensors"):
            path.unlink(missing_ok=True)

    def _write(self, name: str, arrays: Mapping[str, mx.array], metadata: dict[str, str], what: str) -> None:
        path = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as aside:
                save_weights(aside, arrays, metadata)
                aside.chmod(0o644)
        except OSError as error:
            raise _not_written(path, what, arrays, error) from error


def _not_written(path: Path, what: str, arrays: Mapping[str, mx.array], error: OSError) -> TrainingError:
    size = sum(value.nbytes for value in arrays.values()) / 1e9
    kept = "The one before it is as it was" if path.exists() else "There is none before it"
    if error.errno in FULL:
        free = shutil.disk_usage(path.parent).free / 1e9
        why, cure = f"the disk is full ({free:.2f} GB free, {size:.2f} GB needed)", "Free some space"
    else:
        why, cure = str(error), "Make the folder writable"
    return TrainingError(f"{what} could not be written to {path}: {why}. {kept}. {cure}, and go on with `--resume`.")


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    try:
        arrays, metadata = mx.load(str(path), return_metadata=True)
        mx.eval(arrays)  # now: the file may be replaced while they are used
    except Exception as error:  # RuntimeError, OSError
        raise _damaged(path, error) from error
    return arrays, metadata  # type: ignore[return-value]


def _damaged(path: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"{path} cannot be read ({error}), so the training cannot go on from it. Restore it from a copy, or delete the "
        "folder that it is in to begin again at step 0 with `--resume`."
    )
