"""Pilots: messages that wait, are edited, asked again, taken back; what comes back with Up."""

from __future__ import annotations

import threading

from chatting import Chat, running
from scripted import Answer, Script
from textual.widgets import TextArea

from dflash_mlx.app.screens.talk import EDITING
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.widgets.queue import QueueLine

LONG = Answer("many words " * 9000, depths=(3, 0), cycle_s=0.004)


def waiting(chat: Chat) -> list[str]:
    return [message.text for message in chat.app.chat.session.waiting]


async def _stop(chat: Chat) -> None:
    await chat.pilot.press("escape")
    await chat.until(lambda: not chat.busy)


async def test_messages_sent_during_an_answer_wait_and_are_answered_in_their_order() -> None:
    """Type-ahead: nothing typed is lost, and nothing is sent into a conversation that has not got there."""
    gate = threading.Event()
    async with running(Script([Answer("one", gate=gate), Answer("two"), Answer("three")])) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        await chat.send("third", wait=False)
        shown = chat.screen_text()
        assert "2 waiting" in shown and "second" in shown and "third" in shown
        assert chat.prompt.text == "" and len(chat.engine.asked) == 1
        gate.set()
        await chat.until(lambda: len(chat.answers) == 3 and not chat.busy)
        assert [turn.user for turn in chat.app.chat.session.conversation.turns] == ["first", "second", "third"]
        assert chat.engine.asked[2].messages[-3:] == (("user", "second"), ("assistant", "two"), ("user", "third"))
        assert "waiting" not in chat.screen_text() and not chat.app.chat.query_one(QueueLine).has_class("-shown")


async def test_the_clock_of_a_message_that_waited_starts_when_it_is_sent() -> None:
    """Its TTFT would count the answer before it."""
    async with running(Script([Answer("one" * 30, cycle_s=0.05), Answer("two")])) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        await chat.until(lambda: len(chat.answers) == 2 and not chat.busy)
        first, second = chat.engine.asked
        assert first.requested_at is not None and second.requested_at is not None
        assert second.requested_at - first.requested_at > 1.0


async def test_escape_stops_the_answer_then_drops_what_waits() -> None:
    """After a stop the next message is not sent under the hand of someone who wanted quiet."""
    async with running(Script([LONG, Answer("two")])) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        await _stop(chat)
        assert waiting(chat) == ["second"] and "1 held: Enter sends" in chat.screen_text()
        assert len(chat.engine.asked) == 1
        await chat.pilot.press("escape")
        assert waiting(chat) == [] and "held" not in chat.screen_text()
        await chat.pilot.press("up")
        assert chat.prompt.text == "second", "dropped is not lost"


async def test_enter_in_the_empty_box_goes_on_after_a_stop() -> None:
    async with running(Script([LONG, Answer("two"), Answer("three")])) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        await chat.send("third", wait=False)
        await _stop(chat)
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.answers) == 3 and not chat.busy)
        assert [ask.messages[-1][1] for ask in chat.engine.asked] == ["first", "second", "third"]


async def test_a_failed_answer_holds_what_waits() -> None:
    """Five messages into the same full disk or full context help nobody."""
    gate = threading.Event()
    failing = Answer("abc", gate=gate, fail_after=1, error=ValueError("The context is full."))
    async with running(Script([failing, Answer("two")])) as chat:
        await chat.send("first", wait=False)
        await chat.send("second", wait=False)
        gate.set()
        await chat.until(lambda: not chat.busy)
        assert "The context is full." in chat.screen_text() and "1 held" in chat.screen_text()
        assert len(chat.engine.asked) == 1


async def test_up_takes_a_waiting_message_back_to_be_edited() -> None:
    gate = threading.Event()
    async with running(Script([Answer("one", gate=gate), Answer("two")])) as chat:
        await chat.send("first", wait=False)
        await chat.send("secnd", wait=False)
        await chat.pilot.press("up")
        assert chat.prompt.text == "secnd" and waiting(chat) == []
        chat.prompt.text = ""
        await chat.send("second", wait=False)
        gate.set()
        await chat.until(lambda: len(chat.answers) == 2 and not chat.busy)
        assert chat.engine.asked[1].messages[-1] == ("user", "second")


async def test_up_edits_the_last_message_and_enter_sends_it_in_its_place() -> None:
    async with running(Script([Answer("one"), Answer("two"), Answer("three")])) as chat:
        await chat.send("first")
        await chat.send("secnd")
        await chat.pilot.press("up")
        assert chat.prompt.text == "secnd" and chat.prompt.border_title == EDITING
        chat.prompt.move_cursor((0, 3))
        await chat.pilot.press("o", "enter")
        await chat.until(lambda: len(chat.engine.asked) == 3 and not chat.busy)
        assert chat.engine.asked[2].messages == (("user", "first"), ("assistant", "one"), ("user", "second"))
        assert len(chat.questions) == 2 and "secnd" not in chat.screen_text() and "two" not in chat.screen_text()
        assert not chat.prompt.border_title and chat.prompt.text == ""


async def test_escape_leaves_editing_and_the_conversation_as_it_was() -> None:
    async with running(Script([Answer("one")])) as chat:
        await chat.send("first")
        await chat.pilot.press("up")
        await chat.pilot.press("escape")
        assert chat.prompt.text == "" and not chat.prompt.border_title
        assert len(chat.questions) == 1 and len(chat.engine.asked) == 1
        await chat.send("second")
        assert len(chat.questions) == 2, "it was not sent in the place of the first"


async def test_up_goes_further_back_and_down_returns_to_the_empty_box() -> None:
    async with running(Script([Answer("one"), Answer("two"), Answer("three")])) as chat:
        await chat.send("first")
        await chat.send("/temp 0.5", wait=False)
        await chat.send("second")
        seen = []
        for key in ("up", "up", "up", "up", "down", "down", "down"):
            await chat.pilot.press(key)
            seen.append(chat.prompt.text)
        assert seen == ["second", "/temp 0.5", "first", "first", "/temp 0.5", "second", ""]
        await chat.pilot.press("up", "up", "up")
        assert not chat.prompt.border_title, "an older message is not edited in place"
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.answers) == 3 and not chat.busy)
        assert chat.engine.asked[2].messages[-1] == ("user", "first")


async def test_up_and_down_move_in_a_text_of_many_lines() -> None:
    async with running(Script()) as chat:
        await chat.send("old")
        await chat.type("one\ntwo")
        await chat.pilot.press("up")
        assert chat.prompt.text == "one\ntwo" and chat.prompt.cursor_location[0] == 0
        await chat.pilot.press("up")
        assert chat.prompt.text == "one\ntwo"


async def test_undo_takes_the_last_turn_out_of_history_and_screen() -> None:
    async with running(Script([Answer("one"), Answer("two"), Answer("three")])) as chat:
        await chat.send("first")
        await chat.send("second")
        await chat.send("/undo", wait=False)
        assert len(chat.questions) == 1 and "two" not in chat.screen_text()
        await chat.send("third")
        assert chat.engine.asked[2].messages == (("user", "first"), ("assistant", "one"), ("user", "third"))
        await chat.send("/undo", wait=False)
        await chat.send("/undo", wait=False)
        assert not chat.questions and not chat.app.chat.has_class("-chatting")
        await chat.send("/undo", wait=False)
        assert "nothing to take back" in chat.screen_text()


async def test_nothing_is_taken_back_or_edited_under_a_running_answer() -> None:
    async with running(Script([LONG])) as chat:
        await chat.send("go", wait=False)
        for command in ("/undo", "/edit", "/regen"):
            await chat.send(command, wait=False)
            assert "Esc stops it first" in chat.screen_text() and chat.busy and len(chat.questions) == 1
        await _stop(chat)


async def test_a_failed_message_can_be_asked_again() -> None:
    failing = Answer("abc", fail_after=0, error=ValueError("Busy."))
    async with running(Script([failing, Answer("Fine.")])) as chat:
        await chat.send("hi")
        await chat.pilot.press("ctrl+r")
        await chat.until(lambda: len(chat.engine.asked) == 2 and not chat.busy)
        assert "Fine." in chat.screen_text() and "Busy." not in chat.screen_text() and len(chat.questions) == 1


async def test_three_quotes_make_enter_a_new_line_until_they_are_closed() -> None:
    async with running(Script()) as chat:
        await chat.pilot.press(*'"""one', "enter", *"two", "enter")
        assert not chat.engine.asked and chat.prompt.text == '"""one\ntwo\n'
        await chat.pilot.press(*'"""', "enter")
        await chat.until(lambda: len(chat.engine.asked) == 1 and not chat.busy)
        assert chat.engine.asked[0].messages == (("user", "one\ntwo"),)


async def test_commands_are_offered_while_one_is_typed_and_tab_completes() -> None:
    async with running(Script()) as chat:
        await chat.pilot.press(*"/te")
        assert "temperature; 0 is greedy" in chat.screen_text()
        await chat.pilot.press("tab")
        assert chat.prompt.text == "/temp " and chat.prompt.has_focus
        await chat.pilot.press(*"0.3", "enter")
        assert chat.app.chat.session.settings.temperature == 0.3
        assert "Temperature 0.3, from the next message on" in chat.screen_text()


async def test_the_system_prompt_is_edited_on_its_own_page() -> None:
    async with running(Script(), settings=Settings(system="Be brief.", max_tokens=100)) as chat:
        await chat.send("/system", wait=False)
        await chat.until(lambda: "System prompt" in chat.screen_text())
        box = chat.app.screen.query_one(TextArea)
        assert box.text == "Be brief."
        await chat.pilot.press("enter", *"Be kind.", "ctrl+s")
        await chat.send("hi")
        assert chat.engine.asked[0].messages[0] == ("system", "Be brief.\nBe kind.")
        await chat.send("/system", wait=False)
        await chat.pilot.press(*"no", "escape")
        assert chat.app.chat.session.settings.system == "Be brief.\nBe kind."


async def test_the_answer_and_its_last_code_block_are_copied_as_they_were_written() -> None:
    text = "Text with *stars*.\n\n```python\none()\n```\n\n- in a list\n\n  ```\n  two()\n  ```\n"
    async with running(Script([Answer(text, reasoning="hm"), Answer("no code")])) as chat:
        await chat.pilot.press("ctrl+y")
        assert "no answer to copy" in chat.screen_text()
        await chat.send("hi")
        await chat.pilot.press("ctrl+y")
        assert chat.app.clipboard == text.strip("\n")
        await chat.pilot.press("ctrl+k")
        assert chat.app.clipboard == "two()\n"
        await chat.send("again")
        await chat.pilot.press("ctrl+k")
        assert "no code block" in chat.screen_text() and chat.app.clipboard == "two()\n"
