"""What the tests of training share: a small data set of a tiny target, recipes for it, runs and what came of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.files import save_weights, whole_folder
from dflash_mlx.targets import Target, target_for
from dflash_mlx.training.checkpoint import Checkpoints, State, by_name
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.generate import Settings, generate
from dflash_mlx.training.hooks import Hooks, Snapshot
from dflash_mlx.training.prepare import Prepared, Task, begin, prepare
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.target_identity import identity
from dflash_mlx.training.trainer import train
from tests.conftest import byte_tokenizer
from tests.families import tiny

TAPS = (0, 2)
TOP = 4
RECIPE = Recipe(
    layers=2,
    block_size=5,
    taps=TAPS,
    steps=4,
    sequences=3,
    anchors=6,
    longest=64,
    rank=8,
    candidates=4,
    warm_up=0.25,
    evaluate_every=2,
    checkpoint_every=1,
)


def target() -> Target:
    return target_for(tiny("llama"))


def answers(folder: Path, *, features: bool = True, prompts: int = 12) -> Dataset:
    """Greedy and drawn answers of different lengths: some ids end one."""
    tokenizer = byte_tokenizer(range(24))
    asked = [Prompt("say " + chr(97 + n) * (1 + n % 5), topic=f"{n}", held_out=n == 7) for n in range(prompts)]
    settings = Settings(seed=1, samples=2, batch=8, max_tokens=24, top=TOP, features=TAPS if features else ())
    named = identity("tiny", None, tiny("llama"))
    return generate(tiny("llama"), tokenizer, asked, folder, settings, target=named, source="test")


def prepared(dataset: Dataset, recipe: Recipe = RECIPE) -> Prepared:
    task = Task(target(), byte_tokenizer(), dataset, recipe)
    return prepare(task, begin(task))


@dataclass(frozen=True)
class Scripted:
    """An evaluation that finds what it is told."""

    step: int
    score: float

    def record(self, *, best: bool) -> dict[str, Any]:
        return {"kind": "evaluation", "step": self.step, "tokens_per_cycle": self.score, "best": best}


def export(snapshot: Snapshot, folder: Path) -> None:
    """The weights, and the step that they are of."""
    with whole_folder(folder, replace=True) as scratch:
        save_weights(scratch / "model.safetensors", by_name(snapshot.draft.parameters()))
        (scratch / "step").write_text(str(snapshot.step))


@dataclass
class Seen:
    """What hooks were called with. at: raised, or called, when a record of this kind and step is told."""

    records: list[Mapping[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    at: dict[tuple[str, int], Callable[[], None]] = field(default_factory=dict)

    def progress(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        self.at.get((record["kind"], record.get("step", -1)), lambda: None)()

    def hooks(self, scores: Mapping[int, float] | None = None) -> Hooks:
        """scores: of the evaluations, by step; None evaluates nothing."""

        def evaluate(snapshot: Snapshot) -> Scripted:
            self.at.get(("in evaluation", snapshot.step), lambda: None)()
            return Scripted(snapshot.step, (scores or {}).get(snapshot.step, 0.0))

        return Hooks(export, None if scores is None else evaluate, self.progress, self.lines.append)


def learn(dataset: Dataset, folder: Path, recipe: Recipe = RECIPE, seen: Seen | None = None, **rest: Any) -> Path:
    """rest: `scores` of the evaluations, and more for `train`."""
    scores = rest.pop("scores", None)
    hooks = (seen or Seen()).hooks(scores)
    return train(target(), byte_tokenizer(), dataset, recipe, folder, hooks=hooks, **rest)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Of the log, without the time that they took."""
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in each.items() if k != "seconds"} for each in found if each["kind"] == kind]


def assert_same_bits(one: Path, other: Path) -> None:
    """Of two runs: the finished drafts, the best ones, weights and moments of the last checkpoints, and the logs."""
    for name in ("draft/model.safetensors", "best/model.safetensors", "checkpoint/best.safetensors"):
        assert (one / name).exists() == (other / name).exists(), name
        if (one / name).exists():
            assert_equal(mx.load(str(one / name)), mx.load(str(other / name)))
    first, second = (Checkpoints(run / "checkpoint").load() for run in (one, other))
    assert first is not None and second is not None
    assert_equal(first.draft, second.draft)
    assert_equal(first.optimiser, second.optimiser)
    assert _reached(first.state) == _reached(second.state)
    for kind in ("step", "evaluation"):
        assert lines(one, kind) == lines(other, kind)


def _reached(state: State) -> tuple[Any, ...]:
    """Where a training is, without the time that it took."""
    best = state.best and state.best | {"record": {**state.best["record"], "seconds": None}}
    return state.step, state.blocks, best, state.evaluated


def assert_equal(one: Mapping[str, mx.array], other: Mapping[str, mx.array]) -> None:
    assert one.keys() == other.keys() and len(one)
    for name, value in one.items():
        assert value.dtype == other[name].dtype and mx.array_equal(value, other[name]), name


def losses(folder: Path) -> list[float]:
    found = [record["loss"] for record in lines(folder, "step")]
    assert found and all(math.isfinite(loss) for loss in found)
    return found
