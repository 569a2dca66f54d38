"""A frozen target that reads and continues many rows at once, all of them at the same position.

`MlxDecoder` runs any mlx_lm model with mlx_lm's own caches. On a CPU `HostLlama` (`host_llama`) is faster for the plain
Llama architecture; `decoder_for` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from dflash_mlx.cache import TargetCache
from dflash_mlx.targets import Target, target_for
from dflash_mlx.training.host_llama import HostLlama


@dataclass(frozen=True)
class Rows:
    """logits: [B, V] float32 at the last position; features: [B, T, len(taps) * H] float16, or None without taps."""

    logits: np.ndarray
    features: np.ndarray | None


class Decoder(Protocol):
    """A batch of sequences of equal length that grow together."""

    def start(self, ids: np.ndarray, capacity: int) -> Rows:
        """Forget everything and read [B, T] ids; room for `capacity` positions in all."""
        ...

    def extend(self, ids: np.ndarray) -> Rows:
        """Read the next [B] ids, one per row."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        ...


class MlxDecoder:
    """Any target with an adapter, in the dtype and on the device that it was loaded for, with mlx_lm's caches."""

    def __init__(self, target: Target, taps: Sequence[int] = ()) -> None:
        """taps: indices of layers whose output is returned as features."""
        self._target = target
        self._taps = tuple(taps)
        self._cache = TargetCache([], 0)

    def start(self, ids: np.ndarray, capacity: int) -> Rows:
        self._cache = TargetCache(self._target.make_entries(), 0)
        return self._read(mx.array(ids))

    def extend(self, ids: np.ndarray) -> Rows:
        return self._read(mx.array(ids)[:, None])

    def keep(self, rows: Sequence[int]) -> None:
        entries, chosen = self._cache.entries, mx.array(list(rows))
        for entry in entries:
            entry.state = tree_map(lambda part: part[chosen] if _has_rows(part) else part, entry.state)
        self._cache = TargetCache(entries, self._cache.length)
        self._cache.evaluate()

    def _read(self, ids: mx.array) -> Rows:
        width = ids.shape[1]
        self._cache.begin(width)
        forward = self._target.forward(ids, self._cache, self._taps)
        self._cache.commit(width)
        logits = self._target.logits(forward.hidden[:, -1:])[:, 0].astype(mx.float32)
        features = None if forward.features is None else forward.features.astype(mx.float16)
        mx.eval(logits, features)
        self._cache.evaluate()
        return Rows(np.array(logits), None if features is None else np.array(features))


def _has_rows(part: Any) -> bool:
    return isinstance(part, mx.array) and part.ndim > 1


def decoder_for(model: nn.Module, taps: Sequence[int] = ()) -> Decoder:
    """The fastest decoder of this model here."""
    if mx.default_device() == mx.cpu and HostLlama.serves(model):
        return HostLlama(model, taps)
    return MlxDecoder(target_for(model), taps)
