"""Everything that a training works with, made from target, data set and recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.targets import Target
from dflash_mlx.training.answers import Answers
from dflash_mlx.training.architecture import draft_config, initial_digest, initial_vocabulary, settled
from dflash_mlx.training.blocks import Blocks, Plan, assemble
from dflash_mlx.training.checkpoint import TrainingError, by_name
from dflash_mlx.training.dataset import Dataset, DatasetError
from dflash_mlx.training.decoder import Decoder, decoder_for
from dflash_mlx.training.frozen import Frozen, by_frequency
from dflash_mlx.training.initialise import FeatureScales, new_draft
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.run_folder import Start
from dflash_mlx.training.target_identity import identity

_MEASURED = 64  # answers whose features are measured: their scales are rounded to powers of two


@dataclass(frozen=True)
class Task:
    """What is to be trained.

    decoder: of the target, with the draft's taps, for features that are not stored; None makes one if need be.
    """

    target: Target
    tokenizer: TokenizerWrapper
    dataset: Dataset
    recipe: Recipe
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Prepared:
    """recipe: with what target and draft decided. draft: in training, float32, for divided features.

    decoder: what computes features; None if all are stored.
    """

    task: Task
    start: Start
    recipe: Recipe
    draft: DraftModel
    scales: FeatureScales
    frozen: Frozen
    answers: Answers
    plan: Plan
    decoder: Decoder | None

    def blocks(self, number: int) -> Blocks:
        """The micro-batch with this number."""
        draws = self.plan.draws(number)
        return assemble(draws, self.answers.reader(draws, self.recipe), self.recipe)

    def serving(self) -> DraftModel:
        """The draft as it will be loaded: for features as they are. It shares all arrays but one."""
        made = self.scales.out_of(self.draft)
        if self.frozen.vocabulary is not None:
            made.vocabulary, made.largest_id = self.frozen.vocabulary, int(self.frozen.vocabulary[-1])
        return made

    def restore(self, weights: dict[str, mx.array]) -> None:
        """Give the draft other weights.

        Raises:
            TrainingError: they are of another draft.
        """
        mine = {name: value.shape for name, value in by_name(self.draft.parameters()).items()}
        theirs = {name: value.shape for name, value in weights.items()}
        if mine != theirs:
            name = next(name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name))
            raise TrainingError(
                f"The checkpoint is of another draft: its {name} has the shape {theirs.get(name)}, here it has "
                f"{mine.get(name)}. Continue with the version that began the run, or begin another run."
            )
        self.draft.load_weights(list(weights.items()), strict=True)

    def facts(self) -> dict[str, Any]:
        """For the log."""
        return {
            "target": self.start.target["name"],
            "answers": len(self.plan.samples),
            "parameters": sum(value.size for value in by_name(self.draft.trainable_parameters()).values()),
            "micro_batches": self.plan.micro_batches,
            "block_size": self.recipe.block_size,
            "taps": list(self.draft.config.target_layer_ids),
            "vocabulary": self.frozen.size,
            "columns": min(self.recipe.columns or self.frozen.size, self.frozen.size),
            "feature_scales": self.scales.to_json(),
        }


def target_identity(target: Target, dataset: Dataset) -> dict[str, Any]:
    """The target's identity, under the name that the data set has for it.

    Raises:
        TrainingError: the data set is of another target, or of this one in another dtype.
    """
    theirs = dataset.manifest.get("target", {})
    found = identity(theirs.get("name", "target"), theirs.get("revision"), target.model)
    for key in ("dtype", "weights"):
        if key in theirs and theirs[key] != found[key]:
            raise TrainingError(
                f"The answers in {dataset.folder} are those of another target than the one that is loaded: its {key} "
                f"is {str(theirs[key])[:16]}, here it is {str(found[key])[:16]}. A draft would learn what this target "
                f"does not say. Load {theirs.get('name', 'that target')} as it was loaded then, or generate answers of "
                "this one."
            )
    return found


def stored_top(dataset: Dataset, numbers: list[int], recipe: Recipe) -> int:
    """Tokens per distribution to learn from: the most that all shards have; 0 if the recipe asks for none.

    Raises:
        TrainingError: it asks for them, and they are not there.
    """
    if not recipe.soft:
        return 0
    tops = [top for top in dataset.tops() if all(dataset.soft_path(number, top).exists() for number in numbers)]
    if not tops:
        raise TrainingError(
            f"The recipe learns from the target's distributions (`soft` {recipe.soft:g}), and {dataset.folder} does "
            "not have them for every shard. Complete the data set with its distributions, or set `soft` to 0."
        )
    return tops[-1]


def begin(task: Task, shards: list[int] | None = None, top: int | None = None) -> Start:
    """What a run of this task starts with.

    Args:
        shards, top: of a run that goes on; None takes all that are there.
    Raises:
        TrainingError, DatasetError: target, data set and recipe do not fit.
    """
    dataset = task.dataset
    there = dataset.numbers()
    shards = there if shards is None else shards
    if gone := sorted(set(shards) - set(there)):
        raise DatasetError(
            f"{dataset.folder} has no shard {gone[0]} any more ({len(gone)} of {len(shards)} are gone), and this run "
            "learns from it. Restore it, or begin another run, which learns from what is there."
        )
    if not shards:
        raise DatasetError(
            f"{dataset.folder} has no answers yet, so there is nothing to learn from. Generate some first."
        )
    known = target_identity(task.target, dataset)
    top = stored_top(dataset, shards, task.recipe) if top is None else top
    return Start.of(task.recipe, known, dataset, shards, top, initial_digest(task.recipe))


def prepare(task: Task, start: Start, scales: FeatureScales | None = None) -> Prepared:
    """Draft, plan and data.

    Args:
        scales: of the features; None measures them.
    Raises:
        DatasetError, RecipeError, IncompatiblePair, CheckpointError, ValueError: what does not fit, and why.
    """
    target, dataset = task.target, task.dataset
    config = draft_config(target, task.tokenizer, task.recipe, start.target["name"])
    recipe, taps = settled(task.recipe, config), config.target_layer_ids
    decoder = None
    if not all(dataset.features_path(number, taps).exists() for number in start.shards):
        decoder = task.decoder or decoder_for(target.model, taps)
        if decoder.taps != taps:
            raise ValueError(f"`decoder` has to have the layers {taps} as its taps, got {decoder.taps}.")
    answers = Answers(dataset, start.shards, taps, start.top, decoder)
    plan = Plan(answers.lengths, answers.prompt_lengths, recipe)
    if scales is None:
        scales = _measured(plan, answers, recipe, len(taps))
    draft = new_draft(target, recipe, config, scales)
    draft.known_tokens = 1 + max(task.tokenizer.get_vocab().values())  # as `load`
    vocabulary, order = None, None
    if recipe.vocabulary or recipe.columns:
        order = by_frequency(answers.counts(target.spec.vocab_size))
        order = order[order < config.vocab_size]  # a draft that is adapted may know fewer
    if not recipe.vocabulary:
        vocabulary = initial_vocabulary(recipe, config)
        recipe = recipe if vocabulary is None else recipe.changed(vocabulary=len(vocabulary))
    elif order is not None and recipe.vocabulary < target.spec.vocab_size:
        vocabulary = np.sort(order[: recipe.vocabulary])
    frozen = Frozen(target, draft, vocabulary, order)
    return Prepared(task, start, recipe, draft, scales, frozen, answers, plan, decoder)


def _measured(plan: Plan, answers: Answers, recipe: Recipe, taps: int) -> FeatureScales:
    """Of the answers that are learned first; the same whether their features are stored or not."""

    def found() -> Iterator[np.ndarray]:
        """One at a time: all of them may be gigabytes."""
        batches = min(plan.micro_batches, -(-_MEASURED // recipe.sequences))
        for draws in map(plan.draws, range(batches)):
            sample_of = answers.reader(draws, recipe)
            yield from (sample_of(draw.sample).features[: int(draw.anchors[-1])] for draw in draws)

    return FeatureScales.measure(found(), taps)
