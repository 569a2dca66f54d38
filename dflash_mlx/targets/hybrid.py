"""Hybrids of recurrent and attention layers: Qwen3-Next, Qwen3.5 to 3.8 (gated delta rule), LFM2 (short convolution),
Nemotron-H (Mamba-2).

The loop is mlx_lm's (`Qwen3_5TextModel.__call__`, `Lfm2Model.__call__`, `NemotronHModel.__call__`). The block of a
recurrent layer is written out, because its rollback runs the mixer again over the rows it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from dflash_mlx.cache import RecurrentState, TargetCache
from dflash_mlx.targets import Forward, register
from dflash_mlx.targets.dense import DenseTarget, Names


@dataclass(frozen=True)
class Parts:
    """What a recurrent layer computes: h + mixer(norm(h)), then, where it has one, h + mlp(norm(h)) as (norm, mlp)."""

    norm: nn.Module
    mixer: nn.Module
    mlp: tuple[nn.Module, nn.Module] | None = None


class HybridTarget(DenseTarget, ABC):
    """Layers with an attention cache are called whole, layers with a recurrent one in parts."""

    @abstractmethod
    def recurrent_mask(self, h: mx.array, entries: list) -> mx.array | None:
        """The mask of recurrent layers, as the model's own forward builds it."""

    @abstractmethod
    def parts(self, layer: nn.Module) -> Parts:
        """A recurrent layer in parts."""

    def holds(self, layer: nn.Module) -> bool:
        """Whether the layer has a cache entry."""
        return True

    def forward(self, ids: mx.array, cache: TargetCache, taps: Sequence[int] = ()) -> Forward:
        h = self.embed(ids)  # [B, T, H]
        full = create_attention_mask(h, cache.entries[self.inner.fa_idx])
        recurrent = self.recurrent_mask(h, cache.entries)
        outputs = {}
        held = zip(cache.states, cache.entries, strict=True)
        for index, layer in enumerate(self.layers):
            state, entry = next(held) if self.holds(layer) else (None, None)
            if isinstance(state, RecurrentState):
                h = _recurrent(self.parts(layer), h, recurrent, state, entry)
            else:
                h = layer(h, mask=full, cache=entry)
            if index in taps:
                outputs[index] = h
        return Forward.of(h, outputs, taps)


def _recurrent(parts: Parts, h: mx.array, mask: mx.array | None, state: RecurrentState, entry: object) -> mx.array:
    """[B, T, H] through one recurrent layer, of which is recorded how to come to the state after fewer rows."""
    rows = parts.norm(h)
    taped = getattr(parts.mixer, "taped", None)  # a module of ours that keeps a tape of the blocks that suit it
    mixed = taped(rows, mask, state) if taped else None
    if mixed is None:
        state.record(_Replay(parts.mixer, rows, entry))
        mixed = parts.mixer(rows, mask=mask, cache=entry)
    h = h + mixed
    if parts.mlp is not None:
        norm, mlp = parts.mlp
        h = h + mlp(norm(h))
    return h


class _Replay:
    """Runs a mixer again over the first rows of a block; only its state is of interest."""

    def __init__(self, mixer: nn.Module, rows: mx.array, entry: object) -> None:
        self._mixer, self._rows, self._entry = mixer, rows, entry

    def __call__(self, count: int) -> None:
        self._mixer(self._rows[:, :count], mask=None, cache=self._entry)


@register("qwen3_next", "qwen3_5", "qwen3_5_moe")
class GatedDeltaTarget(HybridTarget):
    """Three gated-delta layers, then one attention layer, and so on."""

    def recurrent_mask(self, h: mx.array, entries: list) -> mx.array | None:
        return create_ssm_mask(h, entries[self.inner.ssm_idx])

    def parts(self, layer: nn.Module) -> Parts:
        return Parts(layer.input_layernorm, layer.linear_attn, (layer.post_attention_layernorm, layer.mlp))


@register("lfm2", "lfm2_moe")
class ShortConvTarget(HybridTarget):
    """LFM2: short convolutions between attention layers."""

    names = Names(norm="embedding_norm")

    def recurrent_mask(self, h: mx.array, entries: list) -> mx.array | None:
        return create_ssm_mask(h, entries[self.inner.conv_idx])

    def parts(self, layer: nn.Module) -> Parts:
        return Parts(layer.operator_norm, layer.conv, (layer.ffn_norm, layer.feed_forward))


@register("nemotron_h")
class NemotronTarget(HybridTarget):
    """Blocks of one mixer each: Mamba-2, attention, MLP or experts, of which only the first two have a cache entry.

    Mamba-2 computes several rows as one matrix product and a single row as a step of its state, so a block and single
    rows round differently here (`rounding` in tests/families.py).
    """

    names = Names(inner="backbone", embedding="embeddings", norm="norm_f")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.spec = replace(self.spec, width_dependent=True)

    def recurrent_mask(self, h: mx.array, entries: list) -> mx.array | None:
        return create_ssm_mask(h, entries[self.inner.ssm_idx])

    def holds(self, layer: nn.Module) -> bool:
        return layer.block_type in ("M", "*")

    def parts(self, layer: nn.Module) -> Parts:
        return Parts(layer.norm, layer.mixer)
