"""The demo pair's numbers in the README: a table and two charts, made from the record of one run."""

from __future__ import annotations

from pathlib import Path

from .record import Record
from .summary import ArmSummary, Speedup, Summary
from .tables import ratio

CLOCKS = ("request", "decode")
PLOTS = {"speedup": "speed-up by category, with intervals", "acceptance": "drafts accepted per cycle"}
"""Charts that the README shows, by their names in charts.py."""


def table(record: Record) -> str:
    """Per category and in all, the worst marked: identity, acceptance, latency, and speed-ups on both clocks."""
    run, summary = record.run, whole_summary(record)
    machine, base = run.machine, summary.arms[summary.baseline]
    lines = [
        "| prompts | n | same tokens | tokens per cycle | drafts accepted | `dflash`, with prefill "
        "| generation only | `auto`, with prefill | generation only |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arms in [*summary.categories.items(), ("**all**", summary.arms)]:
        label = f"{name} (worst)" if name == summary.worst_category["dflash"] else name
        lines.append(_row(label, arms["dflash"], arms["auto"]))
    single = {arm: with_prefill(summary.arms[arm]) for arm in ("dflash", "auto")}
    spread = "; ".join(
        f"{name} {_seconds(arm.request_s.p50)} and {_seconds(arm.request_s.p95)}" for name, arm in summary.arms.items()
    )
    lines += [
        "",
        f"Times of `{summary.baseline}` (mlx_lm's own `stream_generate` on the same ids) divided by those of "
        "`--mode dflash` and of the default, `--mode auto`; in brackets 95 % intervals by resampling prompts. Single "
        f"prompts range from {single['dflash'].worst:.2f}x to {single['dflash'].best:.2f}x with `dflash` and from "
        f"{single['auto'].worst:.2f}x to {single['auto'].best:.2f}x with `auto`, with prefill. Median and 95th "
        f"percentile of a request, in seconds, of {base.request_s.n} requests each: {spread}. "
        f"Greedy, at most {run.limits.max_tokens} tokens, weights as they are computed with: target "
        f"{run.pair.target_weights}, draft {run.pair.draft_weights}; {machine['chip']}, {machine['cores']} cores, "
        f"{machine['system']}, mlx {machine['mlx']}, {machine['date']}. {machine['blas']} "
        f"`{run.command}`, [bench/results/demo.json](bench/results/demo.json).",
        "",
        *(f"![{what}](bench/results/demo-{name}.svg)\n" for name, what in PLOTS.items()),
    ]
    return "\n".join(lines).rstrip()


def _row(label: str, dflash: ArmSummary, auto: ArmSummary) -> str:
    accepted = dflash.acceptance or {}
    speeds = [ratio(speed) for arm in (dflash, auto) for speed in ((arm.speedup or {}).get(c) for c in CLOCKS)]
    same = min(dflash.same_tokens, auto.same_tokens)
    return (
        f"| {label} | {dflash.prompts} | {same} of {dflash.prompts} | {accepted['mean_acceptance_length']:.2f} "
        f"| {accepted['draft_acceptance_rate']:.0%} | " + " | ".join(speeds) + " |"
    )


def whole_summary(record: Record) -> Summary:
    """Raises SystemExit: the record is not of a whole run."""
    if record.summary is None or not record.complete:
        raise SystemExit("bench/results/demo.json is not the record of a whole run. Run it again.")
    return record.summary


def with_prefill(arm: ArmSummary) -> Speedup:
    """Raises SystemExit: the arm has none, as the baseline."""
    found = (arm.speedup or {}).get("request")
    if found is None:
        raise SystemExit(f"bench/results/demo.json has no speed-up of {arm.arm}. Run it with all arms.")
    return found


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def draw(record: Record, folder: Path) -> None:
    """Write the charts as SVG beside the record. Raises BenchError: matplotlib is not here."""
    from .charts import svgs

    drawn = svgs(record)
    for name in PLOTS:
        (folder / f"demo-{name}.svg").write_text(drawn[name] + "\n", encoding="utf-8")
