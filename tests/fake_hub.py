"""A hub without a network: huggingface_hub's functions over folders, which are the repositories.

hub = FakeHub(tmp_path); hub.install(monkeypatch)
hub.add("org/model", folder, card={"base_model": "org/base"})
hub.asked      what was asked for, in order: ("info", "org/model"), ("head", ...), ("get", ...), ("snapshot", ...)
hub.each_file = f  called before each file of a download, whose bytes are told to its bar behind it
hub.down = True    nothing is answered any more; what was fetched before stays in the cache
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import safe_open

from tests import checkpoints
from tests.folders import target_folder

COMMIT = "c" * 40


@dataclass
class Repository:
    folder: Path
    card: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # what the hub says instead of the files' own
    error: Exception | None = None  # for every request but the list of files
    gone: Exception | None = None  # for every request


def hub_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, draft: str) -> FakeHub:
    """A hub in the place of the real one, with a tiny target and a draft that belong together."""
    made = FakeHub(tmp_path / "cache")
    made.install(monkeypatch)
    made.add(target, target_folder(tmp_path / "target"))
    made.add(draft, checkpoints.v1(tmp_path / "draft"))
    return made


class FakeHub:
    def __init__(self, cache: Path) -> None:
        self.cache, self.down = cache, False
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str]] = []
        self.revisions: list[str | None] = []
        self.each_file: Callable[[], None] = lambda: None

    def add(self, name: str, folder: Path, **what: Any) -> None:
        self.repositories[name] = Repository(folder, **what)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        functions = {
            "model_info": self.info,
            "hf_hub_download": self.get,
            "parse_safetensors_file_metadata": self.head,
            "snapshot_download": self.snapshot,
            "try_to_load_from_cache": self.held,
        }
        for name, function in functions.items():
            monkeypatch.setattr(f"huggingface_hub.{name}", function)

    def place(self, name: str) -> Path:
        """Where the snapshot of a repository lies in the cache, as huggingface_hub lays it."""
        return self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT

    def _answer(self, what: str, name: str, revision: str | None) -> Repository:
        self.asked.append((what, name))
        self.revisions.append(revision)
        if self.down:
            raise OfflineModeIsEnabled("no network in this test")
        found = self.repositories[name]
        if found.gone is not None or (found.error is not None and what != "info"):
            raise found.gone or found.error  # type: ignore[misc]
        return found

    def info(self, name: str, *, revision: str | None = None, **_: Any) -> SimpleNamespace:
        found = self._answer("info", name, revision)
        files = sorted(path for path in found.folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(found.folder)) for path in files]
        sizes = {name: path.stat().st_size for name, path in zip(names, files, strict=True)} | found.sizes
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
        card = SimpleNamespace(to_dict=lambda: found.card) if found.card else None
        return SimpleNamespace(sha=COMMIT, siblings=siblings, card_data=card, tags=found.tags)

    def get(self, name: str, file: str, *, revision: str | None = None) -> str:
        return str(self._answer("get", name, revision).folder / file)

    def head(self, name: str, file: str, *, revision: str | None = None) -> SimpleNamespace:
        folder = self._answer("head", name, revision).folder
        with safe_open(str(folder / file), framework="numpy") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        content = (folder / file).read_bytes()
        places = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        tensors = {
            key: SimpleNamespace(shape=one.get_shape(), data_offsets=tuple(places[key]["data_offsets"]))
            for key, one in slices.items()
        }
        return SimpleNamespace(tensors=tensors)

    def snapshot(self, name: str, *, local_files_only: bool = False, **how: Any) -> str:
        folder = self.place(name)
        if local_files_only:
            if not folder.exists():
                raise LocalEntryNotFoundError("not in the cache")
            return str(folder)
        found = self._answer("snapshot", name, how["revision"])
        folder.mkdir(parents=True, exist_ok=True)
        on_way, on_disk = (
            how["tqdm_class"](desc=what, total=0, unit="B") for what in ("Downloading", "Reconstructing")
        )
        for path in found.folder.iterdir():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in how["allow_patterns"]):
                self.each_file()
                on_way.update(path.stat().st_size)
                shutil.copy(path, folder)
                on_disk.update(path.stat().st_size)
        if found.card and "README.md" in how["allow_patterns"]:
            (folder / "README.md").write_text(f"---\n{json.dumps(found.card)}\n---\n")
        return str(folder)

    def held(self, name: str, file: str, *, revision: str | None = None) -> str | None:
        path = self.place(name) / file
        return str(path) if path.exists() else None
