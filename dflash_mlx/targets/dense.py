"""Dense and mixture-of-experts decoders with one residual stream: Llama, Qwen2, Qwen3, Qwen3-MoE.

The loop is mlx_lm's own (`LlamaModel.__call__`, `Qwen3Model.__call__`), with the masks those files build.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.cache import TargetCache
from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.targets import Forward, TargetSpec, register


@register("qwen3")
class DenseTarget:
    """A model whose layers are called as layer(h, mask, cache) with one causal mask."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.text = model.get("language_model", model)  # inside a vision shell
        self.inner = self.text.model
        args = self.text.args
        self.tied = self.is_tied()
        positions = vars(args).get("max_position_embeddings")
        probe = self.inner.embed_tokens(mx.array([[0]]))
        self.spec = TargetSpec(
            args.model_type, len(self.text.layers), args.hidden_size, args.vocab_size, probe.dtype, positions
        )

    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.text.args.tie_word_embeddings)

    @property
    def final_norm(self) -> nn.Module:
        return self.inner.norm

    def embed(self, ids: mx.array) -> mx.array:
        return self.inner.embed_tokens(ids)

    def head(self, normed: mx.array) -> mx.array:
        return self.inner.embed_tokens.as_linear(normed) if self.tied else self.text.lm_head(normed)

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
        for index, (layer, mask, entry) in enumerate(zip(self.inner.layers, masks, cache.entries, strict=True)):
            h = layer(h, mask, entry)
            if index in taps:
                outputs[index] = h
        return Forward.of(h, outputs, taps)


@register("qwen2", "qwen3_moe")
class PipelinedTarget(DenseTarget):
    """Families that mlx_lm can split over machines; a split model is refused."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.inner.pipeline_size > 1:
            raise UnsupportedTarget(
                f"This {self.spec.model_type} model is split over {self.inner.pipeline_size} machines, and a split "
                "model's layers cannot all be read here. Load it on one machine, or generate with mlx_lm."
            )


@register("llama")
class LlamaTarget(DenseTarget):
    """Llama 3.x, SmolLM2, Mistral; some layers may slide."""

    def masks(self, h: mx.array, entries: list) -> list:
        full = create_attention_mask(h, entries[self.inner.fa_idx])
        if self.inner.swa_idx is None:
            return [full] * len(entries)
        sliding = create_attention_mask(h, entries[self.inner.swa_idx], window_size=self.inner.sliding_window)
        return [sliding if layer.use_sliding else full for layer in self.inner.layers]
