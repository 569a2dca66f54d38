"""Which targets are found on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from dflash_mlx.hub.local import lm_studio_folders, targets_here
from tests.conftest import DRAFT_CONFIG
from tests.fake_hub import FakeHub
from tests.folders import draft_folder, target_folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "hub")
    made.install(monkeypatch)
    made.down = True
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.cache))
    return made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def names(home: Path, *folders: Path) -> list[str]:
    return [target.name for target in targets_here(folders, home)]


def test_targets_are_found_in_the_cache_in_lm_studio_and_in_given_folders(
    hub: FakeHub, home: Path, tmp_path: Path
) -> None:
    """Each with what loads it and the bytes of its weights; the hub is not asked."""
    target_folder(hub.place("org/cached"))
    in_studio = target_folder(home / ".lmstudio" / "models" / "maker" / "studio")
    own = target_folder(tmp_path / "mine" / "own")
    found = list(targets_here([tmp_path / "mine"], home))
    assert [(each.name, each.path, each.place) for each in found] == [
        ("org/cached", "org/cached", "hub cache"),
        ("maker/studio", str(in_studio), "LM Studio"),
        ("own", str(own), "folder"),
    ]
    assert all(each.size == (own / "model.safetensors").stat().st_size for each in found)
    assert not hub.asked


def test_a_folder_that_is_a_model_itself_is_found(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    assert names(home, target_folder(tmp_path / "model")) == ["model"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").write_text('{"model_type": "whisper"}'),
        lambda folder: (folder / "config.json").write_text('{"model_type": ["llama"]}'),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
        ),
    ],
)
@pytest.mark.parametrize("cached", [True, False])
def test_what_could_not_be_loaded_is_left_out_and_hides_nothing(
    spoil: Callable[[Path], object], cached: bool, hub: FakeHub, home: Path, tmp_path: Path
) -> None:
    """A damaged or half-fetched model, or one of no kind that mlx_lm has, would only be an error later."""
    spoil(target_folder(hub.place("org/a") if cached else tmp_path / "all" / "a"))
    target_folder(tmp_path / "all" / "good")
    assert names(home, tmp_path / "all") == ["good"]


def test_drafts_are_no_targets(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    """Theirs look like a qwen3's config, and some bring a tokenizer."""
    draft = draft_folder(tmp_path / "all" / "draft")
    (draft / "config.json").write_text(json.dumps(DRAFT_CONFIG | {"model_type": "qwen3"}))
    (draft / "tokenizer.json").write_text("{}")
    assert names(home, tmp_path / "all") == []


def test_links_that_lead_back_end_and_no_model_is_listed_twice(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    """A folder that links to itself must not hang the list, and a linked model is one model."""
    root = tmp_path / "all"
    target_folder(root / "model")
    os.symlink(root, root / "again")
    os.symlink(root / "model", root / "alias")
    os.symlink(root / "nowhere", root / "dangling")
    os.symlink(root / "circle", root / "circle")
    assert len(names(home, root)) == 1


def test_lm_studio_is_found_where_its_pointer_and_its_settings_say(home: Path, tmp_path: Path) -> None:
    studio, moved = tmp_path / "studio", tmp_path / "disk"
    studio.mkdir()
    (home / ".lmstudio-home-pointer").write_text(f"{studio}\n")
    (studio / "settings.json").write_text(json.dumps({"downloadsFolder": str(moved)}))
    assert lm_studio_folders(home)[:2] == [moved, studio / "models"]
    (home / ".lmstudio-home-pointer").write_bytes(b"\xff\xfe")
    (studio / "settings.json").write_text("[]")
    assert lm_studio_folders(home) == [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def test_the_list_imports_no_mlx() -> None:
    """It would take seconds, and arrays' threads."""
    code = (
        "import sys, dflash_mlx.app.discovery as d; next(d.candidates())\n"
        "print([m for m in ('mlx', 'mlx_lm', 'transformers', 'textual') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
