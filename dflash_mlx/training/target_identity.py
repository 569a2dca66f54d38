"""What a target is, so that data of one is never taken for data of another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """What a manifest says of a tokenizer: how many ids it has, and digests of its tokens and its chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    template = tokenizer.chat_template if tokenizer.has_chat_template else ""
    return {
        "vocabulary": 1 + vocabulary[-1][1],
        "tokenizer_sha256": hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
        "template_sha256": hashlib.sha256(str(template).encode()).hexdigest(),
    }


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes and the first rows of all parameters: another model or another fine-tune differs."""
    digest = hashlib.sha256()
    for name, value in sorted(_parameters(model), key=lambda pair: pair[0]):
        rows = value[:_ROWS] if value.ndim else value
        rows = rows.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else rows
        digest.update(f"{name} {value.shape} {value.dtype}\n".encode())
        digest.update(np.array(rows).tobytes())
    return digest.hexdigest()


def what_decides(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two manifests without what may differ between two of the same data.

    Where both have a digest of the weights it is the target, with its dtype, wherever it lay; prompts are their digest.
    """
    return _decisive(found, wanted), _decisive(wanted, found)


def _decisive(manifest: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(manifest)
    for part, digest, decisive in (("target", "weights", ("weights", "dtype")), ("prompts", "sha256", None)):
        here, there = manifest.get(part), other.get(part)
        if isinstance(here, Mapping) and isinstance(there, Mapping) and digest in here and digest in there:
            kept[part] = {key: value for key, value in here.items() if key in (decisive or here.keys() - {"source"})}
    return kept


def _dtype(model: nn.Module) -> str:
    floating = [value.dtype for _, value in _parameters(model) if mx.issubdtype(value.dtype, mx.floating)]
    return str(floating[0]).removeprefix("mlx.core.")


def _parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[return-value]
