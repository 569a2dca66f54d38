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
    warning: bool = False
    """Coloured as a warning; words say the same elsewhere."""

    def content(self) -> Content:
        before = f"{self.name} " if self.name else ""
        after = f" {self.unit}" if self.unit and self.unit != "%" else self.unit
        value = (self.value, "bold $warning" if self.warning else "bold")
        return Content.assemble((before, "$quiet"), value, (after, "$quiet"))


def line(facts: Sequence[Fact]) -> Content:
    """All of them on one line."""
    parts: list[Content | tuple[str, str]] = []
    for fact in facts:
        parts += [(SEPARATOR, "$quiet"), fact.content()] if parts else [fact.content()]
    return Content.assemble(*parts)


def pack(facts: Sequence[Fact], width: int) -> list[Content]:
    """Fill lines of at most `width` cells, facts in order, never splitting one."""
    lines: list[list[Fact]] = []
    for fact in facts:
        if lines and line([*lines[-1], fact]).cell_length <= width:
            lines[-1].append(fact)
        else:
            lines.append([fact])
    return [line(facts_of_line) for facts_of_line in lines]


def fitting(facts: Sequence[Fact], width: int) -> tuple[Fact, ...]:
    """As many of the first facts as fit on one line of `width` cells; the first one always."""
    kept = tuple(facts)
    while len(kept) > 1 and line(kept).cell_length > width:
        kept = kept[:-1]
    return kept


class Facts(Widget):
    """Shows facts. They change ten times a second, so the window is laid out anew only if their height changes."""

    facts: reactive[tuple[Fact, ...]] = reactive(())

    def render(self) -> Content:
        return _packed(self.facts, self.size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """A fact that is wider than the widget is wrapped; nothing is cut off."""
        return _height(self.facts, width)

    def watch_facts(self, before: tuple[Fact, ...], now: tuple[Fact, ...]) -> None:
        width = self.size.width
        if _height(before, width) != _height(now, width):
            self.refresh(layout=True)


def _packed(facts: Sequence[Fact], width: int) -> Content:
    return Content("\n").join(pack(facts, max(width, 1)))


def _height(facts: Sequence[Fact], width: int) -> int:
    return _packed(facts, width).get_height({}, max(width, 1))
