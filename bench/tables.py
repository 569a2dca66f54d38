"""A record as tables: every number with its unit and what it means, the worst row always among them.

A table is rows of text, so that a terminal, Markdown and HTML show the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .record import Record
from .summary import ArmSummary, Speedup, Spread, Summary

if TYPE_CHECKING:
    from rich.console import Group

UNKNOWN = "-"
WIDE = 240  # letters, where there is no terminal


@dataclass(frozen=True)
class Table:
    """columns: headings, the unit in brackets. notes: what the columns mean. rows: one text per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _row(self.columns), "|" + "---|" * len(self.columns), *map(_row, self.rows)]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)])

    @property
    def width(self) -> int:
        """Letters of a line, if nothing is folded."""
        return sum(max(map(len, column)) + 3 for column in zip(self.columns, *self.rows, strict=True)) + 1

    def upright(self) -> Table:
        """Columns as rows, for a terminal that is not as wide."""
        first, *others = zip(self.columns, *self.rows, strict=True)
        return Table(self.title, first, tuple(others), self.notes)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def tables(record: Record) -> list[Table]:
    """Of a record with a summary; those that say nothing about it are left out."""
    summary = record.summary
    if summary is None or not summary.arms:
        return []
    made = [speed_table(summary), rate_table(record, summary), acceptance_table(summary), answer_table(summary)]
    return [table for table in [*made, pass_table(record)] if table.rows]


def speed_table(summary: Summary) -> Table:
    """Speed-ups by category and arm; the whole, the worst category and the longest prompt at the end."""
    rows: list[tuple[str, ...]] = []
    for category, arms in summary.categories.items():
        rows += _speed_rows(category, arms, [n for n, worst in summary.worst_category.items() if worst == category])
    rows += _speed_rows("all prompts", summary.arms)
    if summary.prompts > 1 and summary.longest_prompt:
        rows += _speed_rows(
            f"longest: {summary.longest_prompt}, {summary.longest_prompt_tokens} tokens", summary.longest
        )
    base = summary.baseline
    return Table(
        f"Speed-up over `{base}`",
        (
            "prompts",
            "arm",
            "same text",
            "with prefill (x)",
            "generation only (x)",
            "worst prompt (x)",
            "best prompt (x)",
        ),
        tuple(rows),
        (
            f"speed-up: sum of `{base}`'s times over sum of the arm's, over prompts with the same text; per token "
            "where marked so, since no text is the same, or the first burst has several tokens",
            "with prefill: from the request to the last token; generation only: from the first token to the last, the "
            "draft's work on the prompt included; in brackets 95% by resampling prompts",
            "worst and best: of single prompts, with prefill; (worst) marks the arm's slowest category",
        ),
    )


def _speed_rows(label: str, arms: dict[str, ArmSummary], worst: Sequence[str] = ()) -> Iterable[tuple[str, ...]]:
    for name, arm in arms.items():
        if arm.speedup is None:
            continue
        with_prefill = arm.speedup["request"]
        yield (
            f"{label} (worst)" if name in worst else label,
            name,
            f"{arm.same_tokens} of {arm.prompts}",
            ratio(with_prefill),
            ratio(arm.speedup["decode"]),
            UNKNOWN if with_prefill is None else f"{with_prefill.worst:.2f}",
            UNKNOWN if with_prefill is None else f"{with_prefill.best:.2f}",
        )


def ratio(speedup: Speedup | None) -> str:
    """1.52 [1.31, 1.77], and the basis where it is not total time."""
    if speedup is None:
        return UNKNOWN
    interval = "" if speedup.low is None else f" [{speedup.low:.2f}, {speedup.high:.2f}]"
    return f"{speedup.ratio:.2f}{interval}" + ("" if speedup.basis == "total time" else " per token")


def rate_table(record: Record, summary: Summary) -> Table:
    rows = tuple(
        (
            name,
            str(arm.requests),
            number(arm.decode_tps),
            number(arm.request_tps),
            number(arm.mlx_lm_tps),
            *(percentiles(spread) for spread in (arm.ttft_s, arm.request_s, arm.cycle_s)),
            number(arm.peak_memory_gb, 2),
        )
        for name, arm in summary.arms.items()
    )
    columns = ("arm", "requests", "generation only (tokens/s)", "with prefill (tokens/s)", "mlx_lm's rate (tokens/s)")
    times = ("first token p50, p95 (ms)", "request p50, p95 (ms)", "cycle p50, p95 (ms)", "peak memory (GB)")
    bursts = any(each.mode == "server" for each in record.measured)
    return Table(
        "Rates and latencies",
        (*columns, *times),
        rows,
        (
            "generation only: tokens behind the first over the time from the first to the last; with prefill: tokens "
            "over the time from the request; mlx_lm's rate: tokens over the time from first to last",
            "p50, p95: percentiles over requests (n), of cycles over cycles; - below 20",
            "cycle: from one burst of tokens to the next"
            + (", as the network delivered them; 2 ms and less apart is one burst" if bursts else ""),
        ),
    )


def acceptance_table(summary: Summary) -> Table:
    rows = []
    for name, arm in summary.arms.items():
        found = arm.acceptance
        if found is None:
            continue
        histogram = ", ".join(f"{accepted}: {cycles}" for accepted, cycles in found["histogram"].items())
        positions = ", ".join(number(share, 2) for share in found["position_conditional"])
        rows.append(
            (
                name,
                number(found["mean_acceptance_length"], 2),
                number(arm.of_requests, 2),
                share(found["draft_acceptance_rate"]),
                share(found["accepted_share"]),
                share(found["cycle_efficiency"]),
                f"{found['cycles']} ({found['plain_steps']})",
                histogram or UNKNOWN,
                positions or UNKNOWN,
            )
        )
    return Table(
        "Acceptance: four numbers that go by this name, and what they are made of",
        (
            "arm",
            "mean acceptance length (tokens/cycle)",
            "mean of requests (tokens/cycle)",
            "draft acceptance rate",
            "accepted share of the answer",
            "cycle efficiency",
            "cycles (without drafts)",
            "accepted: cycles",
            "by position",
        ),
        tuple(rows),
        (
            "R cycles that drafted, P drafts, A accepted, N tokens of all cycles: length 1 + A/R, rate A/P, share A/N, "
            "efficiency (A + R)/(P + R)",
            "by position: share of the i-th drafts accepted where all before them were",
        ),
    )


def answer_table(summary: Summary) -> Table:
    rows = tuple(
        (
            name,
            f"{arm.same_tokens} of {arm.prompts}",
            share(arm.common_share),
            str(arm.near_ties),
            str(arm.bugs),
            f"{arm.same_answers} of {arm.answers}",
            f"{arm.right} of {arm.right_known}",
            f"{arm.lengths.shortest}, {arm.lengths.median:g}, {arm.lengths.longest}",
            str(arm.lengths.at_limit),
        )
        for name, arm in summary.arms.items()
    )
    columns = ("arm", "same text", "common beginning", "near-ties", "bugs", "same answer", "right answer")
    return Table(
        f"Answers beside `{summary.baseline}`'s",
        (*columns, "shortest, median, longest (tokens)", "ended by the budget"),
        rows,
        (
            "common beginning: mean share of the longer answer; near-tie: the first difference is smaller than what "
            "rounding moves; answers and whether they are right are counted where they are known",
        ),
    )


def pass_table(record: Record) -> Table:
    """Throughput of requests at the same time, over all passes of an arm."""
    rows = []
    for name in record.run.arms:
        passes = [each for each in record.passes if each.arm == name]
        if not passes:
            continue
        tokens, wall = sum(each.generated for each in passes), sum(each.wall_s for each in passes)
        cycles, accepted = sum(each.cycles or 0 for each in passes), sum(each.accepted or 0 for each in passes)
        drafted = sum(each.drafted or 0 for each in passes)
        rows.append(
            (
                name,
                str(passes[0].concurrency),
                str(sum(each.requests for each in passes)),
                number(tokens / wall if wall else None),
                number(1 + accepted / cycles if cycles else None, 2),
                share(accepted / drafted if drafted else None),
            )
        )
    columns = ("arm", "at a time", "requests", "throughput (tokens/s)", "mean acceptance length (tokens/cycle)")
    return Table(
        "Requests at the same time",
        (*columns, "draft acceptance rate"),
        tuple(rows),
        (
            "throughput: tokens of all requests over the time of the passes, prefill included; acceptance: by the "
            "server's counters over the passes; latencies above are those among other requests",
        ),
    )


def rich_group(shown: Sequence[Table], lines: Sequence[str], width: int = WIDE) -> Group:
    """For a terminal so many letters wide: a table that does not fit stands upright, if that is narrower."""
    from rich.console import Group
    from rich.table import Table as Rich
    from rich.text import Text

    parts: list[Any] = [Text(line) for line in lines]
    for table in shown:
        if table.width > width and table.upright().width < table.width:
            table = table.upright()
        made = Rich(title=Text(table.title, style="bold"), title_justify="left", show_lines=False)
        for index, column in enumerate(table.columns):
            made.add_column(Text(column), justify="left" if index < 2 else "right", overflow="fold")
        for row in table.rows:
            made.add_row(*(Text(cell) for cell in row))
        parts += [Text(""), made, *(Text(f"  {note}", style="dim") for note in table.notes)]
    return Group(*parts)


def number(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def percentiles(spread: Spread) -> str:
    """Milliseconds."""
    if spread.p50 is None or spread.p95 is None:
        return f"{UNKNOWN} (n {spread.n})"
    return f"{spread.p50 * 1e3:.0f}, {spread.p95 * 1e3:.0f} (n {spread.n})"
