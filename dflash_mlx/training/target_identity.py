"""What a target is, so that data of one is never taken for data of another."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.demo import artifact
from dflash_mlx.pairing.registry import DEMO

_ROWS = 4  # of each parameter


def identity(name: str, revision: str | None, model: nn.Module) -> dict[str, Any]:
    """Its name, its revision or file, the dtype that it runs in, and a digest of its weights."""
    found: dict[str, Any] = {"name": name, "dtype": _dtype(model), "weights": weights_digest(model)}
    if name == DEMO:
        return found | {"sha256": artifact.GGUF_SHA256, "repository": artifact.HUB_REPO}
    return found | {"revision": revision}


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes and the first rows of all parameters: another model or another fine-tune differs."""
    digest = hashlib.sha256()
    for name, value in sorted(_parameters(model), key=lambda pair: pair[0]):
        rows = value[:_ROWS] if value.ndim else value
        rows = rows.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else rows
        digest.update(f"{name} {value.shape} {value.dtype}\n".encode())
        digest.update(np.array(rows).tobytes())
    return digest.hexdigest()


def _dtype(model: nn.Module) -> str:
    floating = [value.dtype for _, value in _parameters(model) if mx.issubdtype(value.dtype, mx.floating)]
    return str(floating[0]).removeprefix("mlx.core.")


def _parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[return-value]
