"""Lists and code of an answer, which Textual draws too slowly while they grow.

It builds a list anew for every word, and guesses the language of unlabelled code by trying all lexers. With those,
8,000 characters of an answer took 6 to 13 s of processor time and held keys up for half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from markdown_it.token import Token
from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Size
from textual.widgets import Label, Markdown
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownBulletList,
    MarkdownFence,
    MarkdownList,
    MarkdownListItem,
    MarkdownOrderedList,
    MarkdownParagraph,
)

CHUNK = 2_000
"""Characters of code that are highlighted at once, roughly."""
MAX_HIGHLIGHTED = 40_000
"""Longer code is shown without colours."""


class ListItems(MarkdownList):
    """A few items of a list, drawn as text if there is only text in them.

    Class `-more` if more of the list follows.
    """

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self.set_class(bool(token.meta.get("more")), "-more")
        self._lines: list[Line] | None = None
        self._drawing: tuple[int, Content] | None = None

    def compose(self) -> ComposeResult:
        self._lines = outline(self)
        if self._lines is None:
            yield from super().compose()

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        lines = outline(block) if type(block) is type(self) and self._lines is not None else None
        if lines is None:
            await super()._update_from_block(block)
            return
        self._lines, self._drawing = lines, None
        self._copy_context(block)
        self.set_class(block.has_class("-more"), "-more")
        self.refresh(layout=True)

    def draw(self, width: int) -> Content:
        if self._drawing is None or self._drawing[0] != width:
            self._drawing = width, draw_lines(self._lines or [], width)
        return self._drawing[1]

    def render(self) -> Content:
        return self.draw(self.content_size.width) if self._lines is not None else Content("")

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if self._lines is None:
            return super().get_content_height(container, viewport, width)
        return self.draw(width).plain.count("\n") + 1


class BulletItems(ListItems, MarkdownBulletList):
    """With bullets."""


class OrderedItems(ListItems, MarkdownOrderedList):
    """With numbers."""


@dataclass(frozen=True)
class Line:
    """A paragraph of a list: what stands before its first row and, as wide, before the others; and its text."""

    lead: Content
    text: Content


def outline(items: MarkdownBlock) -> list[Line] | None:
    """The paragraphs of a list and of the lists in it; None if anything else is in it, code say."""
    lines: list[Line] = []
    ordered = isinstance(items, MarkdownOrderedList)
    first = None
    for index, item in enumerate(items._blocks):
        assert isinstance(item, MarkdownListItem)
        if first is None:
            first = int(item.bullet) if ordered else 0
        lead = Content.styled(f"{first + index}. ".rjust(4) if ordered else f" {item.bullet}", "$primary")
        inside = _outline_item(item)
        if inside is None:
            return None
        indent = Content(" " * lead.cell_length)
        if not item._blocks or not isinstance(item._blocks[0], MarkdownParagraph):
            inside.insert(0, Line(Content(""), Content("")))
        lines.append(replace(inside[0], lead=lead))
        lines += [replace(line, lead=indent + line.lead) for line in inside[1:]]
    return lines


def _outline_item(item: MarkdownBlock) -> list[Line] | None:
    lines: list[Line] = []
    for block in item._blocks:
        if isinstance(block, MarkdownParagraph):
            lines.append(Line(Content(""), block._content))
        elif isinstance(block, MarkdownList) and (inside := outline(block)) is not None:
            lines += inside
        else:
            return None
    return lines


def draw_lines(lines: Sequence[Line], width: int) -> Content:
    rows: list[Content] = []
    for line in lines:
        lead = line.lead
        for row in line.text.wrap(max(width - lead.cell_length, 8)) or [Content("")]:
            rows.append(lead + row)
            lead = Content(" " * lead.cell_length)
    return Content("\n").join(rows)


class Fence(MarkdownFence):
    """A code block, highlighted and laid out a chunk at a time, and only in a language that the model named."""

    def __init__(self, markdown: Markdown, token: Token, code: str) -> None:
        super().__init__(markdown, token, code)
        self._chunks = chunks(code)

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        return Content("")  # what Textual would make at once, `_colour` makes chunk by chunk

    def compose(self) -> ComposeResult:
        for chunk in self._chunks:
            yield Label(self._colour(chunk), expand=True)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not isinstance(block, Fence):
            await super()._update_from_block(block)
            return
        old, same = self._chunks, self.lexer == block.lexer
        self._copy_context(block)
        self._chunks = block._chunks
        for label, before, chunk in zip(self.query(Label), old, self._chunks, strict=False):
            if before != chunk or not same:
                label.update(self._colour(chunk))
        await self.mount_all(Label(self._colour(chunk), expand=True) for chunk in self._chunks[len(old) :])

    def set_content(self, content: Content) -> None:
        """Called with nothing by Textual when the look changes: the labels resolve their colours themselves."""

    def _colour(self, chunk: str) -> Content:
        words = self.lexer.split()
        if not words or len(self.code) > MAX_HIGHLIGHTED:
            return Content(chunk)
        return _highlighted(chunk, words[0], self.app.native_ansi_color, self.app.current_theme.dark)


@lru_cache(maxsize=128)
def _highlighted(code: str, language: str, ansi: bool, dark: bool) -> Content:
    return MarkdownFence.highlight(code, language, ansi, dark)


def chunks(code: str, size: int = CHUNK) -> list[str]:
    """Code cut at line ends, where possible before an unindented line, after about `size` characters.

    Joined by newlines they are the code. Each is highlighted for itself, so that only the last one of a growing block
    is highlighted again. What spans a cut, a long string say, is coloured wrongly from there to the next cut.
    """
    cut: list[list[str]] = [[]]
    length = 0
    for line in code.split("\n"):
        starts = line[:1].isalnum() or line[:1] in ("@", "#", "<", "/")
        if (length > size and starts) or length > 2 * size:
            cut.append([])
            length = 0
        cut[-1].append(line)
        length += len(line) + 1
    return ["\n".join(lines) for lines in cut]
