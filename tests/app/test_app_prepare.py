"""What the real library finds out about a pair before the one that is loaded has to go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from dflash_mlx import load
from dflash_mlx.app import prepare as preparing
from dflash_mlx.app.backend import TooLarge
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.prepare import prepare
from dflash_mlx.errors import CheckpointError, FetchError, IncompatiblePair
from dflash_mlx.machine import Machine
from tests import checkpoints
from tests.fake_hub import FakeHub, hub_with
from tests.folders import target_folder


def options(**changes: Any) -> Mapping[str, Any]:
    return LoadModel(**changes).options


def silent(text: str, share: float | None) -> None:
    pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return hub_with(tmp_path, monkeypatch, "org/target", "org/draft")


def test_a_name_with_a_typo_is_known_to_be_one(hub: FakeHub, tmp_path: Path) -> None:
    """It would cost the pair that is loaded."""
    hub.down = True
    with pytest.raises(FetchError, match="There is no folder org/targte here"):
        prepare("org/targte", options(), silent)
    with pytest.raises(FetchError, match="does not exist"):
        prepare(str(tmp_path / "targte"), options(), silent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        prepare(str(tmp_path / "empty"), options(), silent)


def test_a_draft_that_was_named_has_to_fit_before_anything_is_freed_or_fetched(hub: FakeHub, tmp_path: Path) -> None:
    target = str(target_folder(tmp_path / "mine"))
    config = checkpoints.v1_config(hidden_size=128, head_dim=32)
    hub.add("org/wide", checkpoints.write(tmp_path / "wide", config, checkpoints.tensors_of(config)))
    with pytest.raises(IncompatiblePair, match="its hidden size is 128"):
        prepare(target, options(draft="org/wide"), silent)
    assert "snapshot" not in [what for what, _ in hub.asked]


def test_a_draft_that_was_only_found_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """`load` warns of it and goes on without: two rules would refuse a model that runs."""
    target = target_folder(tmp_path / "mine")
    config = checkpoints.v1_config(hidden_size=128, head_dim=32)
    checkpoints.write(tmp_path / "mine-dflash", config, checkpoints.tensors_of(config))
    prepare(str(target), options(), silent)
    with pytest.warns(UserWarning, match="is not used, so decoding will be plain"):
        assert load(str(target), **options())[2] is None
    with pytest.raises(IncompatiblePair):
        prepare(str(target), options(draft=str(tmp_path / "mine-dflash")), silent)


def test_what_is_not_here_is_fetched_before_the_pair_that_is_loaded_goes(hub: FakeHub) -> None:
    """A download breaks off more often than a file is damaged; loading then finds all of it."""
    said: list[str] = []
    prepare("org/target", options(draft="org/draft"), lambda text, share: said.append(text))
    assert [name for what, name in hub.asked if what == "snapshot"] == ["org/target", "org/draft"]
    assert said[0] == "Looking for org/target" and any(text.startswith("Fetching org/target") for text in said)
    asked = len(hub.asked)
    prepare("org/target", options(draft="org/draft"), silent)
    assert len(hub.asked) == asked, "all of it is here"


def test_a_fetched_draft_whose_tokens_are_others_is_refused_in_time(hub: FakeHub, tmp_path: Path) -> None:
    """The tokenizers can be compared only when they are here, which is before the weights are read."""
    folder = shutil.copytree(hub.repositories["org/draft"].folder, tmp_path / "other")
    vocabulary = {chr(ord("a") + index): index for index in range(26)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    hub.add("org/other", folder)
    with pytest.raises(IncompatiblePair, match="org/other"):
        prepare("org/target", options(draft="org/other"), silent)


def test_a_download_can_be_cancelled(hub: FakeHub) -> None:
    class Stopped(Exception):
        pass

    def stop(text: str, share: float | None) -> None:
        if text.startswith("Fetching"):
            raise Stopped

    with pytest.raises(Stopped):
        prepare("org/target", options(draft=None), stop)


def test_what_is_too_large_is_loaded_if_it_is_insisted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody fills their memory by accident, and an estimate forbids nothing."""
    target = str(target_folder(tmp_path / "mine"))
    prepare(target, options(), silent)
    monkeypatch.setattr(preparing, "this_machine", lambda: Machine.mac(2**20))
    with pytest.raises(TooLarge, match=r"needs about 0\.2 GB, and a model may use 0\.0 GB here.* once more"):
        prepare(target, options(), silent)
    prepare(target, options(), silent, insist=True)


def test_the_demo_is_fetched_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Path | None] = []
    monkeypatch.setattr("dflash_mlx.demo.target_folder", lambda gguf, progress: fetched.append(gguf))
    prepare("demo", options(gguf="~/mine.gguf"), silent)
    assert fetched == [Path.home() / "mine.gguf"]
