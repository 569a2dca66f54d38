"""The model picker: what it lists, how it is filtered, and what it loads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from instruments import LOOKS, PICTURES, Compare, Host, before
from textual.app import App
from textual.pilot import Pilot

from dflash_mlx import demo
from dflash_mlx.app.discovery import Candidate, candidates, demo_candidate
from dflash_mlx.app.screens.models import Choice, ModelsScreen
from dflash_mlx.app.widgets.model_row import ModelRow
from dflash_mlx.fit import Fit
from dflash_mlx.machine import Machine
from tests.fake_hub import FakeHub
from tests.folders import draft_folder, target_folder

MACHINE = Machine.mac(16 * 2**30)
DEMO = Candidate(
    "demo", "demo", "demo", 0.098, "demo", "it is the demo's own", True, None,
    Fit("fits", 0.67, 11.5, {"target": 0.27, "draft": 0.02, "context": 0.09, "work": 0.29}), here=False,
)  # fmt: skip
TIGHT = Candidate(
    "mlx-community/Qwen3-8B-8bit", "mlx-community/Qwen3-8B-8bit", "hub cache", 8.7, "z-lab/Qwen3-8B-DFlash-b16",
    "the registry lists it for qwen3-8b", True, None,
    Fit("tight", 11.1, 11.5, {"target": 8.7, "draft": 1.1, "context": 0.6, "work": 0.7}), draft_here=False,
)  # fmt: skip
LARGE = Candidate(
    "lmstudio-community/Olmo-2-32B", "/models/lmstudio-community/Olmo-2-32B", "LM Studio", 64.5, None,
    "the registry has none for Olmo-2-32B", None, "if it passes the check at loading",
    Fit("too large", 67.0, 11.5, {"target": 64.5, "context": 1.6, "work": 0.9}),
)  # fmt: skip
REFUSED = Candidate(
    "Kimi-K2", "/data/Kimi-K2", "folder", 9.5, None, "the registry has none", False,
    "mlx_lm has no kimi_k9", Fit("unknown", None, 11.5),
)  # fmt: skip
ALL = (DEMO, TIGHT, LARGE, REFUSED)


def picker(
    *found: Candidate, current: str | None = None, find: Callable[[], Iterator[Candidate]] | None = None
) -> Host:
    return Host(screen=ModelsScreen(find or (lambda: iter(found)), current))


async def listed(pilot: Pilot[Any], condition: Callable[[str], bool] = lambda text: "on this machine" in text) -> str:
    """What is shown once the condition holds; by default, once the search has ended."""
    app, end = pilot.app, time.monotonic() + 10
    assert isinstance(app, Host)
    while not condition(app.text()) or "looking" in app.text():
        assert time.monotonic() < end, app.text()
        await asyncio.sleep(0.01)
    await pilot.pause()
    return app.text()


# What is found --------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "hub")
    made.install(monkeypatch)
    made.down = True
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.cache))
    return made


def test_the_demo_comes_first_and_the_rest_has_the_draft_that_loading_would_take(hub: FakeHub, tmp_path: Path) -> None:
    """From the registry, from beside the target, or none; the hub is never asked, it may take its time for that."""
    target_folder(hub.place("mlx-community/Qwen3-4B-4bit"), "qwen3")
    target_folder(tmp_path / "mine" / "own")
    beside = draft_folder(tmp_path / "mine" / "own" / "dflash")
    target_folder(hub.place("org/unknown"), "olmo2")
    found = list(candidates([tmp_path / "mine"], tmp_path, machine=MACHINE))
    assert [each.name for each in found] == ["demo", "mlx-community/Qwen3-4B-4bit", "org/unknown", "own"]
    assert [each.draft for each in found] == ["demo", "z-lab/Qwen3-4B-DFlash-b16", None, str(beside)]
    assert [each.draft_here for each in found] == [True, False, True, True]
    assert [each.runs for each in found] == [True, True, None, True]
    assert all(each.fit is not None and each.fit.verdict == "fits" for each in found)
    assert not hub.asked


def test_a_draft_in_the_cache_is_counted_and_not_said_to_be_fetched(hub: FakeHub, tmp_path: Path) -> None:
    target_folder(hub.place("mlx-community/Qwen3-4B-4bit"), "qwen3")
    draft_folder(hub.place("z-lab/Qwen3-4B-DFlash-b16"))
    (found,) = list(candidates([], tmp_path, machine=MACHINE))[1:]
    assert found.draft_here and found.fit is not None
    bytes_ = (hub.place("z-lab/Qwen3-4B-DFlash-b16") / "model.safetensors").stat().st_size
    assert 0 < found.fit.parts["draft"] * 1e9 <= bytes_ < 1e6


def test_a_target_that_the_card_here_derives_from_a_known_one_gets_its_draft(hub: FakeHub, tmp_path: Path) -> None:
    """A card that is on this machine is read; one that is not is not asked for."""
    folder = target_folder(tmp_path / "mine" / "my-finetune", "qwen3")
    (folder / "README.md").write_text("---\nbase_model: Qwen/Qwen3-4B\n---\n")
    assert list(candidates([tmp_path / "mine"], tmp_path))[1].draft == "z-lab/Qwen3-4B-DFlash-b16"
    assert not hub.asked


def test_damaged_weights_hide_no_other_model(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("a", "b"):
        target_folder(tmp_path / "mine" / name)
    (tmp_path / "mine" / "a" / "model.safetensors").write_bytes(b"\xff" * 100)
    assert [each.name for each in candidates([tmp_path / "mine"], tmp_path)] == ["demo", "b"]


def test_the_demo_fits_before_it_is_made_as_it_does_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made = demo_candidate(machine=MACHINE)
    monkeypatch.setattr(demo, "converted_folder", lambda: None)
    to_make = demo_candidate(machine=MACHINE)
    assert not to_make.here and to_make.fit == made.fit and made.fit is not None and made.fit.verdict == "fits"


# The screen -----------------------------------------------------------------------------------------------


async def test_every_model_is_shown_with_its_place_size_verdict_and_draft() -> None:
    """A shape and a word for every verdict: nothing depends on colours."""
    async with picker(*ALL).run_test(size=(100, 24)) as pilot:
        text = await listed(pilot)
        for said in (
            "comes with this package · 0.10 GB to fetch", "● fits · 0.7 of 11.5 GB", "draft demo",
            "hub cache · 8.7 GB", "◐ tight · 11.1 of 11.5 GB", "draft z-lab/Qwen3-8B-DFlash-b16, to fetch",
            "LM Studio · 64.5 GB", "○ too large · 67.0 of 11.5 GB", "no draft known: plain decoding",
            "✗ cannot run", "mlx_lm has no kimi_k9", "4 models on this machine",
            "Memory with 4,096 tokens of context, about 0.67 GB: target 0.27, draft 0.02",
        ):  # fmt: skip
            assert said in text, said


async def test_the_screen_is_there_before_anything_is_found_and_keys_work_meanwhile() -> None:
    """A slow disk must not freeze the window; what comes later does not move what was chosen."""
    gate = threading.Event()

    def slow() -> Iterator[Candidate]:
        yield TIGHT
        assert gate.wait(10)
        yield DEMO
        yield replace(LARGE, name="org/newer")  # shown too, above what was typed

    app = picker(find=slow)
    async with app.run_test(size=(80, 24)) as pilot:
        end = time.monotonic() + 10
        while "1 model so far" not in app.text():
            assert time.monotonic() < end, app.text()
            await asyncio.sleep(0.01)
        await pilot.press(*"org/new")
        await pilot.pause()
        assert "load org/new" in app.text() and "Qwen3" not in app.text()
        gate.set()
        assert "org/newer" in await listed(pilot)
        await pilot.press("enter")
        await pilot.pause()
        assert app.results == [Choice("org/new")]


async def test_what_enter_would_load_is_marked_from_the_start() -> None:
    """Also when the list is filtered to another row in the same place."""
    async with picker(*ALL).run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        for typed, name in (("", "demo"), ("olmo", "lmstudio-community/Olmo-2-32B")):
            await pilot.press(*typed)
            await pilot.pause()
            [row] = pilot.app.screen.query(ModelRow).filter(".-highlight")
            assert isinstance(row, ModelRow) and row.candidate.name == name


async def test_ctrl_c_in_the_picker_says_how_to_leave() -> None:
    async with picker(DEMO).run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("ctrl+c")
        await listed(pilot, lambda text: "Ctrl+Q quits" in text)


async def test_enter_loads_what_the_arrows_are_on() -> None:
    app = picker(*ALL)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("down", "enter")
        await pilot.pause()
        assert app.results == [Choice(TIGHT.path_or_repo, "auto")]


async def test_typing_filters_by_every_word_and_enter_loads_the_first_that_is_left() -> None:
    app = picker(*ALL)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press(*"qwen", "space", *"8BIT")
        text = await listed(pilot, lambda text: "load qwen 8BIT" in text)
        assert "Qwen3-8B-8bit" in text and "Olmo" not in text and "demo" not in text
        await pilot.press("up", "down", "up", "enter")
        await pilot.pause()
        assert app.results == [Choice(TIGHT.path_or_repo)]


@pytest.mark.parametrize(
    ("typed", "choice"),
    [
        ("org/model", Choice("org/model", "auto")),
        ("  ~/models/mine ", Choice("~/models/mine", "auto")),
        ("org/model + org/draft", Choice("org/model", "org/draft")),
        ("org/model + ", Choice("org/model +", "auto")),
    ],
)
async def test_any_repository_or_folder_can_be_typed(typed: str, choice: Choice) -> None:
    app = picker(*ALL)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        app.screen.query_one("Input").insert_text_at_cursor(typed)  # type: ignore[attr-defined]
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert app.results == [choice]


async def test_what_cannot_run_is_not_loaded_and_says_why() -> None:
    app = picker(DEMO, REFUSED)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("down", "enter", "enter")
        await pilot.pause()
        assert app.results == [] and "Not loaded, it cannot run here: mlx_lm has no kimi_k9." in app.text()


async def test_what_is_too_large_is_loaded_after_a_second_enter_on_it() -> None:
    """The estimate may be wrong, but nobody fills their memory by accident."""
    app = picker(DEMO, LARGE)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("down", "enter")
        await pilot.pause()
        assert app.results == [] and "Enter again loads it all the same." in " ".join(
            app.text().replace("│", "").split()
        )
        await pilot.press("up", "down", "enter")  # another look at the list: asked again
        await pilot.pause()
        assert app.results == []
        await pilot.press("enter")
        await pilot.pause()
        assert app.results == [Choice(LARGE.path_or_repo)]


async def test_escape_clears_the_filter_then_goes_back_to_the_model_that_is_loaded() -> None:
    app = picker(*ALL, current="demo")
    async with app.run_test(size=(80, 24)) as pilot:
        assert "demo (loaded)" in await listed(pilot)
        await pilot.press("x", "escape")
        await pilot.pause()
        assert app.results == [] and "demo (loaded)" in app.text()
        await pilot.press("escape")
        await pilot.pause()
        assert app.results == [None]


async def test_without_a_model_escape_says_what_to_do_and_ctrl_q_quits() -> None:
    app = picker(*ALL)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("escape")
        await pilot.pause()
        assert app.results == [] and "Choose one, or Ctrl+Q quits." in app.text()
        await pilot.press("ctrl+q")
    assert not app.is_running


async def test_a_search_that_fails_is_said_and_the_box_still_works() -> None:
    def broken() -> Iterator[Candidate]:
        yield DEMO
        raise PermissionError("no entry to [bold]/x")

    app = picker(find=broken)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, lambda text: "ended early: no entry to [bold]/x" in text)
        await pilot.press(*"org/m", "enter")
        await pilot.pause()
        assert app.results == [Choice("org/m")]


async def test_names_of_folders_are_shown_letter_by_letter() -> None:
    """A folder's name is foreign text: no markup, and nothing that a terminal would obey."""
    hostile = Candidate("[red]a[/]\x1b[2J", "/x", "folder", 1.0, "[@click=app.quit]d[/]", "b\x07", True, None, None)
    async with picker(hostile).run_test(size=(80, 24)) as pilot:
        text = await listed(pilot)
        assert "[red]a[/]␛[2J" in text and "draft [@click=app.quit]d[/]" in text and "? size unknown" in text
        assert "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize("size", [(40, 12), (64, 18), (200, 60)])
async def test_the_box_and_the_chosen_row_are_seen_in_every_size(size: tuple[int, int]) -> None:
    async with picker(*(DEMO, TIGHT, LARGE) * 4).run_test(size=size) as pilot:
        text = await listed(pilot)
        assert "Filter, or type a" in text and "demo" in text
        for _ in range(11):
            await pilot.press("down")
        await pilot.pause()
        assert "Olmo-2-32B" in pilot.app.text()  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["escape", "ctrl+q"])
async def test_a_disk_that_does_not_answer_keeps_nobody_in_the_picker_or_the_app(key: str) -> None:
    gate = threading.Event()

    def stuck() -> Iterator[Candidate]:
        yield DEMO
        gate.wait(30)
        yield TIGHT

    app = picker(find=stuck, current="demo")
    began = time.monotonic()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press(key)
        await pilot.pause()
    assert app.results == ([None] if key == "escape" else [])
    await asyncio.get_running_loop().shutdown_default_executor()
    assert time.monotonic() - began < 10
    gate.set()


# How it looks ---------------------------------------------------------------------------------------------


async def _wait(pilot: Pilot[Any]) -> None:
    pilot.app.screen.query_one("Input").cursor_blink = False  # type: ignore[attr-defined]
    await listed(pilot)


@PICTURES
@pytest.mark.parametrize(("theme", "size"), LOOKS)
@pytest.mark.parametrize("state", ["list", "typed"])
def test_the_models(snap_compare: Compare, theme: str, size: tuple[int, int], state: str) -> None:
    """Shows the box, two lines for each model with a shape for its verdict, the bar of the chosen one and its memory;
    or what was typed as the only row."""
    app: App[Any] = Host(theme, screen=ModelsScreen(lambda: iter(ALL), None))

    async def act(pilot: Pilot[Any]) -> None:
        await _wait(pilot)
        await pilot.press(*(["down"] if state == "list" else [*"org/model"]))

    assert snap_compare(app, terminal_size=size, run_before=before(act))
