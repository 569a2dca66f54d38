"""How every chart here is drawn with matplotlib (the extra `report`), which is imported when something is drawn.

The same numbers give the same bytes, and a user's own style changes nothing. Figures are made as `Figure`, without
pyplot, so there is no window and nothing to close.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#8a8a8a"
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: smaller, and it can be searched
    "text.parse_math": False,  # a dollar sign in a name is one
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "grid.color": "#ececec",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
}
_DATELESS: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
FORMS = tuple(_DATELESS)


@contextmanager
def styled(name: str, more: Any = None) -> Iterator[None]:
    """Around everything that is drawn.

    Args:
        name: what the ids in an SVG are made from; otherwise they are drawn at random.
        more: settings of matplotlib, by name, beside the common ones.
    Raises:
        ImportError: matplotlib is not here.
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": name, **(more or {})})
        yield


def save(figure: Figure, file: Any, form: str) -> None:
    """Write a figure without date and program.

    Args:
        file: a path, or a file that takes bytes. form: one of `FORMS`.
    Raises:
        OSError: it cannot be written.
    """
    figure.savefig(file, format=form, dpi=150, metadata=_DATELESS[form])


def colour_of(index: int, count: int, last: float = 0.85) -> tuple[float, ...]:
    """Of a map whose steps can be told apart by the colour-blind too; `last` leaves its yellow end out."""
    import matplotlib

    return matplotlib.colormaps["viridis"](last * index / max(1, count - 1))
