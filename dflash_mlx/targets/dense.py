"""Dense and mixture-of-experts decoders with one residual stream: Llama, Llama 4, Qwen2, Qwen3, Qwen3-MoE.

The loop is mlx_lm's own (`LlamaModel.__call__`, `Qwen3Model.__call__`), with the masks those files build.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.cache import TargetCache
from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.targets import Forward, TargetSpec, family, register, text_part


@dataclass(frozen=True)
class Names:
    """What a family calls the parts that an adapter needs; a model without a `head` is tied to its embedding."""

    inner: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"


@register("qwen2", "qwen3", "qwen3_moe")
class DenseTarget:
    """A model whose layers are called as layer(h, mask, cache) with one causal mask."""

    names = Names()

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.text = text_part(model)
        self.inner = getattr(self.text, self.names.inner)
        self.embedding = getattr(self.inner, self.names.embedding)
        self.layers = getattr(self.inner, self.names.layers)
        self.final_norm = getattr(self.inner, self.names.norm)
        self.tied = self.names.head not in self.text
        self._refuse_split()
        args = getattr(self.text, "args", None)
        probe = self.embedding(mx.array([[0]]))
        self.spec = TargetSpec(
            model_type=getattr(args, "model_type", family(model)),
            n_layers=len(self.layers),
            hidden_size=probe.shape[-1],
            vocab_size=self.embedding.weight.shape[0],
            dtype=probe.dtype,
            max_positions=getattr(args, "max_position_embeddings", None),
        )

    def _refuse_split(self) -> None:
        """Raises UnsupportedTarget where this process has only part of the layers or of the vocabulary."""
        group = getattr(self.text, "sharding_group", None)
        machines = max(getattr(self.inner, "pipeline_size", 1), group.size() if group else 1)
        if machines > 1:
            raise UnsupportedTarget(
                f"This {family(self.model)} model is split over {machines} machines, and a split model's layers and "
                "logits cannot all be read here. Load it on one machine, or generate with mlx_lm."
            )

    def embed(self, ids: mx.array) -> mx.array:
        return self.embedding(ids)

    def block_rows(self, ids: mx.array) -> mx.array:
        return self.embed(ids)

    @property
    def head_module(self) -> nn.Module:
        return self.embedding if self.tied else getattr(self.text, self.names.head)

    def head(self, normed: mx.array) -> mx.array:
        return self.head_module.as_linear(normed) if self.tied else self.head_module(normed)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.head(self.final_norm(hidden))

    def make_entries(self, max_kv_size: int | None = None) -> list:
        return make_prompt_cache(self.model, max_kv_size)

    def masks(self, h: mx.array, entries: list) -> list:
        """The mask of each layer, as the model's own forward builds them."""
        return [create_attention_mask(h, entries[0])] * len(entries)

    def forward(self, ids: mx.array, cache: TargetCache, taps: Sequence[int] = ()) -> Forward:
        h = self.embed(ids)  # [B, T, H]
        outputs = {}
        masks = self.masks(h, cache.entries)
        for index, (layer, mask, entry) in enumerate(zip(self.layers, masks, cache.entries, strict=True)):
            h = layer(h, mask, entry)
            if index in taps:
                outputs[index] = h
        return Forward.of(h, outputs, taps)


@register("llama")
class LlamaTarget(DenseTarget):
    """Llama 3.x, SmolLM2, Mistral; some layers may slide."""

    def masks(self, h: mx.array, entries: list) -> list:
        full = create_attention_mask(h, entries[self.inner.fa_idx])
        if self.inner.swa_idx is None:
            return [full] * len(entries)
        sliding = create_attention_mask(h, entries[self.inner.swa_idx], window_size=self.inner.sliding_window)
        return [sliding if layer.use_sliding else full for layer in self.layers]


@register("llama4_text")
class Llama4TextTarget(DenseTarget):
    """The dense Llama 4 text models; whether a layer rotates its keys is the layer's own business."""

    names = Names(head="output")
