"""Attention layers whose blocks run on `sdpa_rows`: the cache's buffer is one segment, the block's own rows the other.

A module here holds one of mlx_lm's and calls its projections, norms and rotary embedding as it does. Single rows,
prompts, rotating or quantised caches and masks that were built go through mlx_lm's module whole.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_moe, qwen3_next
from mlx_lm.models.cache import KVCache

from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.operation import WIDEST, Case
from dflash_mlx.kernels.sdpa_rows import OPERATION, Attend, Segment, Sight, cases_of

_SEPARATE = (llama.Attention, qwen2.Attention, qwen3.Attention, qwen3_moe.Attention)
_GATED = (qwen3_next.Qwen3NextAttention,)  # Qwen3.5's too
_EVERYTHING, _CAUSAL = Sight("full"), Sight("causal")


def swap(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """The module that takes the place of an attention layer of exactly these classes; None: not for us."""
    return RowsAttention(module, kernels) if type(module) in _SEPARATE + _GATED else None


class RowsAttention(nn.Module):
    """The call of mlx_lm's module."""

    def __init__(self, original: Any, kernels: Kernels) -> None:
        super().__init__()
        self.original = original
        self._kernels = kernels
        self._gated = type(original) in _GATED

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> mx.array:
        """[1, L, H] -> [1, L, H]; `mask` None sees the whole block."""
        if not _is_block(x, mask, cache):
            return self.original(x, mask, cache)
        module, before = self.original, cache.offset
        queries, keys, values, gate = self._projected(x)
        queries, keys = module.rope(queries, offset=before), module.rope(keys, offset=before)
        held = cache.update_and_fetch(keys, values)  # first: an older buffer in use would have it copied
        attend = Attend(
            *(queries, Segment(cache.keys, cache.values, before), keys, values),
            scale=module.scale,
            sight=_EVERYTHING if mask is None else _CAUSAL,
            joined=lambda: (*held, mask),
        )
        (out,) = self._kernels.run(OPERATION, attend)
        return module.o_proj(out if gate is None else out * mx.sigmoid(gate))

    def _projected(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """[1, L, H] -> queries, keys, values [1, heads, L, D], normed if the layer norms; the gate [1, L, Hq * D]."""
        module, gate = self.original, None
        batch, rows, _ = x.shape
        heads, kv_heads = self._heads
        queries, keys, values = module.q_proj(x), module.k_proj(x), module.v_proj(x)
        queries = queries.reshape(batch, rows, heads, -1)
        if self._gated:
            queries, gate = mx.split(queries, 2, axis=-1)
            gate = gate.reshape(batch, rows, -1)
        keys, values = (part.reshape(batch, rows, kv_heads, -1) for part in (keys, values))
        if "q_norm" in module:
            queries, keys = module.q_norm(queries), module.k_norm(keys)
        return *(part.transpose(0, 2, 1, 3) for part in (queries, keys, values)), gate

    @property
    def _heads(self) -> tuple[int, int]:
        """Read at every call: mlx_lm's `shard` divides them."""
        module = self.original
        if self._gated:
            return module.num_attention_heads, module.num_key_value_heads
        return module.n_heads, module.n_kv_heads

    def cases(self) -> list[Case]:
        """What has to be raced before the kernel serves this layer."""
        out = self.original.o_proj
        dtype = (out["scales"] if "scales" in out else out["weight"]).dtype
        return cases_of(dtype, round(self.original.scale**-2), *self._heads)


def _is_block(x: mx.array, mask: object, cache: object) -> bool:
    """Whether this is a block of one sequence that is appended to a plain cache and sees its own rows simply."""
    simple = mask is None or (isinstance(mask, str) and mask == "causal")
    return x.shape[0] == 1 and 2 <= x.shape[1] <= WIDEST and simple and type(cache) is KVCache
