"""The work of `dflash-metal train`: load, generate or complete the answers, train, measure, export, report.

Sentences go to stderr. The finished draft's folder goes to stdout, or with --json the records of the log and a last one
of the kind "result".
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx import blas, load
from dflash_mlx.cli import INTERRUPTED, LoadingBar, noted_warnings
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.formats_shapes import expected_shapes
from dflash_mlx.draft.quantize import is_packable
from dflash_mlx.errors import Interrupted
from dflash_mlx.files import check_space
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.targets import target_for
from dflash_mlx.training import charts, outlook, supply
from dflash_mlx.training.architecture import draft_config
from dflash_mlx.training.asked import DECIDING, FILE, asked_of
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.held_out import HeldOut, NothingHeldOut, held_out, positions_in
from dflash_mlx.training.initialise import FeatureScales
from dflash_mlx.training.interrupts import Interrupts, Stopped
from dflash_mlx.training.judging import Judge
from dflash_mlx.training.log import Log, plain
from dflash_mlx.training.memory import estimate, memory_here
from dflash_mlx.training.panel import number
from dflash_mlx.training.prepare import Prepared, Task, begin, prepare
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.run_folder import RunFolder
from dflash_mlx.training.supply import CACHED, Gaps, Loaded
from dflash_mlx.training.trainer import Hooks, train

DATA = "data"  # in a run's folder: the answers, if they were generated for it


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        ValueError, DFlashError, OSError: for `cli.guarded`.
    """
    folder = RunFolder(args.out)
    resume = f"To go on: {outlook.resume_line(args.out)}"

    def begun() -> bool:
        return not args.dry_run and (folder.started or (args.out / FILE).exists())

    try:
        with Interrupts() as interrupts, interrupts.at_once():  # no signal leaves a half-written file
            return _Command(args, folder).run()
    except KeyboardInterrupt as stopped:
        said = str(stopped) if isinstance(stopped, Stopped) else "Interrupted."
        _say(f"{said}\n{resume}" if begun() else said)
        return stopped.status if isinstance(stopped, Interrupted) else INTERRUPTED
    except BrokenPipeError:
        if not begun() or Log(folder.log).finished:
            raise
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to fail at exit
            _say(f"Error: nobody reads the records any more, so the training stopped. {resume}")
        return 1
    except OSError as error:
        if not begun():
            raise
        raise OSError(f"{error}. What was finished before is kept. {resume}") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Command:
    def __init__(self, args: argparse.Namespace, run: RunFolder) -> None:
        if run.started and not args.resume:
            run.refuse_run()
        if args.resume and not run.started and not (args.out / FILE).exists():
            run.refuse_none()
        self._args, self._run, self._asked = args, run, asked_of(args)
        self._generated = args.out / DATA

    def run(self) -> int:
        """Returns the exit status."""
        asked, dataset, prompts = self._asked, None, list[Prompt]()
        asked.settings()  # refused before anything is loaded
        if asked.is_dataset or self._run.started:
            dataset = Dataset.open(Path(asked.data) if asked.is_dataset else self._generated)
        else:
            prompts = supply.prompts_of(asked, _say)
        self._note_unused()
        loaded = self._load(dataset)
        _say(outlook.of_target(asked, loaded))
        _say(outlook.of_draft(asked.recipe, loaded))
        _say(outlook.of_mask(asked.recipe, loaded))
        if dataset is not None:
            supply.check(asked, loaded, dataset)
        self._place(dataset, prompts, loaded)
        if dataset is None or self._args.dry_run:  # else the training itself says so, at once
            self._foresee(dataset, prompts, loaded)
        if self._args.dry_run:
            _say("nothing was written: this was a dry run")
            return 0
        with self._run.held():  # before anything is written: another process may be at work in it
            self._asked.write(self._args.out)
            if dataset is None:
                _say(f"Ctrl-C stops it and keeps the shards that are done; {outlook.going_on(self._args.out)}")
                dataset = supply.answered(self._asked, loaded, prompts, self._generated, _say)
            supply.fill(self._asked, loaded, dataset, self._run, _say)
            return self._train(dataset, loaded)

    def _note_unused(self) -> None:
        """Answers that are there stay as they are, and who asks for others has to know it."""
        given = [f"--{name.replace('_', '-')}" for name in DECIDING if getattr(self._args, name) is not None]
        if self._asked.is_dataset and given:
            _say(
                f"note: {self._asked.data} has its answers already, all of them are used, and {', '.join(given)} "
                "changes nothing"
            )

    def _load(self, dataset: Dataset | None) -> Loaded:
        """The target, as the answers were made if they are there and it is the demo's, which can be loaded in several
        ways."""
        asked, notes = self._asked, list[str]()
        dtype = asked.dtype
        if dtype is None and dataset is not None and asked.target == DEMO:
            dtype = dataset.manifest.get("target", {}).get("dtype")
        try:
            with LoadingBar() as bar, noted_warnings(notes):
                model, tokenizer = load(asked.target, dtype=dtype, revision=asked.revision, progress=bar)
        finally:
            for note in notes:
                _say(f"note: {note}")
        blas.bind(asked.threads)
        target = target_for(model)
        config = draft_config(target, tokenizer, asked.recipe, asked.target)
        loaded = Loaded(model, tokenizer, target, config)
        if asked.bits is not None:
            check_groups(asked.group_size, config)
        return loaded

    def _place(self, dataset: Dataset | None, prompts: Sequence[Prompt], loaded: Loaded) -> None:
        """Decide where features are and how many answers are made together, and say it with what is still needed."""
        asked = self._asked
        if dataset is None:
            held = sum(prompt.held_out for prompt in prompts)
            _say(
                f"data: {outlook.counted(len(prompts))} of {asked.data}, {held} of them held out; {asked.samples} "
                f"answers to each, of at most {asked.max_tokens} tokens, go to {self._generated}"
            )
            positions, folder = supply.positions_of(prompts, asked, loaded.tokenizer), self._generated
        else:
            gaps = Gaps.of(dataset, asked, loaded.taps, self._run)
            positions, folder = gaps.positions, dataset.folder
        where, why = supply.where_features_are(asked, positions, loaded, folder)
        self._asked = asked = replace(asked, features=where)
        if positions:
            _say(f"features: {why}")
            check_space(folder, loaded.feature_bytes(positions) if where == CACHED and dataset is not None else 0)
        if dataset is None:
            batch, line = supply.batch_of(asked, loaded, prompts, folder)
            self._asked = replace(asked, batch=batch)
            _say(line)
        elif said := gaps.line(loaded, where):
            _say(said)

    def _foresee(self, dataset: Dataset | None, prompts: Sequence[Prompt], loaded: Loaded) -> None:
        """Say what the training will need, before the target is asked for days.

        Raises:
            TooLarge: more memory than there is.
        """
        asked = self._asked
        if dataset is None:
            task = Task(loaded.target, loaded.tokenizer, Dataset(self._generated, {}), asked.recipe)
            prepared = outlook.expected(asked, loaded, prompts, task)
            _say(f"the rest holds if every answer has {asked.max_tokens} tokens; most have fewer")
            chosen = outlook.to_be_held_out(prompts, asked.recipe)
            longest = max(supply.prompt_lengths(prompts, loaded.tokenizer), default=0)
            held = chosen.total() * (longest + asked.recipe.evaluate_tokens)
        else:
            task = Task(loaded.target, loaded.tokenizer, dataset, asked.recipe)
            gaps = Gaps.of(dataset, asked, loaded.taps, self._run)
            shards = self._run.shards() if self._run.started else None
            start = begin(task, shards, 0 if gaps.soft else None)
            prepared = prepare(task, start, FeatureScales(np.ones(len(loaded.taps), np.float32)))
            if asked.features == CACHED:
                prepared = replace(prepared, decoder=None)  # they are there by then
            for line in outlook.of_answers(replace(prepared, start=replace(start, top=gaps.top))):
                _say(line)
            answers = self._chosen(dataset)
            chosen, held = outlook.categories(answers), positions_in(answers)
        _say(outlook.of_steps(prepared))
        _say(outlook.of_evaluation(asked.recipe, chosen))
        need = estimate(prepared, held)
        _say(need.line())
        _say(outlook.of_disk(need))
        need.refuse_more_than(memory_here())

    def _chosen(self, dataset: Dataset) -> list[HeldOut]:
        """What the draft is measured on, without features; empty if nothing is held out."""
        recipe = self._asked.recipe
        try:
            return held_out(
                dataset,
                numbers=self._run.shards() if self._run.started else None,
                per_category=recipe.evaluate_prompts,
                max_tokens=recipe.evaluate_tokens,
                seed=recipe.seed,
            )
        except NothingHeldOut as error:
            _say(f"note: {error}")
            return []

    def _train(self, dataset: Dataset, loaded: Loaded) -> int:
        asked, run, chosen = self._asked, self._run, self._chosen(dataset)
        with self._shown() as (show, tell):

            def begins(prepared: Prepared) -> None:
                for line in (*outlook.of_answers(prepared), outlook.of_steps(prepared)):
                    tell(line)
                tell(outlook.of_evaluation(prepared.recipe, outlook.categories(chosen)))
                tell(outlook.of_disk(estimate(prepared)))
                tell(f"Ctrl-C stops it and loses nothing; {outlook.going_on(run.path)}")

            judge = Judge(asked, loaded, run, chosen, tell, show)
            evaluate = judge.evaluate if chosen else None
            hooks = Hooks(judge.export, evaluate, show, tell, begins, positions_in(chosen))
            train(loaded.target, loaded.tokenizer, dataset, asked.recipe, run, hooks=hooks, resume=run.started)
        charts.write(Log(run.log).read(), run.path, tell=_say)
        self._report(judge)
        return 0

    @contextmanager
    def _shown(self) -> Iterator[tuple[Callable[[Mapping[str, Any]], None], Callable[[str], None]]]:
        """What shows records, and what says sentences meanwhile."""
        if self._args.json:
            yield _print_record, _say
            return
        with Progress(self._run.checkpoints.folder) as progress:
            if self._run.started:
                progress.show_past(Log(self._run.log).read())
            yield progress.show, progress.say

    def _report(self, judge: Judge) -> None:
        """Where the draft is, what it accepts, and how to run it."""
        folder, found = self._run.draft, judge.found
        at = ["--revision", self._asked.revision] if self._asked.revision else []
        words = ["generate", "--model", self._asked.target, *at, "--draft", str(folder), "--prompt", "Hello there"]
        command = shlex.join(["dflash-metal", *words])
        if self._args.json:
            _print_record({**found, "kind": "result", "draft": str(folder), "run": command})
            return
        for name, each in (found.get("categories") or {}).items():
            rate = number(each["tokens_per_cycle"], ".2f")
            _say(f"{name}: {rate} tokens per cycle ({outlook.counted(each['prompts'])})")
        overall = found.get("tokens_per_cycle")
        _say("not measured: nothing was held out" if not found else f"all: {number(overall, '.2f')} tokens per cycle")
        _say(f"to run it: {command}")
        print(folder, flush=True)


def _print_record(record: Mapping[str, Any]) -> None:
    print(json.dumps(plain(record), ensure_ascii=False, allow_nan=False), flush=True)


def check_groups(group_size: int, config: DraftConfig) -> None:
    """Raises ValueError if the finished draft could not be quantised: hours later would be late."""
    shapes = expected_shapes(config).items()
    rows = {shape[-1] for name, shape in shapes if len(shape) == 2 and is_packable(name.removesuffix(".weight"))}
    if not any(row % group_size == 0 for row in rows):
        raise ValueError(
            f"`--group-size` {group_size} divides no matrix of the draft (rows of {sorted(rows)}), so nothing would be "
            "quantised. Choose a smaller one, or leave --bits out."
        )
