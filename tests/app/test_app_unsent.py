"""Pilots: what was written and not sent is there again when the chat is resumed, and is not sent by itself."""

from __future__ import annotations

import threading

from chatting import Chat, running
from scripted import Answer, Script

from dflash_mlx.app.chat_file import Unsent
from dflash_mlx.app.places import Places
from dflash_mlx.app.store import ChatStore

SLOW = Answer("One.", cycle_s=0.01)
HELD = "held: Enter sends, Esc drops"


def saved() -> ChatStore:
    return ChatStore(Places.default().chats)


def in_the_file() -> Unsent:
    """Of the only chat, as another process reads it now."""
    [path] = Places.default().chats.iterdir()
    return saved().open(path.stem).unsent


def waiting(chat: Chat) -> list[str]:
    return [message.text for message in chat.app.session.waiting]


def blocked() -> tuple[Script, threading.Event]:
    """A first answer that waits, until the app closes at the latest."""
    gate = threading.Event()
    return Script([Answer("One.", gate=gate), Answer("Two."), Answer("Three.")]), gate


async def test_messages_that_waited_are_held_after_a_restart_and_enter_sends_them() -> None:
    """They were lost. Sent at once they would be questions that nobody asked today."""
    script, gate = blocked()
    async with running(script) as chat:
        for text in ("first", "second", "third"):
            await chat.send(text, wait=False)
        await chat.type("half a thou")
        chat.app.exit()
        gate.set()
    again = Script([Answer("Two."), Answer("Three.")])
    async with running(again, resume="") as chat:
        shown = chat.screen_text()
        assert waiting(chat) == ["second", "third"] and f"2 {HELD}" in shown and "second" in shown
        assert chat.prompt.text == "half a thou" and not chat.engine.asked
        chat.prompt.clear()
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.engine.asked) == 2 and not chat.busy)
        assert [ask.messages[-1][1] for ask in chat.engine.asked] == ["second", "third"]
    async with running(Script(), resume="") as chat:
        assert waiting(chat) == [] and chat.prompt.text == "" and len(chat.answers) == 3


async def test_what_was_held_can_be_dropped_and_up_brings_it_back() -> None:
    script, gate = blocked()
    async with running(script) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        chat.app.exit()
        gate.set()
    async with running(Script(), resume="") as chat:
        await chat.pilot.press("escape")
        assert waiting(chat) == [] and "Up brings it back" in chat.screen_text()
        await chat.pilot.press("up")
        assert chat.prompt.text == "second"
        chat.prompt.clear()
    async with running(Script(), resume="") as chat:
        assert waiting(chat) == [] and "held" not in chat.screen_text()


async def test_a_message_that_waited_for_the_first_model_makes_a_chat_of_its_own() -> None:
    """There is no file before the first question, and Enter was pressed on this one."""
    async with running(Script(load_gate=threading.Event()), ready=False) as chat:
        await chat.send("an early question", wait=False)
    [summary] = saved().list()
    assert (summary.title, summary.turns) == ("an early question", 0)
    async with running(Script([Answer("One.")]), resume="") as chat:
        assert waiting(chat) == ["an early question"] and f"1 {HELD}" in chat.screen_text()
        assert not chat.engine.asked
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.answers) == 1 and not chat.busy)
    assert [(chat.id, chat.turns) for chat in saved().list()] == [(summary.id, 1)]


async def test_a_signal_says_that_a_chat_with_only_a_waiting_message_is_saved() -> None:
    async with running(Script(load_gate=threading.Event()), ready=False) as chat:
        await chat.send("an early question", wait=False)
        chat.app._ended_by("SIGTERM", 143)
    assert f"--resume {saved().list()[0].id}" in chat.app.last_words


async def test_every_change_of_the_queue_is_in_the_file_before_the_end() -> None:
    """A process that is killed writes no last words."""
    script, gate = blocked()
    async with running(script) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        await chat.send("thrid", wait=False)
        assert in_the_file() == Unsent(("second", "thrid"))
        await chat.pilot.press("up")
        assert in_the_file() == Unsent(("second",), "thrid")
        chat.prompt.clear()
        await chat.send("third", wait=False)
        assert in_the_file() == Unsent(("second", "third"))
        gate.set()
        await chat.until(lambda: len(chat.answers) == 3 and not chat.busy)
        assert in_the_file() == Unsent()


async def test_what_was_dropped_is_out_of_the_file_before_the_end() -> None:
    """It would come back after a crash."""
    async with running(Script([Answer("many words " * 9000, cycle_s=0.004)])) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        await chat.pilot.press("escape")
        await chat.until(lambda: not chat.busy)
        assert in_the_file() == Unsent(("second",))
        await chat.pilot.press("escape")
        assert in_the_file() == Unsent()


async def test_a_message_is_never_out_of_the_queue_before_it_is_asked() -> None:
    """Between the two it would be in no file at all."""
    script, gate = blocked()
    async with running(script) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        gate.set()
        await chat.until(lambda: len(chat.answers) == 2 and not chat.busy)
    [path] = Places.default().chats.iterdir()
    lines = path.read_text().splitlines()
    asked = next(at for at, line in enumerate(lines) if '"user":"second"' in line)
    emptied = next(at for at, line in enumerate(lines) if '"waiting":[]' in line)
    assert asked < emptied


async def test_a_chat_that_is_left_keeps_what_waited_in_it_and_the_box_goes_along() -> None:
    """/clear forgot the queue; the same text twice in the box would be worse than none."""
    script, gate = blocked()
    gate.set()
    script.answers[1] = Answer("Two " * 9000, cycle_s=0.01)
    async with running(script) as chat:
        await chat.send("first")
        first = chat.app.session.keeper.id
        await chat.send("second", wait=False)
        await chat.send("third", wait=False)
        await chat.type("a draft")
        await chat.pilot.press("ctrl+l")
        await chat.until(lambda: not chat.answers)
        assert waiting(chat) == [] and chat.prompt.text == "a draft"
        for _ in range(2):
            await chat.app.chat.resume(first)
            assert waiting(chat) == ["third"] and chat.app.session.held and chat.prompt.text == "a draft"
        await chat.pilot.press("ctrl+l")
        await chat.until(lambda: not chat.answers)
    async with running(Script(), resume=first) as chat:
        assert waiting(chat) == ["third"] and chat.prompt.text == "", "it was in the box of the other chat"


async def test_what_was_in_the_box_comes_before_what_is_typed_meanwhile() -> None:
    async with running(Script([SLOW])) as chat:
        await chat.send("first")
        await chat.type("yesterday's words")
        first = chat.app.session.keeper.id
    async with running(Script()) as chat:
        await chat.type("today's")
        for _ in range(2):
            await chat.app.chat.resume(first)
            assert chat.prompt.text == "yesterday's words\ntoday's"
    async with running(Script(), resume=first) as chat:
        assert chat.prompt.text == "yesterday's words\ntoday's"


async def test_an_earlier_message_that_was_only_looked_at_was_not_written() -> None:
    """Up, then Ctrl+Q: it is in the chat already."""
    async with running(Script([SLOW])) as chat:
        await chat.send("first")
        await chat.pilot.press("up")
        assert chat.prompt.text == "first"
    async with running(Script(), resume="") as chat:
        assert chat.prompt.text == "" and len(chat.answers) == 1


async def test_a_chat_that_is_open_elsewhere_does_not_hand_its_queue_to_another_window() -> None:
    """Both windows would send it."""
    script, gate = blocked()
    async with running(script) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        async with running(Script(), resume=chat.app.session.keeper.id) as other:
            assert [turn.user for turn in other.app.session.conversation.turns] == ["first"]
            assert waiting(other) == [] and "held" not in other.screen_text()
        gate.set()


async def test_a_chat_that_cannot_be_opened_leaves_the_queue_of_this_one() -> None:
    script, gate = blocked()
    async with running(script) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        await chat.app.chat.resume("20260101-000000-nowhere")
        gate.set()
        assert waiting(chat) == ["second"] and f"1 {HELD}" in chat.screen_text()
    assert in_the_file() == Unsent(("second",))


async def test_without_saving_what_waits_is_written_nowhere() -> None:
    script, gate = blocked()
    async with running(script, save=False) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        chat.app.exit()
        gate.set()
    assert not Places.default().chats.exists() and chat.app.session.saved is None
