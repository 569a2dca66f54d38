"""Markdown from a model: shown, never obeyed.

Textual's Markdown turns links into click actions and table cells into tooltips. Here a link opens only if it
is http or https, cells have no tooltips (a plain-string tooltip is parsed as markup), and HTML is shown as
text instead of being dropped, so that `#include <stdio.h>` survives. A line break stays a line break: models do
not wrap their text, so one that is there is meant (verse, addresses).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual import on
from textual.app import ComposeResult
from textual.message import Message
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownTable, MarkdownTableContent


def _parser() -> MarkdownIt:
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("keep_line_breaks", _keep_line_breaks)
    return parser


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


class _TableContent(MarkdownTableContent):
    def compose(self) -> ComposeResult:
        for cell in super().compose():
            cell.tooltip = None
            yield cell


class _Table(MarkdownTable):
    def compose(self) -> ComposeResult:
        for content in super().compose():
            if isinstance(content, MarkdownTableContent):
                yield _TableContent(content.headers, content.rows)
            else:
                yield content


def is_web_link(href: str) -> bool:
    """Whether `href` is something to hand to a browser."""
    try:
        parts = urlsplit(href)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


class AnswerMarkdown(Markdown):
    """The answer of a model."""

    BLOCKS = {**Markdown.BLOCKS, "table_open": _Table}  # noqa: RUF012 (the base declares it unannotated)

    class LinkRefused(Message):
        """A clicked link was not opened."""

        def __init__(self, href: str) -> None:
            super().__init__()
            self.href = href

    def __init__(self) -> None:
        super().__init__(parser_factory=_parser, open_links=False)

    @on(Markdown.LinkClicked)
    def _open(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        if is_web_link(event.href):
            self.app.open_url(event.href)
        else:
            self.post_message(self.LinkRefused(event.href))
