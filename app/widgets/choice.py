"""One of a few words, chosen with the arrow keys. The chosen one stands between brackets, so no colour is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget


class Choice(Widget, can_focus=True):
    """A row of words."""

    BINDINGS: ClassVar = [
        Binding("right,space", "step(1)", show=False),
        Binding("left", "step(-1)", show=False),
    ]

    chosen: reactive[int] = reactive(0)

    class Changed(Message):
        """Another word was chosen."""

        def __init__(self, choice: Choice) -> None:
            super().__init__()
            self.choice = choice

        @property
        def control(self) -> Choice:
            return self.choice

    def __init__(self, words: Sequence[str], chosen: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._words = tuple(words)
        self.set_reactive(Choice.chosen, self._words.index(chosen))

    @property
    def value(self) -> str:
        return self._words[self.chosen]

    def render(self) -> Content:
        parts: list[tuple[str, str]] = []
        for index, word in enumerate(self._words):
            parts.append((f"[{word}]", "bold $accent") if index == self.chosen else (f" {word} ", "$quiet"))
        return Content.assemble(*parts)

    def action_step(self, by: int) -> None:
        self.chosen = (self.chosen + by) % len(self._words)

    def watch_chosen(self) -> None:
        self.post_message(self.Changed(self))

    def on_click(self, event: Click) -> None:
        """Choose the word under the mouse."""
        right = 0
        for index, word in enumerate(self._words):
            right += len(word) + 2
            if event.x < right:
                self.chosen = index
                return
