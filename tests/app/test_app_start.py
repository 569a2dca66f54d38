"""Pilots: choosing and loading a model, cancelling that, switching in mid-chat; races, controls, palette."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from chatting import Chat, running
from scripted import Answer, Script
from textual.command import CommandPalette
from textual.widgets import Input

from dflash_mlx.app.actions import ACTIONS
from dflash_mlx.app.discovery import Candidate
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.palette import how
from dflash_mlx.app.screens.controls import ControlsScreen
from dflash_mlx.app.screens.models import ModelsScreen
from dflash_mlx.app.screens.race import RaceScreen
from dflash_mlx.app.screens.sheet import Sheet

LONG = Answer("many words " * 9000, depths=(3, 0), cycle_s=0.004)


def some_models() -> Iterator[Candidate]:
    yield Candidate("Demo pair", "demo", "demo", 0.1, "demo", "made for it", True, None, None)
    yield Candidate("Small-1B", "org/Small-1B", "hub cache", 1.2, None, "none is known", True, None, None)


def loads(chat: Chat) -> list[LoadModel]:
    return [job for job in chat.engine.submitted if isinstance(job, LoadModel)]


async def _until_open(chat: Chat, screen: type) -> None:
    await chat.until(lambda: isinstance(chat.app.screen, screen))


async def test_without_a_model_the_picker_opens_and_loads_what_is_chosen() -> None:
    options = LoadModel(dtype="float32", revision="abc")
    async with running(Script([Answer("Hello.")]), ready=False, load=None, find=some_models, options=options) as chat:
        await _until_open(chat, ModelsScreen)
        await chat.until(lambda: "Small-1B" in chat.screen_text())
        assert loads(chat) == [], "nothing is loaded unasked"
        await chat.pilot.press(*"small", "enter")
        await chat.ready()
        [job] = loads(chat)
        assert (job.model, job.dtype, job.revision) == ("org/Small-1B", "float32", None)
        assert "loaded in" in chat.line("#more") and "launch" not in chat.line("#more"), "the choice took its time"
        await chat.send("hi")
        assert "Hello." in chat.screen_text()


async def test_escape_while_loading_cancels_and_returns_to_the_picker() -> None:
    script = Script(load_steps=(("Fetching", 0.1),), load_gate=threading.Event())
    async with running(script, ready=False, find=some_models) as chat:
        await chat.until(lambda: "Fetching" in chat.screen_text())
        await chat.send("early", wait=False)
        await chat.pilot.press("escape")
        await _until_open(chat, ModelsScreen)
        assert chat.app.chat.session.card is None and chat.app.chat.session.loading is None
        script.load_gate = None
        await chat.until(lambda: "Demo pair" in chat.screen_text())
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.app.chat.session.card is not None)
        await chat.pilot.pause()
        assert "1 held" in chat.screen_text() and not chat.engine.asked, "a stop holds what waits"
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.answers) == 1 and not chat.busy)


async def test_another_model_goes_on_with_the_same_chat() -> None:
    """Its template renders the conversation anew; a running answer is stopped and kept."""
    async with running(Script([Answer("One."), LONG, Answer("Three.")]), find=some_models) as chat:
        await chat.send("first")
        await chat.send("second", wait=False)
        await chat.until(lambda: len(chat.answers[1].source) > 20)
        await chat.send("/load org/Small-1B", wait=False)
        await chat.until(lambda: not chat.busy and chat.app.chat.session.card is not None)
        kept = chat.app.chat.session.conversation.turns[1].answer
        assert kept and LONG.text.startswith(kept)
        await chat.send("third")
        assert chat.engine.asked[2].messages == (
            ("user", "first"), ("assistant", "One."), ("user", "second"), ("assistant", kept), ("user", "third"),
        )  # fmt: skip
        assert len(loads(chat)) == 2 and chat.script.reused[-1] == 0


async def test_the_picker_is_left_with_escape_while_a_model_is_loaded() -> None:
    async with running(Script(), find=some_models) as chat:
        await chat.pilot.press("f2")
        await _until_open(chat, ModelsScreen)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is chat.app.chat)
        assert len(loads(chat)) == 1 and chat.app.chat.session.card is not None


async def test_after_a_failed_load_another_model_can_be_chosen() -> None:
    script = Script([Answer("Fine.")], load_error=ValueError("No model at /nowhere."))
    async with running(script, ready=False, find=some_models) as chat:
        await chat.until(lambda: "No model at /nowhere." in chat.screen_text())
        await chat.send("hello", wait=False)
        assert "F2 or /models" in chat.screen_text() and chat.prompt.text == "hello"
        script.load_error = None
        await chat.pilot.press("f2")
        await _until_open(chat, ModelsScreen)
        await chat.until(lambda: "Demo pair" in chat.screen_text())
        await chat.pilot.press("enter")
        await chat.ready()
        assert chat.app.failure is None, "it would be said again at the end"
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.answers) == 1 and not chat.busy)
        assert "Fine." in chat.screen_text()


async def test_out_of_memory_while_loading_or_answering_ends_in_a_message() -> None:
    script = Script([Answer("abc", fail_after=1, error=MemoryError()), Answer("Fine.")])
    async with running(script, find=some_models) as chat:
        await chat.send("hi")
        assert "Out of memory" in chat.screen_text()
        await chat.send("again")
        assert "Fine." in chat.screen_text()
        script.load_error = MemoryError()
        await chat.send("/load org/Huge", wait=False)
        await chat.until(lambda: "No model is loaded" in chat.screen_text() or chat.app.failure is not None)
        assert chat.app.failure is not None and "memory" in chat.app.failure.title.lower()
        assert "Fine." in chat.screen_text(), "what was said is still there"


async def test_a_race_leaves_the_conversation_as_it_was_and_gives_a_baseline() -> None:
    async with running(Script([Answer("words " * 20)])) as chat:
        await chat.send("/race", wait=False)
        assert "no message to race with" in chat.screen_text()
        await chat.send("tell me")
        before = chat.app.chat.session.conversation.messages()
        await chat.pilot.press("f5")
        await _until_open(chat, RaceScreen)
        assert "tell me" in chat.screen_text()
        await chat.until(lambda: chat.app.chat.session.racing is None, 20)
        await chat.pilot.press("space", "escape")
        await chat.until(lambda: chat.app.screen is chat.app.chat)
        assert chat.app.chat.session.conversation.messages() == before
        assert chat.app.chat.session.baseline is not None
        await chat.send("and more")
        assert len(chat.answers) == 2


async def test_a_race_is_stopped_with_escape_and_what_waits_is_not_sent_into_it() -> None:
    async with running(Script([Answer("short"), LONG])) as chat:
        await chat.send("tell me")
        await chat.pilot.press("f5")
        await _until_open(chat, RaceScreen)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is chat.app.chat and chat.app.chat.session.racing is None)
        assert len(chat.answers) == 1 and chat.app.chat.session.baseline is None


async def test_a_race_without_a_draft_says_what_to_do() -> None:
    async with running(Script(draft=None)) as chat:
        await chat.send("tell me")
        await chat.pilot.press("f5")
        assert "needs a draft" in chat.screen_text() and chat.app.screen is chat.app.chat


async def test_controls_change_the_next_message() -> None:
    async with running(Script()) as chat:
        await chat.pilot.press("f4")
        await _until_open(chat, ControlsScreen)
        chat.app.screen.query_one("#temperature", Input).value = "0.5"
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.app.screen is chat.app.chat)
        await chat.send("hi")
        assert chat.engine.asked[0].settings.temperature == 0.5


@pytest.mark.parametrize(
    ("typed", "happened"),
    [
        ("mark the tokens", lambda chat: chat.transcript.has_class("-origins")),
        ("/theme", lambda chat: chat.app.theme == "dflash-light"),
        ("keys, commands", lambda chat: isinstance(chat.app.screen, Sheet)),
    ],
)
async def test_the_palette_runs_what_it_lists(typed: str, happened: Callable[[Chat], bool]) -> None:
    async with running(Script([Answer("x y")])) as chat:
        await chat.send("hi")
        await chat.pilot.press("ctrl+p")
        await _until_open(chat, CommandPalette)
        await chat.until(lambda: "New chat" in chat.screen_text())
        await chat.pilot.press(*typed)
        await chat.pilot.pause(0.3)
        await chat.pilot.press("enter")
        await chat.until(lambda: happened(chat))


async def test_the_palette_says_the_key_and_the_command_of_each_action() -> None:
    assert how(next(action for action in ACTIONS if action.name == "race")) == "F5 · /race"
    async with running(Script(), size=(100, 60)) as chat:
        await chat.send("/palette", wait=False)
        await _until_open(chat, CommandPalette)
        await chat.until(lambda: "Ctrl+L · /clear" in chat.screen_text())


async def test_show_info_lists_what_is_loaded_and_set() -> None:
    async with running(Script(), size=(100, 40)) as chat:
        await chat.send("/show info", wait=False)
        await _until_open(chat, Sheet)
        shown = chat.screen_text()
        assert "fake-draft" in shown and "temperature" in shown and "0 (greedy)" in shown


async def test_the_theme_is_the_one_of_the_config_until_another_is_chosen() -> None:
    async with running(Script(), theme="light") as chat:
        assert chat.app.theme == "dflash-light"
        await chat.send("/theme dark", wait=False)
        await chat.until(lambda: chat.app.theme == "dflash-dark")
    async with running(Script(), theme="light") as chat:
        assert chat.app.theme == "dflash-dark"
