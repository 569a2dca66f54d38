"""A record as one HTML file: nothing is fetched, no script runs, and what models or servers said is only text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from .tables import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { border-bottom: 1px solid #e4e4e4; padding: 4px 10px; text-align: right; vertical-align: top; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.scroll { overflow-x: auto; } ul { color: #555; font-size: 13px; } svg { max-width: 100%; height: auto; }
"""


def page(title: str, lines: Sequence[str], shown: Sequence[Table], charts: Mapping[str, str]) -> str:
    """lines: facts above the tables; charts: SVG elements by name."""
    facts = "".join(f"<li>{escape(line)}</li>" for line in lines)
    drawn = "".join(f'<figure id="{escape(name)}">{svg}</figure>' for name, svg in charts.items())
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<ul>{facts}</ul>\n{drawn}\n"
        + "\n".join(map(_table, shown))
        + "\n</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>\n<ul>{notes}</ul>"
    )
