"""Copies of drafts: with other tensors, or stored as a file stores them."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import quantize
from dflash_mlx.training.about import Stored
from dflash_mlx.training.checkpoint import by_name


def twin(draft: DraftModel, changed: Mapping[str, mx.array] | None = None) -> DraftModel:
    """A draft that shares all arrays of another but those that are given, and what was decided about it."""
    made = DraftModel(draft.config, draft.name)
    made.load_weights(list((by_name(draft.parameters()) | dict(changed or {})).items()), strict=True)
    made.block_size, made.context_window, made.known_tokens = draft.block_size, draft.context_window, draft.known_tokens
    made.notes, made.vocabulary, made.largest_id = draft.notes, draft.vocabulary, draft.largest_id
    made.eval()
    return made


def as_stored(draft: DraftModel, stored: Stored) -> DraftModel:
    """A copy as it will be loaded: packed before it is cast, as `load` does it."""
    made = twin(draft)
    if stored.bits is not None:
        quantize(made, stored.bits, stored.group_size)
    made.set_dtype(getattr(mx, stored.dtype))
    mx.eval(made.parameters())
    return made
