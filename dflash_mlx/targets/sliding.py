"""Decoders that alternate sliding-window and full attention: Gemma 3 and gpt-oss.

The loops are mlx_lm's (`Gemma3Model.__call__`, `GptOssMoeModel.__call__`).
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from dflash_mlx.targets import register
from dflash_mlx.targets.dense import DenseTarget


@register("gemma3_text")
class Gemma3Target(DenseTarget):
    """Embeddings scaled by sqrt(hidden size) in bf16 precision; every n-th layer is full."""

    def is_tied(self) -> bool:
        return bool(self.text.tie_word_embeddings)

    def embed(self, ids: mx.array) -> mx.array:
        h = self.inner.embed_tokens(ids)
        return h * mx.array(self.text.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)

    def masks(self, h: mx.array, entries: list) -> list:
        pattern = self.inner.sliding_window_pattern
        full = create_attention_mask(h, entries[pattern - 1])
        if pattern == 1:
            return [full] * len(entries)
        sliding = create_attention_mask(h, entries[0], window_size=self.inner.window_size)
        return [full if i % pattern == pattern - 1 else sliding for i in range(len(entries))]


@register("gpt_oss")
class GptOssTarget(DenseTarget):
    """Attention sinks and a mixture of experts, which are the layers' own business; never a tied head."""

    def is_tied(self) -> bool:
        return False

    def masks(self, h: mx.array, entries: list) -> list:
        inner = self.inner
        full = create_attention_mask(h, entries[inner.ga_idx])
        sliding = create_attention_mask(h, entries[inner.swa_idx], window_size=inner.window_size)
        return [full if kind == "full_attention" else sliding for kind in inner.layer_types]
