"""The draft that a training begins with."""

from __future__ import annotations

import zlib

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.formats_shapes import expected_shapes
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.targets import Target
from dflash_mlx.training.architecture import initial_folder
from dflash_mlx.training.from_target import copy_layers, final_norm
from dflash_mlx.training.recipe import FROM_TARGET, RANDOM, Recipe, RecipeError
from dflash_mlx.training.scales import FUSION, mark
from dflash_mlx.training.scales import FeatureScales as FeatureScales

_NOISE = 0.1  # of a random fusion, where the deepest tap passes through


def new_draft(target: Target, recipe: Recipe, config: DraftConfig, scales: FeatureScales) -> DraftModel:
    """The draft of step 0, in float32, with the scales folded in: for divided features.

    Its `notes` say what of it could not be taken from where the recipe says. What is random depends on the recipe's
    seed and the name of the tensor only.

    Args:
        config: of `architecture.draft_config` for this recipe.
    Raises:
        RecipeError: the draft to begin with is another than the config is of.
        CheckpointError, FetchError: it cannot be had.
        ValueError: the scales are of another number of taps.
    """
    if len(scales.std) != len(config.target_layer_ids):
        raise ValueError(
            f"`scales` has to have one for each tap {list(config.target_layer_ids)}, got {scales.to_json()}. They were "
            "measured for another draft. Measure them again."
        )
    taken, notes = _taken(target, recipe, config, scales)
    shapes = expected_shapes(config)
    if wrong := [key for key, value in taken.items() if tuple(value.shape) != shapes.get(key)]:
        raise RecipeError(
            f"The draft {recipe.initial} has `{wrong[0]}` {list(taken[wrong[0]].shape)}, and the config is of one with "
            f"{list(shapes.get(wrong[0], ()))}. It was changed since. Begin again with a config that is made of it."
        )
    fresh = {key: _fresh(key, shape, config, recipe.seed) for key, shape in shapes.items() if key not in taken}
    draft = DraftModel(config, "the draft in training")
    draft.load_weights(list((taken | fresh).items()), strict=True)
    draft.notes = notes
    if config.own_embedding:
        draft.embed_tokens.freeze()
    mark(draft, scales)
    draft.eval()
    mx.eval(draft.parameters())
    return draft


def _taken(
    target: Target, recipe: Recipe, config: DraftConfig, scales: FeatureScales
) -> tuple[dict[str, mx.array], tuple[str, ...]]:
    """What is not random, and notes about the rest."""
    if recipe.initial == RANDOM:
        return final_norm(target, config), ()
    if recipe.initial == FROM_TARGET:
        copied = copy_layers(target, config)
        return {FUSION: _through(config, recipe.seed), **copied.tensors}, copied.notes
    folder = initial_folder(recipe)
    assert folder is not None
    old = load_draft(folder, name=recipe.initial, dtype=mx.float32, packed=False)
    tensors: dict[str, mx.array] = dict(tree_flatten(old.parameters()))
    tensors[FUSION] = scales.times(tensors[FUSION])
    if config.selector is None or old.config.selector is not None:
        return tensors, ()
    added = "it becomes DFlash 2: its convolutions and its selector begin without an effect"
    if old.vocabulary is not None:
        added += f", and its list of {len(old.vocabulary)} tokens is dropped, since the selector scores all"
    return tensors, (added,)


def _through(config: DraftConfig, seed: int) -> mx.array:
    """A fusion of divided features that passes the deepest tap, and a little of the others."""
    taps, hidden = config.target_layer_ids, config.hidden_size
    fusion = _drawn(FUSION, (hidden, len(taps) * hidden), _NOISE * (len(taps) * hidden) ** -0.5, seed)
    start = taps.index(max(taps)) * hidden
    fusion[:, start : start + hidden] = np.eye(hidden, dtype=np.float32)
    return mx.array(fusion)


def _fresh(name: str, shape: tuple[int, ...], config: DraftConfig, seed: int) -> mx.array:
    """A tensor that comes from nowhere. DFlash 2's parts have no effect; what a layer adds to its input is small."""
    if len(shape) == 1:
        return mx.zeros(shape) if name.endswith(".bias") else mx.ones(shape)
    if name.endswith(("kernel_projection.weight", "predecessor_codebook")):
        return mx.zeros(shape)
    if name.endswith("base_kernel"):
        return mx.concatenate([mx.ones((2, 1, shape[2])), mx.zeros((2, shape[1] - 1, shape[2]))], axis=1)
    size = shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        size *= (2 * config.num_layers) ** -0.5
    return mx.array(_drawn(name, shape, size, seed))


def _drawn(name: str, shape: tuple[int, ...], size: float, seed: int) -> np.ndarray:
    """Normal, float32; the same on every machine."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return generator.standard_normal(shape, np.float32) * np.float32(size)
