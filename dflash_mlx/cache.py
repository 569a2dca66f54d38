"""The target's cache as a transaction: begin(width) -> forward -> commit(keep), or abort().

Invariant: after `commit` every layer holds exactly the positions that were kept, as if nothing else had ever been
written. Nothing is rolled back "by the difference": the caller says what to keep, each layer state knows how.
A committed block may still be shortened with `shrink` until the next `begin` (a consumer that stops mid-block).

The entries are mlx_lm's own cache objects, so mlx_lm's code can use them before and after. Which state serves
an entry is decided by its type; a type with no exact rollback is refused by name before the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from dflash_mlx.errors import CacheStateError, UnsupportedTarget


class LayerState(Protocol):
    """One layer's part of the transaction."""

    def begin(self, width: int) -> None: ...

    def keep(self, count: int) -> None:
        """Hold the first `count` of the positions written since `begin`; may be called again with fewer."""
        ...

    def abort(self) -> None:
        """Undo everything since `begin`, also a forward that stopped half-way."""
        ...

    def trim_to(self, length: int) -> bool:
        """Outside a transaction: keep the first `length` positions. False, and no change, if that is impossible."""
        ...


class AppendState:
    """A KV cache that only grows: rows past its offset are dead."""

    def __init__(self, entry: KVCache) -> None:
        self.entry = entry
        self._start = entry.offset

    def begin(self, width: int) -> None:
        self._start = self.entry.offset

    def keep(self, count: int) -> None:
        self.entry.trim(self.entry.offset - self._start - count)

    def abort(self) -> None:
        self.keep(0)

    def trim_to(self, length: int) -> bool:
        self.entry.trim(self.entry.offset - length)
        return True


@dataclass(frozen=True)
class _Ring:
    """A checkpoint of a ring by reference; without arrays, only its place."""

    offset: int
    index: int
    keys: mx.array | None = None
    values: mx.array | None = None


class WindowState:
    """A sliding window: mlx_lm's `RotatingKVCache`, whose own `trim` is wrong once the ring has wrapped.

    A write of two or more rows replaces the arrays by new ones in temporal order that hold window - 1 + width
    rows, so dropping rejected rows off the tail is exact and the old arrays are a free checkpoint. A write of
    one row overwrites, in place, the one row that no later position can see; undoing it moves the write position
    back, and the next write covers or drops that slot.
    """

    def __init__(self, entry: RotatingKVCache) -> None:
        self.entry = entry
        self._before = _Ring(entry.offset, entry._idx)

    def begin(self, width: int) -> None:
        e = self.entry
        arrays = (e.keys, e.values) if width > 1 else (None, None)
        self._before = _Ring(e.offset, e._idx, *arrays)

    def keep(self, count: int) -> None:
        e, before = self.entry, self._before
        drop = e.offset - before.offset - count
        if drop and e.keys is not None and e.values is not None:
            rows = e.keys.shape[2] - drop
            e.keys, e.values = e.keys[..., :rows, :], e.values[..., :rows, :]
            e.offset -= drop
            e._idx = rows
        self._before = _Ring(before.offset, before.index)  # frees the old ring

    def abort(self) -> None:
        e, before = self.entry, self._before
        if e.offset == before.offset:
            return  # the forward never reached this layer
        if before.keys is not None or before.offset == 0:
            e.keys, e.values, e._idx = before.keys, before.values, before.index
        elif e.keys is not None:
            e._idx = min(before.index, e.keys.shape[2])  # mlx_lm may have cut the ring to its window first
        e.offset = before.offset

    def trim_to(self, length: int) -> bool:
        e = self.entry
        if length == e.offset:
            return True
        if not e.is_trimmable():
            return False
        e.trim(e.offset - length)
        return True


_STATES: dict[type, Callable[..., LayerState]] = {KVCache: AppendState, RotatingKVCache: WindowState}


def layer_states(entries: Sequence[object]) -> list[LayerState]:
    """One state per mlx_lm cache entry.

    Raises:
        UnsupportedTarget: an entry's type has no exact rollback; the message names layer and type.
    """
    states = []
    for index, entry in enumerate(entries):
        make = _STATES.get(type(entry))
        if make is None:
            raise UnsupportedTarget(
                f"Cache entry {index} is a {type(entry).__name__}, for which no exact rollback is known "
                f"(known: {', '.join(t.__name__ for t in _STATES)}). Rejected draft tokens would stay in it, so the "
                "answer would change. Generate with mlx_lm, or add a LayerState to dflash_mlx/cache.py."
            )
        states.append(make(entry))
    return states


class TargetCache:
    """Per-layer mlx_lm cache entries and at most one open transaction over them.

    length: positions held in every layer; the anchor is never among them.
    """

    def __init__(self, entries: list, length: int) -> None:
        self.entries = entries
        self.length = length
        self._states = layer_states(entries)
        self._width: int | None = None  # of the open transaction
        self._kept = 0  # positions of the last committed one
        self._closed: str | None = None

    def begin(self, width: int) -> None:
        """Announce a forward over `width` positions."""
        self._check(open=False)
        if width < 1:
            raise ValueError(f"`width` has to be 1 or more, got {width}.")
        for state in self._states:
            state.begin(width)
        self._width = width

    def commit(self, keep: int) -> None:
        """Keep the first `keep` (1..width) of the positions just written."""
        width = self._check(open=True)
        if not 1 <= keep <= width:
            raise ValueError(f"`keep` has to be in 1..{width}, got {keep}.")
        for state in self._states:
            state.keep(keep)
        self.length += keep
        self._kept, self._width = keep, None

    def shrink(self, keep: int) -> None:
        """Keep only the first `keep` positions of the last committed block; before the next `begin`."""
        self._check(open=False)
        if not 1 <= keep <= self._kept:
            raise ValueError(f"`keep` has to be in 1..{self._kept}, got {keep}.")
        for state in self._states:
            state.keep(keep)
        self.length -= self._kept - keep
        self._kept = keep

    def abort(self) -> None:
        """After an exception: as if `begin` had not happened."""
        self._check(open=True)
        self._width = None
        for state in self._states:
            state.abort()

    def trim_to(self, length: int) -> bool:
        """Keep the first `length` positions. False if some layer cannot; the cache is then closed."""
        self._check(open=False)
        if not all([state.trim_to(length) for state in self._states]):  # noqa: C419  (every layer is cut)
            self._closed = f"The cache could not be cut back to {length} positions."
            return False
        self.length, self._kept = length, 0
        return True

    @property
    def is_open(self) -> bool:
        return self._width is not None

    @property
    def closed(self) -> str | None:
        """Why the cache cannot be used any more, or None."""
        return self._closed

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def evaluate(self) -> None:
        """Force pending writes: prefill chunks, and before another thread may use the cache."""
        mx.eval([entry.state for entry in self.entries])

    def _check(self, *, open: bool) -> int:
        if self._closed is not None:
            raise CacheStateError(self._closed)
        if (self._width is not None) != open:
            raise CacheStateError(
                f"The cache has {'no' if open else 'an'} open transaction. This is a bug in dflash_mlx: please "
                "report it with the command and the statistics that were printed."
            )
        return self._width or 0
