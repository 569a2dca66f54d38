"""The system prompt, in a box of many lines."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import TextArea


class SystemScreen(ModalScreen[str | None]):
    """Dismissed with the new prompt, empty for none, or with None if it stays as it is."""

    CSS_PATH = "system.tcss"
    BINDINGS: ClassVar = [
        Binding("escape", "leave", "Leave it as it is", show=False, priority=True),
        Binding("ctrl+s,ctrl+enter", "apply", "Use it", show=False, priority=True),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._box = TextArea(text, soft_wrap=True, tab_behavior="focus", highlight_cursor_line=False)

    def compose(self) -> ComposeResult:
        self._box.border_title = "System prompt, from the next message on"
        self._box.border_subtitle = "Ctrl+S use · Esc leave as it is"
        self._box.placeholder = "The template's own"
        yield self._box

    def on_mount(self) -> None:
        self._box.move_cursor(self._box.document.end)
        self._box.focus()

    def action_apply(self) -> None:
        self.dismiss(self._box.text.strip())

    def action_leave(self) -> None:
        self.dismiss(None)
