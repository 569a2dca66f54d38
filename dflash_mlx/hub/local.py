"""Targets on this machine, found without a network and without reading more than their configs.

In the hub's cache, where LM Studio keeps its models, and in folders that the caller names. What cannot be read or is
not complete is left out: it is no model that could be loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, TypeAlias

from huggingface_hub import constants

from dflash_mlx import served, spellings
from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.cache import TARGET, cached_snapshot, loadable
from dflash_mlx.hub.repository import Source, read_object

Place: TypeAlias = Literal["hub cache", "LM Studio", "folder"]
_LEVELS = 2  # LM Studio's publisher/model


@dataclass(frozen=True)
class LocalTarget:
    """A target on this machine.

    name: for people. path: what `load` is called with. size: bytes of its weights as they are stored.
    """

    name: str
    path: str
    place: Place
    folder: Path
    size: int
    config: Mapping[str, Any] = field(repr=False)

    @property
    def source(self) -> Source:
        """As `find` would give it."""
        return Source(self.path, TARGET, folder=self.folder, given=self.place != "hub cache")


def targets_here(folders: Iterable[str | os.PathLike[str]] = (), home: Path | None = None) -> Iterator[LocalTarget]:
    """Every complete target that mlx_lm has a model for, one after the other as they are found, none of them twice.

    Args:
        folders: more places: a model's folder, or one that holds models up to two levels below it.
        home: the user's; where LM Studio is looked for.
    """
    seen: set[Path] = set()
    for target in _everywhere(folders, home or Path.home()):
        real = target.folder.resolve()
        if real not in seen:
            seen.add(real)
            yield target


def _everywhere(folders: Iterable[str | os.PathLike[str]], home: Path) -> Iterator[LocalTarget]:
    yield from _in_cache(Path(constants.HF_HUB_CACHE))
    for root in lm_studio_folders(home):
        yield from _below(root, "LM Studio")
    for each in folders:
        yield from _below(Path(each).expanduser(), "folder")


def _in_cache(cache: Path) -> Iterator[LocalTarget]:
    """Snapshots of main, which is what a name without a revision leads to."""
    for repository in _subfolders(cache):
        kind, _, rest = repository.name.partition("--")
        if kind != "models" or not rest:
            continue
        name = rest.replace("--", "/", 1)
        try:
            folder, _ = cached_snapshot(name, TARGET, None)
        except (DFlashError, OSError, ValueError):
            continue
        if folder is not None and (target := _target(folder, name, name, "hub cache")):
            yield target


def lm_studio_folders(home: Path) -> list[Path]:
    """Where LM Studio keeps models: by its pointer to its folder, by the setting in there, else where it always was.

    The pointer is a file with a path; `downloadsFolder` in settings.json is set when the user moves the models.
    """
    roots = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    try:
        pointed = (home / ".lmstudio-home-pointer").read_text("utf-8").strip()
    except (OSError, ValueError):
        pointed = ""
    if pointed:
        roots.insert(0, Path(pointed).expanduser())
    found = []
    for root in roots:
        try:
            moved = json.loads((root / "settings.json").read_text("utf-8"))["downloadsFolder"]
        except (OSError, ValueError, KeyError, TypeError):
            moved = None
        found += [Path(moved)] if isinstance(moved, str) and os.path.isabs(moved) else []
        found.append(root / "models")
    return list(dict.fromkeys(found))


def _below(root: Path, place: Place, levels: int = _LEVELS) -> Iterator[LocalTarget]:
    """A model's folder, or the models below. It goes no deeper than `levels`, so a link that leads back ends there."""
    if (root / "config.json").is_file():
        if target := _target(root, _name(root, place), str(root), place):
            yield target
    elif levels:
        for folder in _subfolders(root):
            yield from _below(folder, place, levels - 1)


def _name(folder: Path, place: Place) -> str:
    return f"{folder.parent.name}/{folder.name}" if place == "LM Studio" else folder.name


def _subfolders(folder: Path) -> list[Path]:
    """By name, without hidden ones; none of what cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.name[0] != "." and _is_folder(entry))
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Not if it cannot be known: a link that leads to itself, say, hides none of its neighbours."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _target(folder: Path, name: str, path: str, place: Place) -> LocalTarget | None:
    """What lies in a folder, if it is a complete target; drafts are none."""
    try:
        config = read_object(folder / "config.json")
        if spellings.is_draft(config) or not any(served.has_file(file) for file in served.model_files(config)):
            return None
        if not loadable(folder, TARGET):
            return None
        sizes = [each.stat().st_size for each in folder.iterdir() if fnmatch(each.name, TARGET.weights)]
    except (DFlashError, OSError, ValueError, TypeError, AttributeError):  # a config may hold anything at all
        return None
    return LocalTarget(name, path, place, folder, sum(sizes), config)
