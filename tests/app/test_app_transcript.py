"""The transcript: what is shown of an answer, what each token's origin was, and where the reader is."""

from __future__ import annotations

import asyncio

import pytest
from hosting import Hosted, hosted, parts

from dflash_mlx.app.conversation import Conversation, Turn
from dflash_mlx.app.messages import Part
from dflash_mlx.app.widgets.answer_parser import code_blocks
from dflash_mlx.app.widgets.pen import Pen
from dflash_mlx.app.widgets.thinking import Thinking
from dflash_mlx.app.widgets.transcript import BATCH
from dflash_mlx.app.widgets.turn import Prose

THOUGHT = "First I look.\nThen I think.\nAt last I know."
LONG = "\n\n".join(f"Paragraph {number} of the answer." for number in range(60))


# Parts ------------------------------------------------------------------------------------------------------


async def test_folded_thinking_shows_its_newest_lines_while_it_grows_and_one_line_after() -> None:
    """Without this a reader either waits before nothing, or scrolls past pages of reasoning."""
    async with hosted() as host:
        turn = await host.transcript.add_turn(1, "why?")
        await turn.write([*parts("marker", "<think>"), *parts("reasoning", THOUGHT)])
        await host.until(lambda: "At last" in host.text())
        assert "Then I think." in host.text() and "First I look." not in host.text()
        assert f"thinking · {len(THOUGHT)} characters · Ctrl+T" in host.text()
        await turn.write([*parts("marker", "</think>"), *parts("answer", "\n\nBecause.")])
        await turn.finish("done")
        await host.pilot.pause()
        assert "Because." in host.text() and "At last" not in host.text()
        assert f"thought for {len(THOUGHT)} characters" in host.text()
        assert "think>" not in host.text(), "markers are not for the reader"


async def test_unfolding_shows_all_thinking_and_folding_hides_it() -> None:
    async with hosted() as host:
        await host.answer(*parts("reasoning", THOUGHT), *parts("answer", "Because."))
        host.transcript.fold_thinking(False)
        await host.settled()
        assert all(line in host.text() for line in THOUGHT.split("\n")) and "Because." in host.text()
        await host.answer(*parts("reasoning", "More thought."), number=2)
        assert "More thought." in host.text(), "a turn that comes later is unfolded too"
        host.transcript.fold_thinking(True)
        await host.settled()
        assert "First I look." not in host.text() and "More thought." not in host.text()


async def test_a_click_on_the_line_unfolds_one_turn() -> None:
    async with hosted() as host:
        await host.answer(*parts("reasoning", "thought one"))
        await host.answer(*parts("reasoning", "thought two"), number=2)
        await host.pilot.click(host.answers[1].query_one(Thinking).query_one(".title"))
        await host.settled()
        assert "thought two" in host.text() and "thought one" not in host.text()


async def test_tool_calls_are_shown_one_by_one_and_named_as_not_run() -> None:
    """Two calls that run into each other, or a call that looks like an answer, mislead."""
    call = '{"name": "get", "arguments": {"x": [1]}}'
    async with hosted() as host:
        turn = await host.answer(
            *parts("answer", "I ask."),
            *parts("tool_call", call[:9], call[9:]),
            *parts("marker", "</call>", "<call>"),
            *parts("tool_call", "second"),
        )
        assert host.text().count("tool call, not run") == 2
        assert call in host.text() and "second" in host.text() and "<call>" not in host.text()
        assert turn.source == "I ask."


async def test_thinking_between_two_answers_keeps_its_place() -> None:
    async with hosted() as host:
        await host.answer(
            *parts("reasoning", "r1"), *parts("answer", "\n"), *parts("answer", "One."), *parts("tool_call", "call"),
            *parts("reasoning", "r2"), *parts("answer", "\n\nTwo."),
        )  # fmt: skip
        shown = host.text()
        order = [shown.index(text) for text in ("thought for 2", "One.", "call", "Two.")]
        assert order == sorted(order) and shown.count("thought for 2") == 2


# Origins ----------------------------------------------------------------------------------------------------


async def test_only_accepted_draft_tokens_are_underlined_and_the_markdown_comes_back() -> None:
    async with hosted() as host:
        turn = await host.answer(*parts("answer", "Some ", "**drafted** words", " and\n\n", "- more", "."))
        assert host.underlined() == ""
        host.transcript.show_origins(True)
        await host.settled()
        assert host.underlined() == "underlined" + "**drafted** words" + "- more"
        assert "from the draft" in host.text(), "the legend"
        assert turn.source == "Some **drafted** words and\n\n- more."
        host.transcript.show_origins(False)
        await host.settled()
        assert host.underlined() == "" and "Some drafted words and" in host.text()
        assert "accepted from" not in host.text()


async def test_the_underline_remains_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with hosted() as host:
        await host.answer(*parts("answer", "mine ", "drafted"))
        host.transcript.show_origins(True)
        await host.settled()
        assert host.underlined() == "underlineddrafted"
        assert all(colour is None or colour.r == colour.g == colour.b for colour in host.colours())


async def test_switching_views_in_the_middle_of_an_answer_loses_and_repeats_nothing() -> None:
    """Each view is brought up to date when it is shown; a fragment written twice or skipped would stay so."""
    words = [f"word{number} " for number in range(120)]
    async with hosted() as host:
        turn = await host.transcript.add_turn(1, "go")
        for index, word in enumerate(words):
            await turn.write([Part("answer", "draft" if index % 3 else "target", word)])
            if index % 10 == 5:
                host.transcript.show_origins(index % 20 == 5)
            if index % 4 == 0:
                await asyncio.sleep(0.01)
        await turn.finish("done")
        for on in (True, False):
            host.transcript.show_origins(on)
            await host.settled()
            assert turn.source == "".join(words)
            shown = " ".join(host.text().split())
            assert all(shown.count(word) == 1 for word in words)


async def test_switching_views_keeps_the_readers_place() -> None:
    text = "".join(
        f"## Heading {number}\n\n1. one\n\n2. two\n\n3. three\n\n4. four\n\n" for number in range(12)
    )  # of two heights
    async with hosted() as host:
        for number in range(1, 6):
            await host.answer(*parts("answer", text), question=f"question {number}", number=number)
        host.transcript.scroll_to(y=host.answers[2].virtual_region.y - 4, animate=False)
        await host.pilot.pause()
        assert "question 3" in host.text()
        for on in (True, False):
            host.transcript.show_origins(on)
            await host.settled()
            assert "question 3" in host.text() and not host.transcript.following
        host.transcript.follow()
        host.transcript.show_origins(True)
        await host.settled()
        assert host.lines()[-1].strip() == "closing line" and host.transcript.following


# Scrolling --------------------------------------------------------------------------------------------------


async def start(host: Hosted) -> None:
    turn = await host.transcript.add_turn(1, "go")
    await turn.write(parts("answer", LONG))
    await host.until(lambda: turn.source == LONG and "Paragraph 59" in host.text())


async def test_a_reader_who_scrolls_up_stays_there_while_text_comes() -> None:
    async with hosted() as host:
        await start(host)
        host.transcript.scroll_page_up(animate=False)
        await host.pilot.pause()
        y = host.transcript.scroll_y
        before = [line[:70].rstrip() for line in host.lines()[:-1]]  # without the scrollbar
        assert host.lines()[-1].endswith("more below · Ctrl+End")
        await host.answers[0].write(parts("answer", "\n\n```python\n" + "x = 1\n" * 50 + "```\n\n- a\n- b\n"))
        await host.until(lambda: "- b" in host.answers[0].source)
        assert host.transcript.scroll_y == y and [line[:70].rstrip() for line in host.lines()[:-1]] == before
        assert not host.transcript.following
        host.transcript.follow()
        await host.pilot.pause()
        assert "• b" in host.text() and "more below" not in host.text()


async def test_scrolling_back_to_the_end_follows_again() -> None:
    async with hosted() as host:
        await start(host)
        host.transcript.scroll_page_up(animate=False)
        await host.pilot.pause()
        assert not host.transcript.following
        for _ in range(2):
            host.transcript.scroll_page_down(animate=False)
            await host.pilot.pause()
        assert host.transcript.following
        await host.answers[0].write(parts("answer", "\n\nThe newest."))
        await host.until(lambda: "The newest." in host.text())


async def test_page_down_at_the_end_does_not_stop_following() -> None:
    """Textual lets go at every scroll, also one that changes nothing: the next words would come unseen."""
    async with hosted() as host:
        await start(host)
        host.transcript.scroll_page_down(animate=False)
        await host.pilot.pause()
        assert host.transcript.following
        await host.answers[0].write(parts("answer", "\n\nThe newest."))
        await host.until(lambda: "The newest." in host.text())


async def test_a_click_on_more_below_goes_there() -> None:
    async with hosted() as host:
        await start(host)
        host.transcript.scroll_home(animate=False)
        await host.pilot.pause()
        await host.pilot.click("#below")
        await host.pilot.pause()
        assert host.transcript.following and "Paragraph 59" in host.text()


# Saved chats ------------------------------------------------------------------------------------------------


def saved(turns: int) -> Conversation:
    conversation = Conversation()
    for number in range(1, turns + 1):
        turn = Turn(
            number - turns - 1, f"question {number}", parts("answer", "An ", "answer.\n\n- a\n- b"), "stop", "cost"
        )
        conversation.turns.append(turn)
    return conversation


async def test_a_saved_chat_opens_at_its_end_and_shows_earlier_turns_when_they_are_reached() -> None:
    """Laying out 200 turns at once takes seconds in which no key is answered."""
    async with hosted() as host:
        await host.transcript.show(saved(200))
        await host.settled()
        assert "question 200" in host.text() and len(host.answers) == BATCH
        assert host.lines()[-1].strip() == "cost"
        for _ in range(200):
            if len(host.answers) > BATCH:
                break
            host.transcript.scroll_page_up(animate=False)
            await host.settled()
        assert len(host.answers) == 2 * BATCH
        first = 200 - BATCH + 1
        assert f"question {first}" in host.text(), "what was at the top is still to be seen"
        numbers = [answer.number for answer in host.answers]
        assert numbers == list(range(-2 * BATCH, 0)), "earlier turns are above, in order"
        await host.answer(*parts("answer", "new"), number=1)
        assert "new" in host.text()


async def test_a_saved_chat_says_how_each_turn_ended_and_by_whom_it_was_written() -> None:
    conversation = saved(1)
    conversation.turns.append(Turn(2, "broken", parts("reasoning", "hm"), "open"))
    async with hosted() as host:
        await host.transcript.show(conversation)
        await host.settled()
        assert "cost" in host.text() and "cut off" in host.text() and "thought for 2" in host.text()
        assert not any(answer.has_class("-running") for answer in host.answers)
        host.transcript.show_origins(True)
        await host.settled()
        assert "- a" in host.underlined()


async def test_dropping_and_clearing_leave_nothing_behind() -> None:
    async with hosted() as host:
        await host.transcript.show(saved(BATCH + 5))
        await host.transcript.add_notice("Title", "body")
        await host.transcript.drop_last_turn()
        await host.pilot.pause()
        assert len(host.answers) == BATCH - 1 and "Title" not in host.text()
        await host.transcript.clear()
        await host.settled()
        assert not host.answers and not "".join(host.lines()).strip()
        host.transcript.scroll_home(animate=False)
        await host.settled()
        assert not host.answers, "earlier turns of a chat that was closed"


async def test_an_answer_that_is_cleared_away_while_it_grows_ends_quietly() -> None:
    async with hosted() as host:
        turn = await host.transcript.add_turn(1, "go")
        await turn.write(parts("answer", "some text"))
        await host.transcript.clear()
        await host.settled()
        await turn.write(parts("answer", "late text"))
        await turn.finish("late")
        assert not "".join(host.lines()).strip()


# Blocks -----------------------------------------------------------------------------------------------------

DOCUMENT = """# Title

Text with **bold**, `code` and a [link](https://example.org).
A second line.

- one
- two
  - inner
    with a second line

    and a second paragraph
  1. deep
- three

7. seven
8. eight
   ```sh
   ls
   ```
9. nine

Other numbers:

1. one
1. one again

| name | value |
|------|------:|
| `a` | 1 |
| b with *more* | 2 |

> quoted
> - in a quote

```python
def f():
    return "x"

class A:
    pass
```

The end.
"""


@pytest.mark.parametrize("step", [1, 3, 17, 1000])
async def test_an_answer_that_grows_looks_as_if_it_had_come_at_once(step: int) -> None:
    """Blocks are updated in place; one that forgets a line, a number or an indent shows it only while growing."""
    async with hosted((70, 80)) as host:
        await host.answer(*parts("answer", DOCUMENT))
        whole = host.lines()
        assert "8. eight" in host.text() and "• three" in host.text() and "2. one again" in host.text()
        await host.transcript.clear()
        turn = await host.transcript.add_turn(2, "question")
        await turn.write(parts("answer", DOCUMENT[:step]))
        await host.until(lambda: bool(turn.query(Prose)))
        for start in range(step, len(DOCUMENT), step):
            await turn.query_one(Prose).append(parts("answer", DOCUMENT[start : start + step]))
        await turn.finish("closing line")
        await host.pilot.pause()
        assert turn.source == DOCUMENT and host.lines() == whole


async def test_writes_that_overlap_repeat_nothing() -> None:
    """A change of view writes too. Textual's Markdown then parses from where it was, and shows a block twice."""
    async with hosted((70, 80)) as host:
        await host.answer(*parts("answer", DOCUMENT))
        whole = host.lines()
        await host.transcript.clear()
        turn = await host.transcript.add_turn(2, "question")
        await turn.write(parts("answer", DOCUMENT[:20]))
        await host.until(lambda: bool(turn.query(Prose)))
        prose = turn.query_one(Prose)
        pieces = [DOCUMENT[start : start + 20] for start in range(20, len(DOCUMENT), 20)]
        await asyncio.gather(*(prose.append(parts("answer", piece)) for piece in pieces))
        await turn.finish("closing line")
        await host.pilot.pause()
        assert host.lines() == whole


async def test_long_lists_tables_and_code_are_few_widgets() -> None:
    """A widget for every item and cell took 15 s of processor time for 8,000 characters."""
    items = "".join(f"- item {number} with **bold**\n" for number in range(200))
    rows = "| a | b |\n|---|---|\n" + "".join(f"| {number} | x |\n" for number in range(200))
    code = "```python\n" + "x = [1, 2, 3]\n" * 800 + "```\n"
    async with hosted() as host:
        turn = await host.answer(*parts("answer", f"{items}\n{rows}\n{code}"))
        assert len(turn.query("*")) < 50


def test_code_blocks_are_found_where_they_are_and_as_they_are() -> None:
    """Copied code that lost its tabs, or holds the end of a bracketed paste, is worse than none."""
    text = (
        "a\n\n```make\nall:\n\techo\x1b[201~ x\n```\n\n    indented\n\n- b\n  ```\n  nested\n  ```\n\n"
        "> ```\n> quoted\n> ```\n\n```py\nopen"
    )
    assert code_blocks(text)[0] == "all:\n\techo[201~ x\n"
    assert [block.strip() for block in code_blocks(text)[1:]] == ["indented", "nested", "quoted", "open"]
    assert code_blocks("|a" * 500 + "|\n" + "|-" * 500 + "|\n") == [], "a table shown as text is no code"


# The pen ----------------------------------------------------------------------------------------------------


async def test_the_pen_merges_what_comes_while_it_rests_and_writes_the_rest_at_once() -> None:
    written: list[list[Part]] = []

    async def put(given: list[Part]) -> None:
        written.append(given)

    pen = Pen(put)
    texts = [f"{number} " for number in range(300)]
    for text in texts:
        pen.write([Part("answer", "draft", text)])
        await asyncio.sleep(0)
    await pen.stop()
    assert len(written) < 20 and all(len(given) == 1 for given in written)
    assert "".join(given[0].text for given in written) == "".join(texts)
