"""How far a model's logits move with the width of the forward: the same tokens, one by one and in blocks.

The model is called as mlx_lm calls it, with mlx_lm's cache; nothing of this package's adapters takes part.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

WIDTHS = (2, 4, 8, 16)
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

    def forward(self, model: nn.Module, ids: Sequence[int], cache: list[Any]) -> mx.array:
        """[T] ids on top of the cache -> logits [T, V], not computed yet."""
        logits = model(mx.array([list(ids)]), cache=cache)[0]
        maybe_quantize_kv_cache(cache, self.quantized_kv_start, self.kv_group_size, self.kv_bits)
        mx.eval([entry.state for entry in cache])
        return logits


def logits_after(
    model: nn.Module, prompt: Sequence[int], tokens: Sequence[int], decoding: Decoding
) -> tuple[mx.array, mx.array]:
    """Logits of the token after prompt + tokens: [V] by single-token steps, [len(WIDTHS), V] in blocks.

    Everything but the last token of the prompt is prefilled in chunks, once, as mlx_lm does. Blocks are full: the rows
    behind the last token are no news to it, unless a mask is wrong.
    """
    cache = make_prompt_cache(model)
    *head, last = prompt
    for start in range(0, len(head), decoding.prefill_step_size):
        decoding.forward(model, head[start : start + decoding.prefill_step_size], cache)
        mx.clear_cache()
    todo = [last, *tokens]

    def after(width: int) -> mx.array:
        held, padded = copy.deepcopy(cache), todo + todo[-1:] * (-len(todo) % width)
        for start in range(0, len(todo), width):
            logits = decoding.forward(model, padded[start : start + width], held)
        row = logits[(len(todo) - 1) % width]
        mx.eval(row)
        return row

    return after(1), mx.stack([after(width) for width in WIDTHS])
