"""Rotary embeddings of a draft, from the draft's own config (never the target's).

YaRN follows Hugging Face: `attention_factor` and `truncate` are honoured, `mscale` and `mscale_all_dim` are not
(the published drafts that carry them were trained with the plain factor). Other scalings are mlx_lm's.
Source: Peng et al. 2023 (arXiv 2309.00071); transformers' `_compute_yarn_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import CheckpointError
from dflash_mlx.kernels.rotation import Rotation, rotation_of


class YarnRope(nn.Module):
    """x [B, heads, T, D] rotated at positions offset..offset+T-1, scaled by the YaRN attention factor."""

    def __init__(self, dims: int, theta: float, scaling: Mapping[str, Any], *, traditional: bool) -> None:
        super().__init__()
        self._dims, self._traditional = dims, traditional
        factor = float(scaling["factor"])
        self._scale = float(scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0)
        self._freqs = _yarn_freqs(dims, theta, factor, scaling)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x * self._scale,
            self._dims,
            traditional=self._traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )

    @property
    def rotation(self) -> Rotation:
        """The same as data; all dimensions of a head turn, so all are scaled."""
        return Rotation(self._dims, freqs=self._freqs, mscale=self._scale, traditional=self._traditional)


def rotation_by(rope: nn.Module) -> Rotation | None:
    """What a module of `make_rope` does, as data; None where it changes with the length (dynamic NTK)."""
    return rope.rotation if isinstance(rope, YarnRope) else rotation_of(rope)


def _yarn_freqs(dims: int, theta: float, factor: float, scaling: Mapping[str, Any]) -> mx.array:
    """[dims / 2] periods: 1 / inv_freq, as `mx.fast.rope` takes them."""
    original = float(scaling["original_max_position_embeddings"])

    def correction(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(scaling.get("beta_fast", 32.0)), correction(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    index = mx.arange(dims // 2, dtype=mx.float32)
    ramp = mx.clip((index - low) / max(high - low, 1e-3), 0, 1)
    base = theta ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return 1.0 / ((1 - ramp) / base + ramp / (factor * base))


def make_rope(config: DraftConfig) -> nn.Module:
    """The rotary module of one draft layer; call it as rope(x [B, heads, T, D], offset=position).

    Raises:
        CheckpointError: the scaling is unknown or incomplete.
    """
    scaling = config.rope_scaling
    try:
        if scaling is not None and scaling.get("rope_type", scaling.get("type")) == "yarn":
            return YarnRope(config.head_dim, config.rope_theta, scaling, traditional=config.rope_traditional)
        return initialize_rope(
            config.head_dim,
            config.rope_theta,
            config.rope_traditional,
            dict(scaling) if scaling else None,
            config.max_position_embeddings,
        )
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"Draft config: the rope scaling {dict(scaling or {})} is not usable ({error}). Get the config.json from "
            "the draft's own repository."
        ) from error
