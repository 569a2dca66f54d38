"""SVG pictures of the whole window, every state at two sizes, dark and light, and without colours.

To accept a change: look at the report first, then `--snapshot-update`.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import textual
from chatting import LOAD, Chat, make_app
from scripted import Answer, Script
from textual.command import CommandPalette
from textual.widgets import Input, TextArea

from dflash_mlx.app.discovery import Candidate
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.messages import Part
from dflash_mlx.app.places import Places
from dflash_mlx.app.screens.chats import ChatsScreen
from dflash_mlx.app.screens.controls import ControlsScreen
from dflash_mlx.app.screens.models import ModelsScreen
from dflash_mlx.app.screens.race import RaceScreen
from dflash_mlx.app.screens.sheet import Sheet
from dflash_mlx.app.screens.system import SystemScreen
from dflash_mlx.app.store import ChatStore

Compare = Callable[..., bool]

pytestmark = pytest.mark.skipif(
    textual.__version__ != "8.2.8", reason="the pictures were taken with Textual 8.2.8; another one draws otherwise"
)

ANSWER = """Speculative decoding lets a *small* draft propose and the **target** verify.

1. The draft proposes a block.
2. The target checks it in one pass.

```python
def accept(p, q):
    return p == q  # [greedy]
```
"""
BLAS = ("BLAS: scipy-openblas32, 1 thread",)


@dataclass
class State:
    """What is shown, and how to get there. gate: what the script waits for, opened when the picture has been taken."""

    show: Callable[[Chat], Awaitable[None]]
    script: Callable[[], Script] = lambda: Script([Answer(ANSWER, notes=BLAS)])
    load: LoadModel | None = LOAD
    gate: threading.Event = field(default_factory=threading.Event)


def _models() -> Iterator[Candidate]:
    yield Candidate("Demo pair", "demo", "demo", 0.1, "demo", "comes with it", True, None, None)
    yield Candidate(
        "Qwen3-4B-4bit", "org/Qwen3-4B-4bit", "hub cache", 2.3, "z/Qwen3-4B-DFlash", "listed", True, None, None
    )
    yield Candidate("Huge-70B", "org/Huge-70B", "LM Studio", 39.7, None, "none is known", True, None, None)
    yield Candidate("odd", "org/odd", "folder", None, None, "", False, "its model_type is not served here", None)


async def _open(chat: Chat, key: str, screen: type) -> None:
    await chat.pilot.press(key)
    await chat.until(lambda: isinstance(chat.app.screen, screen))
    await chat.pilot.pause()


async def loading(chat: Chat) -> None:
    await chat.until(lambda: "42%" in chat.line("#doing"))
    await chat.type("typed ahead")


async def picker(chat: Chat) -> None:
    await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen) and "odd" in chat.screen_text())


async def ready(chat: Chat) -> None:
    await chat.ready()
    card = chat.app.chat.session.card
    assert card is not None
    chat.app.chat.welcome.show_ready(replace(card, ready_s=1.25))


async def thinking(chat: Chat) -> None:
    await chat.ready()
    await chat.pilot.press("ctrl+t")
    await chat.send("why?")


async def answer(chat: Chat) -> None:
    await chat.ready()
    await chat.send("explain")


async def origins(chat: Chat) -> None:
    await answer(chat)
    await chat.pilot.press("f6")
    await chat.pilot.pause()


async def verbose(chat: Chat) -> None:
    await answer(chat)
    await chat.send("/verbose", wait=False)


async def stopped(chat: Chat) -> None:
    await answer(chat)
    await chat.send("and more", wait=False)
    await chat.until(lambda: len(chat.script.prompts) == 2)
    await chat.pilot.press("escape")
    chat.script.answers[1].gate.set()  # type: ignore[union-attr]
    await chat.until(lambda: not chat.busy)


async def failed(chat: Chat) -> None:
    await answer(chat)
    await chat.send("again")


async def queue(chat: Chat) -> None:
    await chat.ready()
    await chat.send("first", wait=False)
    for text in ("second", "third\nin two lines", "fourth", "fifth"):
        await chat.send(text, wait=False)


async def suggestions(chat: Chat) -> None:
    await answer(chat)
    await chat.type("/s")


async def editing(chat: Chat) -> None:
    await answer(chat)
    await chat.pilot.press("up")


async def race(chat: Chat) -> None:
    await answer(chat)
    await _open(chat, "f5", RaceScreen)
    await chat.until(lambda: chat.app.chat.session.racing is None)
    await chat.until(lambda: chat.app.screen.has_class("-replay"))
    await chat.pilot.press("space")
    await chat.until(lambda: chat.app.screen.has_class("-done"))
    await chat.pilot.pause()


async def controls(chat: Chat) -> None:
    await answer(chat)
    await _open(chat, "f4", ControlsScreen)


async def system(chat: Chat) -> None:
    await answer(chat)
    await chat.send("/system", wait=False)
    await chat.until(lambda: isinstance(chat.app.screen, SystemScreen))
    chat.app.screen.query_one(TextArea).insert("Answer in one sentence.\nNo jokes.")


async def chats(chat: Chat) -> None:
    await chat.ready()
    at = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    store = ChatStore(Places.default().chats, now=lambda: at)
    for title in (
        "Speculative decoding, explained",
        "A long question that goes on until it has to be cut somewhere",
        "Vowels",
    ):
        saved = store.create("org/Qwen3-4B-4bit")
        turn = saved.conversation.ask(title, 1)
        saved.asked(turn)
        saved.conversation.append(1, [Part("answer", "target", "Yes.")])
        saved.conversation.finish(1, "stop")
        saved.finished(turn)
        saved.close()
        at += timedelta(days=1)
    await _open(chat, "f3", ChatsScreen)


async def deleting(chat: Chat) -> None:
    await chats(chat)
    await chat.pilot.press("down", "ctrl+d")
    await chat.pilot.pause()


async def help_(chat: Chat) -> None:
    await answer(chat)
    await _open(chat, "f1", Sheet)


async def palette(chat: Chat) -> None:
    await answer(chat)
    await _open(chat, "ctrl+p", CommandPalette)
    await chat.until(lambda: "Ctrl+L · /clear" in chat.screen_text())


def _gated(*answers: Answer) -> Callable[[], Script]:
    return lambda: Script([replace(made) for made in answers])


def _states() -> dict[str, State]:
    gates = {name: threading.Event() for name in ("loading", "stopped", "queue")}
    wait = Answer("never seen", on_prefill=lambda chunk: gates["queue"].wait(10) and None)
    return {
        "loading": State(
            loading,
            lambda: Script(load_steps=(("Unpacking 272 tensors", 0.42),), load_gate=gates["loading"]),
            gate=gates["loading"],
        ),
        "picker": State(picker, load=None),
        "ready": State(ready),
        "thinking": State(
            thinking,
            lambda: Script([Answer("So it is.", reasoning="The two were compared, and then", depths=(2,))]),
        ),
        "answer": State(answer),
        "origins": State(origins),
        "verbose": State(verbose),
        "stopped": State(
            stopped,
            _gated(Answer(ANSWER, notes=BLAS), Answer("More of it, that is cut.", gate=gates["stopped"])),
            gate=gates["stopped"],
        ),
        "failed": State(
            failed,
            _gated(Answer(ANSWER), Answer("abc", fail_after=0, error=ValueError("The context is full."))),
        ),
        "queue": State(queue, _gated(wait), gate=gates["queue"]),
        "suggestions": State(suggestions),
        "editing": State(editing),
        "race": State(race, _gated(Answer("Both arms write this text, word by word. " * 4))),
        "controls": State(controls),
        "system": State(system),
        "chats": State(chats),
        "deleting": State(deleting),
        "help": State(help_),
        "palette": State(palette),
    }  # fmt: skip


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
@pytest.mark.parametrize("name", list(_states()))
def test_picture(snap_compare: Compare, name: str, size: tuple[int, int], theme: str) -> None:
    """What a reader sees in this state; nothing overlaps, nothing is cut off that matters."""
    _compare(snap_compare, name, size, theme)


@pytest.mark.parametrize("name", ["answer", "origins", "chats", "picker"])
def test_without_colours_everything_can_still_be_told_apart(
    snap_compare: Compare, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """NO_COLOR: accepted and rejected, drafted and own, marked and unmarked differ by shape or weight."""
    monkeypatch.setenv("NO_COLOR", "1")
    _compare(snap_compare, name, (80, 24), "dark")


def _compare(snap_compare: Compare, name: str, size: tuple[int, int], theme: str) -> None:
    state = _states()[name]
    script = state.script()
    app = make_app(script, load=state.load, find=_models)
    app.theme = f"dflash-{theme}"

    async def before(pilot: Any) -> None:
        chat = Chat(app, pilot, script)
        chat.prompt.cursor_blink = False
        await state.show(chat)
        for box in (*app.screen.query(Input), *app.screen.query(TextArea)):
            box.cursor_blink = False
        await pilot.pause()

    try:
        assert snap_compare(app, terminal_size=size, run_before=before)
    finally:
        state.gate.set()
        app.close_engine(5.0)
