"""A training on a terminal: one panel, drawn from what the log has, in any width, with and without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from dflash_mlx.training.log import History, Record

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
BAR = "magenta"  # of the sixteen colours of a terminal one that can be read on black and on white
UNKNOWN = "?"
_LABEL = 13  # columns of what stands before a row of numbers


@dataclass
class Board:
    """The panel. `where` says where the checkpoint is, `footer` what a key does; both are one line."""

    where: str = ""
    footer: str = ""
    history: History = field(default_factory=History)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 4  # border and padding
        bars = ASCII_BARS if options.ascii_only else BARS
        parts: list[RenderableType] = [_advance(self.history, width), *_loss(self.history, width, bars)]
        for section in (_accuracy(self.history, width, bars), _acceptance(self.history, width)):
            if section:
                parts += [Text(), *section]
        parts += [Text(), *self._ending()]
        target = self.history.start.get("target")
        title = Text(f"training a draft for {target}" if target else "training", style="bold")
        yield Panel(Group(*parts), title=title, title_align="left", border_style="dim", padding=(0, 1))

    def _ending(self) -> list[Text]:
        saved = self.history.checkpoint
        at = f"checkpoint of step {saved['step']} in {self.where}" if saved else f"checkpoints go to {self.where}"
        end = self.history.end
        last = f"ended at step {end['step']}: {end.get('why') or UNKNOWN}" if end else self.footer
        return [_line(at), _line(last)]


def _advance(history: History, width: int) -> Group:
    """How far it is, and how fast."""
    total = history.total
    of = f"step {history.step} of {total or UNKNOWN}"
    left = history.seconds_left()
    after = "" if left is None or history.end else f"{duration(left)} left"
    parts: list[RenderableType] = []
    if total:
        bar = ProgressBar(total, history.step, width, complete_style=BAR, finished_style=BAR)
        parts.append(Padding(bar, 0))  # the bar alone ends no line
    parts.append(_line(of + after.rjust(width - cell_len(of)), "bold"))
    last = history.steps[-1] if history.steps else {}
    facts = [
        f"epoch {number(last.get('epoch'), '.2f')}",
        f"{number(history.rates()[0], '.0f')} blocks/s",
        f"learning rate {number(last.get('lr'), '.2e')}",
        f"gradient norm {number(last.get('grad_norm'), '.2f')}",
    ]
    parts.append(_line(" · ".join(facts)))
    return Group(*parts)


def _loss(history: History, width: int, bars: str) -> list[Text]:
    """The last one, and a line of all of them, from the left."""
    if not history.steps:
        return [_line("no step yet")]
    losses = [record.get("loss") for record in history.steps]
    known = [loss for loss in losses if loss is not None]
    line = Text("loss".ljust(_LABEL), no_wrap=True)
    line.append(number(losses[-1], ".3f"), "bold")
    if len(known) > 1:
        ends = f"  {min(known):.3f} to {max(known):.3f}"
        line.append("  ")
        line.append(sparkline(known, max(8, width - line.cell_len - len(ends)), bars), BAR)
        line.append(ends)
    return [line]


def _accuracy(history: History, width: int, bars: str) -> list[Text]:
    """Of each position: bars, and per cent in training and in the last evaluation. Those that fit are shown."""
    training = history.steps[-1].get("accuracy") if history.steps else None
    held_out = history.evaluations[-1].get("accuracy") if history.evaluations else None
    shown = held_out or training
    if not shown:
        return []
    fit = max(1, (width - _LABEL) // 4)
    header = "".join(f"{position:>4}" for position in range(1, 1 + min(fit, len(shown))))
    lines = [_line("accuracy, %".ljust(_LABEL) + header, "dim"), Text(" " * _LABEL, no_wrap=True)]
    for share in shown[:fit]:
        lines[-1].append("  " + 2 * _level(share, bars), BAR)
    for name, row in (("training", training), ("held out", held_out)):
        if row:
            cells = "".join(f"{percent(share):>4}" for share in row[:fit])
            lines.append(_line(name.ljust(_LABEL) + cells))
    if training and history.columns:
        lines.append(_line(f"in training among {history.columns} tokens only", "dim"))
    if len(shown) > fit:
        lines.append(_line(f"{len(shown) - fit} more positions have no room", "dim"))
    return lines


def _acceptance(history: History, width: int) -> list[Text]:
    """The last evaluation beside the best one, and as many categories side by side as fit."""
    if not history.evaluations:
        return []
    last, best = history.evaluations[-1], history.best
    title = Text(no_wrap=True)
    title.append(f"{_rate(last)} tokens per cycle", "bold")
    title.append(f" at step {last['step']}")
    both = best is not None and best is not last
    if best:
        title.append(f" · best {_rate(best)} at step {best['step']}" if both else ", the best so far")
    pairs = [(last, "last"), (best, "best")] if both else [(last, "last")]
    lines, names = [title], list(last.get("categories") or {})
    if not names:
        return lines
    size = min(20, max(cell_len(name) for name in names))
    cell = size + 7 * len(pairs)
    across = min(len(names), max(1, (width + 4) // (cell + 4)))
    if both:
        head = " " * size + "".join(f"{word:>7}" for _, word in pairs)
        lines.append(_line((4 * " ").join([head] * across), "dim"))
    for first in range(0, len(names), across):
        cells = [_category(name, size, [each for each, _ in pairs]) for name in names[first : first + across]]
        lines.append(_line((4 * " ").join(cells)))
    return lines


def _category(name: str, size: int, evaluations: Sequence[Record | None]) -> str:
    rates = [_rate((each or {}).get("categories", {}).get(name, {})) for each in evaluations]
    return set_cell_size(name, size) + "".join(f"{rate:>7}" for rate in rates)


def _rate(record: Record) -> str:
    return number(record.get("tokens_per_cycle"), ".2f")


def _line(text: str, style: str = "") -> Text:
    """One that is cut off rather than broken; names in it are no markup."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _level(share: float | None, bars: str) -> str:
    """The bar of a share in 0..1."""
    return " " if share is None else bars[min(len(bars) - 1, max(0, int(share * len(bars))))]


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """At most `width` bars between the lowest and the highest; each is the mean of as many values as the others."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_level((mean - low) / ((high - low) or 1), bars) for mean in means)


def number(value: Any, form: str) -> str:
    """As `format` does it; a question mark for what is not known."""
    return UNKNOWN if value is None else format(value, form)


def percent(share: float | None) -> str:
    """Without the sign."""
    return UNKNOWN if share is None else f"{100 * share:.0f}"


def duration(seconds: float) -> str:
    """In the two largest units that it has."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
