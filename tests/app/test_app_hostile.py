"""Text from models and users is shown, never obeyed: no markup, no actions, no terminal commands."""

from __future__ import annotations

import pytest
from chatting import Chat, running
from scripted import Answer, Script
from textual.pilot import Pilot
from textual.widgets import Markdown

from dflash_mlx.app.text import visible
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
        cells = chat.app.chat.query("MarkdownTableCellContents")
        assert cells and all(cell.tooltip is None for cell in cells), "Textual parses these tooltips as markup"
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
    text = "Příliš žluťoučký 漢字 😀\n  code\n"
    assert visible(text) == text
