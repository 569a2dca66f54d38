"""Keys, commands, and what the numbers mean."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_mlx.app.commands import USAGE
from dflash_mlx.app.widgets.cycle_strip import ACCEPTED, OWN, REJECTED

KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "send"),
    ("Ctrl+J", "new line"),
    ("Esc", "stop; what was written stays"),
    ("Ctrl+C", "copy the selection, or stop"),
    ("Ctrl+R", "answer the last message again"),
    ("Ctrl+L", "new conversation"),
    ("PgUp PgDn", "scroll; Ctrl+End returns to the newest text"),
    ("F1", "this page; Esc closes it"),
    ("Ctrl+Q", "quit"),
)

MEANING: tuple[tuple[str, str], ...] = (
    ("generation only", "tokens after the first, over the time after the first"),
    ("prefill-inclusive", "all tokens, over the time since you pressed Enter"),
    ("TTFT", "time to the first token, since you pressed Enter"),
    ("tokens/cycle", "mean acceptance length: 1 + accepted / cycles that drafted"),
    ("acceptance", "draft tokens accepted / draft tokens proposed"),
    ("resting", "drafts do not pay on this text now: one token a cycle"),
    (f"{ACCEPTED} {REJECTED} {OWN}", "accepted, rejected, the target's own token"),
)


class Rows(Vertical):
    """A heading and rows of two columns, the second one wrapping under itself."""

    def __init__(self, title: str, rows: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self._title = title
        self._rows = rows

    def compose(self) -> ComposeResult:
        yield Static(self._title, classes="heading")
        width = max(len(name) for name, _ in self._rows) + 2
        for name, meaning in self._rows:
            with Horizontal():
                left = Static(Content(name), markup=False, classes="name")
                left.styles.width = width
                yield left
                yield Static(Content(meaning), markup=False, classes="meaning")


class HelpScreen(ModalScreen[None]):
    """Opens over the chat, which goes on below."""

    CSS_PATH = "help.tcss"
    BINDINGS: ClassVar = [
        Binding("escape,f1,q,question_mark,enter", "dismiss", "Close", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="sheet") as sheet:
            sheet.border_title = "dflash"
            sheet.border_subtitle = "Esc close"
            yield Rows("Keys", KEYS)
            yield Rows("Commands", USAGE)
            yield Rows("Numbers", MEANING)

    def action_scroll(self, lines: int) -> None:
        self.query_one("#sheet", VerticalScroll).scroll_relative(y=lines, animate=False)
