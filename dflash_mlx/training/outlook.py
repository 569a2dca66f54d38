"""What is about to be trained, in sentences, before it begins."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.draft.formats_shapes import expected_shapes
from dflash_mlx.training.answers import Answers
from dflash_mlx.training.architecture import initial_vocabulary
from dflash_mlx.training.asked import Asked
from dflash_mlx.training.blocks import Plan
from dflash_mlx.training.checkpoint import by_name
from dflash_mlx.training.decoder import decoder_for
from dflash_mlx.training.frozen import Frozen
from dflash_mlx.training.held_out import HeldOut
from dflash_mlx.training.initialise import FeatureScales, new_draft
from dflash_mlx.training.memory import Need
from dflash_mlx.training.prepare import Prepared, Task
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.recipe import FROM_TARGET, RANDOM, Recipe
from dflash_mlx.training.run_folder import Start
from dflash_mlx.training.supply import COMPUTED, Loaded, prompt_lengths


def of_target(asked: Asked, loaded: Loaded) -> str:
    spec = loaded.target.spec
    dtype = str(spec.dtype).removeprefix("mlx.core.")
    return (
        f"target: {asked.target}, {spec.model_type}, {spec.n_layers} layers, hidden size {spec.hidden_size}, "
        f"{spec.vocab_size} tokens, {dtype}"
    )


def of_draft(recipe: Recipe, loaded: Loaded) -> str:
    config = loaded.config
    kind = "DFlash" if config.selector is None else "DFlash 2"
    size = sum(int(np.prod(shape)) for shape in expected_shapes(config).values())
    begun = {FROM_TARGET: "the target's own last layers", RANDOM: "random weights"}
    kept = "" if recipe.initial in begun or recipe.block_size else ", whose block size it keeps"
    window = f", windows of {config.sliding_window} positions" if config.sliding_window else ""
    return (
        f"draft: {kind}, {config.num_layers} layers{window}, {size / 1e6:.2f} million parameters, block size "
        f"{config.block_size} (1 known token and {config.block_size - 1} proposals), reads the target's layers "
        f"{', '.join(map(str, loaded.taps))}, begins with {begun.get(recipe.initial, recipe.initial)}{kept}"
    )


def of_mask(recipe: Recipe, loaded: Loaded) -> str:
    token = loaded.config.mask_token_id
    if recipe.initial not in (FROM_TARGET, RANDOM):
        why = f"as in {recipe.initial}"
    elif recipe.mask_token_id is not None:
        why = "as the recipe says"
    elif token > max(_vocabulary(loaded.tokenizer)):
        why = "a row of the embedding that no token has"
    else:
        why = "a special token that no conversation has"
    text = _vocabulary(loaded.tokenizer).get(token)
    return f"mask token: {token}{'' if text is None else f' ({text!r})'}, {why}"


def _vocabulary(tokenizer: TokenizerWrapper) -> dict[int, str]:
    return {index: text for text, index in tokenizer.get_vocab().items()}


def of_answers(prepared: Prepared) -> list[str]:
    """Data and vocabulary."""
    answers, frozen = prepared.answers, prepared.frozen
    dataset, shards = prepared.task.dataset, prepared.start.shards
    plan = prepared.plan
    held = sum(int(dataset.shard(number).held_out.sum()) for number in shards)
    learns = f"{prepared.start.top} likeliest tokens of each distribution" if prepared.start.top else "tokens alone"
    where = "computed in every step" if prepared.decoder is not None else "stored"
    lines = [
        f"data: {dataset.folder}, {len(shards)} shards, {len(plan.samples)} answers to learn from, "
        f"{plan.tokens(plan.samples)} tokens without their prompts, {held} more answers held out; learns from "
        f"{learns}; features are {where}"
    ]
    if frozen.vocabulary is not None:
        counts = answers.counts(prepared.task.target.spec.vocab_size)
        share = counts[frozen.vocabulary].sum() / max(1, counts.sum())
        kept = "" if prepared.start.recipe.vocabulary else ", the list of the draft that it begins with"
        lines.append(
            f"vocabulary: proposes {frozen.size} of {len(counts)} tokens, {share:.2%} of those in the answers{kept}"
        )
    return lines


def of_steps(prepared: Prepared) -> str:
    recipe, plan = prepared.recipe, prepared.plan
    parameters = sum(value.size for value in by_name(prepared.draft.trainable_parameters()).values())
    accumulated = f" of {recipe.accumulate} micro-batches" if recipe.accumulate > 1 else ""
    return (
        f"training: {plan.steps} steps{accumulated} ({plan.epoch(plan.steps * recipe.accumulate):.2f} passes over the "
        f"answers), {recipe.sequences} answers and up to {recipe.sequences * recipe.anchors} blocks in each, "
        f"{parameters / 1e6:.2f} million parameters in {recipe.precision}, seed {recipe.seed}"
    )


def categories(chosen: Sequence[HeldOut]) -> Counter[str]:
    """How many held-out answers there are of each."""
    return Counter(answer.category for answer in chosen)


def to_be_held_out(prompts: Sequence[Prompt], recipe: Recipe) -> Counter[str]:
    """As `categories`, of answers that are not there yet."""
    counts = Counter(prompt.category for prompt in prompts if prompt.held_out)
    return Counter({name: min(count, recipe.evaluate_prompts) for name, count in counts.items()})


def of_evaluation(recipe: Recipe, counts: Counter[str]) -> str:
    if not counts:
        return "evaluation: none, since no answers are held out; the draft of the last step is kept"
    every = f"every {recipe.evaluate_every} steps and " if recipe.evaluate_every else ""
    listed = ", ".join(f"{count} {category}" for category, count in sorted(counts.items()))
    answers = f"{counts.total()} held-out answer{'s' * (counts.total() != 1)}"
    return (
        f"evaluation: {every}at the end, on {answers} ({listed}) of at most "
        f"{recipe.evaluate_tokens} tokens; the best draft is kept"
    )


def counted(prompts: int) -> str:
    return f"{prompts} prompt{'s' * (prompts != 1)}"


def of_disk(need: Need) -> str:
    return (
        f"disk: about {5 * need.draft / 3 / 1e9:.2f} GB for checkpoints and drafts, twice that while they are written"
    )


def resume_line(out: object) -> str:
    return f"dflash-metal train --out {shlex.quote(str(out))} --resume"


def going_on(out: object) -> str:
    return f"to go on: {resume_line(out)}"


def expected(asked: Asked, loaded: Loaded, prompts: Sequence[Prompt], task: Task) -> Prepared:
    """What would be trained if every answer to the prompts were as long as it may be: none is there yet.

    Raises:
        ValueError: no prompt is to be learned from.
    """
    tried = prompt_lengths(prompts, loaded.tokenizer)
    learned = sum(not prompt.held_out for prompt in prompts) * asked.samples
    lengths = np.resize(np.array(tried, np.int64), learned)
    draft = new_draft(loaded.target, task.recipe, loaded.config, FeatureScales(np.ones(len(loaded.taps), np.float32)))
    vocabulary = initial_vocabulary(task.recipe, loaded.config)
    if task.recipe.vocabulary:
        vocabulary = np.arange(min(task.recipe.vocabulary, loaded.config.vocab_size), dtype=np.int32)
    order = np.arange(loaded.config.vocab_size, dtype=np.int32) if task.recipe.columns else None
    return Prepared(
        task=task,
        start=Start(task.recipe, {"name": asked.target}, {}, [], 0, ""),
        recipe=task.recipe,
        draft=draft,
        scales=FeatureScales(np.ones(len(loaded.taps), np.float32)),
        frozen=Frozen(loaded.target, draft, vocabulary, order),
        answers=cast(Answers, None),  # nothing here reads them
        plan=Plan(lengths + asked.max_tokens, lengths, task.recipe),
        decoder=decoder_for(loaded.model, loaded.taps) if asked.features == COMPUTED else None,
    )
