"""Text from models and users is shown, never obeyed: no markup, no actions, no terminal commands."""

from __future__ import annotations

import time
from random import Random

import pytest
from chatting import Chat, running
from hosting import hosted
from scripted import Answer, Script
from textual.pilot import Pilot
from textual.widgets import Markdown

from dflash_mlx.app.messages import Kind, Part
from dflash_mlx.app.text import pasted, visible
from dflash_mlx.app.widgets.answer_markdown import is_web_link

HOSTILE = ["[/]", "[/some/path]", "arr[i] = b[/j]", "[red]x[/red]", "[@click=app.quit]x[/]", "[bold"]


@pytest.mark.parametrize("text", HOSTILE)
async def test_square_brackets_are_shown_as_they_are_everywhere(text: str) -> None:
    """In Textual 8.2.8 these raise MarkupError, or lose their brackets, in any widget with markup on."""
    script = Script(
        [
            Answer(f"{text} here", notes=(text,)),
            Answer(f"# {text}\n\n- {text}\n\n| a | b |\n|---|---|\n| {text} | `{text}` |\n\n```{text}\n{text}\n```\n"),
            Answer("x", fail_after=0, error=ValueError(text)),
        ],
        load_steps=((text, 0.5),),
    )
    assert script.draft is not None
    script.draft.name = text
    async with running(script, size=(100, 50)) as chat:
        await chat.send(f"question {text}")
        shown = chat.screen_text()
        assert f"question {text}" in shown, "the user's turn"
        assert f"{text} here" in shown, "the answer"
        assert text in chat.line("#notes") and text in chat.line("#pair")
        await chat.send("blocks")
        shown = chat.screen_text()
        assert shown.count(text) >= 6, shown
        tooltips = [widget.tooltip for widget in chat.transcript.query("*")]
        assert tooltips and not any(tooltips), "Textual parses tooltips as markup"
        await chat.send("fail")
        assert chat.screen_text().count(text) >= 6
        await chat.send(f"/{text.replace(' ', '_')}", wait=False)
        assert "is not a command" in chat.screen_text()


async def click_link(chat: Chat, pilot: Pilot[None]) -> None:
    paragraph = chat.answers[-1].query_one("MarkdownParagraph")
    await pilot.click(paragraph, offset=(1, 0))
    await pilot.pause()


@pytest.mark.parametrize(
    "href", ["app.quit", "javascript:1", "file:///etc/passwd", "app.quit('x')", "#top", "ftp://x/y"]
)
async def test_only_web_links_open(href: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Script([Answer(f"[press here]({href})")])) as chat:
        opened: list[str] = []
        monkeypatch.setattr(chat.app, "open_url", lambda url, **_: opened.append(url))
        await chat.send("a link please")
        await click_link(chat, chat.pilot)
        assert opened == [] and chat.app.is_running
        chat.answers[0].query_one(Markdown).post_message(
            Markdown.LinkClicked(chat.answers[0].query_one(Markdown), href)
        )
        await chat.pilot.pause()
        assert opened == []
        assert "only http and https" in chat.screen_text()


async def test_a_web_link_opens_when_clicked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for the test above: its click does hit the link."""
    async with running(Script([Answer("[press here](https://example.org/a?b=c)")])) as chat:
        opened: list[str] = []
        monkeypatch.setattr(chat.app, "open_url", lambda url, **_: opened.append(url))
        await chat.send("a link please")
        await click_link(chat, chat.pilot)
        assert opened == ["https://example.org/a?b=c"]


def test_links_without_a_host_are_not_web_links() -> None:
    assert is_web_link("http://example.org")
    for href in ("http:", "https:///x", "//example.org", "HTTP", "http://[", ""):
        assert not is_web_link(href)


async def test_html_in_an_answer_is_shown_and_not_dropped() -> None:
    """Textual's default parser recognises HTML and drops it: includes and generics would lose their names."""
    async with running(Script([Answer("Use #include <stdio.h> and List<int>.\n\n<div>kept</div>")])) as chat:
        await chat.send("code")
        for wanted in ("<stdio.h>", "List<int>", "<div>kept</div>"):
            assert wanted in chat.screen_text()


async def test_a_line_break_of_the_model_stays_one() -> None:
    """A poem on one line is no poem."""
    async with running(Script([Answer("old pond\na frog jumps in\nsplash")])) as chat:
        await chat.send("haiku")
        lines = [line.strip() for line in chat.screen_text().splitlines()]
        assert {"old pond", "a frog jumps in", "splash"} <= set(lines)


async def test_escape_sequences_do_not_reach_the_terminal() -> None:
    """An answer could otherwise retitle the window, move the cursor or fill the clipboard."""
    attack = "a\x1b]0;owned\x07b\x9b31mc\u202fd"
    async with running(Script([Answer(attack)])) as chat:
        await chat.send(f"user {attack}")
        shown = chat.screen_text()
        assert not {c for c in shown if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160}
        assert "a␛]0;owned" in shown
        assert chat.app.chat.session.conversation.turns[0].answer == attack, "history keeps what the model said"


async def test_odd_line_breaks_do_not_repeat_text() -> None:
    """Textual's Markdown counts \\u2028 as a line break, its parser does not; streaming then repeats text."""
    text = "one\u2028two\u2028three\u2028four\x0c\n\nnext *paragraph* here\n\nlast one"
    async with running(Script([Answer(text, depths=(0,), cycle_s=0.03)])) as chat:
        await chat.send("go")
        shown = chat.screen_text()
        for word in ("one", "two", "three", "four", "next", "last"):
            assert shown.count(word) == text.count(word), shown


def test_visible_keeps_ordinary_text() -> None:
    text = "Příliš žluťoučký 漢字 😀 👩‍💻 नमस्ते می‌خواهم\n  code\n"
    assert visible(text) == text


def test_nothing_turns_the_text_around_or_hides_in_it() -> None:
    """With direction controls code reads otherwise than it runs; half a character cannot be written at all."""
    assert visible("a\u202eb\u2066c\ud800d") == "a\ufffdb\ufffdc\ufffdd"
    assert visible("a\u200b\u2060\ufeff\U000e0041b") == "ab"
    assert pasted("\tx\x1b[201~\r\n\u202ey\n") == "\tx[201~\n\ufffdy\n"


def cuts(text: str, seed: int = 0) -> list[Part]:
    """`text` in pieces of odd lengths, by both origins."""
    random = Random(seed)
    pieces: list[Part] = []
    while text:
        length = random.randint(1, 900)
        pieces.append(Part("answer", random.choice(("draft", "target")), text[:length]))
        text = text[length:]
    return pieces


TABLE_500 = "|a" * 500 + "|\n" + "|-" * 500 + "|\n" + ("|b" * 500 + "|\n") * 20
FLOODS = {
    "a line": "x" * 100_000,
    "brackets": "![[" * 4_000,
    "stars": "*a _b " * 4_000,
    "quotes": ">" * 400 + " deep",
    "quotes by line": "\n".join(">" * (number % 60) + " y" for number in range(400)),
    "lists": "".join("  " * depth + "- a\n" for depth in range(60)),
    "items": "- a\n" * 3_000,
    "columns": TABLE_500,
    "rows": "| a | b |\n|---|---|\n" + "| c | d |\n" * 2_000,
    "fences": "```\n" * 801,
    "code": "```python\n" + "x = [1, 2]\n" * 5_000,
    "one line of code": "```python\nx = '" + "y" * 50_000,
    "zero width": "a" + "\u0301" * 20_000 + "\u200b" * 20_000,
    "entities": "&#x1b;[31m&#0;&lt;" * 1_000,
    "newlines": "\n" * 20_000 + "end",
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_is_shown_in_bounded_time_and_space(name: str) -> None:
    """Each of these is quadratic, or makes thousands of widgets, if it is taken for what it pretends to be."""
    text = FLOODS[name]
    async with hosted() as host:
        started = time.thread_time()
        turn = await host.transcript.add_turn(1, "flood")
        for part in cuts(text):
            await turn.write([part])
        await turn.finish("closing line")
        await host.pilot.pause()
        assert turn.source == visible(text), "all of it is there"
        assert len(turn.query("*")) < 1_000
        assert "closing line" in host.text()
        assert "\x1b" not in host.text()
        assert time.thread_time() - started < 20, "processor time; the machine is shared, but this does not count that"


@pytest.mark.parametrize("text", [">" * 40 + " deepest", "".join("  " * depth + "- deepest\n" for depth in range(40))])
async def test_what_is_nested_too_deeply_is_shown_as_it_was_written(text: str) -> None:
    """The parser drops what is below its limit: the reader would see less than the model wrote."""
    async with hosted((200, 60)) as host:
        await host.answer(Part("answer", "target", text))
        assert host.text().count("deepest") == text.count("deepest")


async def test_of_a_very_wide_table_every_cell_can_be_read() -> None:
    """Drawn as a table, what does not fit is cut off."""
    names = [f"c{number}" for number in range(60)]
    text = "|".join(["", *names, ""]) + "\n" + "|-" * 60 + "|\n" + "|".join(["", *names, ""]) + "\n"
    async with hosted() as host:
        await host.answer(Part("answer", "target", text))
        shown = host.text().replace("\n", "").replace(" ", "")
        assert all(shown.count(f"|{name}|") == 2 for name in names)


async def test_link_definitions_are_shown() -> None:
    """Markdown swallows them: a list of sources would disappear."""
    async with hosted() as host:
        await host.answer(Part("answer", "target", "See [1].\n\n[1]: https://example.org/source\n[x]: javascript:1"))
        assert "https://example.org/source" in host.text() and "javascript:1" in host.text()


@pytest.mark.parametrize("kind", ["reasoning", "answer", "tool_call", "marker"])
async def test_foreign_text_of_every_kind_and_view_is_inert(kind: Kind) -> None:
    attack = "[@click=app.quit]x[/] [/] \x1b]52;c;b3duZWQ=\x07 \x1b]8;;http://a\x1b\\ \u202e \x9b2J"
    async with hosted() as host:
        host.transcript.fold_thinking(False)
        await host.answer(Part(kind, "draft", attack), Part("answer", "target", "ok"), question=attack)
        for origins in (False, True):
            host.transcript.show_origins(origins)
            await host.settled()
            shown = host.text()
            assert shown.count("[@click=app.quit]x[/]") == 1 + (kind != "marker")
            assert not {c for c in shown if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e"}
        assert host.app.is_running
