"""Where the user writes: Enter sends, Ctrl+J is a new line, a paste never sends."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.binding import Binding
from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea

NEWLINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter")
"""Ctrl+J works in every terminal; most cannot tell Shift+Enter from Enter."""

IDLE_KEYS = ("Enter send · Ctrl+J new line · F1 help", "Enter send · F1 help")
BUSY_KEYS = ("Esc stop · F1 help",)


class Prompt(TextArea):
    """A text box that grows with its text. A bracketed paste arrives as one event, so its newlines stay text.

    Class `-busy`: an answer is being written or the model is loading.
    """

    BINDINGS: ClassVar = [
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
        Binding("ctrl+end", "screen.follow", show=False),
    ]

    class Submitted(Message):
        """Enter was pressed; the text is still in the box."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text
            self.pressed_at = time.perf_counter()

    class Edited(Message):
        """A key was pressed that is not a command: the hint above the box has been read."""

    class HelpWanted(Message):
        """A question mark in the empty box."""

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Ask anything",
        )

    def set_busy(self, busy: bool) -> None:
        self.set_class(busy, "-busy")
        self._show_keys()

    def on_resize(self) -> None:
        self._show_keys()

    def _show_keys(self) -> None:
        """As many key hints as fit on the border."""
        keys = BUSY_KEYS if self.has_class("-busy") else IDLE_KEYS
        self.border_subtitle = next((line for line in keys if len(line) + 6 <= self.outer_size.width), keys[-1])

    async def _on_key(self, event: Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.post_message(self.Submitted(self.text))
        elif event.key in NEWLINE_KEYS:
            event.stop()
            event.prevent_default()
            self.post_message(self.Edited())
            self.insert("\n", maintain_selection_offset=False)
        elif event.character == "?" and not self.text:
            event.stop()
            event.prevent_default()
            self.post_message(self.HelpWanted())
        elif event.is_printable:
            self.post_message(self.Edited())
