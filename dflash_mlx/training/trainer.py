"""Training a draft: steps, with evaluations and checkpoints between them.

Everything that a step does follows from its number, the weights and the data, so a run that is interrupted and
continued ends with the same bits on the same machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.files import check_space
from dflash_mlx.targets import Target
from dflash_mlx.training.checkpoint import Checkpoint, State, TrainingError, by_name
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.decoder import Decoder
from dflash_mlx.training.hooks import Hooks, Snapshot
from dflash_mlx.training.initialise import FeatureScales
from dflash_mlx.training.interrupts import Interrupts, Stopped
from dflash_mlx.training.log import Log
from dflash_mlx.training.memory import estimate, memory_here
from dflash_mlx.training.optimise import Optimiser, Sum, Update, check_progress
from dflash_mlx.training.prepare import Prepared, Task, begin, prepare
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.run_folder import RunFolder
from dflash_mlx.training.step import Step
from dflash_mlx.training.sums import added, means

LINES = 2000  # of steps in the log of a run; of a longer one each line says the mean of several steps


class Trainer:
    """A session on its way.

    Args:
        log: of the run in `folder`.
    """

    def __init__(self, prepared: Prepared, folder: RunFolder, log: Log, hooks: Hooks) -> None:
        self._prepared, self._folder, self._log, self._hooks = prepared, folder, log, hooks
        self._optimiser = Optimiser(prepared.draft, prepared.recipe, prepared.plan.steps)
        self._step = Step(prepared.draft, prepared.frozen, prepared.recipe, prepared.scales)
        self._every = max(1, prepared.plan.steps // LINES)
        self._state = State(scales=prepared.scales.to_json())
        self._saved = 0  # the step of the last checkpoint; of step 0 none is needed
        self._unseen: OSError | None = None  # why nothing can be shown any more
        self._clock = time.perf_counter()

    def resume(self, found: Checkpoint | None) -> None:
        """Go on from a checkpoint, or without one from the beginning; the log loses what came after it.

        Raises:
            TrainingError: the checkpoint is of another draft.
        """
        if found is not None:
            self._prepared.restore(dict(found.draft))
            self._optimiser.restore(dict(found.optimiser))
            self._state, self._saved = found.state, found.state.step
            if not (self._folder.best.exists() and self._folder.checkpoints.has_best):  # killed while it was replaced
                self._state = replace(self._state, best=None)
        self._log.cut(self._state.step)

    def run(self, interrupts: Interrupts) -> None:
        """To the last step, its evaluation and the export.

        Raises:
            Stopped: it was interrupted, and can be continued.
            Diverged: it cannot.
            TrainingError, OSError: something could not be written, or shown.
        """
        steps = self._prepared.plan.steps
        self._tell({"kind": "start", "step": self._state.step, "steps": steps, **self._prepared.facts()}, log=True)
        self._clock = time.perf_counter()
        while True:
            if self._due():
                self._evaluate(interrupts)
            if self._state.step == steps:
                break
            if self._state.step - self._saved >= self._prepared.recipe.checkpoint_every:
                self._save()
            self._advance()
            if interrupts.asked:
                self._stop(interrupts)
            if self._unseen:
                self._save()
                raise self._unseen
        self._finish(interrupts)
        if self._unseen:
            raise self._unseen

    def _due(self) -> bool:
        """Whether to evaluate before the next step."""
        state, every = self._state, self._prepared.recipe.evaluate_every
        if self._hooks.evaluate is None or state.evaluated == state.step or not state.step:
            return False
        return state.step == self._prepared.plan.steps or (every > 0 and state.step % every == 0)

    def _advance(self) -> None:
        """One step."""
        state, accumulate = self._state, self._prepared.recipe.accumulate
        total = Sum()
        for number in range(state.step * accumulate, (state.step + 1) * accumulate):
            total.add(*self._step(self._prepared.blocks(number)))
        weight = mx.maximum(total.totals["weight"], 1e-9)  # 0 if no token of any block can be proposed
        update = self._optimiser.update(total.mean(weight), total.totals["loss"], state.step)
        sums: dict[str, Any] = {name: value.tolist() for name, value in total.totals.items()}
        now = time.perf_counter()
        self._state = replace(
            state,
            step=state.step + 1,
            blocks=state.blocks + int(sums["blocks"]),
            seconds=state.seconds + now - self._clock,
            skipped=state.skipped + (not update.taken),
            in_a_row=0 if update.taken else state.in_a_row + 1,
        )
        self._clock = now
        self._record(update, sums)
        check_progress(self._state.in_a_row, self._prepared.recipe)

    def _record(self, update: Update, sums: Mapping[str, Any]) -> None:
        """Add a step to the window, and say what is in it when it is full."""
        state = self._state
        if update.taken:
            state = replace(state, window=added(state.window, {**sums, "norm": update.norm, "steps": 1}))
        full = state.step % self._every == 0 or state.step == self._prepared.plan.steps
        shared = {"kind": "step", "step": state.step, "blocks": state.blocks, "seconds": round(state.seconds, 3)}
        shared |= {"epoch": self._prepared.plan.epoch(state.step * self._prepared.recipe.accumulate), "lr": update.rate}
        if state.skipped:
            shared["skipped"] = state.skipped
        self._state = replace(state, window={}) if full else state
        self._tell(shared | means(state.window if full else dict(sums) | {"norm": update.norm, "steps": 1}), log=full)

    def _evaluate(self, interrupts: Interrupts) -> None:
        """Evaluate, and keep the draft if it is the best so far.

        What ends it in the middle leaves the training as it was before: it is evaluated when it goes on.
        """
        assert self._hooks.evaluate is not None
        try:
            with interrupts.at_once():
                found = self._hooks.evaluate(self._snapshot())
        except KeyboardInterrupt:
            self._stop(interrupts)
        recipe, kept = self._prepared.recipe, self._state.best
        measure = [recipe.evaluate_prompts, recipe.evaluate_tokens]  # of others, scores cannot be compared
        same = kept if kept is not None and kept.get("measure", measure) == measure else None
        best = math.isfinite(found.score) and (same is None or found.score > same["score"])
        record = found.record(best=best)
        if best:
            self._folder.checkpoints.save_best(self._weights(), self._state.step)
            self._hooks.export(self._snapshot(record), self._folder.best)
            kept = {"score": found.score, "record": record, "measure": measure}
        self._tell(record, log=True)
        self._state = replace(self._state, evaluated=self._state.step, best=kept)
        self._save()
        self._clock = time.perf_counter()

    def _snapshot(self, evaluation: Mapping[str, Any] | None = None) -> Snapshot:
        step = self._state.step if evaluation is None else evaluation["step"]
        return Snapshot(self._prepared.serving(), self._prepared, step, evaluation)

    def _weights(self) -> dict[str, mx.array]:
        return by_name(self._prepared.draft.parameters())

    def _save(self) -> None:
        self._folder.checkpoints.save(Checkpoint(self._state, self._weights(), self._optimiser.state))
        self._saved = self._state.step
        self._tell({"kind": "checkpoint", "step": self._saved}, log=False)

    def _stop(self, interrupts: Interrupts) -> None:
        """Raises Stopped."""
        self._save()
        self._tell({"kind": "end", "step": self._state.step, "why": "interrupted"}, log=True)
        raise Stopped(
            f"Stopped after step {self._state.step} of {self._prepared.plan.steps}, and nothing is lost. Go on with "
            f"`--resume`, as if it had not been stopped.",
            interrupts.number,
        )

    def _finish(self, interrupts: Interrupts) -> None:
        """The last checkpoint, and the draft of the best evaluation, or without any the last one.

        It may be measured for minutes: what interrupts that leaves a training that is finished when it goes on.
        """
        self._save()
        best, last = self._state.best, self._weights()
        weights = self._folder.checkpoints.load_best() if best else None
        self._prepared.restore(weights or last)
        try:
            with interrupts.at_once():
                self._hooks.export(self._snapshot(best["record"] if best else None), self._folder.draft)
        except KeyboardInterrupt:
            self._prepared.restore(last)
            self._stop(interrupts)
        self._prepared.restore(last)
        self._tell({"kind": "end", "step": self._state.step, "why": "finished"}, log=True)

    def _tell(self, record: dict[str, Any], *, log: bool) -> None:
        if log:
            try:
                self._log.append(record)
            except OSError as error:
                raise TrainingError(
                    f"The log of {self._folder.path} could not be written ({error}), so nothing would say how the "
                    f"training went. What it learned until step {self._saved} is kept. Free some space, or make "
                    "the folder writable, and go on with `--resume`."
                ) from error
        if self._unseen:
            return
        try:
            self._hooks.progress(record)
        except OSError as error:  # a closed pipe, or a terminal that is gone before SIGHUP says so: the step counts
            self._unseen = error


def train(
    target: Target,
    tokenizer: TokenizerWrapper,
    dataset: Dataset,
    recipe: Recipe,
    folder: Path | RunFolder,
    *,
    decoder: Decoder | None = None,
    hooks: Hooks,
    resume: bool = False,
) -> Path:
    """Train a draft in a run folder, or go on with the training there.

    A new run learns from all shards that the data set has; one that goes on from those that it began with.

    Args:
        folder: of the run; a `RunFolder` may be held already.
        decoder: of the target, with the draft's taps, for features that are not stored; None makes one if need be.
    Returns:
        The folder of the finished draft.
    Raises:
        Stopped: it was interrupted, and can be continued.
        DFlashError: it cannot begin, continue or end; says why, and what to do.
        ValueError: recipe and answers do not fit.
    """
    run = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    task = Task(target, tokenizer, dataset, recipe, decoder)
    with run.held(), Interrupts(hooks.tell) as interrupts:
        with interrupts.at_once():
            trainer = _begun(run, task, hooks, resume)
        trainer.run(interrupts)
    return run.draft


def _begun(run: RunFolder, task: Task, hooks: Hooks, resume: bool) -> Trainer:
    """The trainer, where it begins or goes on. Nothing is written before everything is checked."""
    found, scales = None, None
    if resume:
        run.refuse_none()
        start = begin(task, run.shards(), run.top())
        run.check(start)
        found = run.checkpoints.load()
        scales = FeatureScales.from_json(found.state.scales) if found else None
    else:
        run.refuse_run()
        start = begin(task)
    prepared = prepare(task, start, scales)
    hooks.begin(prepared)
    need = estimate(prepared, hooks.held_out)
    hooks.tell(need.line())
    need.refuse_more_than(memory_here())
    check_space(run.path / "checkpoint", 2 * need.draft)  # two at a time, while one replaces the other
    for line in (*prepared.draft.notes, *run.write(start)):
        hooks.tell(line)
    trainer = Trainer(prepared, run, Log(run.log), hooks)
    trainer.resume(found)
    return trainer
