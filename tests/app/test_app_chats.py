"""Pilots: chats are saved as they grow, resumed, renamed, deleted, exported; nothing is lost when the app ends."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from chatting import Chat, make_app, running
from scripted import Answer, Script
from textual.widgets import Input, OptionList

from dflash_mlx.app.lines import LineFile
from dflash_mlx.app.places import Places
from dflash_mlx.app.screens.chats import ChatsScreen
from dflash_mlx.app.store import ChatStore

LONG = Answer("many words " * 9000, depths=(3, 0), cycle_s=0.004)


def saved() -> ChatStore:
    return ChatStore(Places.default().chats)


async def _open_chats(chat: Chat) -> ChatsScreen:
    await chat.pilot.press("f3")
    await chat.until(lambda: isinstance(chat.app.screen, ChatsScreen))
    screen = chat.app.screen
    assert isinstance(screen, ChatsScreen)
    return screen


async def _two_chats(chat: Chat) -> None:
    await chat.send("about cats")
    await chat.pilot.press("ctrl+l")
    await chat.send("about dogs")


async def test_a_chat_is_resumed_tomorrow_with_its_history_and_system_prompt() -> None:
    async with running(Script([Answer("One."), Answer("Two.")])) as chat:
        await chat.send("/system Be kind.", wait=False)
        await chat.send("first")
        await chat.send("second")
    [summary] = saved().list()
    assert summary.turns == 2 and summary.title == "first" and summary.model
    async with running(Script([Answer("Three.")]), resume=summary.id) as chat:
        await chat.until(lambda: len(chat.answers) == 2)
        assert "One." in chat.screen_text() and "Two." in chat.screen_text()
        await chat.send("third")
        assert chat.engine.asked[0].messages == (
            ("system", "Be kind."), ("user", "first"), ("assistant", "One."), ("user", "second"), ("assistant", "Two."),
            ("user", "third"),
        )  # fmt: skip
    assert [chat.turns for chat in saved().list()] == [3], "it went on in the same file"


async def test_resume_without_an_id_takes_the_newest_chat() -> None:
    async with running(Script()) as chat:
        await _two_chats(chat)
    async with running(Script(), resume="") as chat:
        await chat.until(lambda: len(chat.questions) == 1)
        assert "about dogs" in chat.screen_text()


async def test_resuming_what_is_not_there_says_so_and_begins_a_new_chat() -> None:
    async with running(Script(), resume="nothing") as chat:
        await chat.until(lambda: "no saved chat nothing" in chat.screen_text())
        await chat.send("hello")
    assert len(saved().list()) == 1


async def test_a_chat_without_a_question_leaves_no_file() -> None:
    async with running(Script()) as chat:
        await chat.send("/system Be kind.", wait=False)
        await chat.pilot.press("ctrl+l")
    assert saved().list() == []


async def test_what_was_written_before_a_crash_is_there_afterwards() -> None:
    """The app is gone without a word in the middle of an answer: kill -9, a dead battery."""
    async with running(Script([Answer("Done."), LONG])) as chat:
        await chat.send("first")
        await chat.send("second", wait=False)
        await chat.until(lambda: len(chat.answers[1].source) > 800, 20)
        [path] = Places.default().chats.glob("*.jsonl")
        kept = path.read_bytes()  # as it is now, without what closing adds
        await chat.pilot.press("escape")
        await chat.until(lambda: not chat.busy)
    path.write_bytes(kept)
    conversation = saved().open(path.stem).conversation
    assert conversation.turns[0].answer == "Done."
    assert conversation.turns[1].user == "second" and len(conversation.turns[1].answer) > 100
    assert LONG.text.startswith(conversation.turns[1].answer)


async def test_quitting_in_the_middle_of_an_answer_keeps_what_was_shown() -> None:
    async with running(Script([LONG])) as chat:
        await chat.send("go", wait=False)
        await chat.until(lambda: len(chat.answers[0].source) > 20)
        await chat.pilot.press("ctrl+q")
    [turn] = saved().open(saved().list()[0].id).conversation.turns
    assert turn.state == "cancelled" and turn.answer and LONG.text.startswith(turn.answer)


async def test_without_saving_nothing_is_written() -> None:
    async with running(Script(), save=False, metrics=False) as chat:
        await chat.send("secret")
    places = Places.default()
    assert not places.chats.exists() and not places.metrics.exists()


async def test_a_full_disk_is_said_once_and_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Script([Answer("One."), Answer("Two."), Answer("Three.")])) as chat:
        await chat.send("first")

        def full(descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        await chat.send("second")
        await chat.send("third")
        monkeypatch.undo()
        assert "Three." in chat.screen_text()
        said = [notice for notice in chat.notices if "not saved" in str(notice.render())]
        assert len(said) == 1 and "disk is full" in str(said[0].render())
    assert LineFile  # the module whose writes failed


async def test_the_numbers_of_every_turn_go_to_the_metrics_file() -> None:
    async with running(Script([Answer("One."), Answer("Two.")])) as chat:
        await chat.send("first")
        await chat.send("second")
    records = [json.loads(line) for line in Places.default().metrics.read_text().splitlines()]
    assert len(records) == 2
    assert "first" not in json.dumps(records) and "One." not in json.dumps(records), "numbers, not what was said"


async def test_a_saved_chat_is_found_by_its_title_and_resumed() -> None:
    async with running(Script([Answer("Cats purr."), Answer("Dogs bark."), Answer("More.")])) as chat:
        await _two_chats(chat)
        list_ = (await _open_chats(chat)).query_one(OptionList)
        assert list_.option_count == 2
        await chat.pilot.press(*"CATS")
        assert list_.option_count == 1 and "about cats" in str(list_.get_option_at_index(0).prompt)
        await chat.pilot.press("enter")
        await chat.until(lambda: "Cats purr." in chat.screen_text())
        await chat.send("more")
        assert chat.engine.asked[2].messages == (("user", "about cats"), ("assistant", "Cats purr."), ("user", "more"))
    assert {(summary.title, summary.turns) for summary in saved().list()} == {("about cats", 2), ("about dogs", 1)}


async def test_a_chat_is_renamed_in_the_list_and_by_ollamas_save() -> None:
    async with running(Script()) as chat:
        await _two_chats(chat)
        screen = await _open_chats(chat)
        await chat.pilot.press("down", "ctrl+r")
        assert screen.query_one(Input).value == "about cats"
        await chat.pilot.press("ctrl+u", *"felines", "enter")
        assert "felines" in chat.screen_text()
        await chat.pilot.press("escape")
        await chat.send("/save canines", wait=False)
        assert "canines" in chat.line("#chat-title")
    assert {summary.title for summary in saved().list()} == {"felines", "canines"}


async def test_deleting_asks_first_and_escape_or_a_letter_keeps_the_chat() -> None:
    async with running(Script()) as chat:
        await _two_chats(chat)
        await _open_chats(chat)
        for key in ("escape", "x"):
            await chat.pilot.press("ctrl+d")
            assert "Delete “about dogs” for good?" in chat.screen_text()
            await chat.pilot.press(key)
            assert len(saved().list()) == 2 and isinstance(chat.app.screen, ChatsScreen)
        await chat.pilot.press("down", "ctrl+d", "enter")
        assert [summary.title for summary in saved().list()] == ["about dogs"]
        assert "about cats" not in "".join(chat.screen_text().split("Deleted")[0])


async def test_deleting_the_open_chat_begins_a_new_one() -> None:
    """What is said next must not go to a file that was to be gone."""
    async with running(Script()) as chat:
        await chat.send("about cats")
        await _open_chats(chat)
        await chat.pilot.press("ctrl+d", "enter", "escape")
        await chat.until(lambda: not chat.questions)
        assert saved().list() == []
        await chat.send("about dogs")
        assert chat.engine.asked[1].messages == (("user", "about dogs"),)
    assert [summary.title for summary in saved().list()] == ["about dogs"]


async def test_a_chat_is_exported_and_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(Script([Answer("A **bold** answer.")]), size=(160, 30)) as chat:
        await chat.send("tell me")
        await chat.send("/export", wait=False)
        assert f"Written to {tmp_path / 'tell-me.md'}" in chat.screen_text()
        await chat.send("/export", wait=False)
        assert "Written to" not in chat.screen_text()
        await chat.send("/export other.md", wait=False)
        (tmp_path / "tell-me.md").unlink()
        await _open_chats(chat)
        await chat.pilot.press("ctrl+e")
        await chat.until(lambda: (tmp_path / "tell-me.md").exists())
    assert "A **bold** answer." in (tmp_path / "other.md").read_text()
    assert (tmp_path / "tell-me.md").read_text() == (tmp_path / "other.md").read_text()


async def test_theme_and_views_are_remembered() -> None:
    async with running(Script()) as chat:
        await chat.send("/theme light", wait=False)
        await chat.pilot.press("f6")
    app = make_app(Script())
    assert app.theme == "dflash-light" and app.state.origins and app.state.model == "demo"
    async with running(Script([Answer("x y")])) as chat:
        assert chat.transcript.has_class("-origins")
