"""The charts of a training: how a `History` is drawn with matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dflash_mlx.drawing import FAINT, INK, colour_of
from dflash_mlx.training.log import History, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "report"
_SMOOTH = 25  # records before and after one whose mean a smoothed line shows
_GAP = 0.052  # of the height of a chart, between two names
_POINTS = 1000  # of a line at most: more cannot be seen, and make the SVG large
STYLE = {"figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.12}  # inches; beside `drawing`


def figure(history: History) -> Figure:
    """Loss, accuracy, acceptance and learning rate over steps."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 7), layout="constrained")
    (loss, accuracy), (acceptance, rate) = drawn.subplots(2, 2)
    _draw_loss(loss, history)
    _draw_accuracy(accuracy, history)
    _draw_acceptance(acceptance, history)
    steps, rates = _series(history.steps, "lr")
    rate.plot(*_thin(steps, rates), color=INK)
    _label(rate, "learning rate", "learning rate")
    rate.yaxis.set_major_formatter("{x:g}")
    best = history.best
    end = max(1, history.step, *(record["step"] for record in history.evaluations[-1:]))
    for axes in (loss, accuracy, acceptance, rate):
        axes.set_xlim(0, end * 1.02)  # the last points are not cut in half
        axes.set_ylim(bottom=None if axes is acceptance else 0)
        if best:
            axes.axvline(best["step"], color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    drawn.suptitle(_headline(history), x=0.01, ha="left", fontsize=12)
    return drawn


def _headline(history: History) -> str:
    best = history.best
    target = history.start.get("target")
    parts = [f"a draft for {target}" if target else "a draft"]
    if history.block_size:
        parts.append(f"block size {history.block_size}")
    if best and best.get("tokens_per_cycle") is not None:
        parts.append(f"best evaluation at step {best['step']}: {best['tokens_per_cycle']:.2f} tokens per cycle")
    return ", ".join(parts)


def _draw_loss(axes: Axes, history: History) -> None:
    steps, losses = _series(history.steps, "loss")
    axes.plot(*_thin(steps, losses), color=FAINT, linewidth=0.6, alpha=0.6, label="each step")
    axes.plot(*_thin(steps, _smooth(losses)), color=INK, label="smoothed")
    _label(axes, "loss", "loss")
    if steps:
        axes.legend(frameon=False, loc="upper right")


def _draw_accuracy(axes: Axes, history: History) -> None:
    """Held out as lines with points, in training faint behind them."""
    size = (history.block_size or 1) - 1
    ends: list[tuple[float, str, Any]] = []
    for position in range(size):
        colour = colour_of(position, size)
        pick = lambda record, at=position: (record.get("accuracy") or [None] * (at + 1))[at]  # noqa: E731
        steps, shares = _series(history.steps, pick)
        axes.plot(*_thin(steps, _smooth(shares)), color=colour, linewidth=0.8, alpha=0.45)
        held, known = _series(history.evaluations, pick)
        axes.plot(held, known, color=colour, marker="o", markersize=2.5)
        last = known or _smooth(shares)
        if last:
            ends.append((last[-1], f"{position + 1}", colour))
    among = f", among {history.columns} tokens" if history.columns else ""
    _label(axes, f"accuracy by position, teacher-forced (faint: in training{among})", "share of right tokens")
    axes.set_ylim(0, None)
    named: list[tuple[float, str, Any]] = []
    for end in ends:  # late positions lie close together, and their order is known
        if all(abs(other[0] - end[0]) >= axes.get_ylim()[1] * _GAP for other in named):
            named.append(end)
    _name_ends(axes, named)


def _draw_acceptance(axes: Axes, history: History) -> None:
    names = sorted({name for record in history.evaluations for name in record.get("categories") or {}})
    ends: list[tuple[float, str, Any]] = []
    for index, name in enumerate(names):
        pick = lambda record, of=name: ((record.get("categories") or {}).get(of) or {}).get("tokens_per_cycle")  # noqa: E731
        steps, rates = _series(history.evaluations, pick)
        axes.plot(steps, rates, color=colour_of(index, len(names)), marker="o", markersize=2.5, linewidth=1)
        ends.append((rates[-1], name, colour_of(index, len(names))))
    steps, rates = _series(history.evaluations, "tokens_per_cycle")
    if rates:
        axes.plot(steps, rates, color=INK, marker="o", markersize=3.5, linewidth=2)
        ends.append((rates[-1], "all", INK))
    best = history.best
    if best and best.get("tokens_per_cycle") is not None:
        axes.plot([best["step"]], [best["tokens_per_cycle"]], color=INK, marker="*", markersize=13, linestyle="")
    most = f" (block size {history.block_size})" if history.block_size else ""
    _label(axes, "acceptance on held-out prompts (star: best evaluation)", f"tokens per cycle{most}")
    _name_ends(axes, ends)


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)


def _name_ends(axes: Axes, ends: Sequence[tuple[float, str, Any]]) -> None:
    """Names right of the lines' ends, moved apart where they would cover each other."""
    low, high = axes.get_ylim()
    gap = (high - low) * _GAP
    wanted = sorted((end for end in ends if end[0] == end[0]), key=lambda end: end[0])
    places = [value for value, _, _ in wanted]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    ceiling = high
    for i in reversed(range(len(places))):  # back down what went past the top
        places[i] = min(places[i], ceiling)
        ceiling = places[i] - gap
    for place, (_, name, colour) in zip(places, wanted, strict=True):
        at: Any = dict(xy=(1, place), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points")
        axes.annotate(name, **at, color=colour, va="center", annotation_clip=False)


def _series(records: Sequence[Record], of: str | Callable[[Record], float | None]) -> tuple[list[int], list[float]]:
    """Steps and values; NaN, which leaves a gap, for what is not known."""
    values = [record.get(of) if isinstance(of, str) else of(record) for record in records]
    return [record["step"] for record in records], [float("nan") if each is None else each for each in values]


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of each and its neighbours, never more after it than before it: a steep beginning is not flattened."""
    sums, counts, out = [0.0], [0], []
    for value in values:
        known = value == value
        sums.append(sums[-1] + (value if known else 0.0))
        counts.append(counts[-1] + known)
    for i in range(len(values)):
        before = min(_SMOOTH, i)
        first, last = i - before, min(i + before + 1, len(values))
        number = counts[last] - counts[first]
        out.append((sums[last] - sums[first]) / number if number else float("nan"))
    return out


def _thin(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Every n-th, and the last."""
    every = max(1, len(steps) // _POINTS)
    kept = [*range(0, len(steps), every)]
    if kept and kept[-1] != len(steps) - 1:
        kept.append(len(steps) - 1)
    return [steps[i] for i in kept], [values[i] for i in kept]
