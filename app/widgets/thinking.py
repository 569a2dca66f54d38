"""What the model thought before it answered: one line, the newest lines while it grows, or all of it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.events import Click
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from dflash_mlx.app.messages import Part
from dflash_mlx.app.text import count, visible
from dflash_mlx.app.widgets.origin_text import OriginText

TAIL_ROWS = 2
TAIL_CHARACTERS = 600
"""Enough to fill them."""


class Tail(Widget):
    """The last rows of `text`."""

    text: reactive[str] = reactive("", layout=True)

    def render(self) -> Content:
        return Content("\n").join(self._rows(self.content_size.width))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows(width))

    def _rows(self, width: int) -> list[Content]:
        return Content(self.text.strip()).wrap(max(width, 1))[-TAIL_ROWS:]


class Thinking(Vertical):
    """Classes: `-folded`; `-growing` until the answer begins. A click on its first line folds or unfolds it."""

    def __init__(self, *, folded: bool) -> None:
        super().__init__(classes="-growing -folded" if folded else "-growing")
        self._title = Static("", markup=False, classes="title")
        self._tail = Tail()
        self._body = OriginText()
        self._unshown: list[Part] = []
        self._end = ""
        self._length = 0

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._tail
        yield self._body

    async def append(self, parts: list[Part]) -> None:
        text = "".join(part.text for part in parts)
        self._unshown += parts
        self._length += len(text)
        self._end = (self._end + visible(text))[-TAIL_CHARACTERS:]
        await self._show()

    async def close(self) -> None:
        """Nothing comes any more."""
        self.remove_class("-growing")
        await self._show()

    async def fold(self, folded: bool) -> None:
        self.set_class(folded, "-folded")
        await self._show()

    async def on_click(self, event: Click) -> None:
        if event.widget is self._title:
            event.stop()
            await self.fold(not self.has_class("-folded"))

    async def _show(self) -> None:
        folded, growing = self.has_class("-folded"), self.has_class("-growing")
        said = f"thinking · {count(self._length, 'character')}"
        if not growing:
            said = f"thought for {count(self._length, 'character')}"
        self._title.update(Content(f"{'▸' if folded else '▾'} {said} · Ctrl+T"))
        if folded:
            if growing:
                self._tail.text = self._end
        elif self._unshown:
            parts, self._unshown = self._unshown, []
            await self._body.append(parts)
