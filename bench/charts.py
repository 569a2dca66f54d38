"""The plots of a record, drawn with matplotlib (the extra `report`), which is imported when something is drawn.

Speed-ups with their interval by category, accepted drafts per cycle, speed over context, and of a profile the phases of
a cycle. The same record gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dflash_mlx.drawing import FAINT, INK, colour_of, save, styled

from .form import BenchError
from .profile import PHASES, Profile
from .record import Measured, Record
from .summary import ArmSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = dict(zip(PHASES, ("#3b528b", "#21918c", "#5ec962", "#c8c8c8"), strict=True))
_BINS = 12
Draw = Callable[["Axes"], None]


def svgs(record: Record, profile: Profile | None = None) -> dict[str, str]:
    """Charts by name as SVG elements, without an XML head.

    Raises:
        BenchError: matplotlib is not here.
    """
    return {name: drawn[drawn.index("<svg") :] for name, drawn in _drawn(record, profile, "svg").items()}


def pngs(record: Record, profile: Profile | None = None) -> dict[str, bytes]:
    """Raises BenchError: matplotlib is not here."""
    return _drawn(record, profile, "png")


def _drawn(record: Record, profile: Profile | None, form: str) -> dict[str, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(
            f"Charts are drawn with matplotlib, which cannot be imported ({error}). The tables need none: leave --html "
            "and --png out, or `pip install 'dflash-metal[report]'`."
        ) from error
    made: dict[str, Any] = {}
    with styled("bench"):
        for name, (height, draw) in charts(record, profile).items():
            figure: Figure = Figure(figsize=(7.5, height), layout="constrained")
            draw(figure.subplots())
            file = io.BytesIO()
            save(figure, file, form)
            made[name] = file.getvalue().decode() if form == "svg" else file.getvalue()
    return made


def charts(record: Record, profile: Profile | None = None) -> dict[str, tuple[float, Draw]]:
    """By name: inches of height, and what draws it. Those that would be empty are left out."""
    found: dict[str, tuple[float, Draw]] = {}
    summary = record.summary
    if summary is not None and (rows := speed_rows(record)):
        found["speedup"] = (1.2 + 0.28 * len(rows), lambda axes: _speedups(axes, rows, summary.baseline))
    if summary is not None and any(arm.acceptance and arm.acceptance["histogram"] for arm in summary.arms.values()):
        found["acceptance"] = (3.2, lambda axes: _histogram(axes, summary.arms))
    if lines := over_context(record):
        found["context"] = (3.2, lambda axes: _context(axes, lines))
    if profile is not None and profile.cycles:
        found["cycle"] = (1.9, lambda axes: _phases(axes, profile))
    return found


def speed_rows(record: Record) -> list[tuple[str, float, float | None, float | None]]:
    """(label, speed-up with prefill, low, high): all prompts, then each category, of every arm; the worst is marked."""
    summary = record.summary
    if summary is None:
        return []
    rows = []
    for name, arm in summary.arms.items():
        for label, one in [("all", arm), *((category, arms[name]) for category, arms in summary.categories.items())]:
            found = one.speedup["request"] if one.speedup else None
            if found is not None:
                worst = " (worst)" if summary.worst_category.get(name) == label else ""
                rows.append((f"{name}: {label}{worst}", found.ratio, found.low, found.high))
    return rows


def over_context(record: Record) -> dict[str, list[tuple[float, float | None]]]:
    """By arm: (middle of a range of positions, tokens per second of all bursts within it, None without any).

    Of arms whose bursts are counted.
    """
    points = {name: [p for m in record.measured if m.arm == name for p in _bursts(m)] for name in record.run.arms}
    every = [context for bursts in points.values() for context, *_ in bursts]
    if not every or max(every) == min(every):
        return {}
    low, width = min(every), (max(every) - min(every)) / _BINS
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for name, bursts in points.items():
        sums = [[0.0, 0.0] for _ in range(_BINS)]
        for context, tokens, seconds in bursts:
            index = min(int((context - low) / width), _BINS - 1)
            sums[index][0] += tokens
            sums[index][1] += seconds
        if bursts:
            lines[name] = [(low + (i + 0.5) * width, n / s if s > 0 else None) for i, (n, s) in enumerate(sums)]
    return lines


def _bursts(measured: Measured) -> list[tuple[int, int, float]]:
    """(positions before it, tokens, seconds) of every burst behind the first."""
    cycles, first = measured.cycles, measured.first_burst[0]
    if cycles is None or cycles.emitted is None or measured.prefill_tokens not in (0, 1):
        return []
    emitted = cycles.emitted[1:] if measured.prefill_tokens == 0 else cycles.emitted
    context, found = measured.prompt_tokens + first, []
    for tokens, seconds in zip(emitted, measured.cycle_s, strict=True):
        found.append((context, tokens, seconds))
        context += tokens
    return found


def _speedups(axes: Axes, rows: Sequence[tuple[str, float, float | None, float | None]], baseline: str) -> None:
    for place, (_, ratio, low, high) in enumerate(rows):
        colour = FAINT if ratio < 1 else _colour(1, 3)
        axes.barh(place, ratio, color=colour, height=0.62)
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=INK, linewidth=1.2)
        axes.annotate(
            f"{ratio:.2f}x", (max(ratio, high or 0), place), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(f"speed-up over {baseline}, with prefill (line: 95%)", loc="left")
    axes.set_xlabel(f"time of {baseline} / time of the arm")


def _histogram(axes: Axes, arms: dict[str, ArmSummary]) -> None:
    drawn = {name: arm.acceptance["histogram"] for name, arm in arms.items() if arm.acceptance}
    drawn = {name: histogram for name, histogram in drawn.items() if histogram}
    width = 0.8 / len(drawn)
    for index, (name, histogram) in enumerate(drawn.items()):
        total = sum(histogram.values())
        places = [int(accepted) + (index - (len(drawn) - 1) / 2) * width for accepted in histogram]
        shares = [cycles / total for cycles in histogram.values()]
        axes.bar(places, shares, width, color=_colour(index, len(drawn)), label=name)
    axes.set_xticks(range(max(int(accepted) for histogram in drawn.values() for accepted in histogram) + 1))
    _legend(axes)
    axes.set_title("accepted drafts per cycle", loc="left")
    axes.set_xlabel("accepted drafts")
    axes.set_ylabel("share of cycles that drafted")


def _context(axes: Axes, lines: dict[str, list[tuple[float, float | None]]]) -> None:
    for index, (name, line) in enumerate(lines.items()):
        places, rates = [place for place, _ in line], [float("nan") if rate is None else rate for _, rate in line]
        axes.plot(places, rates, color=_colour(index, len(lines)), marker="o", markersize=3, label=name)
    axes.set_ylim(bottom=0)
    _legend(axes)
    axes.set_title("speed over context, generation only", loc="left")
    axes.set_xlabel("positions before (tokens)")
    axes.set_ylabel("tokens/s")


def _legend(axes: Axes) -> None:
    """Above, at the right of the title, where it covers nothing."""
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=6)


def _phases(axes: Axes, profile: Profile) -> None:
    times = [(phase, (profile.median_s(phase) or 0.0) * 1e3) for phase in PHASES]
    edges = [0.0]
    for phase, milliseconds in times:
        axes.barh(0, milliseconds, left=edges[-1], color=_PHASES[phase], label=f"{phase}, {milliseconds:.1f} ms")
        edges.append(edges[-1] + milliseconds)
    axes.set_yticks([])
    axes.legend(frameon=False, ncols=len(times), loc="upper center", bbox_to_anchor=(0.5, -0.35))
    axes.set_title("a cycle, from a profiled run (waits at each phase; no throughput)", loc="left")
    axes.set_xlabel("median (ms)")


def _colour(index: int, count: int) -> tuple[float, ...]:
    return colour_of(index, count, 0.8)
