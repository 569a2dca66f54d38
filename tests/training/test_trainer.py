"""A training is the same however it is cut: into micro-batches, rows, processes; and it ends in words, not in noise."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from dflash_mlx.training import interrupts
from dflash_mlx.training import step as step_module
from dflash_mlx.training.about import About, TargetFacts
from dflash_mlx.training.answers import Answers
from dflash_mlx.training.blocks import Draw, assemble
from dflash_mlx.training.checkpoint import Checkpoints, TrainingError, by_name
from dflash_mlx.training.dataset import Dataset, DatasetError
from dflash_mlx.training.decoder import decoder_for
from dflash_mlx.training.export import export as export_draft
from dflash_mlx.training.hooks import Snapshot
from dflash_mlx.training.interrupts import Stopped
from dflash_mlx.training.optimise import PATIENCE, Diverged, Optimiser, Schedule, Sum, decays
from dflash_mlx.training.outlook import of_answers
from dflash_mlx.training.prepare import Prepared
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.run_folder import RunFolder
from dflash_mlx.training.step import Step
from dflash_mlx.training.trainer import train
from tests.conftest import byte_tokenizer, special_draft
from tests.families import tiny
from tests.training.runs import (
    RECIPE,
    TAPS,
    TOP,
    Seen,
    answers,
    assert_equal,
    assert_same_bits,
    export,
    learn,
    lines,
    losses,
    prepared,
    target,
)

KINDS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "packed": {"pack": 128},
    "dflash2": {"second": True},
    "bfloat16": {"precision": "bfloat16"},
    "reduced": {"vocabulary": 100, "weighting": "pace", "window": 6, "full": 1},
}
SCORES = {2: 2.0, 4: 1.0}  # the best is not the last


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return answers(tmp_path_factory.mktemp("answers") / "data")


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def passes(made: Prepared) -> Step:
    return Step(made.draft, made.frozen, made.recipe, made.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_ends_with_the_bits_of_one_that_was_not_stopped(
    dataset: Dataset, tmp_path: Path, kind: str
) -> None:
    """Weights, moments, scores and every line of the log; stopped after a step, and in the middle of an evaluation."""
    recipe = RECIPE.changed(**KINDS[kind])
    learn(dataset, tmp_path / "whole", recipe, scores=SCORES)
    for stop in (("step", 1), ("in evaluation", 2), ("step", 3)):
        seen = Seen(at={stop: ctrl_c})
        with pytest.raises(Stopped, match=rf"after step {stop[1]} of 4, and nothing is lost.*`--resume`"):
            learn(dataset, tmp_path / "cut", recipe, seen, scores=SCORES, resume=stop != ("step", 1))
    learn(dataset, tmp_path / "cut", recipe, scores=SCORES, resume=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")
    assert [record["step"] for record in lines(tmp_path / "cut", "end")] == [1, 2, 3, 4]


def test_what_was_lost_is_done_again_with_the_same_bits(dataset: Dataset, tmp_path: Path) -> None:
    """An error two steps after the last checkpoint: the log loses these steps, and they come again as they were."""

    def fail() -> None:
        raise RuntimeError("a crash")

    recipe = RECIPE.changed(checkpoint_every=2, evaluate_every=0, steps=5)
    learn(dataset, tmp_path / "whole", recipe)
    with pytest.raises(RuntimeError, match="a crash"):
        learn(dataset, tmp_path / "cut", recipe, Seen(at={("step", 4): fail}))
    assert [record["step"] for record in lines(tmp_path / "cut", "step")] == [1, 2, 3, 4]
    learn(dataset, tmp_path / "cut", recipe, resume=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")


def test_a_failure_at_any_write_leaves_what_can_be_continued(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th file that takes its place does not, for every n; what is continued ends as if nothing had been."""
    recipe = RECIPE.changed(steps=2, evaluate_every=1, sequences=2, anchors=3)
    scores = {1: 1.0, 2: 2.0}
    learn(dataset, tmp_path / "whole", recipe, scores=scores)
    real = os.replace
    writes = 0
    while True:
        writes += 1
        left = [writes]

        def replace(source: Any, place: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            real(source, place)

        monkeypatch.setattr(os, "replace", replace)
        folder = tmp_path / f"{writes}"
        try:
            learn(dataset, folder, recipe, scores=scores)
            break
        except KeyboardInterrupt:
            monkeypatch.setattr(os, "replace", real)
        learn(dataset, folder, recipe, scores=scores, resume=(folder / "run.json").exists())
        assert_same_bits(tmp_path / "whole", folder)
    assert writes > 8  # run.json, two checkpoints, best weights and best draft twice, the finished draft


def test_micro_batches_add_up_to_one_big_batch(dataset: Dataset) -> None:
    """Of unequal weights, so that a mean of means would be another gradient. Equal within float32 rounding, 1e-5."""
    made = prepared(dataset, RECIPE.changed(sequences=4))
    draws = [made.plan.draws(number) for number in (0, 1)]
    draws = [draws[0][:1], draws[0][1:] + draws[1]]
    step, parts, whole = passes(made), Sum(), Sum()
    for part in draws:
        parts.add(*step(assemble(part, made.answers.reader(part, made.recipe), made.recipe)))
    together = [draw for part in draws for draw in part]
    whole.add(*step(assemble(together, made.answers.reader(together, made.recipe), made.recipe)))
    np.testing.assert_allclose(parts.totals["weight"], whole.totals["weight"], rtol=1e-6)
    expected = by_name(whole.mean(whole.totals["weight"]))
    assert_close(by_name(parts.mean(parts.totals["weight"])), expected, 1e-5)


def assert_close(found: dict[str, mx.array], expected: dict[str, mx.array], rtol: float) -> None:
    """Relative to the largest entry of each array."""
    for name, value in expected.items():
        largest = float(mx.abs(value).max())
        assert largest > 0 or "codebook" in name or "projection" in name, name
        np.testing.assert_allclose(np.array(found[name]), np.array(value), rtol=0, atol=rtol * largest, err_msg=name)


@pytest.mark.parametrize("kind", ["plain", "dflash2"])
def test_packed_answers_lose_and_teach_the_same(dataset: Dataset, kind: str) -> None:
    """Two answers in a row see nothing of each other. Within float32 rounding: 1e-5 of losses, 1e-4 of gradients."""
    recipe = RECIPE.changed(sequences=4, **KINDS[kind])
    made = prepared(dataset, recipe)
    step, draws = passes(made), made.plan.draws(1)
    apart, packed = (
        step(assemble(draws, made.answers.reader(draws, made.recipe), each))
        for each in (made.recipe, made.recipe.changed(pack=128))
    )
    for name, value in apart[1].items():
        np.testing.assert_allclose(packed[1][name], value, rtol=1e-5, err_msg=name)
    assert_close(by_name(packed[0]), by_name(apart[0]), 1e-4)


def test_features_from_the_disk_and_from_the_target_give_the_same_losses(dataset: Dataset, tmp_path: Path) -> None:
    """The target's own are rounded as stored ones are; what is left, 1e-3, is that answers were made token by token."""
    bare = tmp_path / "bare"
    shutil.copytree(dataset.folder, bare, ignore=lambda _, names: [n for n in names if n.startswith("features")])
    recipe = RECIPE.changed(evaluate_every=0)
    learn(dataset, tmp_path / "stored", recipe)
    learn(Dataset.open(bare), tmp_path / "computed", recipe)
    learn(Dataset.open(bare), tmp_path / "given", recipe, decoder=decoder_for(tiny("llama"), TAPS))
    np.testing.assert_allclose(losses(tmp_path / "computed"), losses(tmp_path / "stored"), rtol=1e-3)
    assert losses(tmp_path / "given") == losses(tmp_path / "computed")


def test_every_answer_is_read_with_its_own_rows(dataset: Dataset) -> None:
    """Rows of the answer before it would teach noise that nothing else shows; held-out answers are not there."""
    made = Answers(dataset, dataset.numbers(), TAPS, TOP, None)
    assert sum(shard.held_out.sum() for shard in dataset.shards()) > 0
    read = iter(range(len(made)))
    draws = [Draw(number, np.array([30])) for number in range(len(made))]
    sample_of = made.reader(draws, RECIPE.changed(longest=36))
    counts = np.zeros(257, np.int64)
    for shard in dataset.shards(top=TOP, layers=TAPS):
        assert shard.features is not None and shard.top_ids is not None and shard.top_logprobs is not None
        for index in np.flatnonzero(~shard.held_out):
            sample = sample_of(next(read))
            length = min(36, len(shard.sequence(index)))
            np.testing.assert_array_equal(sample.tokens, shard.sequence(index)[:length])
            rows = shard.features[shard.feature_offsets[index] :][: len(sample.features)]
            np.testing.assert_array_equal(sample.features, rows)
            assert len(sample.features) == min(36, len(shard.sequence(index)) - 1)
            own = slice(*shard.response_offsets[index : index + 2])
            np.testing.assert_array_equal(sample.soft_ids, shard.top_ids[own])
            np.testing.assert_array_equal(sample.soft_logprobs, shard.top_logprobs[own])
            assert sample.prompt_length == shard.prompt_lengths[index]
            counts += np.bincount(shard.sequence(index)[sample.prompt_length :], minlength=257)
    assert next(read, None) is None
    np.testing.assert_array_equal(made.counts(257), counts)


def test_a_decoder_with_other_taps_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    """It would feed other layers than the draft is told to read."""
    bare = tmp_path / "bare"
    shutil.copytree(dataset.folder, bare, ignore=lambda _, names: [n for n in names if n.startswith("features")])
    with pytest.raises(ValueError, match=r"`decoder` has to have the layers \(0, 2\) as its taps, got \(1,\)"):
        learn(Dataset.open(bare), tmp_path / "run", decoder=decoder_for(tiny("llama"), (1,)))
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("kind", ["plain", "dflash2"])
def test_logits_in_pieces_give_the_same_losses_and_gradients(
    dataset: Dataset, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed twice has its whole gradient, the selector's parts too. Within rounding, 1e-5."""
    made = prepared(dataset, RECIPE.changed(**KINDS[kind]))
    if kind == "dflash2":  # as after some steps: a fresh one teaches its own parts nothing
        selector = made.draft.candidate_selector
        selector.predecessor_codebook = mx.random.normal(selector.predecessor_codebook.shape, key=mx.random.key(1))
    whole = passes(made)(made.blocks(0))
    monkeypatch.setattr(step_module, "LOGITS", 7 * made.frozen.size)
    pieces = passes(made)(made.blocks(0))
    assert len(by_name(pieces[0])) == len(by_name(made.draft.trainable_parameters()))
    assert_close(by_name(pieces[0]), by_name(whole[0]), 1e-5)
    for name, value in whole[1].items():
        np.testing.assert_allclose(pieces[1][name], value, rtol=1e-5, err_msg=name)


def test_a_pass_leaves_the_draft_as_it_was(dataset: Dataset) -> None:
    """In bfloat16 it runs on a rounded copy; an error in the middle does not leave that copy behind."""
    made = prepared(dataset, RECIPE.changed(precision="bfloat16"))
    before = {name: np.array(value) for name, value in by_name(made.draft.parameters()).items()}
    gradients, _ = passes(made)(made.blocks(0))
    assert all(value.dtype == mx.float32 for value in by_name(gradients).values())
    broken = made.blocks(0)
    with pytest.raises(ValueError):
        passes(made)(type(broken)(**{**vars(broken), "segments": broken.segments[:, :-1]}))
    for name, value in by_name(made.draft.parameters()).items():
        assert value.dtype == mx.float32
        np.testing.assert_array_equal(np.array(value), before[name], err_msg=name)


def test_bfloat16_learns_what_float32_learns_and_keeps_float32_weights(dataset: Dataset, tmp_path: Path) -> None:
    """Weights that were rounded to bfloat16 after each step would lose most of what small steps add to them."""
    recipe = RECIPE.changed(steps=30, evaluate_every=0, rate=2e-3)
    for precision in ("float32", "bfloat16"):
        learn(dataset, tmp_path / precision, recipe.changed(precision=precision))
    full, half = losses(tmp_path / "float32"), losses(tmp_path / "bfloat16")
    assert full[-1] < 0.85 * full[0] and half != full
    np.testing.assert_allclose(half[-1], full[-1], rtol=0.03)
    kept = Checkpoints(tmp_path / "bfloat16" / "checkpoint").load()
    assert kept is not None
    for name, value in (kept.draft | kept.optimiser).items():
        if not name.endswith("step"):
            assert value.dtype == mx.float32, name
    weight = kept.draft["layers.0.mlp.up_proj.weight"]
    assert (weight != weight.astype(mx.bfloat16).astype(mx.float32)).mean().item() > 0.9


def test_float16_is_refused_because_features_overflow_it() -> None:
    """Half precision on an M1 or M2 means float16 to many; NaN would be all that comes of it."""
    with pytest.raises(ValueError, match=r"`precision` has to be float32 or bfloat16, got 'float16'\. .*overflow"):
        Recipe(precision="float16")


def broken_steps(monkeypatch: pytest.MonkeyPatch, broken: Callable[[int], bool], what: str) -> None:
    """Make the gradients or the loss of these micro-batches NaN or infinite."""
    real, number = Step.__call__, iter(range(10**6))

    def call(self: Step, blocks: Any) -> Any:
        gradients, totals = real(self, blocks)
        if broken(next(number)):
            if what == "loss":
                totals["loss"] = mx.array(float("inf"))
            else:
                gradients["norm"]["weight"] = gradients["norm"]["weight"] * mx.array(float("nan"))
        return gradients, totals

    monkeypatch.setattr(Step, "__call__", call)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One NaN in a gradient would be in every weight for good."""
    broken_steps(monkeypatch, lambda number: number == 2, what)
    after: dict[int, dict[str, np.ndarray]] = {}

    def note(step: int) -> None:
        kept = Checkpoints(tmp_path / "checkpoint").load()
        assert kept is not None and kept.state.step == step
        after[step] = {name: np.array(value) for name, value in (kept.draft | kept.optimiser).items()}

    seen = Seen(at={("checkpoint", step): lambda step=step: note(step) for step in (2, 3)})  # type: ignore[misc]
    learn(dataset, tmp_path, RECIPE.changed(evaluate_every=0), seen)
    for name, value in after[2].items():
        np.testing.assert_array_equal(after[3][name], value, err_msg=name)
    third, fourth = lines(tmp_path, "step")[2:]
    assert third["skipped"] == fourth["skipped"] == 1
    assert third["loss"] is None and np.isfinite(fourth["loss"])


def test_a_training_that_does_not_recover_ends_with_what_to_do(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of steps that change nothing look like a training from afar. A few that recover do not end it."""
    recipe = RECIPE.changed(steps=12, evaluate_every=0, precision="bfloat16")
    broken_steps(monkeypatch, lambda number: number % 4 != 0, "loss")
    learn(dataset, tmp_path / "recovers", recipe)
    monkeypatch.undo()
    broken_steps(monkeypatch, lambda number: number >= 3, "loss")
    with pytest.raises(Diverged, match=r"in 5 steps in a row.*lower `rate` \(now 0.0006\).*\"float32\""):
        learn(dataset, tmp_path / "ends", recipe)
    assert len(lines(tmp_path / "ends", "step")) == 3 + PATIENCE


def test_the_finished_draft_is_that_of_the_best_evaluation(dataset: Dataset, tmp_path: Path) -> None:
    """Not the last one; and an evaluation that found nothing finite is never the best."""
    recipe = RECIPE.changed(evaluate_every=1)
    scores = {1: float("nan"), 2: 1.0, 3: 3.0, 4: 2.0}
    assert learn(dataset, tmp_path, recipe, scores=scores) == tmp_path / "draft"
    assert [record["best"] for record in lines(tmp_path, "evaluation")] == [False, True, True, False]
    assert (tmp_path / "draft" / "step").read_text() == (tmp_path / "best" / "step").read_text() == "3"
    best, finished = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("best", "draft"))
    assert_equal(best, finished)
    last = Checkpoints(tmp_path / "checkpoint").load()
    assert last is not None
    name = "layers.0.mlp.up_proj.weight"
    assert not np.array_equal(np.array(best[name]), np.array(last.draft[name]))


def test_scores_on_other_prompts_are_not_compared(dataset: Dataset, tmp_path: Path) -> None:
    """Fewer prompts, or easier ones, may give a higher score for a worse draft."""

    def fail() -> None:
        raise RuntimeError("a crash")

    recipe = RECIPE.changed(steps=6)
    with pytest.raises(RuntimeError, match="a crash"):
        learn(dataset, tmp_path, recipe, Seen(at={("step", 3): fail}), scores={2: 9.0})
    changed = recipe.changed(evaluate_prompts=1)
    learn(dataset, tmp_path, changed, scores={4: 1.0, 6: 0.5}, resume=True)
    assert [(each["step"], each["best"]) for each in lines(tmp_path, "evaluation")] == [
        (2, True),
        (4, True),
        (6, False),
    ]
    assert (tmp_path / "draft" / "step").read_text() == "4"


def test_ctrl_c_while_the_finished_draft_is_measured_stops_at_once(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take minutes; what goes on then ends as if nothing had been, with the weights of the last step kept."""
    learn(dataset, tmp_path / "whole", scores=SCORES)

    def measured(snapshot: Snapshot, folder: Path) -> None:
        export(snapshot, folder)
        if folder.name == "draft":
            ctrl_c()

    with monkeypatch.context() as patched:
        patched.setattr("tests.training.runs.export", measured)
        with pytest.raises(Stopped, match="after step 4 of 4, and nothing is lost"):
            learn(dataset, tmp_path / "cut", scores=SCORES)
    learn(dataset, tmp_path / "cut", scores=SCORES, resume=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")


def test_what_is_evaluated_and_exported_takes_features_as_they_are(dataset: Dataset, tmp_path: Path) -> None:
    """In training the draft's features are divided by scales; exported so, it would accept nothing."""
    learn(dataset, tmp_path, RECIPE.changed(evaluate_every=0))
    state = Checkpoints(tmp_path / "checkpoint").load()
    assert state is not None
    finished = mx.load(str(tmp_path / "draft" / "model.safetensors"))
    scales = np.repeat(state.state.scales, 64)
    assert (scales != 1).any()
    np.testing.assert_array_equal(np.array(finished["fc.weight"]) * scales, np.array(state.draft["fc.weight"]))


def test_sigterm_stops_after_the_step_as_ctrl_c_does(dataset: Dataset, tmp_path: Path) -> None:
    """A machine that shuts down sends it; the user is told what happens."""
    seen = Seen(at={("step", 2): lambda: os.kill(os.getpid(), signal.SIGTERM)})
    with pytest.raises(Stopped, match="after step 2 of 4") as caught:
        learn(dataset, tmp_path, RECIPE.changed(evaluate_every=0, checkpoint_every=99), seen)
    assert caught.value.status == 143
    assert any("Stopping after this step" in line for line in seen.lines)
    kept = Checkpoints(tmp_path / "checkpoint").load()
    assert kept is not None and kept.state.step == 2


def test_a_hang_up_that_is_sent_twice_costs_no_step(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a terminal is closed the shell sends SIGHUP to its jobs, and the system once more when the shell is gone."""

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(interrupts, "terminals", list)  # those of the tests stay
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)  # else one that is not heard ends the tests
    recipe = RECIPE.changed(evaluate_every=0, checkpoint_every=99)
    try:
        with pytest.raises(KeyboardInterrupt, match="after step 3 of 4") as caught:
            learn(dataset, tmp_path, recipe, Seen(at={("step", 3): twice}))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert isinstance(caught.value, Stopped) and caught.value.status == 128 + signal.SIGHUP
    kept = Checkpoints(tmp_path / "checkpoint").load()
    assert kept is not None and kept.state.step == 3


def test_in_a_thread_signals_are_left_alone() -> None:
    """Python refuses handlers there, and a server that trains in a worker has its own."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def enter() -> list[Any]:
        with interrupts.Interrupts():
            return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() == before
    assert enter() != before


def test_under_nohup_a_training_goes_on_when_the_terminal_is_closed(dataset: Dataset, tmp_path: Path) -> None:
    """That is what nohup is for."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen = Seen(at={("step", 2): lambda: os.kill(os.getpid(), signal.SIGHUP)})
    try:
        assert learn(dataset, tmp_path, RECIPE.changed(evaluate_every=0), seen).exists()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    except KeyboardInterrupt as stopped:  # which would end the tests
        pytest.fail(str(stopped))
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_a_step_that_cannot_be_shown_is_kept(dataset: Dataset, tmp_path: Path, error: OSError) -> None:
    """A terminal may be gone before SIGHUP says so, and a pipe's reader leaves without a word."""

    def fail() -> None:
        raise error

    recipe = RECIPE.changed(evaluate_every=0, checkpoint_every=99)
    with pytest.raises(OSError) as caught:
        learn(dataset, tmp_path / "run", recipe, Seen(at={("step", 3): fail}))
    assert caught.value is error
    kept = Checkpoints(tmp_path / "run" / "checkpoint").load()
    assert kept is not None and kept.state.step == 3
    learn(dataset, tmp_path / "run", recipe, resume=True)
    learn(dataset, tmp_path / "whole", recipe)
    assert_same_bits(tmp_path / "whole", tmp_path / "run")


def test_a_last_word_that_cannot_be_shown_takes_nothing_from_a_finished_training(
    dataset: Dataset, tmp_path: Path
) -> None:
    """The draft is there, and the log says that it is finished."""

    def fail() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        learn(dataset, tmp_path, RECIPE.changed(evaluate_every=0), Seen(at={("end", 4): fail}))
    assert (tmp_path / "draft" / "step").read_text() == "4" and lines(tmp_path, "end")[-1]["why"] == "finished"


def test_the_answer_to_a_signal_that_cannot_be_said_costs_no_step(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said in the middle of a step, and a closed pipe would end that."""

    def closed(line: str) -> None:
        if "Stopping" in line:
            raise BrokenPipeError

    def interrupted(self: Optimiser, gradients: Any, loss: Any, step: int) -> Any:
        if step == 1:
            ctrl_c()
        return update(self, gradients, loss, step)

    update = Optimiser.update
    monkeypatch.setattr(Optimiser, "update", interrupted)
    hooks = replace(Seen().hooks(), tell=closed)
    with pytest.raises(Stopped, match="after step 2 of 4") as caught:
        train(target(), byte_tokenizer(), dataset, RECIPE.changed(checkpoint_every=99), tmp_path, hooks=hooks)
    assert caught.value.status == 130


def test_a_second_ctrl_c_ends_at_once_without_damage(dataset: Dataset, tmp_path: Path) -> None:
    """The last checkpoint is what it was, and the handlers of before are there again."""

    def twice() -> None:
        ctrl_c()
        ctrl_c()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    recipe = RECIPE.changed(evaluate_every=0, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        learn(dataset, tmp_path, recipe, Seen(at={("step", 3): twice}))
    assert not isinstance(caught.value, Stopped)
    assert [signal.getsignal(number) for number in numbers] == before
    kept = Checkpoints(tmp_path / "checkpoint").load()
    assert kept is not None and kept.state.step == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate": 1e-3}, r"its recipe.rate is 0.0006, now it is 0.001"),
        ({"seed": 7, "anchors": 9}, r"its recipe.anchors is 6, now it is 9; its recipe.seed is 0, now it is 7"),
    ],
)
def test_a_run_is_not_continued_with_another_recipe(
    dataset: Dataset, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """A draft that learned by two recipes is what neither says. All differences are named."""
    recipe = RECIPE.changed(evaluate_every=0)
    with pytest.raises(Stopped):
        learn(dataset, tmp_path, recipe, Seen(at={("step", 1): ctrl_c}))
    with pytest.raises(TrainingError, match=said):
        learn(dataset, tmp_path, recipe.changed(**changes), resume=True)
    learn(dataset, tmp_path, recipe.changed(evaluate_every=3, checkpoint_every=2), resume=True)


def test_a_data_set_that_grew_does_not_change_a_run_that_goes_on(tmp_path: Path) -> None:
    """It learns from the shards that it began with; a new run learns from all; one that is gone is named."""
    few = answers(tmp_path / "few")
    recipe = RECIPE.changed(evaluate_every=0)
    learn(few, tmp_path / "whole", recipe)
    with pytest.raises(Stopped):
        learn(few, tmp_path / "run", recipe, Seen(at={("step", 2): ctrl_c}))
    more = few.numbers()[-1] + 1
    for kind in ("shards", "soft-4", "features-0-2"):
        shutil.copyfile(few.folder / kind / "00000.safetensors", few.folder / kind / f"{more:05d}.safetensors")
    learn(few, tmp_path / "run", recipe, resume=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "run")
    assert more not in RunFolder(tmp_path / "run").shards()
    learn(few, tmp_path / "new", recipe)
    assert more in RunFolder(tmp_path / "new").shards()
    (few.folder / "shards" / f"{more:05d}.safetensors").unlink()
    with pytest.raises(DatasetError, match=rf"has no shard {more} any more \(1 of {more + 1} are gone\), and this run"):
        learn(few, tmp_path / "new", recipe, resume=True)


def test_a_run_is_not_continued_with_other_answers_or_another_target(dataset: Dataset, tmp_path: Path) -> None:
    """Either would be taken for what the run learned so far."""
    recipe = RECIPE.changed(evaluate_every=0)
    with pytest.raises(Stopped):
        learn(dataset, tmp_path / "run", recipe, Seen(at={("step", 1): ctrl_c}))
    changed = tmp_path / "changed"
    shutil.copytree(dataset.folder, changed)
    shutil.copyfile(changed / "shards" / "00001.safetensors", changed / "shards" / "00000.safetensors")
    for kind in ("soft-4", "features-0-2"):
        shutil.copyfile(changed / kind / "00001.safetensors", changed / kind / "00000.safetensors")
    with pytest.raises(TrainingError, match="its tokens_sha256 is"):
        learn(Dataset.open(changed), tmp_path / "run", recipe, resume=True)
    other = Dataset(dataset.folder, dataset.manifest | {"target": {"name": "other", "weights": "0" * 64}})
    with pytest.raises(TrainingError, match="those of another target than the one that is loaded: its weights is 0000"):
        learn(other, tmp_path / "run", recipe, resume=True)


def test_answers_without_what_the_recipe_learns_from_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    """Rather than learning the hard tokens in silence."""
    bare = tmp_path / "bare"
    shutil.copytree(dataset.folder, bare, ignore=lambda _, names: [n for n in names if n.startswith("soft")])
    with pytest.raises(TrainingError, match=r"\(`soft` 0.5\).*set `soft` to 0"):
        learn(Dataset.open(bare), tmp_path / "run")
    learn(Dataset.open(bare), tmp_path / "run", RECIPE.changed(soft=0.0, evaluate_every=0, steps=1))


def test_a_run_is_not_overwritten_nor_made_up(dataset: Dataset, tmp_path: Path) -> None:
    """Without --resume a run's folder is refused, with it an empty one."""
    with pytest.raises(TrainingError, match=r"holds no run to continue.*Leave `--resume` out"):
        learn(dataset, tmp_path, resume=True)
    learn(dataset, tmp_path, RECIPE.changed(steps=1))
    with pytest.raises(TrainingError, match="holds a run already, and it is not overwritten"):
        learn(dataset, tmp_path)


def test_a_checkpoint_of_nobody_knows_what_is_not_gone_on_from(dataset: Dataset, tmp_path: Path) -> None:
    """Without run.json a new run could begin beside it, and after an interrupt go on from another draft's weights."""
    learn(dataset, tmp_path, RECIPE.changed(steps=1, evaluate_every=0))
    (tmp_path / "run.json").unlink()
    with pytest.raises(TrainingError, match=r"holds a checkpoint, and no run\.json .* delete .*checkpoint, or"):
        learn(dataset, tmp_path, RECIPE)


def test_rows_of_other_answers_are_refused_before_anything_is_learned(dataset: Dataset, tmp_path: Path) -> None:
    """A longer file would be read without a word, and a draft learn from features of other tokens."""
    for beside in ("features-0-2", f"soft-{TOP}"):
        folder = tmp_path / beside
        shutil.copytree(dataset.folder, folder)
        files = sorted((folder / beside).iterdir(), key=lambda path: path.stat().st_size)
        shutil.copyfile(files[-1], files[0])
        with pytest.raises(DatasetError, match=r"rows for \d+ tokens, so they are of other answers\. Delete it"):
            learn(Dataset.open(folder), tmp_path / "run", RECIPE)


def test_a_reduced_vocabulary_has_only_tokens_that_an_adapted_draft_knows(dataset: Dataset, tmp_path: Path) -> None:
    """A fine-tune may have more tokens than the embedding that the draft carries: its export would be refused."""
    old = special_draft(dict(own_embedding=True), vocab_size=250, dflash_config={"mask_token_id": 249})
    export_draft(old, tmp_path / "old", About(TargetFacts("tiny")))
    recipe = Recipe(initial=str(tmp_path / "old"), vocabulary=256, sequences=2, anchors=2)
    found = prepared(dataset, recipe).frozen.vocabulary
    assert found is not None and found.tolist() == list(range(250))


def test_an_adapted_draft_keeps_its_list_unless_another_is_asked_for(dataset: Dataset, tmp_path: Path) -> None:
    """It was chosen for its target, and only its rows of the head are computed; a default asks for nothing."""
    old = special_draft({})
    old.vocabulary = np.arange(0, 200, 3, dtype=np.int32)
    export_draft(old, tmp_path / "old", About(TargetFacts("tiny")))
    recipe = Recipe(initial=str(tmp_path / "old"), sequences=2, anchors=2)
    made = prepared(dataset, recipe)
    assert made.frozen.vocabulary is not None and made.frozen.vocabulary.tolist() == list(range(0, 200, 3))
    assert made.recipe.vocabulary == 67 and ", the list of the draft that it begins with" in of_answers(made)[1]
    assert made.serving().vocabulary is not None
    for asked, size in ((100, 100), (257, 257), (5000, 257)):
        chosen = prepared(dataset, recipe.changed(vocabulary=asked))
        assert chosen.frozen.size == size and "the list of" not in "".join(of_answers(chosen))
        assert (chosen.serving().vocabulary is None) == (size == 257)
    second = prepared(dataset, recipe.changed(second=True, rank=8, candidates=4))
    assert second.frozen.vocabulary is None and "its list of 67 tokens is dropped" in second.draft.notes[0]


def test_two_processes_do_not_train_in_one_folder(dataset: Dataset, tmp_path: Path) -> None:
    """Their checkpoints would replace each other. A lock of the system: one that is killed leaves none."""
    with RunFolder(tmp_path).held(), pytest.raises(TrainingError, match="Another process is training in"):
        learn(dataset, tmp_path)
    learn(dataset, tmp_path, RECIPE.changed(steps=1))


def test_a_best_draft_that_was_lost_is_found_again(dataset: Dataset, tmp_path: Path) -> None:
    """A kill while best/ is replaced can leave none: the next evaluation is the best of those that are there."""
    with pytest.raises(Stopped):
        learn(dataset, tmp_path, RECIPE, Seen(at={("step", 3): ctrl_c}), scores=SCORES)
    shutil.rmtree(tmp_path / "best")
    learn(dataset, tmp_path, RECIPE, scores=SCORES, resume=True)
    assert (tmp_path / "draft" / "step").read_text() == "4"


def test_a_long_run_says_the_mean_of_several_steps_in_a_line(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over a stop in between: its sums are in the checkpoint. Every step is shown all the same."""
    recipe = RECIPE.changed(evaluate_every=0, steps=6)
    learn(dataset, tmp_path / "each", recipe)
    monkeypatch.setattr("dflash_mlx.training.trainer.LINES", 2)
    seen = Seen(at={("step", 2): ctrl_c})
    with pytest.raises(Stopped):
        learn(dataset, tmp_path / "few", recipe, seen)
    learn(dataset, tmp_path / "few", recipe, seen, resume=True)
    few, each = lines(tmp_path / "few", "step"), lines(tmp_path / "each", "step")
    assert [record["step"] for record in few] == [3, 6]
    np.testing.assert_allclose(few[0]["grad_norm"], np.mean([record["grad_norm"] for record in each[:3]]), rtol=1e-9)
    assert min(r["loss"] for r in each[:3]) < few[0]["loss"] < max(r["loss"] for r in each[:3])
    assert [record["step"] for record in seen.records if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]


def test_the_learning_rate_rises_in_a_line_and_falls_to_its_floor() -> None:
    """A function of the step alone, so that a resumed run follows it."""
    schedule = Schedule.of(Recipe(rate=1.0, floor=0.1, warm_up=0.1), 100)
    assert [schedule.at(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    rates = [schedule.at(step) for step in range(10, 100)]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.1)
    assert schedule.at(10 + 44) == pytest.approx(0.55, abs=0.01)
    assert Schedule.of(Recipe(rate=1.0, warm_up=0.0), 1).at(0) == pytest.approx(0.03)


def test_norms_kernels_and_codebooks_do_not_decay(dataset: Dataset) -> None:
    """Pulled to 0 they would be pulled away from where they do nothing."""
    made = prepared(dataset, RECIPE.changed(second=True, decay=0.5, rate=1e-2, warm_up=0.0))
    names = by_name(made.draft.trainable_parameters())
    kept = {name for name, value in names.items() if not decays(name, value)}
    assert kept == {n for n in names if "norm" in n or "base_kernel" in n or "codebook" in n}
    zero = {name: mx.zeros_like(value) for name, value in names.items()}
    optimiser = Optimiser(made.draft, made.recipe, 10)
    optimiser.update(tree_unflatten(list(zero.items())), mx.array(1.0), 0)
    for name, value in by_name(made.draft.trainable_parameters()).items():
        factor = 1.0 if name in kept else 1 - 0.5 * optimiser.schedule.at(0)
        np.testing.assert_allclose(np.array(value), np.array(names[name]) * factor, rtol=1e-6, err_msg=name)
