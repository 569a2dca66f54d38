"""Numbers that others published, beside ours, with what differs between their conditions and ours.

They stand in presets.toml with their sources. A number is compared with ours by the same definition: `MEASURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.pairing.registry import base_name, is_copy

from .form import read
from .record import Record
from .summary import ArmSummary
from .tables import UNKNOWN, Table


@dataclass(frozen=True)
class Conditions:
    """What a published number was measured under, as far as it was stated.

    engine: what ran, which machine. block, drafting ("chain", "tree of 22 nodes"), n: prompts. baseline: what it is
    compared with. averaging: what rates and speed-ups over several prompts are means of. The others are as in
    `Settings` and `record.Pair`.
    """

    source: str = ""
    engine: str = ""
    machine: str = ""
    baseline: str | None = None
    averaging: str | None = None
    target: str | None = None
    weights: str | None = None
    draft_weights: str | None = None
    block: int | None = None
    drafting: str = "chain"
    prompts: str | None = None
    n: int | None = None
    template: str | None = None
    thinking: bool | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Published:
    """A row. category: of our prompts; part: of the preset; None is all."""

    conditions: Conditions
    numbers: dict[str, float]
    category: str | None = None
    part: str | None = None


@dataclass(frozen=True)
class Beside:
    """A published number and ours. measure: by the names of `MEASURES`; ours: None where it is not known.

    differs: what is not the same, in words; empty where everything stated is.
    """

    source: str
    category: str | None
    measure: str
    published: float
    arm: str
    ours: float | None
    differs: tuple[str, ...]


_BASELINES = {"stock": "mlx_lm"}
_AVERAGING = "sums over sums"
_NOTES = (
    "tokens per cycle: with the target's own token; of requests: their mean, each counted alike",
    "decode: generation only, from the first token to the last; request: with prefill; mlx lm tps: by mlx_lm's formula",
    "what nobody stated may differ too",
)
Measure = Callable[[ArmSummary, ArmSummary], float | None]


def _speedup(clock: str) -> Measure:
    def read(arm: ArmSummary, base: ArmSummary) -> float | None:
        found = (arm.speedup or {}).get(clock)
        return found.ratio if found is not None else None

    return read


def _accepted(name: str) -> Measure:
    return lambda arm, base: (arm.acceptance or {}).get(name)


# Of an arm and the baseline. What others call "acceptance" is one of these, by the definition that they gave.
MEASURES: dict[str, Measure] = {
    "tokens_per_cycle": _accepted("mean_acceptance_length"),
    "tokens_per_cycle_of_requests": lambda arm, base: arm.of_requests,  # each request counts alike
    "draft_acceptance_rate": _accepted("draft_acceptance_rate"),
    "accepted_share": _accepted("accepted_share"),
    "decode_speedup": _speedup("decode"),
    "request_speedup": _speedup("request"),
    "decode_tps": lambda arm, base: arm.decode_tps,
    "baseline_decode_tps": lambda arm, base: base.decode_tps,
    "mlx_lm_tps": lambda arm, base: arm.mlx_lm_tps,
    "baseline_mlx_lm_tps": lambda arm, base: base.mlx_lm_tps,
}


def published(rows: Sequence[Mapping[str, Any]], common: Mapping[str, Any], where: str) -> tuple[Published, ...]:
    """Of a preset's table. common: conditions of all rows that do not say otherwise."""
    made = []
    for row in rows:
        own = {key: value for key, value in row.items() if key not in ("category", "part", "numbers")}
        conditions = read(Conditions, {**common, **own}, f"{where}.published")
        numbers = {measure: float(value) for measure, value in row["numbers"].items()}
        made.append(Published(conditions, numbers, row.get("category"), row.get("part")))
    return tuple(made)


def beside(record: Record, rows: Sequence[Published]) -> list[Beside]:
    """Every number that was published for what the record runs: of its target if there are any, else of all."""
    part = (record.run.preset or "").partition("/")[2]
    here = [row for row in rows if row.part in (None, part)]
    own = [row for row in here if _is_target(record.run.pair.target, row.conditions.target)]
    return [each for row in own or here for each in _row(record, row)]


def differing(record: Record, rows: Sequence[Published]) -> Record:
    """The record, with what differs between it and the published runs among its conditions."""
    differences = dict.fromkeys(text for row in beside(record, rows) for text in row.differs)
    return replace(record, run=replace(record.run, conditions_differ=tuple(differences)))


def _row(record: Record, row: Published) -> Iterator[Beside]:
    summary = record.summary
    if summary is None:
        return
    arms = summary.categories.get(row.category, summary.arms) if row.category else summary.arms
    drafting = {name: block for name in arms if name.startswith("dflash") and (block := _block(record, name))}
    if not drafting:
        return
    name = next((name for name, block in drafting.items() if block == row.conditions.block), next(iter(drafting)))
    differs = tuple(_differences(record, row, drafting[name]))
    for measure, value in row.numbers.items():
        ours = MEASURES[measure](arms[name], arms[summary.baseline])
        yield Beside(row.conditions.source, row.category, measure, value, name, ours, differs)


def _block(record: Record, arm: str) -> int | None:
    return next((each.block_size for each in record.measured if each.arm == arm), None)


def _is_target(ours: str, theirs: str | None) -> bool:
    return theirs is not None and is_copy(base_name(ours), theirs)


def _differences(record: Record, row: Published, block: int) -> Iterator[str]:
    """What was stated and is not as here. What was not stated may differ too."""
    theirs, run, limits = row.conditions, record.run, record.run.limits
    prompts, count = _asked(record, row.category)
    machine = run.machine.get("chip")
    stated: list[tuple[str, object, object, bool]] = [
        ("model", theirs.target, base_name(run.pair.target), _is_target(run.pair.target, theirs.target)),
        ("weights", theirs.weights, run.pair.target_weights, _begins(run.pair.target_weights, theirs.weights)),
        ("draft", theirs.draft_weights, run.pair.draft_weights, _begins(run.pair.draft_weights, theirs.draft_weights)),
        ("backend", theirs.engine, "MLX", theirs.engine == "MLX"),
        ("machine", theirs.machine, machine, theirs.machine in (machine or "")),
        ("baseline", theirs.baseline, _BASELINES.get(record.baseline, record.baseline), False),
        ("rates and speed-ups", theirs.averaging, _AVERAGING, False),
        ("block", theirs.block, block, False),
        ("drafting", theirs.drafting, "chain", False),
        ("prompts", theirs.prompts or row.category, prompts, False),
        ("n", theirs.n, count, False),
        ("template", theirs.template, run.template, False),
        ("thinking", theirs.thinking, run.thinking, False),
        ("max tokens", theirs.max_tokens, limits.max_tokens, False),
        ("ignoring ends", theirs.ignore_eos, limits.ignore_eos, False),
        ("temperature", theirs.temperature, limits.temperature, False),
    ]
    for name, their, ours, same in stated:
        if their not in (None, "") and not same and their != ours:
            yield f"{name}: {_said(their)}, here {_said(ours)}"
    if not record.complete:
        yield "the run here is not complete"


def _asked(record: Record, category: str | None) -> tuple[str, int]:
    """Which prompts ours are of, and how many: turns of one conversation are one."""
    left_out = record.summary.left_out if record.summary else ()
    done = [each for each in record.prompts if each.name not in left_out]
    own = [each for each in done if each.category == category]
    names = {each.name.partition("/")[0] for each in own or done}
    return (category if own and category else record.run.prompt_set or "unknown"), len(names)


def _begins(ours: str | None, theirs: str | None) -> bool:
    """ "4 bits, groups of 64" is "4 bits"."""
    return ours is not None and theirs is not None and (ours == theirs or ours.startswith(f"{theirs},"))


def _said(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "on", False: "off"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def published_table(rows: Sequence[Beside]) -> Table:
    """For a report. Never without what differs."""
    cells = [
        (
            row.category or "all",
            row.measure.replace("_", " "),
            f"{row.published:g}",
            UNKNOWN if row.ours is None else f"{row.ours:.4g}",
            row.arm,
            row.source,
            "; ".join(row.differs) or "nothing that was stated",
        )
        for row in rows
    ]
    columns = ("prompts", "number", "published", "here", "arm", "source", "what differs (theirs, here)")
    return Table("Published numbers beside these", columns, tuple(cells), _NOTES)
