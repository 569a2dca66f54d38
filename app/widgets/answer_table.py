"""Tables of an answer, drawn as text. Textual makes a widget of every cell, which took 15 s for 8,000 characters."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_it.token import Token
from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Size
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock, MarkdownTable


class Table(MarkdownTable):
    """A table drawn as text. Cells wrap; a column is never narrower than one letter."""

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self._drawing: tuple[int, Content] | None = None

    def compose(self) -> ComposeResult:
        self._headers, self._rows = self._get_headers_and_rows()
        return ()

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, Table):
            self._headers, self._rows = block._get_headers_and_rows()
            self._drawing = None
            self._copy_context(block)
            self.refresh(layout=True)
        else:
            await super()._update_from_block(block)

    def draw(self, width: int) -> Content:
        if self._drawing is None or self._drawing[0] != width:
            self._drawing = width, draw_table(self._headers, self._rows, width)
        return self._drawing[1]

    def render(self) -> Content:
        return self.draw(self.content_size.width)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.draw(width).plain.count("\n") + 1


def draw_table(headers: Sequence[Content], rows: Sequence[Sequence[Content]], width: int) -> Content:
    """Header, rule and rows, in at most `width` cells if there is room for a letter of every column."""
    columns = len(headers)
    table = [[*row, *[Content("")] * (columns - len(row))][:columns] for row in (headers, *rows)]
    natural = [max(max((cell.cell_length for cell in column), default=1), 1) for column in zip(*table, strict=True)]
    widths = column_widths(natural, max(width - 3 * (columns - 1), columns))
    lines = [line for row in table[1:] for line in _row(row, widths)]
    header = [line.stylize("bold") for line in _row(table[0], widths)]
    rule = Content.styled("─┼─".join("─" * cells for cells in widths), "$border")
    return Content("\n").join([*header, rule, *lines])


def _row(row: Sequence[Content], widths: Sequence[int]) -> list[Content]:
    cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    bar = Content.styled(" │ ", "$border")
    lines = []
    for y in range(max(map(len, cells))):
        line = [
            (cell[y] if y < len(cell) else Content("")).pad_right(width - (cell[y].cell_length if y < len(cell) else 0))
            for cell, width in zip(cells, widths, strict=True)
        ]
        lines.append(bar.join(line))
    return lines


def _wrap(cell: Content, width: int) -> list[Content]:
    return cell.wrap(width) if cell.cell_length > width or "\n" in cell.plain else [cell]


def column_widths(natural: Sequence[int], room: int) -> list[int]:
    """The natural widths if they fit into `room` cells, else the widest cut to one common width."""
    if sum(natural) <= room:
        return list(natural)
    left, common = room, 1
    for index, cells in enumerate(sorted(natural)):
        common = max(left // (len(natural) - index), 1)
        if cells > common:
            break
        left -= cells
    return [min(cells, common) for cells in natural]
