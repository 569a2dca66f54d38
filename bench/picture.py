"""Read a Textual screenshot (an SVG by Rich) back as lines of text, to check what a picture says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

CELL = 12.2
"""Width of a letter in Rich's SVG: 20 units high, 0.61 as wide."""
AGAIN = "Take it again with python -m bench.tour."


def lines_of(svg: str) -> list[str]:
    """The terminal's lines, with letters where they stand; spaces at the end are gone.

    Raises:
        ValueError: it is no picture of a terminal.
    """
    rows: dict[int, dict[int, str]] = {}
    try:
        elements = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))
    except ElementTree.ParseError as error:
        raise ValueError(f"The picture is not SVG: {error}. {AGAIN}") from error
    for element in elements:
        row = re.search(r"-line-(\d+)\)", element.get("clip-path", ""))
        if row is not None:  # else it is the title in the window's frame
            cell = round(float(element.get("x", "0")) / CELL)
            rows.setdefault(int(row[1]), {})[cell] = (element.text or "").replace("\u00a0", " ")
    if not rows:
        raise ValueError(f"The picture has no line of text. {AGAIN}")
    return [_line(rows.get(number, {})) for number in range(max(rows) + 1)]


def _line(pieces: dict[int, str]) -> str:
    line = ""
    for cell, text in sorted(pieces.items()):
        line = line.ljust(cell) + text
    return line.rstrip()


def missing(svg: str, texts: Iterable[str]) -> list[str]:
    """Those of `texts` that stand on no line of the picture."""
    lines = lines_of(svg)
    return [text for text in texts if not any(text in line for line in lines)]
