"""A page of rows over the chat, which goes on below: the keys, or what is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_mlx.app.text import visible

Section = tuple[str, Sequence[tuple[str, str]]]
"""A heading, and (name, meaning) rows."""


class Rows(Vertical):
    """A heading and rows of two columns, the second one wrapping under itself."""

    def __init__(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title = title
        self._rows = rows

    def compose(self) -> ComposeResult:
        yield Static(Content(self._title), markup=False, classes="heading")
        width = max(len(name) for name, _ in self._rows) + 2
        for name, meaning in self._rows:
            with Horizontal():
                left = Static(Content(visible(name)), markup=False, classes="name")
                left.styles.width = width
                yield left
                yield Static(Content(visible(meaning)), markup=False, classes="meaning")


class Sheet(ModalScreen[None]):
    """Shows sections; any of the keys that people try closes it."""

    CSS_PATH = "sheet.tcss"
    BINDINGS: ClassVar = [
        Binding("escape,f1,q,question_mark,enter", "close", "Close", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
    ]

    def __init__(self, title: str, sections: Sequence[Section]) -> None:
        super().__init__()
        self._name = title
        self._sections = sections

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="sheet", can_focus=False) as sheet:
            sheet.border_title = self._name
            sheet.border_subtitle = "↑↓ scroll · Esc close"
            for heading, rows in self._sections:
                yield Rows(heading, rows)

    def action_close(self) -> None:
        self.dismiss()

    def action_scroll(self, lines: int) -> None:
        self.query_one("#sheet", VerticalScroll).scroll_relative(y=lines, animate=False)

    def action_page(self, direction: int) -> None:
        sheet = self.query_one("#sheet", VerticalScroll)
        sheet.scroll_relative(y=direction * max(sheet.size.height - 1, 1), animate=False)
