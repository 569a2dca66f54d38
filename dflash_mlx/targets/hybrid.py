"""Hybrids of recurrent and attention layers: Qwen3-Next, Qwen3.5 to 3.8 (gated delta rule), LFM2 (short convolution).

The loop is mlx_lm's (`Qwen3_5TextModel.__call__`, `Lfm2Model.__call__`). The block of a recurrent layer is written out,
because its rollback runs the mixer again over the rows it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from dflash_mlx.cache import RecurrentState, TargetCache
from dflash_mlx.targets import Forward, register
from dflash_mlx.targets.dense import DenseTarget, PipelinedTarget


@dataclass(frozen=True)
class Parts:
    """What a recurrent layer computes: h + mixer(norm(h)), then h + mlp(mlp_norm(h))."""

    norm: nn.Module
    mixer: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module


class HybridTarget(DenseTarget, ABC):
    """Layers with an attention cache are called whole, layers with a recurrent one in parts."""

    @abstractmethod
    def recurrent_mask(self, h: mx.array, entries: list) -> mx.array | None:
        """The mask of recurrent layers, as the model's own forward builds it."""

    @abstractmethod
    def parts(self, layer: nn.Module) -> Parts:
        """A recurrent layer in parts."""

    def forward(self, ids: mx.array, cache: TargetCache, taps: Sequence[int] = ()) -> Forward:
        h = self.embed(ids)  # [B, T, H]
        full = create_attention_mask(h, cache.entries[self.inner.fa_idx])
        recurrent = self.recurrent_mask(h, cache.entries)
        outputs = {}
        layers = zip(self.inner.layers, cache.states, cache.entries, strict=True)
        for index, (layer, state, entry) in enumerate(layers):
            if isinstance(state, RecurrentState):
                parts = self.parts(layer)
                rows = parts.norm(h)
                state.record(_Replay(parts.mixer, rows, entry))
                h = h + parts.mixer(rows, mask=recurrent, cache=entry)
                h = h + parts.mlp(parts.mlp_norm(h))
            else:
                h = layer(h, mask=full, cache=entry)
            if index in taps:
                outputs[index] = h
        return Forward.of(h, outputs, taps)


class _Replay:
    """Runs a mixer again over the first rows of a block; only its state is of interest."""

    def __init__(self, mixer: nn.Module, rows: mx.array, entry: object) -> None:
        self._mixer, self._rows, self._entry = mixer, rows, entry

    def __call__(self, count: int) -> None:
        self._mixer(self._rows[:, :count], mask=None, cache=self._entry)


@register("qwen3_next", "qwen3_5", "qwen3_5_moe")
class GatedDeltaTarget(HybridTarget, PipelinedTarget):
    """Three gated-delta layers, then one attention layer, and so on."""

    def recurrent_mask(self, h: mx.array, entries: list) -> mx.array | None:
        return create_ssm_mask(h, entries[self.inner.ssm_idx])

    def parts(self, layer: nn.Module) -> Parts:
        return Parts(layer.input_layernorm, layer.linear_attn, layer.post_attention_layernorm, layer.mlp)


@register("lfm2")
class ShortConvTarget(HybridTarget):
    """LFM2: short convolutions between attention layers, always a tied head."""

    def is_tied(self) -> bool:
        return True

    @property
    def final_norm(self) -> nn.Module:
        return self.inner.embedding_norm

    def recurrent_mask(self, h: mx.array, entries: list) -> mx.array | None:
        return create_ssm_mask(h, entries[self.inner.conv_idx])

    def parts(self, layer: nn.Module) -> Parts:
        return Parts(layer.operator_norm, layer.conv, layer.ffn_norm, layer.feed_forward)
