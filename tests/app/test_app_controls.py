"""The controls: every setting of a turn, changed with the keyboard, refused in the settings' own words."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from instruments import CARD, LOOKS, PICTURES, Compare, Host, before
from textual.pilot import Pilot

from dflash_mlx.app.control_fields import FIELDS, build, meaning, problem
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.screens.controls import ControlsScreen
from dflash_mlx.app.settings import MODES, Settings

BY_NAME = {field.name: field for field in FIELDS}
SET = Settings(0.7, 0.9, 0.05, 40, 512, 8, "dflash", "Be brief.", 7, True)


def texts(settings: Settings, **changed: str) -> dict[str, str]:
    return {field.name: field.show(settings) for field in FIELDS} | changed


# Text and values ------------------------------------------------------------------------------------------


def test_every_setting_but_the_system_prompt_has_a_field() -> None:
    """A new setting that nobody can reach is forgotten; the system prompt has a command and a box of its own."""
    assert {field.name for field in fields(Settings)} - {"system"} == set(BY_NAME)


@pytest.mark.parametrize("settings", [Settings(), SET, Settings(thinking=False, mode="plain", max_tokens=-1)])
def test_what_is_shown_reads_back_as_what_it_was(settings: Settings) -> None:
    """Enter without a change must change nothing, the system prompt included."""
    assert build(settings, texts(settings), CARD) == settings


def test_a_word_or_an_empty_field_stands_for_not_set() -> None:
    changed = dict(block_size="", seed="off", max_tokens="off", top_p="", min_p="off", top_k="", thinking="auto")
    built = build(SET, texts(SET, **changed), CARD)
    assert built == Settings(0.7, max_tokens=-1, mode="dflash", system="Be brief.")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temperature", "hot", "temperature has to be a number, got hot."),
        ("temperature", "", "temperature has to be a number, got nothing."),
        ("block_size", "4.5", "block size has to be auto or a whole number, got 4.5."),
        ("seed", "x", "seed has to be off or a whole number, got x."),
    ],
)
def test_text_that_is_no_value_is_named(name: str, text: str, said: str) -> None:
    assert problem(BY_NAME[name], text, CARD) == said


@pytest.mark.parametrize(
    ("name", "text"),
    [("temperature", "-1"), ("temperature", "nan"), ("min_p", "1.5"), ("top_k", "-3"), ("max_tokens", "0"),
     ("seed", "-1"), ("top_p", "-0.1"), ("block_size", "0")],
)  # fmt: skip
def test_a_range_is_refused_in_the_settings_own_words(name: str, text: str) -> None:
    """Two texts for one rule drift apart."""
    value = float(text) if name in ("temperature", "min_p", "top_p") else int(text)
    with pytest.raises(ValueError) as refused:
        replace(Settings(), **{name: value})
    assert problem(BY_NAME[name], text, CARD) == str(refused.value)


def test_the_loaded_pair_sets_limits_too() -> None:
    assert "1..16" in problem(BY_NAME["block_size"], "17", CARD) and not problem(BY_NAME["block_size"], "16", CARD)
    alone = ModelCard("t", None, None, 1.0)
    assert "needs a draft" in problem(BY_NAME["mode"], "dflash", alone)
    assert not problem(BY_NAME["mode"], "dflash", None), "nothing is loaded yet: anything may be"
    assert "1..16" in meaning(BY_NAME["block_size"], CARD) and "no switch" in meaning(BY_NAME["thinking"], alone)


def test_two_values_that_do_not_go_together_are_said_by_one_of_them() -> None:
    problems = build(Settings(), texts(Settings(), mode="dflash", block_size="1"), CARD)
    assert (
        isinstance(problems, dict) and list(problems) == ["block_size"] and "mode is dflash" in problems["block_size"]
    )


# The screen -----------------------------------------------------------------------------------------------


def staged(settings: Settings | None = None, card: ModelCard | None = CARD) -> Host:
    return Host(screen=ControlsScreen(settings or Settings(), card))


async def test_enter_in_the_first_field_hands_over_what_the_arrows_chose() -> None:
    app = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("right", "enter")
        await pilot.pause()
        assert app.results == [Settings(mode=MODES[1])]


@pytest.mark.parametrize("next_key", ["down", "tab"])
async def test_every_field_is_reached_and_set_without_a_mouse(next_key: str) -> None:
    app = staged(Settings(system="Be brief."))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("right", next_key)
        for typed in ("8", "0.7", "0.9", "40", "0.05", "7", "512"):
            await pilot.press(*typed, next_key)
        await pilot.press("right", "enter")
        await pilot.pause()
        assert app.results == [SET]


async def test_escape_leaves_everything_as_it_was() -> None:
    app = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("right", "down", "8", "escape")
        await pilot.pause()
        assert app.results == [None]


@pytest.mark.parametrize("size", [(80, 24), (46, 30), (130, 40)])
async def test_a_wrong_field_says_so_at_once_and_keeps_enter_from_leaving(size: tuple[int, int]) -> None:
    app = staged()
    async with app.run_test(size=size) as pilot:
        await pilot.press("down", *"99")
        await pilot.pause()
        text = " ".join(app.text().replace("│", " ").split())
        assert "✗ block_size has to be in 1..16" in text and "got 99." in text
        await pilot.press("down", *"0.5", "enter")
        await pilot.pause()
        assert app.results == [] and app.focused is not None and app.focused.id == "block_size"
        await pilot.press("backspace", "backspace", "6")
        await pilot.pause()
        assert "✗" not in app.text()
        await pilot.press("enter")
        await pilot.pause()
        assert app.results == [Settings(block_size=6, temperature=0.5)]


async def test_a_choice_turns_round_at_both_ends_and_follows_the_mouse() -> None:
    app = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("left")
        await pilot.pause()
        assert "[plain]" in app.text()
        await pilot.press("right")
        await pilot.click("#thinking", offset=(8, 0))
        await pilot.pause()
        assert "[auto] dflash" in app.text() and "[on]" in app.text()


async def test_a_choice_shows_what_is_chosen_without_colour() -> None:
    app = staged(SET)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert " auto [dflash] plain" in app.text() and " auto [on] off" in app.text()
        assert "From the next message on" in app.text()


# How it looks ---------------------------------------------------------------------------------------------


@PICTURES
@pytest.mark.parametrize(("theme", "size"), LOOKS)
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_the_controls(snap_compare: Compare, theme: str, size: tuple[int, int], wrong: bool) -> None:
    """Shows nine rows of label, value and meaning; the focused field lifted; what is wrong in place of the meaning."""
    app = Host(theme, screen=ControlsScreen(SET, CARD))

    async def act(pilot: Pilot[Any]) -> None:
        for field in app.screen.query("Input"):
            field.cursor_blink = False  # type: ignore[attr-defined]
        if wrong:
            await pilot.press("down", *"32", "down", *"hot", "up")

    assert snap_compare(app, terminal_size=size, run_before=before(act))
