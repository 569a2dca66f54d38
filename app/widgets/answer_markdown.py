"""Markdown from a model: shown, never obeyed.

Textual's Markdown turns links into click actions and table cells into tooltips. Here a link opens only if it is http or
https, there are no tooltips (a plain-string one is parsed as markup), and HTML is shown as text instead of being
dropped, so that `#include <stdio.h>` survives.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from textual import on
from textual.message import Message
from textual.widgets import Markdown

from dflash_mlx.app.widgets.answer_blocks import BulletItems, Fence, OrderedItems
from dflash_mlx.app.widgets.answer_parser import answer_parser
from dflash_mlx.app.widgets.answer_table import Table


def is_web_link(href: str) -> bool:
    """Whether `href` is something to hand to a browser."""
    try:
        parts = urlsplit(href)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


class AnswerMarkdown(Markdown):
    """The answer of a model."""

    BLOCKS = {  # noqa: RUF012 (the base declares it unannotated)
        **Markdown.BLOCKS,
        "bullet_list_open": BulletItems,
        "ordered_list_open": OrderedItems,
        "table_open": Table,
        "fence": Fence,
        "code_block": Fence,
    }

    class LinkRefused(Message):
        """A clicked link was not opened."""

        def __init__(self, href: str) -> None:
            super().__init__()
            self.href = href

    def __init__(self) -> None:
        super().__init__(parser_factory=answer_parser, open_links=False)

    @on(Markdown.LinkClicked)
    def _open(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        if is_web_link(event.href):
            self.app.open_url(event.href)
        else:
            self.post_message(self.LinkRefused(event.href))
