"""What was asked of `dflash-metal train`: kept as command.json in the run's folder, so that `--resume` needs no more.

It is there before the run itself is (`run_folder`), which begins when the target has answered.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_mlx.files import whole_file
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.training.checkpoint import TrainingError
from dflash_mlx.training.generate import Settings
from dflash_mlx.training.recipe import FROM_TARGET, RANDOM, Recipe
from dflash_mlx.training.run_folder import FREE

FILE, FORMAT = "command.json", 1
# Flags that are entries of the recipe, under the same name or another one.
_SHORTCUTS = {"block_size": "block_size", "layers": "layers", "steps": "steps", "seed": "seed", "draft": "initial"}
DECIDING = ("answers", "samples", "temperature", "max_tokens", "batch")  # of generated answers; the rest is checked
# by digests, or changes nothing that is learned
_ANSWERS = Settings()


@dataclass(frozen=True)
class Asked:
    """data: a data set's folder, or prompts. answers: prompts at most. samples, temperature, max_tokens, batch: as in
    `Settings`. features: "cached", "computed" or None. features and batch are decided when it is known how large they
    are. bits, group_size: of the finished draft."""

    target: str
    data: str
    recipe: Recipe
    revision: str | None = None
    dtype: str | None = None
    features: str | None = None
    answers: int | None = None
    samples: int = _ANSWERS.samples
    temperature: float = _ANSWERS.temperature
    max_tokens: int = _ANSWERS.max_tokens
    batch: int | None = None
    bits: int | None = None
    group_size: int = 64
    threads: int | None = None

    @property
    def is_dataset(self) -> bool:
        return Path(self.data).is_dir()

    def settings(self, layers: tuple[int, ...] = ()) -> Settings:
        """Of the answers. Raises ValueError for a value out of range."""
        batch = _ANSWERS.batch if self.batch is None else self.batch
        made = Settings(self.recipe.seed, self.samples, self.temperature, max_tokens=self.max_tokens, batch=batch)
        return replace(made, top=made.top if self.recipe.soft else 0, features=layers)

    def write(self, folder: Path) -> None:
        """Keep it. Raises OSError: it cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / FILE) as aside:
            aside.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
            aside.chmod(0o644)


def asked_of(args: argparse.Namespace) -> Asked:
    """The arguments, with what was asked before where they say nothing.

    Raises:
        RecipeError: the recipe cannot be read, or asks for what cannot be.
        TrainingError: the run in the folder was begun with something else, which is named; or there is none.
    """
    folder = args.out
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file, and a run needs a folder of its own. Give another name as `--out`.")
    before = _read(folder)
    names = [name for name in Asked.__dataclass_fields__ if name != "recipe"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in ("target", "data"):
        if name in given and Path(given[name]).expanduser().exists():
            given[name] = _absolute(given[name])
    if before is None:
        if missing := [name for name in ("target", "data") if name not in given]:
            raise TrainingError(
                f"{folder} has no {FILE} that says what was asked, so `--{missing[0]}` is missing. Give all arguments "
                "that the run was begun with, or leave `--resume` out to begin one."
            )
        return Asked(recipe=_recipe(args, _begun(folder)), **given)
    found = replace(before, recipe=_recipe(args, before.recipe), **given)
    _refuse_others(found, before, folder)
    return found


def _recipe(args: argparse.Namespace, before: Recipe) -> Recipe:
    base = before if args.recipe is None else Recipe.read(args.recipe)
    shortcuts = {entry: getattr(args, flag) for flag, entry in _SHORTCUTS.items() if getattr(args, flag) is not None}
    found = Recipe.from_dict({**base.to_dict(), **dict(args.set), **shortcuts})
    named = found.initial in (FROM_TARGET, RANDOM, DEMO) or not Path(found.initial).expanduser().exists()
    return found if named else found.changed(initial=_absolute(found.initial))


def _absolute(path: str) -> str:
    """A run is continued from any folder."""
    return str(Path(path).expanduser().absolute())


def _begun(folder: Path) -> Recipe:
    """Of a run that was not begun by the command; else the default."""
    try:
        return Recipe.from_dict(json.loads((folder / "run.json").read_text(encoding="utf-8"))["recipe"])
    except (OSError, ValueError, KeyError):
        return Recipe()


def _refuse_others(found: Asked, before: Asked, folder: Path) -> None:
    """Raises TrainingError for what would make another draft of the same name."""
    pairs: dict[str, tuple[Any, Any]] = {
        f"--{name.replace('_', '-')}": (getattr(before, name), getattr(found, name)) for name in DECIDING
    }
    if not (before.is_dataset and found.is_dataset):  # two data sets are compared by what is in them
        pairs["--data"] = before.data, found.data
    theirs, ours = before.recipe.to_dict(), found.recipe.to_dict()
    pairs |= {f"{name} of the recipe": (theirs[name], ours[name]) for name in theirs if name not in FREE}
    for name, (was, is_) in pairs.items():
        if was != is_:
            raise TrainingError(
                f"`{name}` was {was!r} when the run in {folder} was begun, and now it is {is_!r}. What it made so far "
                "would not be what its record says. Leave it out to go on, or begin another run in another folder."
            )


def _read(folder: Path) -> Asked | None:
    """None without a file. Raises TrainingError: it cannot be read."""
    path = folder / FILE
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = {name: found[name] for name in Asked.__dataclass_fields__}
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, this version reads {FORMAT}")
        return Asked(**values | {"recipe": Recipe.from_dict(values["recipe"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{path} cannot be read ({error!r}), so nothing says what was asked. Delete it, and give all arguments "
            "that the run was begun with."
        ) from error
