"""Rotary embeddings as data, which a kernel can be given."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE


@dataclass(frozen=True, eq=False)
class Rotation:
    """What a rotary embedding does, as `mx.fast.rope` takes it.

    dims:   leading dimensions of a head that turn; the rest stays.
    base:   the period of the slowest pair, if there are no `freqs`.
    freqs:  [dims / 2] float32 periods (YaRN, Llama 3), or None.
    scale:  of the positions.
    mscale: of the values that turn.
    traditional: neighbours turn together instead of halves; the reference only.
    """

    dims: int
    base: float | None = None
    freqs: mx.array | None = None
    scale: float = 1.0
    mscale: float = 1.0
    traditional: bool = False

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """[B, heads, T, D] at positions offset.. (one offset, or [B]) -> the same shape."""
        if self.mscale != 1.0:
            x = x.at[..., : self.dims].multiply(self.mscale)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=offset,
            freqs=self.freqs,
        )


def rotation_of(rope: nn.Module) -> Rotation | None:
    """What a rotary module of mlx or mlx_lm does; None of a type that is not known here."""
    kind = type(rope)
    if kind is nn.RoPE:
        return Rotation(rope.dims, rope.base, scale=rope.scale, traditional=rope.traditional)
    if kind is Llama3RoPE or kind is ProportionalRoPE:
        return Rotation(rope.dims, freqs=rope._freqs, traditional=rope.traditional)
    if kind is YarnRoPE:
        return Rotation(rope.dims, freqs=rope._freqs, mscale=rope.mscale, traditional=rope.traditional)
    if kind is SuScaledRoPE:
        return Rotation(rope.dim, freqs=rope._freqs, mscale=rope._scale)
    return None
