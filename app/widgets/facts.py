"""Named numbers on as few lines as they need: a fact is never broken across two lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

SEPARATOR = " · "


class Fact(NamedTuple):
    """`generation only 41.3 tok/s` is Fact("generation only", "41.3", "tok/s")."""

    name: str
    value: str
    unit: str = ""

    def content(self) -> Content:
        before = f"{self.name} " if self.name else ""
        after = f" {self.unit}" if self.unit and self.unit != "%" else self.unit
        return Content.assemble((before, "$quiet"), (self.value, "bold"), (after, "$quiet"))


def pack(facts: Sequence[Fact], width: int) -> list[Content]:
    """Fill lines of at most `width` cells, facts in order, never splitting one."""
    lines: list[Content] = []
    for fact in facts:
        content = fact.content()
        longer = Content.assemble(lines[-1], (SEPARATOR, "$quiet"), content) if lines else content
        if lines and longer.cell_length <= width:
            lines[-1] = longer
        else:
            lines.append(content)
    return lines


class Facts(Widget):
    """Shows facts."""

    facts: reactive[tuple[Fact, ...]] = reactive((), layout=True)

    def render(self) -> Content:
        return Content("\n").join(pack(self.facts, max(self.size.width, 1)))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(pack(self.facts, max(width, 1)))
