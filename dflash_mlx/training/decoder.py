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
from dflash_mlx.targets import Forward, Target, target_for
from dflash_mlx.training.features import narrow
from dflash_mlx.training.host_llama import HostLlama


@dataclass(frozen=True)
class Rows:
    """logits: [B, V] float32 at the last position; features: [B, T, len(taps) * H], narrow, or None without taps."""

    logits: np.ndarray
    features: np.ndarray | None


@dataclass(frozen=True)
class Whole:
    """hidden: [B, T, H] before the final norm; features: [B, T, len(taps) * H], narrow, or None without taps."""

    hidden: np.ndarray
    features: np.ndarray | None


class Decoder(Protocol):
    """A batch of sequences of equal length that grow together; and sequences that are there already."""

    taps: tuple[int, ...]  # layers whose outputs are the features, in this order

    def start(self, ids: np.ndarray, capacity: int) -> Rows:
        """Forget everything and read [B, T] ids; room for `capacity` positions in all."""
        ...

    def extend(self, ids: np.ndarray) -> Rows:
        """Read the next [B] ids, one per row."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        ...

    def read(self, ids: np.ndarray) -> Whole:
        """Read [B, T] ids from their beginning; afterwards `start` again."""
        ...

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """[R, H] of `read` -> [R, V] float32."""
        ...


class MlxDecoder:
    """Any target with an adapter, in the dtype and on the device that it was loaded for, with mlx_lm's caches."""

    def __init__(self, target: Target, taps: Sequence[int] = ()) -> None:
        """taps: indices of layers whose output is returned as features."""
        self._target = target
        self.taps = tuple(taps)
        self._cache = TargetCache([], 0)

    def start(self, ids: np.ndarray, capacity: int) -> Rows:
        self._cache = TargetCache(self._target.make_entries(), 0)
        return self._last(ids)

    def extend(self, ids: np.ndarray) -> Rows:
        return self._last(ids[:, None])

    def keep(self, rows: Sequence[int]) -> None:
        entries, chosen = self._cache.entries, mx.array(list(rows))
        for entry in entries:
            entry.state = tree_map(lambda part: part[chosen] if _has_rows(part) else part, entry.state)
        self._cache = TargetCache(entries, self._cache.length)
        self._cache.evaluate()

    def read(self, ids: np.ndarray) -> Whole:
        self._cache = TargetCache(self._target.make_entries(), 0)
        forward = self._forward(ids)
        return Whole(np.array(forward.hidden.astype(mx.float32)), self._features(forward))

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        rows = mx.array(hidden).astype(self._target.spec.dtype)[:, None]
        return np.array(self._target.logits(rows)[:, 0].astype(mx.float32))

    def _last(self, ids: np.ndarray) -> Rows:
        forward = self._forward(ids)
        logits = self._target.logits(forward.hidden[:, -1:])[:, 0]
        return Rows(np.array(logits.astype(mx.float32)), self._features(forward))

    def _forward(self, ids: np.ndarray) -> Forward:
        width = ids.shape[1]
        self._cache.begin(width)
        forward = self._target.forward(mx.array(ids), self._cache, self.taps)
        self._cache.commit(width)
        self._cache.evaluate()
        return forward

    def _features(self, forward: Forward) -> np.ndarray | None:
        return None if forward.features is None else narrow(np.array(forward.features.astype(mx.float32)))


def _has_rows(part: Any) -> bool:
    return isinstance(part, mx.array) and part.ndim > 1


def decoder_for(model: nn.Module, taps: Sequence[int] = ()) -> Decoder:
    """The fastest decoder of this model here.

    Raises:
        ValueError: a tap is no layer of it.
    """
    target = target_for(model)
    for tap in taps:
        if not 0 <= tap < target.spec.n_layers:
            raise ValueError(f"`features` has to be layers in 0..{target.spec.n_layers - 1} of the target, got {tap}.")
    if mx.default_device() == mx.cpu and HostLlama.serves(model):
        return HostLlama(model, taps)
    return MlxDecoder(target, taps)
