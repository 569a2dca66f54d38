"""How far a model's logits move with the width of the forward: the same tokens, one by one and in blocks.

The model is called as mlx_lm calls it, with mlx_lm's cache; nothing of this package's adapters takes part. Only where
kernels are wired in do blocks run as they do in decoding, since that is whose rounding is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from dflash_mlx.cache import KVQuantization, TargetCache
from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.targets import target_for

WIDTHS = (2, 4, 8, 16)
_NARROW = 17  # rows of a prompt's chunk that kernels take for a block
# The most that rounding can move the logits of a row, beside a shift common to all: standard deviation of the moves
# over that of the logits. Largest measured on SmolLM2-135M (another BLAS at these widths, and plain MLX with the hidden
# units of its MLPs in other orders): 1.3e-5, 0.0082 and 0.060. Wrong masks and positions: 0.03 to 1.7, most above 0.2.
LIMITS = {mx.float32: 2.0**-12, mx.float16: 2.0**-5, mx.bfloat16: 2.0**-2}


def limit(model: nn.Module, dtype: mx.Dtype) -> float:
    """`LIMITS` at the coarsest dtype that takes part in logits of `dtype`."""
    arrays = dict[str, mx.array](tree_flatten(model.parameters()))
    dtypes = {a.dtype for a in arrays.values() if mx.issubdtype(a.dtype, mx.floating)}
    if mx.default_device() == mx.gpu:
        dtypes.add(mx.float16)  # products of float32 run in TF32 on some, which has float16's precision
    if any(isinstance(module, SwitchLinear | QuantizedSwitchLinear) for module in model.modules()):
        dtypes.add(mx.bfloat16)  # a near-tie of a router exchanges an expert, in any dtype
    return max(LIMITS.get(each, LIMITS[mx.bfloat16]) for each in dtypes | {dtype})


@dataclass(frozen=True)
class Decoding:
    """How a request was decoded, as far as it changes the rounding; names and meaning are mlx_lm's."""

    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000

    @property
    def quantization(self) -> KVQuantization | None:
        bits = self.kv_bits
        return None if bits is None else KVQuantization(bits, self.kv_group_size, self.quantized_kv_start)

    def forward(self, model: nn.Module, ids: Sequence[int], cache: list[Any]) -> mx.array:
        """[T] ids on top of the cache -> logits [T, V], not computed yet."""
        logits = model(mx.array([list(ids)]), cache=cache)[0]
        maybe_quantize_kv_cache(cache, self.quantized_kv_start, self.kv_group_size, self.kv_bits)
        mx.eval([entry.state for entry in cache])
        return logits


def logits_after(
    model: nn.Module, prompt: Sequence[int], tokens: Sequence[int], decoding: Decoding, kernels: Kernels = STOCK
) -> tuple[mx.array, mx.array]:
    """Logits of the token after prompt + tokens: [V] by single-token steps, [len(WIDTHS), V] in blocks.

    Everything but the last token of the prompt is prefilled in chunks, once, as mlx_lm does; a last chunk that is as
    narrow as a block runs on kernels too, for the blocks. Blocks are full: the rows behind the last token are no news
    to it, unless a mask is wrong. Single-token steps never run on kernels.
    """
    cache = make_prompt_cache(model)
    *head, last = prompt
    step = decoding.prefill_step_size
    chunks = [head[start : start + step] for start in range(0, len(head), step)]
    narrow = chunks.pop() if kernels.wired and chunks and 2 <= len(chunks[-1]) <= _NARROW else []
    for chunk in chunks:
        decoding.forward(model, chunk, cache)
        mx.clear_cache()
    todo = [last, *tokens]

    def after(width: int, kernels: Kernels = STOCK) -> mx.array:
        forward = _forward(model, copy.deepcopy(cache), len(head) - len(narrow), decoding, kernels)
        if narrow:
            forward(narrow)
        padded = todo + todo[-1:] * (-len(todo) % width)
        for start in range(0, len(todo), width):
            logits = forward(padded[start : start + width])
        row = logits[(len(todo) - 1) % width]
        mx.eval(row)
        return row

    return after(1), mx.stack([after(width, kernels) for width in WIDTHS])


def _forward(
    model: nn.Module, cache: list[Any], length: int, decoding: Decoding, kernels: Kernels
) -> Callable[[Sequence[int]], mx.array]:
    """What takes [T] ids on top of `cache`, which holds `length` positions, to logits [T, V].

    The model itself or, where kernels are wired in, the adapter that verifies blocks: only there does a recurrent layer
    run on them.
    """
    try:
        target = target_for(model, kernels) if kernels.wired else None
    except UnsupportedTarget:
        target = None  # then no block of it ran on a kernel
    if target is None:
        return lambda ids: decoding.forward(model, ids, cache)
    held = TargetCache(cache, length, decoding.quantization)

    def verify(ids: Sequence[int]) -> mx.array:
        held.begin(len(ids))
        logits = target.logits(target.forward(mx.array([list(ids)]), held).hidden)[0]
        held.commit(len(ids))
        mx.eval(logits)
        return logits

    return verify
