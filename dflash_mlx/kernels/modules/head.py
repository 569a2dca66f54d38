"""The weights behind a head, for `lm_head_topk`."""

from __future__ import annotations

from functools import partial

import mlx.nn as nn

from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.lm_head_topk import Head
from dflash_mlx.kernels.modules.linear import RowsEmbedding, RowsLinear, linear

_DENSE, _QUANTIZED = (nn.Linear, nn.Embedding), (nn.QuantizedLinear, nn.QuantizedEmbedding, RowsLinear, RowsEmbedding)


def head_of(module: nn.Module, kernels: Kernels) -> Head | None:
    """The weights of a head, or of an embedding that serves as one; None of a type that is not known here.

    Where `lm_head_topk` is closed its logits come from the module itself, through `kernels`.
    """
    kind = type(module)
    through = module.as_linear if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) else None
    through = through or partial(linear, module, kernels=kernels)
    if "bias" in module:
        return None
    if kind in _DENSE:
        return Head(module.weight, through=through)
    if kind in _QUANTIZED and module.mode == "affine":
        return Head(module.weight, module.scales, module.biases, module.bits, module.group_size, through)
    return None
