"""The demo target as a model: which dtype to decode in, and loading the packed folder in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model, load_model

from dflash_mlx.errors import CheckpointError

PACKED = "packed"
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def best_dtype() -> str:
    """What the demo target decodes fastest in on this machine: "bfloat16" on a GPU, "float32" on a CPU.

    On the CPU it is float32 with and without a real BLAS.
    ms per token and per block of 6, 2 vCPU Xeon (Sapphire Rapids), mlx 0.32.4, 2026-11-29, medians:
    without a BLAS float32 124 and 580, packed (float32 activations) 123 and 631, bfloat16 180 and 400;
    with OpenBLAS 0.3.34, one thread, float32 92 and 131. On a Zen 3 packed is clearly behind: 257 against 152.
    """
    return "bfloat16" if mx.default_device() == mx.Device(mx.gpu) else "float32"


def load_target(folder: Path, dtype: str) -> tuple[nn.Module, dict[str, Any]]:
    """Load the converted folder with mlx_lm.

    Args:
        dtype: "float32", "bfloat16" or "float16" for dense weights, or "packed" to keep the 4-bit ones.
    Returns:
        The model with every floating parameter in that dtype and evaluated; its config, "quantization" only if packed.
    Raises:
        ValueError: an unknown `dtype`.
        CheckpointError: the folder is damaged.
    """
    if dtype != PACKED and dtype not in _DTYPES:
        raise ValueError(f"`dtype` has to be one of {', '.join([*_DTYPES, PACKED])}, got {dtype!r}.")
    try:
        model, config = load_model(folder, lazy=True)
    except (FileNotFoundError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder} is damaged ({error}). Delete it to have it made again.") from error
    if dtype == PACKED:
        _cast(model, _packed_activations())
    else:
        _cast(model, mx.float32)  # products of float16 scales are exact here; round once, below
        model = dequantize_model(model)
        _cast(model, _DTYPES[dtype])
        config = {key: value for key, value in config.items() if key != "quantization"}
    mx.eval(model.parameters())
    return model, config


def _packed_activations() -> mx.Dtype:
    """Scales and norms decide the activations' dtype.

    On a CPU float32: MLX's quantised product with float16 is 40 times slower there (2 vCPU Zen 3).
    On a GPU float16, in which the scales are stored; the largest activation seen is 24,926 of its 65,504 (token 0
    from layer 11 on, a 20-token chat prompt, float32).
    """
    return mx.float16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Every floating parameter to `dtype`; packed weights are integers and stay."""

    def cast(value: mx.array) -> mx.array:
        return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map(cast, model.parameters()))
