"""The folder of a run: what it was started with, and where it is.

    run.json      recipe, target, data set, the shards that it learns from, versions
    log.jsonl     what happened, a line each (`log`)
    checkpoint/   where it is (`checkpoint`)
    best/         the draft of the best evaluation so far, to load
    draft/        the result, to load

One process at a time works in it. It is continued with what it was started with, or not at all: a draft that learned
by two recipes is what neither says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx import __version__
from dflash_mlx.demo.lock import exclusive
from dflash_mlx.files import whole_file
from dflash_mlx.training.checkpoint import Checkpoints, TrainingError
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.recipe import Recipe

FORMAT = 1
# What a run may be continued with other values of: they decide when something is measured or kept, not what is learned.
FREE = ("evaluate_every", "evaluate_prompts", "evaluate_tokens", "checkpoint_every")
_SAME = ("target", "data", "shards", "top", "tokens_sha256")
_SHOWN = 6  # differences that a message lists


@dataclass(frozen=True)
class Start:
    """What a run starts with. target: its identity. data: the data set's manifest. shards: their numbers.

    top: tokens of each distribution that is learned from; 0: none is. tokens_sha256: of the shards' files.
    initial_sha256: of the draft that it begins with; None without one.
    """

    recipe: Recipe
    target: Mapping[str, Any]
    data: Mapping[str, Any]
    shards: Sequence[int]
    top: int
    tokens_sha256: str
    initial_sha256: str | None = None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        target: Mapping[str, Any],
        dataset: Dataset,
        shards: Sequence[int],
        top: int,
        initial_sha256: str | None = None,
    ) -> Start:
        return cls(recipe, target, dataset.manifest, list(shards), top, _digest(dataset, shards), initial_sha256)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        made = {"format": FORMAT, **named, "recipe": self.recipe.to_dict(), "versions": versions()}
        return json.loads(json.dumps(made))


def versions() -> dict[str, str]:
    """Of what computes: with others the bits may be others."""
    return {
        "dflash_mlx": __version__,
        "mlx": version("mlx"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": str(mx.default_device()),
    }


class RunFolder:
    """Paths of a run, and what it was started with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log, self.best, self.draft = path / "log.jsonl", path / "best", path / "draft"
        self.checkpoints = Checkpoints(path / "checkpoint")
        self._run = path / "run.json"
        self._held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Only this process works in it meanwhile; what one that was killed left half-written is deleted.

        It may be held again within.

        Raises:
            TrainingError: another process has it.
            OSError: it cannot be made or written.
        """
        if self._held:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path / ".lock", self._refuse, ""):
            self.checkpoints.clear_leftovers()
            for name in (self.best.name, self.draft.name):
                for scratch in self.path.glob(f".{name}.{'[0-9a-f]' * 32}"):
                    shutil.rmtree(scratch, ignore_errors=True)
            for scratch in self.path.glob(".run.*.json"):
                scratch.unlink(missing_ok=True)
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _refuse(self, message: str, share: float | None) -> None:
        raise TrainingError(
            f"Another process is training in {self.path}, and two would overwrite each other's files. Wait for "
            "it, stop it, or give another folder."
        )

    @property
    def started(self) -> bool:
        """Whether a run was started in it."""
        return self._run.exists()

    def shards(self) -> list[int]:
        """That the run learns from. Raises TrainingError if run.json cannot be read."""
        found: list[int] = self._read()["shards"]
        return found

    def top(self) -> int:
        """Tokens of each distribution that the run learns from. Raises TrainingError as `shards`."""
        found: int = self._read()["top"]
        return found

    def refuse_run(self) -> None:
        """Raises TrainingError if there is a run already, or what is left of one."""
        if self.started:
            raise TrainingError(
                f"{self.path} holds a run already, and it is not overwritten. Go on with it by `--resume`, or give "
                "another folder."
            )
        if self.checkpoints.has_state:
            raise TrainingError(
                f"{self.path} holds a checkpoint, and no run.json that says what it is of. A run that begins here "
                "would go on from it after an interrupt. Restore run.json and go on with `--resume`, delete "
                f"{self.checkpoints.folder}, or give another folder."
            )

    def refuse_none(self) -> None:
        """Raises TrainingError if there is no run to continue."""
        if not self.started:
            raise TrainingError(
                f"{self.path} holds no run to continue: it has no run.json. Leave `--resume` out to begin one."
            )

    def check(self, start: Start) -> None:
        """Raises TrainingError if the run was started with something else, and says what."""
        found, wanted = self._read(), start.to_dict()
        theirs, ours = (
            {name: one.get(name) for name in _SAME}
            | {"recipe": {name: value for name, value in one["recipe"].items() if name not in FREE}}
            for one in (found, wanted)
        )
        if differing := list(differences(theirs, ours)):
            more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
            raise TrainingError(
                f"The run in {self.path} was started with something else: {'; '.join(differing[:_SHOWN])}{more}. What "
                "it learned so far would not be what its record says. Go on with what it was started with, or begin "
                "another run in another folder."
            )
        began = found.get("initial_sha256", start.initial_sha256)  # a run of before this was noted
        if began != start.initial_sha256:
            raise TrainingError(
                f"The draft {start.recipe.initial} is another one than the run in {self.path} was begun with (SHA-256 "
                f"{_short(start.initial_sha256)}, then {_short(began)}). A list or a size of it may have changed, and "
                "the record would not say what was trained. Restore it, or begin another run in another folder."
            )

    def write(self, start: Start) -> list[str]:
        """Note what the run starts with, or goes on with.

        Returns:
            What is worth telling: other versions than before, with which the bits may be others.
        Raises:
            TrainingError: what is there cannot be read. OSError: it cannot be written.
        """
        now = versions()
        before = self._read().get("versions", {}) if self.started else {}
        with whole_file(self._run) as aside:
            aside.write_text(json.dumps(start.to_dict(), indent=1) + "\n", encoding="utf-8")
            aside.chmod(0o644)
        return [
            f"{name} was {was} and is {now.get(name)} now: the last bits of the result may be others"
            for name, was in before.items()
            if was != now.get(name)
        ]

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._run.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}, this version reads {FORMAT}")
            return {"recipe": found["recipe"], "shards": found["shards"], **found}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{self._run} cannot be read ({error!r}), so nothing says what the run was started with. Restore it, "
                "or begin another run in another folder."
            ) from error


def differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Every entry that differs, with both values."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted(found.keys() | wanted.keys()):
            yield from differences(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
    elif found != wanted:
        yield f"its {where} is {_short(found)}, now it is {_short(wanted)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(dataset: Dataset, shards: Sequence[int]) -> str:
    """SHA-256 over the files of tokens."""
    digest = hashlib.sha256()
    for number in shards:
        with dataset.tokens_path(number).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
