"""Messages that wait for the answer before them."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from dflash_mlx.app.text import visible

SHOWN = 3
"""Messages that have a line of their own."""


class QueueLine(Static):
    """One line for each waiting message, the next one first. Classes: `-shown`, `-held` while nothing is sent."""

    def __init__(self) -> None:
        super().__init__("", markup=False)

    def show(self, texts: Sequence[str], *, held: bool) -> None:
        """Args:
        texts: what waits, the next one first.
        held: the user stopped an answer, so the next one is not sent by itself.
        """
        self.set_class(bool(texts), "-shown")
        self.set_class(held, "-held")
        lines = [f"{'‖' if held else '…'} {visible(text).split(chr(10))[0]}" for text in texts[:SHOWN]]
        if len(texts) > SHOWN:
            lines.append(f"  and {len(texts) - SHOWN} more")
        what = "held: Enter sends, Esc drops" if held else "waiting: Up edits the last, Esc stops the answer"
        self.update(Content("\n").join([Content(f"{len(texts)} {what}"), *map(Content, lines)]))
