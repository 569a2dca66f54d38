"""Text as it was written, letter by letter, in which what the draft wrote can be told from what the target wrote.

Accepted draft tokens carry the component class `drafted`; under the class `-origins` of the transcript it underlines
and colours them. The underline is what survives NO_COLOR.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content, Span
from textual.widgets import Static

from dflash_mlx.app.messages import Part
from dflash_mlx.app.text import visible

PIECE = 1_200
"""Characters after which a new widget begins at the next line, so that only the last one is laid out again."""
LONGEST_PIECE = 4_000
"""The same in text without line breaks: at the next token."""
LEGEND = Content.assemble(("underlined", "underline $accent"), " from the draft, the rest the target's own · F6")


class Piece(Static):
    """A few lines of it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"drafted"}

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._text = ""
        self._drafted: list[Span] = []

    @property
    def text(self) -> str:
        return self._text

    def add(self, text: str, drafted: bool) -> None:
        """Append without showing; `show` does that."""
        start, end = len(self._text), len(self._text) + len(text)
        self._text += text
        if not drafted:
            return
        if self._drafted and self._drafted[-1].end == start:
            start = self._drafted.pop().start
        self._drafted.append(Span(start, end, ".drafted"))

    def show(self) -> None:
        self.update(Content(self._text.removesuffix("\n"), spans=self._drafted))

    @property
    def full(self) -> bool:
        return len(self._text) > (PIECE if self._text.endswith("\n") else LONGEST_PIECE)


class OriginText(Vertical):
    """Grows by parts; the kinds of the parts do not matter here."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Piece | None = None

    @property
    def text(self) -> str:
        """All of it, as shown."""
        return "".join(piece.text for piece in self.query(Piece))

    async def append(self, parts: Iterable[Part]) -> None:
        new: list[Piece] = []
        changed: list[Piece] = [self._last] if self._last is not None else []
        for part in parts:
            for line in visible(part.text).splitlines(keepends=True):
                if self._last is None or self._last.full:
                    self._last = Piece()
                    new.append(self._last)
                self._last.add(line, part.origin == "draft")
        for piece in (*changed, *new):
            piece.show()
        if new:
            await self.mount_all(new)
