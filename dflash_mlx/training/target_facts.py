"""What a target's arguments say that its draft takes over; families spell them differently or leave them out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dflash_mlx.config import FULL
from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings import rope
from dflash_mlx.targets import Target

_BASE = 10000.0  # of rotary embeddings, where the target has none
_SAMPLE = 1024  # embedding rows whose sizes are compared


def size_of(args: Any, name: str) -> int | None:
    """A size that the target's arguments state; None if they do not, or state one per layer."""
    value = getattr(args, name, None)
    return value if type(value) is int and value > 0 else None


def rope_of(args: Any) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the target's full layers; unscaled where a draft cannot scale as the target does."""
    entries = {key: getattr(args, key, None) for key in rope.KEYS}
    parameters = entries["rope_parameters"]
    if isinstance(parameters, dict) and FULL in parameters:
        parameters = entries["rope_parameters"] = parameters[FULL]
    try:
        base, scaling = rope.read(entries)
        return base, None if scaling is None else dict(scaling)
    except CheckpointError:
        inner = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        given = entries["rope_theta"] or inner
        return float(given) if isinstance(given, int | float) and given > 1 else _BASE, None


def cap_of(target: Target) -> float | None:
    """The soft cap of the target's logits, which its draft's then have too."""
    text = target.text
    cap = getattr(text, "final_logit_softcapping", None) or getattr(
        getattr(text, "args", None), "final_logit_softcapping", None
    )
    return float(cap) if cap else None


def embedding_scale(target: Target) -> float:
    """What brings a block's rows to the size of the target's own; 1 unless the target norms its embeddings."""
    return _ratio(target, target.embed, target.block_rows)


def row_scale(target: Target) -> float:
    """By what the rows of the target's table are multiplied in a block; 1 for most, more for Gemma's."""
    table = getattr(target, "embedding", None)
    return 1.0 if table is None else _ratio(target, target.block_rows, table)


def _ratio(target: Target, one: Callable[[mx.array], mx.array], other: Callable[[mx.array], mx.array]) -> float:
    """How much larger one kind of rows is than another."""
    ids = mx.arange(min(target.spec.vocab_size, _SAMPLE))[None]
    own, given = (mx.sqrt(rows(ids).astype(mx.float32).square().mean()) for rows in (one, other))
    ratio: float = (own / given).item()  # type: ignore[assignment]
    return float(f"{ratio:.6g}") if math.isfinite(ratio) and ratio > 0 else 1.0
