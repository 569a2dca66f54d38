"""Where the user writes: Enter sends, Ctrl+J is a new line, a paste never sends."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.binding import Binding
from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea

from dflash_mlx.app.commands import completions, unfinished

NEWLINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter")
"""Ctrl+J works in every terminal; most cannot tell Shift+Enter from Enter."""

IDLE_KEYS = ("Enter send · Ctrl+J new line · Ctrl+P all actions · F1 help", "Enter send · F1 help")
BUSY_KEYS = ("Esc stop · Enter sends when the answer is done · F1 help", "Esc stop · F1 help")


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
        """Enter was pressed, and the box is empty again: what is typed from now on is another message.

        `give_back` returns a text that could not be used.
        """

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text
            self.pressed_at = time.perf_counter()

    class Edited(Message):
        """A key was pressed that is not a command: the hint above the box has been read."""

    class HelpWanted(Message):
        """A question mark in the empty box."""

    class EditorWanted(Message):
        """Ctrl+X Ctrl+E, as in a shell."""

    class LeaveWanted(Message):
        """Ctrl+D in the empty box, which ends a shell."""

    class Recall(Message):
        """Up or Down where there is no line to go to: an earlier message is wanted (-1), or a later one (1)."""

        def __init__(self, direction: int) -> None:
            super().__init__()
            self.direction = direction

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Ask anything",
        )
        self._recalled: str | None = None
        self._chord = False

    def set_busy(self, busy: bool) -> None:
        self.set_class(busy, "-busy")
        self._show_keys()

    def recall(self, text: str, title: str = "") -> None:
        """Show an earlier message; Up and Down go on from it until it is changed. `title` says what Enter will do."""
        self.text = text
        self._recalled = text
        self.border_title = title
        self.move_cursor(self.document.end)

    def give_back(self, text: str) -> None:
        """Put a submitted text before what has been typed since. No `Changed`: what was said about it stays."""
        if text:
            with self.prevent(TextArea.Changed):
                self.set_text(text + self.text)

    def add_before(self, text: str) -> None:
        """Put an unsent message back, in lines of its own before what has been typed since."""
        if text:
            self.set_text("\n".join(filter(None, (text, self.text))))

    @property
    def written(self) -> str:
        """What the user has written; empty if it is an earlier message that was only looked at."""
        return "" if self.text == self._recalled else self.text

    def set_text(self, text: str) -> None:
        """Show `text` as if the user had written it."""
        self.recall(text)
        self._recalled = None

    def on_resize(self) -> None:
        self._show_keys()

    def _show_keys(self) -> None:
        """As many key hints as fit on the border."""
        keys = BUSY_KEYS if self.has_class("-busy") else IDLE_KEYS
        self.border_subtitle = next((line for line in keys if len(line) + 6 <= self.outer_size.width), keys[-1])

    async def _on_key(self, event: Key) -> None:
        message = self._message_for(event)
        # Without a selection Ctrl+X would cut the whole line.
        self._chord = event.key == "ctrl+x" and not self.selected_text
        if message is not None:
            self.post_message(message)
        used = message is not None and not (isinstance(message, self.Edited) and event.is_printable)
        if self._chord or used or await self._edit(event):
            event.stop()
            event.prevent_default()

    async def _edit(self, event: Key) -> bool:
        """Do at once what a key of the text box does; False if it does nothing here.

        Left to Textual, the key goes up to the app and back first, and letters that were typed meanwhile come before
        it: while an answer is laid out, a quick correction would end in other text.
        """
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            if await self.app.run_action(binding.action, self):
                return True
        return False

    def _message_for(self, event: Key) -> Message | None:
        """What a key means here, beyond what it does in any text box; None if nothing."""
        if event.key in NEWLINE_KEYS or (event.key == "enter" and unfinished(self.text)):
            self.insert("\n", maintain_selection_offset=False)
            return self.Edited()
        if event.key == "enter":
            submitted = self.Submitted(self.text)
            self.clear()
            self._recalled = None
            return submitted
        if event.key == "tab" and self._complete():
            return self.Edited()
        if event.key == "ctrl+e" and self._chord:
            return self.EditorWanted()
        if event.key == "ctrl+d" and not self.text:
            return self.LeaveWanted()
        if event.key in ("up", "down") and (not self.text or self.text == self._recalled):
            at_edge = self.cursor_at_first_line if event.key == "up" else self.cursor_at_last_line
            return self.Recall(-1 if event.key == "up" else 1) if at_edge else None
        if event.character == "?" and not self.text:
            return self.HelpWanted()
        return self.Edited() if event.is_printable else None

    def _complete(self) -> bool:
        """Tab: as much of a command's name as is certain."""
        names = {command.split()[0] for command, _ in completions(self.text)}
        if not names:
            return False
        first, last = min(names), max(names)
        shared = next((i for i, letter in enumerate(first) if last[i : i + 1] != letter), len(first))
        self.set_text(first + " " if len(names) == 1 else first[:shared])
        return True
