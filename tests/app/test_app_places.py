"""Where things lie, what is remembered, and what config.toml may say."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dflash_mlx.app.places import Places
from dflash_mlx.app.settings import Config, Settings, from_config
from dflash_mlx.app.state import State
from dflash_mlx.app.store import StoreError


@pytest.mark.parametrize(
    ("platform", "data", "config"),
    [
        ("darwin", "Library/Application Support", "Library/Application Support"),
        ("linux", ".local/share", ".config"),
    ],
)
def test_files_lie_where_the_system_keeps_such_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, data: str, config: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/is/to/be/ignored")
    places = Places.default()
    assert places == Places(tmp_path / data / "dflash-metal", tmp_path / config / "dflash-metal")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "c"))
    places = Places.default()
    assert places.chats == tmp_path / "d/dflash-metal/chats"
    assert places.metrics == tmp_path / "d/dflash-metal/metrics.jsonl"
    assert places.state == tmp_path / "d/dflash-metal/state.json"
    assert places.config_file == tmp_path / "c/dflash-metal/config.toml"
    assert list(tmp_path.iterdir()) == [], "nothing is made before it is needed"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "data", tmp_path / "config")


def test_the_state_comes_back(places: Places) -> None:
    state = State("org/target", None, "dflash-light", fold_thinking=False, origins=True, verbose=True, chat="some-chat")
    assert all(value != asdict(State())[name] for name, value in asdict(state).items() if name != "note")
    state.save(places)
    replace(state, note="not saved").save(places)
    assert State.load(places) == state and State.load(places).note == ""
    assert "note" not in places.state.read_text()
    assert stat.S_IMODE(places.state.stat().st_mode) == 0o600
    assert [path.name for path in places.data.iterdir()] == ["state.json"]


def test_the_first_start_has_no_state_and_nothing_to_say(places: Places) -> None:
    assert State.load(places) == State() and State.load(places).note == ""


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"7", b"[" * 100_000])
def test_a_damaged_state_is_a_note_and_not_a_crash(places: Places, content: bytes) -> None:
    places.data.mkdir()
    places.state.write_bytes(content)
    state = State.load(places)
    assert state == State()
    assert str(places.state) in state.note and "damaged" in state.note


def test_a_value_that_cannot_be_used_takes_nothing_else_along(places: Places) -> None:
    places.data.mkdir()
    places.state.write_text(json.dumps({"model": 7, "origins": "yes", "theme": "dflash-light", "of tomorrow": 1}))
    state = State.load(places)
    assert state == State(theme="dflash-light")
    assert "model, origins cannot be used" in state.note


def test_a_state_that_cannot_be_saved_is_said(places: Places) -> None:
    places.data.write_text("in the way")
    with pytest.raises(StoreError, match=r"state\.json cannot be written"):
        State().save(places)
    assert State.load(places).note


def configured(places: Places, text: str) -> Config:
    places.config.mkdir(exist_ok=True)
    places.config_file.write_text(text)
    return from_config(places)


def test_config_sets_the_defaults(places: Places) -> None:
    assert from_config(places) == Config(Settings(), None)
    assert configured(places, "") == Config()
    text = 'theme = "light"\n[defaults]\ntemperature = 1\ntop_p = 0.9\nthinking = false\nseed = 7\nsystem = "Be kind."'
    wanted = Settings(temperature=1, top_p=0.9, thinking=False, seed=7, system="Be kind.")
    assert configured(places, text) == Config(wanted, "light")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[defaults]\ntemperatur = 1", ("`temperatur` in [defaults] is not a key", "temperature, top_p, min_p")),
        ("temperature = 1", ("`temperature` at the top level is not a key", "theme, defaults")),
        ('[defaults]\ntemperature = "hot"', ("`temperature` in [defaults] has to be a number, got 'hot'",)),
        ("[defaults]\ntemperature = true", ("`temperature` in [defaults] has to be a number, got True",)),
        ("[defaults]\nseed = 1.5", ("`seed` in [defaults] has to be a whole number, got 1.5",)),
        ("[defaults]\nthinking = 1", ("`thinking` in [defaults] has to be true or false, got 1",)),
        ("[defaults]\nsystem = 1", ("`system` in [defaults] has to be a text in quotes, got 1",)),
        ("[defaults]\ntemperature = -1", ("temperature has to be 0 or more and finite, got -1",)),
        ('[defaults]\nmode = "fast"', ("mode has to be one of auto, dflash, plain, got fast",)),
        ('theme = "blue"', ("`theme` has to be one of dark, light, got 'blue'",)),
        ("theme = []", ("`theme` has to be one of dark, light",)),
        ("defaults = 1", ("`defaults` has to be a table",)),
        ("x = 1\ntheme = blue", ("is not TOML", "line 2")),
        ("theme = '\ud800'", ("is not TOML",)),
    ],
)
def test_a_mistake_in_config_is_named_with_its_file_key_and_what_is_allowed(
    places: Places, text: str, said: tuple[str, ...]
) -> None:
    """A misspelt key that does nothing is looked for in the wrong place."""
    places.config.mkdir()
    places.config_file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError) as caught:
        from_config(places)
    for part in (str(places.config_file), *said):
        assert part in str(caught.value)


def test_a_config_that_cannot_be_read_is_said(places: Places) -> None:
    os.makedirs(places.config_file)
    with pytest.raises(ValueError, match="cannot be read"):
        from_config(places)
