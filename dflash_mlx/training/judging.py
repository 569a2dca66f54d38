"""What the command has a training do: measure the draft on held-out answers, and write it with a card that says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.draft.checkpoint import check_pair, load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.vocabulary import borrow_head
from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.repository import find
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.training.about import About, Stored, TargetFacts
from dflash_mlx.training.asked import Asked
from dflash_mlx.training.evaluate import accepted, walked
from dflash_mlx.training.evaluation import Count, Evaluation
from dflash_mlx.training.export import export
from dflash_mlx.training.held_out import HeldOut, held_out
from dflash_mlx.training.hooks import Snapshot
from dflash_mlx.training.log import Log
from dflash_mlx.training.matches import Matches
from dflash_mlx.training.outlook import counted
from dflash_mlx.training.prepare import Prepared
from dflash_mlx.training.run_folder import RunFolder, versions
from dflash_mlx.training.supply import Loaded
from dflash_mlx.training.target_facts import row_scale

ACCEPTANCE = "acceptance"  # kind of the record that says what the decode loop made of the finished draft


@dataclass
class Judge:
    """Hooks of one training.

    chosen: the held-out answers that count, without features; none measures nothing.
    tell: sentences for the user. show: records for the log's readers.
    """

    asked: Asked
    loaded: Loaded
    run: RunFolder
    chosen: list[HeldOut]
    tell: Callable[[str], None]
    show: Callable[[Mapping[str, Any]], None]
    found: dict[str, Any] = field(default_factory=dict)  # the record of the finished draft
    _answers: list[HeldOut] = field(default_factory=list)

    @cached_property
    def stored(self) -> Stored:
        return Stored(bits=self.asked.bits, group_size=self.asked.group_size)

    def evaluate(self, snapshot: Snapshot) -> Evaluation:
        """At all places of the held-out answers, with the cycles that the decode loop would take."""
        prepared = snapshot.prepared
        if not self._answers:
            self._answers = held_out_answers(prepared, features=True)
        matches = Matches(snapshot.draft, prepared.frozen)
        return walked(matches, self._answers, block_size=prepared.recipe.block_size, step=snapshot.step)

    def export(self, snapshot: Snapshot, folder: Path) -> None:
        """Write a draft; the finished one is then measured as it is stored, and its card says what was found."""
        self._write(snapshot, folder, snapshot.evaluation)
        if folder != self.run.draft:
            return
        evaluation = snapshot.evaluation
        if self.chosen:
            evaluation = {**(evaluation or {}), "step": snapshot.step, **self._measured(snapshot, folder)}
            self._write(snapshot, folder, evaluation)
        self.found = dict(evaluation or {})

    def _measured(self, snapshot: Snapshot, folder: Path) -> dict[str, Any]:
        """What the decode loop makes of the held-out prompts with the draft in a folder."""
        started = time.perf_counter()
        recipe, target = snapshot.prepared.recipe, self.loaded.target
        draft = self._served(folder)
        counts: dict[str, Count] = {}
        stop = set(self.loaded.tokenizer.eos_token_ids)
        for category in sorted({answer.category for answer in self.chosen}):
            answers = [answer for answer in self.chosen if answer.category == category]
            self.tell(f"measuring the finished draft in the decode loop: {counted(len(answers))} of {category}")
            counts |= accepted(
                target, draft, answers, stop=stop, block_size=recipe.block_size, max_tokens=recipe.evaluate_tokens
            )
        every = sum(counts.values(), Count())
        categories = {
            name: {**asdict(count), "tokens_per_cycle": count.tokens_per_cycle} for name, count in counts.items()
        }
        found = {"categories": categories, "tokens_per_cycle": every.tokens_per_cycle, "stored": str(self.stored)}
        seconds = time.perf_counter() - started
        record = {"kind": ACCEPTANCE, "step": snapshot.step, **found, "seconds": seconds}
        Log(self.run.log).append(record)
        self.show(record)
        return found

    def _served(self, folder: Path) -> DraftModel:
        """The draft in a folder as `load` gives it for this target."""
        target, on_cpu = self.loaded.target, mx.default_device() == mx.cpu
        dtype = mx.float32 if target.spec.dtype == mx.float16 else target.spec.dtype
        draft = load_draft(folder, dtype=dtype if on_cpu else None, packed=not on_cpu)
        check_pair(draft, target, self.asked.target)
        borrow_head(draft, target)
        draft.known_tokens = 1 + max(self.loaded.tokenizer.get_vocab().values())
        return draft

    def _write(self, snapshot: Snapshot, folder: Path, evaluation: Mapping[str, Any] | None) -> None:
        prepared = snapshot.prepared
        plan, target = prepared.plan, self.loaded.target
        reached = plan.reached(snapshot.step * prepared.recipe.accumulate)
        steps = [record for record in Log(self.run.log).read() if record["kind"] == "step"]
        about = About(
            target=self._target(prepared),
            data=prepared.start.data,
            answers=len(reached),
            tokens=plan.tokens(reached),
            usable=len(plan.samples),
            row_scale=1.0 if snapshot.draft.config.own_embedding else row_scale(target),
            recipe=prepared.recipe,
            steps=snapshot.step,
            seconds=next((each["seconds"] for each in reversed(steps) if each["step"] <= snapshot.step), None),
            evaluation=evaluation,
            versions=versions(),
        )
        args = getattr(target.text, "args", None)
        tied = bool(getattr(args, "tie_word_embeddings", False))
        export(snapshot.draft, folder, about, stored=self.stored, tied=tied, replace=True)

    def _target(self, prepared: Prepared) -> TargetFacts:
        """Under the name that it was loaded by here."""
        name = self.asked.target
        identity = {**prepared.start.target, "name": name, "revision": self.asked.revision}
        folder = None if name == DEMO else find(name, TARGET, self.asked.revision).folder
        return TargetFacts.of(identity, folder)


def held_out_answers(prepared: Prepared, *, features: bool) -> list[HeldOut]:
    """Those that a run is measured on.

    Raises:
        NothingHeldOut: there are none. DatasetError: a shard is damaged, or lacks features that nothing computes.
    """
    recipe = prepared.recipe
    return held_out(
        prepared.task.dataset,
        numbers=prepared.start.shards,
        per_category=recipe.evaluate_prompts,
        max_tokens=recipe.evaluate_tokens,
        seed=recipe.seed,
        layers=prepared.draft.config.target_layer_ids if features else (),
        decoder=prepared.decoder if features else None,
    )
