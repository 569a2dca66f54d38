"""At DFlash speed the screen must keep up, and must not be what is measured."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
from chatting import running
from scripted import Answer, Script
from textual.await_complete import AwaitComplete

from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.library import mlx_backend
from dflash_mlx.app.messages import Chunk, CycleTick, ModelLoading, Numbers, PrefillProgress
from dflash_mlx.app.widgets.answer_markdown import AnswerMarkdown

PARAGRAPH = "Some words of a paragraph, about sixty letters long, go here.\n\n"


async def test_three_hundred_blocks_a_second_become_few_posts_and_fewer_writes_and_all_text_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,500 blocks. A post or a parse for each would make the screen the bottleneck; a lost one would lose text."""
    text = PARAGRAPH * 96
    writes: list[str] = []
    append = AnswerMarkdown.append

    def count_write(self: AnswerMarkdown, markdown: str) -> AwaitComplete:
        writes.append(markdown)
        return append(self, markdown)

    monkeypatch.setattr(AnswerMarkdown, "append", count_write)
    script = Script([Answer(text, depths=(3,), cycle_s=1 / 300)])
    async with running(script) as chat:
        chunks: list[Chunk] = []
        deliver = chat.app.chat.post_message

        def count(message: object) -> bool:
            if isinstance(message, EngineMessage) and isinstance(message.event, Chunk):
                chunks.append(message.event)
            return deliver(message)  # type: ignore[arg-type]

        chat.app.chat.post_message = count  # type: ignore[method-assign]
        started = time.monotonic()
        await chat.send("go", wait=False)
        chat.prompt.insert("typed meanwhile")
        await chat.until(lambda: not chat.busy, timeout_s=60)
        took = time.monotonic() - started
        await chat.until(lambda: not chat.answers[0].has_class("-running"))
        assert chat.answers[0].source == text
        assert "".join(chunk.text for chunk in chunks) == text
        cycles = len(text) // 4
        assert 5 < len(chunks) <= min(20 * took + 2, cycles / 3), f"{len(chunks)} posts for {cycles} cycles"
        assert "".join(writes) == text and 2 < len(writes) <= len(chunks)
        assert chat.prompt.text == "typed meanwhile"


async def test_a_key_is_handled_while_an_answer_streams() -> None:
    script = Script([Answer(PARAGRAPH * 2000, depths=(3,), cycle_s=1 / 300)])
    async with running(script) as chat:
        await chat.send("go", wait=False)
        await chat.until(lambda: len(chat.answers[0].source) > 500)
        chat.app.simulate_key("x")
        started = time.monotonic()
        while chat.prompt.text != "x":
            await asyncio.sleep(0.005)
            assert time.monotonic() - started < 2.0  # the aim is 0.1 s; the machine is shared
        chat.app.simulate_key("escape")
        await chat.until(lambda: not chat.busy)


def test_only_states_replace_each_other_in_the_queue() -> None:
    """A dropped chunk would be lost text; a queue of old progress would be a slow screen."""

    def replaces(newer: object, older: object) -> bool:
        return EngineMessage(older).can_replace(EngineMessage(newer))  # type: ignore[arg-type]

    tick, progress = CycleTick(1, Numbers()), PrefillProgress(1, 0, 1, 0)
    assert replaces(tick, tick) and replaces(progress, progress)
    assert replaces(ModelLoading("a", None), ModelLoading("b", 0.5))
    assert not replaces(Chunk(1, "a", 1), Chunk(1, "b", 1))
    assert not replaces(tick, progress) and not replaces(Chunk(1, "a", 1), tick)


async def test_collections_do_not_walk_over_what_was_loaded_and_a_next_load_frees_it() -> None:
    """A full collection while an answer streams makes a key wait; a model that stays frozen is never freed."""

    class Loaded:
        def __init__(self) -> None:
            self.itself = self

    loaded = Loaded()
    seen = weakref.ref(loaded)
    async with running(Script()):
        assert gc.get_freeze_count() > 10_000
    del loaded
    mlx_backend().free()
    assert seen() is None and gc.get_freeze_count() == 0
