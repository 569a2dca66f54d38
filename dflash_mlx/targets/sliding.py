"""Decoders that alternate sliding-window and full attention: Gemma 3, Gemma 4, gpt-oss and Muse Glimmer.

The loops are mlx_lm's (`Gemma3Model.__call__`, `Gemma4TextModel.__call__`, `GptOssMoeModel.__call__`,
`MuseGlimmerModel.__call__`).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.gemma4_text import logit_softcap

from dflash_mlx.cache import TargetCache
from dflash_mlx.targets import Forward, register
from dflash_mlx.targets.dense import DenseTarget


@register("gemma3_text")
class Gemma3Target(DenseTarget):
    """Embeddings scaled by sqrt(hidden size) in bf16 precision; every n-th layer is full."""

    def embed(self, ids: mx.array) -> mx.array:
        h = self.embedding(ids)
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
    """Attention sinks and a mixture of experts, which are the layers' own business."""

    def masks(self, h: mx.array, entries: list) -> list:
        inner = self.inner
        full = create_attention_mask(h, entries[inner.ga_idx])
        sliding = create_attention_mask(h, entries[inner.swa_idx], window_size=inner.window_size)
        return [full if kind == "full_attention" else sliding for kind in inner.layer_types]


@register("muse_glimmer")
class MuseGlimmerTarget(DenseTarget):
    """Embeddings normed without weights; only sliding layers rotate their keys. The draft shares the raw head."""

    def embed(self, ids: mx.array) -> mx.array:
        return mx.fast.rms_norm(self.embedding(ids), None, self.inner.embed_eps)

    def block_rows(self, ids: mx.array) -> mx.array:
        """The table's rows without the norm: what the published draft was trained on (z-lab `dflash`)."""
        return self.embedding(ids)

    def logits(self, hidden: mx.array) -> mx.array:
        args = self.text.args
        logits = super().logits(hidden) * args.output_multiplier
        return mx.tanh(logits / args.final_logit_softcapping) * args.final_logit_softcapping

    def masks(self, h: mx.array, entries: list) -> list:
        return self.inner._masks(h, entries)


@register("gemma4_text", "gemma4")
class Gemma4Target(DenseTarget):
    """Gemma 4, bare or in its shell: scaled embeddings, per-layer inputs, layers that share another's keys and values.

    The draft shares the raw head; the target's own logits are soft-capped.
    """

    def embed(self, ids: mx.array) -> mx.array:
        return self.embedding(ids) * self.inner.embed_scale

    def logits(self, hidden: mx.array) -> mx.array:
        logits, cap = super().logits(hidden), self.text.final_logit_softcapping
        return logits if cap is None else logit_softcap(cap, logits)

    def forward(self, ids: mx.array, cache: TargetCache, taps: Sequence[int] = ()) -> Forward:
        inner = self.inner
        h = self.embed(ids)  # [B, T, H]
        entries = [*cache.entries, *[None] * (len(self.layers) - len(cache.entries))]  # sharing layers hold nothing
        masks = inner._make_masks(h, entries)
        gates = self._gates(ids, h)
        outputs, shared = {}, list[tuple]()  # keys, values and offset of every layer, for those that share them
        for index, (layer, entry, mask, source) in enumerate(
            zip(self.layers, entries, masks, inner.previous_kvs, strict=True)
        ):
            keys_values, offset = shared[source] if source < index else (None, None)
            gate = None if gates is None else gates[:, :, index, :]
            h, keys_values, offset = layer(h, mask, entry, per_layer_input=gate, shared_kv=keys_values, offset=offset)
            shared.append((keys_values, offset))
            if index in taps:
                outputs[index] = h
        return Forward.of(h, outputs, taps)

    def _gates(self, ids: mx.array, h: mx.array) -> mx.array | None:
        """[B, T, layers, P]: the per-layer inputs of the small models."""
        inner = self.inner
        if not inner.hidden_size_per_layer_input:
            return None
        return inner._project_per_layer_inputs(h, inner._get_per_layer_inputs(ids))
