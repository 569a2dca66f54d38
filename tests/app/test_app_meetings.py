"""Pilots: a key, the end of the app or another job meets an event of the engine that is only half dealt with."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from chatting import Chat, running
from hosting import hosted
from scripted import Answer, Script

from dflash_mlx.app.chat_engine import ChatEngine
from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.lines import LineFile, StoreError
from dflash_mlx.app.messages import EngineFailed, ModelReady, Noticed, Part
from dflash_mlx.app.session import NO_ENGINE
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.widgets.turn import Prose


class Layout:
    """Text of answers is laid out when `go_on` is called, not before: an answer of a few megabytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._done = asyncio.Event()
        quick = Prose.append

        async def slow(prose: Prose, parts: list[Part]) -> None:
            await self._done.wait()
            await quick(prose, parts)

        monkeypatch.setattr(Prose, "append", slow)

    def go_on(self) -> None:
        self._done.set()


async def _until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """As `Chat.until`, for a window that is in the middle of something: a pilot's pause would wait for its end."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        await asyncio.sleep(0.01)


def _submit(chat: Chat, text: str) -> None:
    chat.prompt.post_message(chat.prompt.Submitted(text))


async def _answered_but_not_shown(chat: Chat, *questions: str) -> None:
    """The first of these is answered in full, and its text is still being laid out."""
    for question in questions:
        _submit(chat, question)
    await _until(lambda: bool(turns := chat.app.session.conversation.turns) and turns[0].state == "stop")


async def test_asking_again_while_the_last_words_are_laid_out_leaves_the_window_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its task ended with the answer's, and the next key ended the app."""
    layout = Layout(monkeypatch)
    async with running(Script([Answer("First try."), Answer("Second try."), Answer("Next.")])) as chat:
        await _answered_but_not_shown(chat, "go")
        chat.app.simulate_key("ctrl+r")
        await asyncio.sleep(0.05)
        layout.go_on()
        await _until(lambda: len(chat.engine.asked) == 2 and not chat.busy)
        await chat.send("more")
        assert [answer.source for answer in chat.answers] == ["Second try.", "Next."]
        assert chat.engine.asked[2].messages[:2] == (("user", "go"), ("assistant", "Second try."))


async def test_a_message_that_waits_and_one_that_is_asked_again_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both were asked at once, which ended the app."""
    layout = Layout(monkeypatch)
    async with running(Script([Answer("one", cycle_s=0.05), Answer("two"), Answer("three")])) as chat:
        await _answered_but_not_shown(chat, "first", "second")
        chat.app.simulate_key("ctrl+r")
        await asyncio.sleep(0.05)
        layout.go_on()
        await _until(lambda: len(chat.engine.asked) >= 2 and not chat.busy)
        await chat.pilot.pause()
        assert [turn.user for turn in chat.app.session.conversation.turns] == ["first", "second"]


async def test_who_waits_for_an_answer_that_is_taken_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were cancelled with it."""
    Layout(monkeypatch)
    async with hosted() as host:
        answer = await host.transcript.add_turn(1, "question")
        await answer.write([Part("answer", "target", "Some text.")])
        finishing = asyncio.create_task(answer.finish("closing line"))
        await host.pilot.pause()
        await host.transcript.drop_last_turn()
        await asyncio.wait_for(asyncio.wait([finishing]), 5)
        assert not finishing.cancelled() and not host.answers


async def test_quitting_while_the_last_words_are_laid_out_ends_with_zero_and_asks_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next question had no place in a window that closes: a traceback, and a turn in the saved chat without an
    answer."""
    layout = Layout(monkeypatch)
    async with running(Script([Answer("one", cycle_s=0.05), Answer("two")])) as chat:
        await _answered_but_not_shown(chat, "first", "second")
        chat.app.exit()
        layout.go_on()
        await _until(lambda: not chat.app.is_running)
    assert chat.app.return_code == 0
    assert [turn.user for turn in chat.app.session.conversation.turns] == ["first"] and len(chat.engine.asked) == 1


async def test_what_comes_while_the_window_closes_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no place for it any more: a traceback, and 1 instead of 0."""
    layout = Layout(monkeypatch)
    async with running(Script([Answer("one")])) as chat:
        await _answered_but_not_shown(chat, "first")
        chat.app.chat.post_message(EngineMessage(Noticed("A notice", "that comes late")))
        chat.app.chat.post_message(chat.prompt.Submitted("a message that comes late"))
        chat.app.exit()
        layout.go_on()
        await _until(lambda: not chat.app.is_running)
    assert chat.app.return_code == 0


async def test_a_speed_up_is_never_a_multiple_of_another_pairs_plain_decoding() -> None:
    """The turn that loading stops ends after loading was asked for, and is long enough to be measured by."""
    plain = Settings(mode="plain", max_tokens=100_000)
    async with running(Script([Answer("word " * 9000, cycle_s=0.002)]), settings=plain) as chat:
        session = chat.app.session
        await chat.send("go", wait=False)
        await chat.until(lambda: session.numbers.generation_tokens > 40)
        chat.app.load_model("another")
        await chat.until(lambda: session.card is not None and not chat.busy)
        assert session.conversation.turns[0].state == "cancelled"
        assert session.baseline is None


async def test_a_load_that_was_overtaken_is_neither_ready_nor_failed() -> None:
    """Otherwise the header names a model whose place another one is taking, and questions go to the wrong one."""
    script = Script()
    async with running(script) as chat:
        session, card = chat.app.session, chat.app.session.card
        assert card is not None
        script.load_gate = threading.Event()
        chat.app.load_model("another")
        assert session.loading is not None
        for event in (ModelReady(card, session.loading - 1), EngineFailed("No", "such.", True, session.loading - 1)):
            chat.app.post_message(EngineMessage(event))
            await chat.pilot.pause()
            assert session.loading is not None and session.card is None and chat.app.failure is None
        script.load_gate.set()
        await chat.until(lambda: session.card is not None)
        assert session.card is not None and session.card.model == "another"


async def test_an_engine_that_dies_in_an_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the chat waits for it for good, and says so of nothing that is sent."""
    async with running(Script([Answer("one", fail_after=1)])) as chat:

        def out_of_order(engine: ChatEngine) -> None:
            raise RuntimeError("the GPU is gone")

        monkeypatch.setattr(ChatEngine, "recover", out_of_order)
        await chat.send("go")
        assert "the GPU is gone" in str(chat.notices[0].render())
        assert [turn.state for turn in chat.app.session.conversation.turns] == ["failed"]
        await chat.until(lambda: not chat.engine.is_alive())
        await chat.send("more", wait=False)
        assert NO_ENGINE[:40] in chat.screen_text()


async def test_a_message_that_waited_for_a_race_is_sent_although_the_race_failed() -> None:
    """It waited until the next one was sent."""
    gate = threading.Event()
    script = Script([Answer("one"), Answer("x", gate=gate, fail_after=0, error=ValueError("Busy.")), Answer("two")])
    async with running(script) as chat:
        await chat.send("first")
        await chat.pilot.press("f5")
        await chat.pilot.press("escape", "escape")
        await chat.send("second", wait=False)
        assert len(chat.engine.asked) == 1
        gate.set()
        await chat.until(lambda: len(chat.engine.asked) == 2 and not chat.busy)
        assert chat.answers[-1].source == "two"


async def test_a_disk_that_refuses_the_last_words_is_said_after_the_window_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would know that the end of the chat is missing."""

    def refuse(file: LineFile, lines: bytes, *, sync: bool = False) -> None:
        raise StoreError("The disk is full.")

    gate = threading.Event()
    async with running(Script([Answer("one", gate=gate)])) as chat:
        await chat.send("go", wait=False)
        monkeypatch.setattr(LineFile, "append", refuse)
        chat.app.exit()
        gate.set()
    assert "The disk is full." in chat.app.last_words and "is not saved" in chat.app.last_words
