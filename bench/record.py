"""The record of a run: everything that was measured, as one JSON object. Its keys are explained in README.md here.

A record is made by `measure`, whole or as far as it came, and its summary by `statistics.summarise`. What follows from
the raw values ("derived", "summary") is written for readers of the file and worked out again when it is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dflash_mlx.files import whole_file

from .acceptance import Acceptance
from .form import BenchError as BenchError
from .form import plain, read
from .measured import Cycles as Cycles
from .measured import Measured as Measured
from .measured import Reported as Reported
from .measured import ids_sha256 as ids_sha256
from .measured import percentile
from .summary import Summary

SCHEMA = 1
KIND = "dflash-bench"
Task = Literal["text", "boxed", "number", "exec", "json"]


@dataclass(frozen=True)
class Prompt:
    """What every arm is given: the same ids.

    task: how answers are compared (`answers`); expected: the right answer, if known; tests: code for "exec", which
    fails by an exception when it is run behind the answer's.
    """

    name: str
    category: str
    ids: tuple[int, ...]
    text: str = ""
    task: Task = "text"
    expected: str | None = None
    tests: str | None = None

    @property
    def asked(self) -> Asked:
        return Asked(self.name, self.category, self.task, len(self.ids), ids_sha256(self.ids), self.text, self.expected)


@dataclass(frozen=True)
class Asked:
    """A prompt as it stands in a record."""

    name: str
    category: str
    task: Task
    tokens: int
    sha256: str
    text: str = ""
    expected: str | None = None


@dataclass(frozen=True)
class Limits:
    """What ends a request and how tokens are chosen, the same for all arms. temperature 0 is greedy."""

    max_tokens: int = 256
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    prefill_step_size: int = 2048

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "prefill_step_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` has to be 1 or more, got {getattr(self, name)}.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` has to be 0 or more and finite, got {self.temperature}.")
        if not self.greedy and self.seed is None:
            raise ValueError(f"`seed` has to be given at temperature {self.temperature}: a run has to be repeatable.")


@dataclass(frozen=True)
class Pair:
    """The models by name and revision. *_weights: "bfloat16", "4 bits, groups of 64", ..."""

    target: str
    target_revision: str | None = None
    target_weights: str | None = None
    draft: str | None = None
    draft_revision: str | None = None
    draft_weights: str | None = None
    sequential_draft: str | None = None
    sequential_draft_revision: str | None = None


@dataclass(frozen=True)
class Run:
    """What was run and on what.

    prompt_set: its name; template: "chat", "raw", ...; thinking: on, off, or None for a model without.
    arms: name -> what it is, in words, settings included; the first is the baseline.
    pairs: of passes, A B and B A. warmup_tokens: at most, per warm-up.
    machine: `machine.card()`; conditions: `machine.conditions()` by when, "before" and "after".
    conditions_differ: what is not as in the run that this one is held against, in words.
    """

    command: str
    pair: Pair
    limits: Limits
    arms: dict[str, str]
    machine: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, dict[str, Any]] = field(default_factory=dict)
    preset: str | None = None
    prompt_set: str | None = None
    prompt_seed: int | None = None
    template: str | None = None
    thinking: bool | None = None
    pairs: int = 1
    warmup_tokens: int = 32
    conditions_differ: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """One prompt: an arm's answers against the baseline's first one; of several differences the worst.

    common_prefix: equal tokens at the beginning; common_share: of the longer answer.
    divergence: "identical", "near-tie" or "bug" (`dflash_mlx.divergence`), None where rounding was not examined.
    index, gap, rounding: where the first difference is, the gap in log-probability between the two tokens, and how far
        blocks move them there.
    answers: how many different ones the arm gave. answer: what was extracted of the first; answer_match, right: whether
        it is the baseline's, and whether it is right; None where that is not known.
    """

    prompt: str
    arm: str
    tokens_match: bool
    common_prefix: int
    common_share: float
    divergence: Literal["identical", "near-tie", "bug"] | None
    index: int | None
    gap: float | None
    rounding: float | None
    explanation: str | None
    answers: int
    answer: str | None
    answer_match: bool | None
    right: bool | None


@dataclass(frozen=True)
class Asking:
    """One request in the order of the run. kind: warm-ups are discarded; closing repeats the first measured one."""

    kind: Literal["warm-up", "measured", "closing"]
    prompt: str
    arm: str
    trial: int = 0


@dataclass(frozen=True)
class Pass:
    """All prompts once, `concurrency` requests at a time. wall_s: from the first request to the last answer.

    cycles, drafted, accepted: of all requests together, where a server's counters say so.
    """

    arm: str
    concurrency: int
    requests: int
    generated: int
    wall_s: float
    cycles: int | None = None
    drafted: int | None = None
    accepted: int | None = None


@dataclass
class Record:
    """complete: whether every request was made; ended: if not, why. passes: only of requests at the same time."""

    run: Run
    prompts: list[Asked] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    order: list[Asking] = field(default_factory=list)
    closing: Measured | None = None
    complete: bool = False
    ended: str | None = None
    summary: Summary | None = None
    passes: list[Pass] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        return next(iter(self.run.arms))

    def of(self, prompt: str, arm: str) -> list[Measured]:
        """Trials in their order."""
        return [each for each in self.measured if each.prompt == prompt and each.arm == arm]


def derived(measured: Measured) -> dict[str, Any]:
    """The numbers by name that follow from one request."""
    accepted, gaps = Acceptance.of(measured), measured.cycle_s
    return {
        "ttft_s": measured.ttft_s,
        "decode_s": measured.decode_s,
        "decode_tps": measured.decode_tps,
        "mlx_lm_tps": measured.mlx_lm_tps,
        "request_tps": measured.request_tps,
        "prompt_tps": measured.prompt_tps,
        "cycle_s": {"n": len(gaps), "p50": percentile(gaps, 50), "p95": percentile(gaps, 95)},
        "acceptance": None if accepted is None else accepted.as_json(),
    }


def to_json(record: Record, **more: Any) -> dict[str, Any]:
    """The record as plain values. Answers stand once each, by their hash. more: keys for readers of the file."""
    every = [*record.measured, *([record.closing] if record.closing else [])]
    body = plain(record)
    for each, row in zip(every, [*body["measured"], body["closing"]], strict=False):
        del row["tokens"], row["text"]
        row["derived"] = plain(derived(each))
    answers = {each.output_sha256: {"tokens": list(each.tokens), "text": each.text} for each in every}
    return {"kind": KIND, "schema": SCHEMA, **body, **plain(more), "answers": answers}


def from_json(value: Any) -> Record:
    """The inverse of `to_json`.

    Raises:
        BenchError: it is no record, of a newer schema, or damaged.
    """
    if not isinstance(value, dict) or value.get("kind") != KIND:
        kind = value.get("kind") if isinstance(value, dict) else type(value).__name__
        raise BenchError(f"This is no record of a benchmark: `kind` is {kind!r} and not {KIND!r}. Give another file.")
    schema = value.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise BenchError(
            f"The record has schema {schema!r}, and this version of dflash_mlx reads 1 to {SCHEMA}. What it does not "
            "know it would show wrongly: read the record with the version that wrote it, or a newer one."
        )
    record, answers = read(Record, value), value.get("answers", {})

    def with_answer(each: Measured) -> Measured:
        if each.output_sha256 not in answers:
            return each
        answer = answers[each.output_sha256]
        return replace(each, tokens=tuple(answer["tokens"]), text=answer["text"])

    record.measured = [with_answer(each) for each in record.measured]
    record.closing = None if record.closing is None else with_answer(record.closing)
    return record


def save(record: Record, path: Path, **more: Any) -> None:
    """Write the record, whole or not at all. more: as in `to_json`."""
    text = json.dumps(to_json(record, **more), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    with whole_file(path) as part:
        part.write_text(text.replace('},{"prompt"', '},\n{"prompt"') + "\n", "utf-8")


def load(path: Path) -> Record:
    """Raises BenchError: no record, a newer schema, or damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BenchError(f"{path} is not JSON ({error}). Give the file that the benchmark wrote.") from error
    return from_json(value)
