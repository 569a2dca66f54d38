"""The last cycles, a cell per position: filled = accepted, hollow = rejected, plus = the target's own token.

Shapes carry the meaning, colour only repeats it (NO_COLOR, 256 colours).
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

ACCEPTED, REJECTED, OWN = "■", "□", "+"
LEGEND = f"{ACCEPTED} accepted  {REJECTED} rejected  {OWN} the target's own (correction or bonus)"


def strip(cycles: Sequence[tuple[int, int]], width: int) -> Content:
    """As many of the newest cycles as fit into `width` cells, newest right.

    Args:
        cycles: (accepted, drafted), oldest first. A cycle without drafts is one plus.
    """
    shown: list[tuple[int, int]] = []
    used = 0
    for accepted, drafted in reversed(cycles):
        cells = drafted + 1 + (1 if shown else 0)
        if used + cells > width:
            break
        used += cells
        shown.append((accepted, drafted))
    parts: list[Content | str] = []
    for accepted, drafted in reversed(shown):
        if parts:
            parts.append(" ")
        parts.append(Content.styled(ACCEPTED * accepted, "$accent"))
        parts.append(Content.styled(REJECTED * (drafted - accepted), "$quiet"))
        parts.append(Content.styled(OWN, "$primary"))
    return Content.assemble(*parts)


class CycleStrip(Widget):
    """Draws `cycles` right-aligned into whatever room it gets."""

    cycles: reactive[tuple[tuple[int, int], ...]] = reactive(())

    def render(self) -> Content:
        return strip(self.cycles, self.size.width)
