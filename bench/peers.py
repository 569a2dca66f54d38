"""Results of other programs, in this package's definitions, each with the number that it was made from.

With R cycles, P drafts, A accepted tokens, N tokens of cycles, and K drafts in every cycle: the mean acceptance length
is 1 + A/R = 1/(1 - A/N), and A/P = (length - 1)/K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .form import BenchError
from .record import Record
from .tables import Table, number, share


@dataclass(frozen=True)
class Number:
    """value: in our definition and unit; theirs: the number and name it had; how: the conversion, "" if none."""

    value: float
    theirs: str
    how: str = ""


@dataclass(frozen=True)
class Peer:
    """One arm of one file. numbers: by our names; other: what has no counterpart here, as it was called."""

    source: str
    file: str
    arm: str
    conditions: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)


def of_length(length: float, theirs: str, how: str = "", drafts: int | None = None) -> dict[str, Number]:
    """What follows from a mean acceptance length; drafts: of every cycle, if it is known."""
    found = {"mean_acceptance_length": Number(length, theirs, how)}
    if length >= 1:
        found["accepted_share"] = Number((length - 1) / length, theirs, f"{how + '; ' if how else ''}1 - 1/length")
    if drafts:
        every = f"(length - 1)/{drafts}, if every cycle drafts {drafts}"
        found["draft_acceptance_rate"] = Number((length - 1) / drafts, theirs, every)
    return found


def of_share(accepted: float, theirs: str, drafts: int | None = None) -> dict[str, Number]:
    """What follows from accepted/generated, below 1."""
    if not 0 <= accepted < 1:
        raise BenchError(f"{theirs} cannot be a share of the answer's tokens: it has to be at least 0 and below 1.")
    length = of_length(1 / (1 - accepted), theirs, "1/(1 - share)", drafts)
    return {**length, "accepted_share": Number(accepted, theirs)}


def own(file: str, record: Record) -> list[Peer]:
    if record.summary is None:
        return []
    return [
        Peer("dflash-bench", file, name, _conditions(record), {k: Number(v, "ours") for k, v in _ours(arm).items()})
        for name, arm in record.summary.arms.items()
    ]


def _ours(arm: Any) -> dict[str, float]:
    """By name, those of an `ArmSummary` that are known. Its percentiles of first tokens are one only from 20 on."""
    found = {name: getattr(arm, name) for name in ("mlx_lm_tps", "decode_tps", "request_tps", "peak_memory_gb")}
    found |= {"ttft_s": arm.ttft_s.p50}
    if arm.acceptance is not None:
        names = ("mean_acceptance_length", "draft_acceptance_rate", "accepted_share")
        found |= {name: arm.acceptance[name] for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _conditions(record: Record) -> dict[str, str]:
    card, run = record.run.machine, record.run
    known = {"chip": card.get("chip"), "memory_gb": card.get("memory_gb"), "target_model": run.pair.target}
    known |= {"draft_model": run.pair.draft, "max_new_tokens": run.limits.max_tokens, "prompts": len(record.prompts)}
    return {name: str(value) for name, value in known.items() if value is not None}


_SHOWN: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("decode_tps", "generation only (tokens/s)", number),
    ("request_tps", "with prefill (tokens/s)", number),
    ("mlx_lm_tps", "mlx_lm's rate (tokens/s)", number),
    ("ttft_s", "first token (ms)", lambda seconds: f"{seconds * 1e3:.0f}"),
    ("mean_acceptance_length", "mean acceptance length (tokens/cycle)", lambda value: number(value, 2)),
    ("draft_acceptance_rate", "draft acceptance rate", share),
    ("accepted_share", "accepted share of the answer", share),
    ("peak_memory_gb", "peak memory (GB)", lambda value: number(value, 2)),
)


def peer_table(peers: Sequence[Peer], ours: Sequence[Record] = ()) -> Table:
    """Others' arms, and behind them ours, in the same definitions. Conditions differ, and stand below."""
    every = [*peers, *(peer for record in ours for peer in own("this record", record))]
    rows = tuple(
        (f"{peer.source}: {peer.file}", peer.arm, *(_cell(peer, name, form) for name, _, form in _SHOWN))
        for peer in every
    )
    notes = ["not measured under the same conditions: only what does not depend on the machine can be compared"]
    for peer in every:
        converted = dict.fromkeys(
            f"{_HEADINGS[name]} from {found.theirs}{f' ({found.how})' if found.how else ''}"
            for name, found in peer.numbers.items()
            if found.theirs != "ours"
        )
        other = [f"{name} = {value:g}, which has no counterpart here" for name, value in peer.other.items()]
        said = [*converted, *other]
        notes += [f"{peer.file}, {peer.arm}: {'; '.join(said)}"] if said else []
    for file, conditions in {peer.file: peer.conditions for peer in every if peer.conditions}.items():
        notes.append(f"{file}: " + ", ".join(f"{name} {value}" for name, value in conditions.items()))
    headings = tuple(heading for _, heading, _ in _SHOWN)
    return Table("Results of other programs, in these definitions", ("from", "arm", *headings), rows, tuple(notes))


_HEADINGS = {name: heading.partition(" (")[0] for name, heading, _ in _SHOWN}


def _cell(peer: Peer, name: str, form: Callable[[float], str]) -> str:
    found = peer.numbers.get(name)
    return "-" if found is None else form(found.value)
