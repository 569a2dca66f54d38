"""What a training is said to need is what it takes, and too much is refused before anything is done."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.training import memory
from dflash_mlx.training.answers import Answers
from dflash_mlx.training.decoder import MlxDecoder
from dflash_mlx.training.memory import Need, TooLarge, disk_for_features, estimate, memory_here
from dflash_mlx.training.optimise import Optimiser, Sum
from dflash_mlx.training.step import Step
from tests.training.runs import RECIPE, TAPS, answers, learn, prepared, target

SHAPES = {
    "weights": {"layers": 4, "sequences": 1, "anchors": 2},
    "accumulated": {"layers": 4, "sequences": 2, "anchors": 6, "accumulate": 3},
    "rows": {"layers": 3, "sequences": 12, "anchors": 16, "block_size": 16},
    "packed": {"sequences": 12, "anchors": 16, "pack": 256},
    "bfloat16": {"layers": 3, "sequences": 12, "anchors": 16, "block_size": 16, "precision": "bfloat16"},
    "dflash2": {"second": True, "rank": 64, "candidates": 16, "sequences": 8, "anchors": 16},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_is_within_a_quarter_of_what_mlx_counts(tmp_path: Path, shape: str) -> None:
    """The user decides by it what to lower. It was fitted to longer contexts and larger vocabularies, too."""
    made = prepared(answers(tmp_path / "data"), RECIPE.changed(evaluate_every=0, **SHAPES[shape]))
    optimiser = Optimiser(made.draft, made.recipe, 4)
    step = Step(made.draft, made.frozen, made.recipe, made.scales)
    mx.eval(made.draft.parameters(), list(optimiser.state.values()))
    gc.collect()
    need = estimate(made)
    others = mx.get_active_memory() - need.target - need.draft  # what other tests hold
    mx.reset_peak_memory()
    for number in range(made.plan.micro_batches // made.recipe.accumulate):
        total = Sum()
        for each in range(made.recipe.accumulate):
            total.add(*step(made.blocks(number * made.recipe.accumulate + each)))
        optimiser.update(total.mean(total.totals["weight"]), total.totals["loss"], 0)
    measured = mx.get_peak_memory() - others
    assert 0.75 <= need.peak / measured <= 1.25, (need, measured)


def test_features_that_the_target_computes_are_counted(tmp_path: Path) -> None:
    """On a Mac a long micro-batch of a large target needs more for that than for the draft."""
    bare = prepared(answers(tmp_path / "bare", features=False), RECIPE.changed(layers=1, sequences=12, anchors=1))
    stored = prepared(answers(tmp_path / "stored"), RECIPE.changed(layers=1, sequences=12, anchors=1))
    assert estimate(stored).reading == 0 and estimate(bare).target == 2 * estimate(stored).target
    decoder = MlxDecoder(target(), TAPS)
    made = replace(bare, answers=Answers(bare.task.dataset, bare.start.shards, TAPS, 4, decoder), decoder=decoder)
    draws = made.plan.draws(0)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made.answers.reader(draws, made.recipe)
    assert 0.5 <= estimate(made).reading / (mx.get_peak_memory() - before) <= 1.5


@pytest.mark.parametrize(
    ("need", "cure"),
    [
        (Need(6 << 30, 3 << 30, 1 << 30, 1 << 30, 1 << 30), "train fewer `layers`, or a smaller target"),
        (Need(1 << 30, 1 << 30, 1 << 30, 1 << 30, 9 << 30), "set a `vocabulary` .8192, say."),
        (Need(1 << 30, 1 << 30, 1 << 30, 9 << 30, 1 << 30), "lower `sequences` .and raise `accumulate` by as much"),
    ],
)
def test_too_much_is_refused_with_what_to_lower(need: Need, cure: str) -> None:
    """What is largest is what helps."""
    with pytest.raises(TooLarge, match=rf"needs about .* GB of memory, .* and 8.59 GB are there.*{cure}"):
        need.refuse_more_than(8 << 30)
    need.refuse_more_than(need.peak)


def test_a_training_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next try, with a smaller recipe, is not a run to be resumed."""
    dataset = answers(tmp_path / "data")
    monkeypatch.setattr("dflash_mlx.training.trainer.memory_here", lambda: 1 << 20)
    with pytest.raises(TooLarge):
        learn(dataset, tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
    monkeypatch.undo()
    learn(dataset, tmp_path / "run", RECIPE.changed(steps=1))


def test_a_container_has_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine around it has more, and the system ends what takes it."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP", limit)
    whole = memory_here()
    assert whole > 1 << 28
    for text, expected in (("123456789\n", 123456789), ("max\n", whole), (str(2**60), whole)):
        limit.write_text(text)
        assert memory_here() == expected


def test_the_disk_for_features_is_what_they_take(tmp_path: Path) -> None:
    """Known before they are computed, which takes long."""
    dataset = answers(tmp_path / "data")
    made = prepared(dataset)
    files = sum(path.stat().st_size for path in (dataset.folder / "features-0-2").iterdir())
    assert disk_for_features(made) == pytest.approx(files, rel=0.05)
