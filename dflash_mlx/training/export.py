"""A trained draft as a folder: z-lab's config and tensor names, what it proposes, and a card that says what it is.

The folder appears whole or not at all, and `load(target, draft=folder)` runs it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx import __version__
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.formats_shapes import check_shapes
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import BITS, GROUP_SIZES, check_choice, check_dtype
from dflash_mlx.draft.vocabulary import write_vocabulary
from dflash_mlx.errors import DFlashError
from dflash_mlx.files import check_space, save_weights, whole_folder
from dflash_mlx.training.about import About, Stored
from dflash_mlx.training.architecture import config_json
from dflash_mlx.training.card import card
from dflash_mlx.training.scales import FeatureScales, scales_of
from dflash_mlx.training.twin import as_stored

_SLACK = 1 << 20  # bytes for everything but the weights


class ExportError(DFlashError):
    """A draft cannot be written as it is."""


def export(
    draft: DraftModel,
    folder: Path,
    about: About,
    *,
    scales: FeatureScales | None = None,
    stored: Stored | None = None,
    tied: bool = False,
    replace: bool = False,
) -> Path:
    """Write a draft; it stays as it is. What its `vocabulary` lists is stored as `draft_vocabulary.json`.

    Args:
        about: for the card.
        scales: those of a draft in training, which are taken out; None for one that takes features as they are.
        stored: how the weights are stored; default bfloat16, nothing packed.
        tied: whether the target's head is its embedding; for other readers.
        replace: what is at `folder` gives way, at the end.
    Returns:
        The folder.
    Raises:
        ExportError: weights are not finite, or config and tensors do not fit.
        FileExistsError: something is at `folder`. OSError: the disk is full, or it cannot be written.
        ValueError: the scales are not those of the draft, or no matrix divides into groups of that size.
    """
    stored = stored or Stored()
    check_dtype("dtype", stored.dtype)
    if stored.bits is not None:
        check_choice("bits", stored.bits, BITS, "or None, which packs nothing")
        check_choice("group_size", stored.group_size, GROUP_SIZES)
    made = as_stored(_unscaled(draft, scales), stored)
    weights: dict[str, mx.array] = dict(tree_flatten(made.parameters()))
    config = made.config
    if stored.bits is not None:
        config = dataclasses.replace(config, quantization={"group_size": stored.group_size, "bits": stored.bits})
    content = config_json(config, dtype=stored.dtype, tied=tied)
    content["trained"] = {"by": f"dflash-metal {__version__}", "for": about.target.name}
    _check(content, weights)
    check_space(folder, sum(value.nbytes for value in weights.values()) + _SLACK)
    with whole_folder(folder, replace=replace) as scratch:
        save_weights(scratch / "model.safetensors", weights)
        (scratch / "config.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if draft.vocabulary is not None:
            write_vocabulary(scratch, config.vocab_size, draft.vocabulary)
        text = card(about, config, stored, _size(draft), draft.vocabulary)
        (scratch / "README.md").write_text(text, encoding="utf-8")
    return folder


def _unscaled(draft: DraftModel, scales: FeatureScales | None) -> DraftModel:
    if scales is not None:
        return scales.out_of(draft)
    if (folded := scales_of(draft)) is not None:
        raise ValueError(
            f"`draft` ({draft.name}) takes features that are divided by {folded.to_json()}, and no decode loop divides "
            "them. Give its `scales`, so that they are taken out."
        )
    return draft


def _check(content: dict, weights: dict[str, mx.array]) -> None:
    """Raises ExportError for what `load` would refuse."""
    floating = {name: value for name, value in weights.items() if mx.issubdtype(value.dtype, mx.floating)}
    finite = np.array(mx.stack([mx.isfinite(value).all() for value in floating.values()]))
    if not finite.all():
        broken = [name for name, fine in zip(floating, finite, strict=True) if not fine]
        raise ExportError(
            f"{broken[0]} of the draft is not finite ({len(broken)} of {len(weights)} tensors are not), so it proposes "
            "nothing that can be accepted, and it is not written. Go back to an earlier checkpoint, and train with a "
            "lower `rate`."
        )
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    try:
        check_shapes(DraftConfig.from_dict(json.loads(json.dumps(content))), shapes, "the export")
    except DFlashError as error:
        raise ExportError(f"The draft cannot be written so that it could be loaded again: {error}") from error


def _size(draft: DraftModel) -> int:
    parameters: dict[str, mx.array] = dict(tree_flatten(draft.parameters()))
    return sum(value.size for value in parameters.values())
