"""Many blocks of many answers in one forward of a draft.

The modules are those that serve (`draft.model`), in their order; what differs is that blocks of several anchors read
one context, each only what lies before its own anchor. `DraftModel.denoise` of one block gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.config import SLIDING
from dflash_mlx.draft.convolution import DynamicConvolution
from dflash_mlx.draft.model import Attention, DraftModel, Layer
from dflash_mlx.training.blocks import Blocks

_HIDDEN = -1e9  # added to a score that does not count


@dataclass(frozen=True)
class Sight:
    """Where things are, and what sees what.

    positions: [N, L] int32, of the context. anchors: [N, A] int32.
    before:    [N, A, 1, L] bool, context of the same answer before the anchor.
    """

    positions: mx.array
    anchors: mx.array
    before: mx.array

    @classmethod
    def of(cls, blocks: Blocks) -> Sight:
        same = blocks.segments[:, None] == blocks.anchor_segments[:, :, None]
        before = (
            same & (blocks.positions[:, None] < blocks.anchor_positions[:, :, None]) & (blocks.segments >= 0)[:, None]
        )
        return cls(mx.array(blocks.positions), mx.array(blocks.anchor_positions), mx.array(before[:, :, None]))

    def context(self, rows: int, window: int | None, kept: int | None = None) -> mx.array:
        """[N, A, rows or 1, L] float32, added to scores: row o of a block sees what is less than a window before it.

        kept: context rows that the draft keeps at most (`DraftModel.context_window`).
        """
        seen = self.before
        if kept is not None:
            seen = seen & (self.anchors[:, :, None, None] - self.positions[:, None, None] <= kept)
        if window is not None:
            row = self.anchors[:, :, None] + mx.arange(rows)
            seen = seen & (row[..., None] - self.positions[:, None, None] < window)
        return mx.where(seen, 0.0, _HIDDEN)


def block_mask(rows: int, *, causal: bool, window: int | None) -> mx.array | None:
    """[rows, rows] float32, added to scores within a block; None where every row sees every other."""
    distance = np.arange(rows)[:, None] - np.arange(rows)
    seen = distance >= 0 if causal else np.ones((rows, rows), bool)
    if window is not None:
        seen = seen & (distance < window)
    return None if seen.all() else mx.array(np.where(seen, 0, _HIDDEN).astype(np.float32))


def denoise_blocks(draft: DraftModel, rows: mx.array, features: mx.array, sight: Sight) -> mx.array:
    """One forward over all blocks.

    Args:
        rows: [N, A, B, H] embeddings of [anchor, mask x K].
        features: [N, L, F], as `fc` takes them.
    Returns:
        [N, A, K, H] after the final norm; row k predicts the token at its anchor's position + 1 + k.
    """
    count, anchors, block, hidden = rows.shape
    dtype = draft.dtype
    fused = draft.hidden_norm(draft.fc(features.astype(dtype)))  # [N, L, H]
    h = rows.astype(dtype)
    if draft.config.input_embedding_scale != 1.0:
        h = h * draft.config.input_embedding_scale
    h = h.reshape(count * anchors, block, hidden)
    config = draft.config
    for index, layer in enumerate(draft.layers):
        window = config.sliding_window if config.layer_types[index] == SLIDING else None
        context = sight.context(block, window, draft.context_window)
        masks = context, block_mask(block, causal=config.is_causal(index), window=window)
        h = _layer(layer, h, fused, sight, masks)
    return draft.norm(h[:, 1:]).reshape(count, anchors, block - 1, hidden)


Masks = tuple[mx.array, mx.array | None]


def _layer(layer: Layer, x: mx.array, fused: mx.array, sight: Sight, masks: Masks) -> mx.array:
    """[N * A, B, H] -> the same."""

    def attend(rows: mx.array) -> mx.array:
        return _attend(layer.self_attn, rows, fused, sight, masks)

    convolves = isinstance(layer.get("attention_conv"), DynamicConvolution)
    u = layer.input_layernorm(x)
    h = x + (layer.attention_conv.around(attend, u) if convolves else attend(u))
    u = layer.post_attention_layernorm(h)
    return h + (layer.mlp_conv.around(layer.mlp, u) if convolves else layer.mlp(u))


def _attend(attention: Attention, x: mx.array, fused: mx.array, sight: Sight, masks: Masks) -> mx.array:
    """Scores against the context and against the own block, one softmax over both."""
    blocks, rows, _ = x.shape
    count, length, _ = fused.shape
    anchors, kv_heads = blocks // count, attention.n_kv_heads
    groups = attention.n_heads // kv_heads
    offsets = sight.anchors.reshape(-1)
    queries = _turned(attention, attention.q_norm, attention.q_proj(x), attention.n_heads, offsets)  # [NA, h, B, D]
    keys = _turned(attention, attention.k_norm, attention.k_proj(x), kv_heads, offsets)  # [NA, kv, B, D]
    values = attention.v_proj(x).reshape(blocks, rows, kv_heads, -1).swapaxes(1, 2)
    places = attention.k_proj(fused).reshape(count * length, 1, -1)  # each on its own: it is where it is in its answer
    past = _turned(attention, attention.k_norm, places, kv_heads, sight.positions.reshape(-1))
    past = past.reshape(count, length, kv_heads, -1).swapaxes(1, 2)  # [N, kv, L, D]
    past_values = attention.v_proj(fused).reshape(count, length, kv_heads, -1).swapaxes(1, 2)

    dim = queries.shape[-1]
    queries = queries * attention.scale
    own = queries.reshape(blocks, kv_heads, groups * rows, dim)
    wide = queries.reshape(count, anchors, kv_heads, groups, rows, dim).transpose(0, 2, 1, 3, 4, 5)
    wide = wide.reshape(count, kv_heads, anchors * groups * rows, dim)
    shape = (count, kv_heads, anchors, groups, rows)
    seen, inside = masks
    over_context = (wide @ past.swapaxes(-1, -2)).reshape(*shape, length).astype(mx.float32)
    over_context = over_context + seen[:, None, :, None]
    over_block = (own @ keys.swapaxes(-1, -2)).reshape(count, anchors, kv_heads, groups, rows, rows)
    over_block = over_block.transpose(0, 2, 1, 3, 4, 5).astype(mx.float32)
    if inside is not None:
        over_block = over_block + inside
    shares = mx.softmax(mx.concatenate([over_context, over_block], axis=-1), axis=-1, precise=True).astype(x.dtype)
    of_context = shares[..., :length].reshape(count, kv_heads, anchors * groups * rows, length) @ past_values
    of_block = shares[..., length:].transpose(0, 2, 1, 3, 4, 5).reshape(blocks, kv_heads, groups * rows, rows) @ values
    out = of_context.reshape(*shape, dim).transpose(0, 2, 1, 3, 4, 5).reshape(blocks, kv_heads * groups, rows, dim)
    out = out + of_block.reshape(blocks, kv_heads * groups, rows, dim)
    return attention.o_proj(out.swapaxes(1, 2).reshape(blocks, rows, -1))


def _turned(attention: Attention, norm: nn.Module, x: mx.array, heads: int, offsets: mx.array) -> mx.array:
    """[S, T, heads * D], whose first rows are at `offsets` [S] -> [S, heads, T, D], normed and rotated."""
    split = x.reshape(*x.shape[:2], heads, -1)
    return attention.rope(norm(split).swapaxes(1, 2), offset=offsets)
