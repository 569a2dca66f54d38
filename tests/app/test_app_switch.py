"""Pilots: another model is asked for, and what becomes of the one that is loaded if that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from chatting import Chat, running
from scripted import Answer, Script

from dflash_mlx.app.backend import TooLarge
from dflash_mlx.app.discovery import Candidate
from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.messages import EngineFailed, LoadCancelled
from dflash_mlx.app.screens.models import ModelsScreen
from dflash_mlx.app.settings import Settings
from dflash_mlx.fit import Fit

TYPO = ValueError("There is no folder org/Typo here, and the hub has no repository of that name.")


def some_models() -> Iterator[Candidate]:
    yield Candidate("demo", "demo", "demo", 0.1, "demo", "made for it", True, None, None)
    large = Fit("too large", 67.0, 11.5)
    yield Candidate("Huge", "org/Huge", "hub cache", 64.5, None, "none is known", True, None, large)


def settled(chat: Chat) -> bool:
    return chat.app.session.loading is None and not chat.busy


async def _load(chat: Chat, what: str) -> None:
    await chat.send(f"/load {what}", wait=False)
    await chat.until(lambda: settled(chat))


async def test_a_typo_leaves_the_model_that_is_loaded_and_the_chat_goes_on_with_it() -> None:
    """The pair was dropped before anybody looked whether there is another one: nothing could be asked any more."""
    script = Script([Answer("One."), Answer("Two.")], prepare_error=TYPO)
    async with running(script, size=(100, 30)) as chat:
        await chat.send("first")
        card = chat.app.session.card
        await _load(chat, "org/Typo")
        shown = chat.screen_text()
        assert "no folder org/Typo here" in shown and "demo + fake-draft is still loaded." in shown
        assert chat.app.session.card == card and "demo + fake-draft" in chat.line("#pair")
        assert chat.app.failure is None, "it would be said again at the end"
        await _load(chat, "org/Typo")
        assert script.prepared == 2 * [("org/Typo", False)], "only what was said to be too large is insisted on"
        await chat.send("second")
        assert chat.answers[-1].source == "Two." and script.reused[-1] > 0, "with its cache"
        assert len(script.loads) == 1 and chat.app.state.model == "demo"
        await chat.pilot.press("f2")
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))
        assert chat.app.screen._current == "demo"  # type: ignore[attr-defined]


async def test_before_the_first_message_a_typo_is_said_above_the_box() -> None:
    async with running(Script([Answer("One.")], prepare_error=TYPO)) as chat:
        await _load(chat, "org/Typo")
        shown = " ".join(chat.screen_text().split())
        assert "no folder org/Typo here" in shown and "demo + fake-draft is still loaded." in shown
        assert "-ready" in chat.welcome_classes
        await chat.send("first")
        assert chat.answers[-1].source == "One."


async def test_a_speed_up_is_still_against_this_pair_after_another_one_was_refused() -> None:
    async with running(Script([Answer("words " * 20)], prepare_error=TYPO)) as chat:
        await chat.send("/mode plain", wait=False)
        await chat.send("first")
        baseline = chat.app.session.baseline
        await _load(chat, "org/Typo")
        assert baseline is not None and chat.app.session.baseline == baseline


async def test_what_waited_for_a_model_that_is_not_loaded_is_held() -> None:
    """It was meant for the other one; Enter sends it to this one."""
    gate = threading.Event()
    async with running(Script([Answer("One.")], prepare_gate=gate, prepare_error=TYPO)) as chat:
        await chat.send("/load org/Typo", wait=False)
        await chat.send("who are you?", wait=False)
        gate.set()
        await chat.until(lambda: settled(chat))
        assert "1 held" in chat.screen_text() and not chat.engine.asked
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.answers) == 1 and not chat.busy)


async def test_a_download_that_is_cancelled_costs_nothing() -> None:
    """It can take an hour; the model that is here works on after Esc."""
    script = Script([Answer("One.")], prepare_gate=threading.Event())
    async with running(script) as chat:
        await chat.send("/load org/Large", wait=False)
        await chat.until(lambda: "Fetching" in chat.screen_text())
        await chat.pilot.press("escape")
        await chat.until(lambda: settled(chat))
        assert chat.app.screen is chat.app.chat, "no picker: there is a model"
        assert "Cancelled. demo + fake-draft is still loaded." in chat.screen_text()
        await chat.send("first")
        assert chat.answers[-1].source == "One." and len(script.loads) == 1


async def test_weights_that_cannot_be_read_cost_the_pair_and_the_message_says_how_it_comes_back() -> None:
    """It comes back as it was, with the draft and the revision that it had."""
    script = Script([Answer("words " * 20), Answer("Two.")])
    first = LoadModel("org/Mine", draft="org/Draft", revision="abc")
    plain = Settings(mode="plain")
    async with running(script, size=(100, 30), settings=plain, load=first) as chat:
        await chat.send("first")
        assert chat.app.session.baseline is not None
        script.load_error = ValueError("model.safetensors is damaged. Fetch it again.")
        await _load(chat, "org/Broken")
        shown = " ".join(chat.screen_text().split())
        assert "Mine + fake-draft was freed for it: /load org/Mine loads that again." in shown
        assert chat.app.session.card is None and chat.app.session.baseline is None
        script.load_error = None
        await _load(chat, "org/Mine")
        model, options = script.loads[-1]
        assert (model, options["draft"], options["revision"]) == ("org/Mine", "org/Draft", "abc")
        await chat.send("second")
        assert chat.answers[-1].source == "Two."
        await _load(chat, "org/Mine")
        assert script.loads[-1][1]["draft"] == "auto", "it is not gone now, and this is asked for anew"


async def test_what_is_too_large_is_loaded_when_it_is_asked_for_once_more() -> None:
    script = Script([Answer("One.")], prepare_error=TooLarge("org/Huge needs about 67.0 GB. Once more loads it."))
    async with running(script) as chat:
        await _load(chat, "org/Huge")
        script.prepare_error, error = None, script.prepare_error
        await _load(chat, "org/Other")
        script.prepare_error = error
        await _load(chat, "org/Huge")
        assert len(script.loads) == 2, "another model in between: asked again"
        await _load(chat, "org/Huge")
        assert script.loads[-1][0] == "org/Huge" and script.prepared[-1] == ("org/Huge", True)
        card = chat.app.session.card
        assert card is not None and card.model == "org/Huge"


async def test_what_the_picker_warned_of_is_not_asked_about_again() -> None:
    async with running(Script(), find=some_models) as chat:
        await chat.pilot.press("f2")
        await chat.until(lambda: "Huge" in chat.screen_text())
        await chat.pilot.press("down", "enter", "enter")
        await chat.until(lambda: bool(chat.script.prepared) and settled(chat))
        assert chat.script.prepared == [("org/Huge", True)]


async def test_a_refused_load_in_whose_place_another_came_is_not_told() -> None:
    """The other one is being loaded: the header would name the old pair, and take a question for it."""
    gate = threading.Event()
    async with running(Script([Answer("One.")], prepare_gate=gate)) as chat:
        session, card = chat.app.session, chat.app.session.card
        await chat.send("first")
        chat.app.load_model("org/Other")
        assert card is not None and session.loading is not None
        number = session.loading - 1
        for event in (LoadCancelled(number, card), EngineFailed("No", "such.", False, number, kept=card)):
            chat.app.post_message(EngineMessage(event))
            await chat.pilot.pause()
            assert session.loading is not None and session.card is None and not chat.notices
        gate.set()
        await chat.until(lambda: settled(chat))
        assert session.card is not None and session.card.model == "org/Other"


async def test_a_load_that_had_ended_when_it_was_overtaken_is_the_one_that_is_kept() -> None:
    """The header and the picker would name the pair before it, and speed-ups would be against that one."""
    script = Script([Answer("words " * 20)])
    async with running(script, size=(100, 30), settings=Settings(mode="plain")) as chat:
        session, card = chat.app.session, chat.app.session.card
        await chat.send("first")
        script.prepare_gate = threading.Event()
        chat.app.load_model("org/Typo")
        assert card is not None and session.loading is not None and session.baseline is not None
        second = replace(card, target="Second", model="org/Second")
        failed = EngineFailed("No", "such.", False, session.loading, kept=second)
        chat.app.post_message(EngineMessage(failed))
        await chat.until(lambda: settled(chat))
        assert session.card == second and session.baseline is None and "Second" in chat.line("#pair")
        chat.app.choose_model()
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))
        assert chat.app.screen._current == "org/Second"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ("org/Other", {"draft": "auto", "dtype": None, "draft_bits": 4}),
        ("org/Other + org/Draft", {"draft": "org/Draft", "dtype": None, "draft_bits": 4}),
        ("org/Other + none", {"draft": None, "dtype": None, "draft_bits": None}),
        ("demo", {"draft": "auto", "dtype": "packed", "draft_bits": 4}),
    ],
)
async def test_another_model_gets_no_option_that_it_would_refuse(typed: str, options: dict[str, object]) -> None:
    """`--dtype packed` is of the demo alone, `--draft-bits` of a pair with a draft: every /load failed."""
    first = LoadModel(dtype="packed", draft_bits=4, revision="abc")
    async with running(Script(), load=first) as chat:
        await _load(chat, typed)
        asked = chat.script.loads[-1][1]
        assert {name: asked[name] for name in options} == options and asked["revision"] is None
