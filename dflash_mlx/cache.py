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
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

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

    def release(self) -> None:
        """Let go of what only `keep` and `abort` need; the block is final."""
        ...

    def can_trim_to(self, length: int) -> bool:
        """Whether, outside a transaction, the first `length` positions can be kept alone."""
        ...

    def trim_to(self, length: int) -> None:
        """Keep the first `length` positions; only where `can_trim_to`."""
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

    def release(self) -> None:
        pass

    def can_trim_to(self, length: int) -> bool:
        return True

    def trim_to(self, length: int) -> None:
        self.entry.trim(self.entry.offset - length)


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

    def release(self) -> None:
        pass  # `keep` freed the old ring

    def can_trim_to(self, length: int) -> bool:
        return length == self.entry.offset or self.entry.is_trimmable()

    def trim_to(self, length: int) -> None:
        if length != self.entry.offset:
            self.entry.trim(self.entry.offset - length)


class RecurrentState:
    """A state that its layer replaces at every step: gated delta rule, Mamba-2, short convolution.

    mlx_lm puts new arrays into the entry and never writes into old ones, so references are a free checkpoint. To keep
    part of a block the layer's own module runs again over the kept rows from there: `record` says how.
    """

    def __init__(self, entry: ArraysCache) -> None:
        self.entry = entry
        self._before = list(entry.cache)
        self._width = 0
        self._replay: Callable[[int], object] | None = None

    def begin(self, width: int) -> None:
        self._before, self._width, self._replay = list(self.entry.cache), width, None

    def record(self, replay: Callable[[int], object]) -> None:
        """The layer ran in this transaction; `replay(count)` runs it again over the first `count` rows."""
        self._replay = replay

    def keep(self, count: int) -> None:
        if count == self._width:
            return  # what the forward left is what is kept; a later call with fewer starts from the checkpoint
        if self._replay is None:
            raise CacheStateError("A recurrent layer was not recorded in this block, so it cannot be cut back.")
        self.entry.cache = list(self._before)
        self._replay(count)

    def abort(self) -> None:
        self.entry.cache = list(self._before)

    def release(self) -> None:
        self._before, self._replay = [], None

    def can_trim_to(self, length: int) -> bool:
        return False  # what a state has forgotten does not come back

    def trim_to(self, length: int) -> None:
        raise CacheStateError("A recurrent state cannot be cut back.")


_STATES: dict[type, Callable[..., LayerState]] = {
    KVCache: AppendState,
    RotatingKVCache: WindowState,
    ArraysCache: RecurrentState,
}


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


def positions_held(entries: Sequence[object]) -> int:
    """Positions that an mlx_lm cache list holds: those of its first attention layer (a recurrent one cannot say)."""
    return next((entry.offset for entry in entries if isinstance(entry, KVCache | RotatingKVCache)), 0)


class TargetCache:
    """Per-layer mlx_lm cache entries and at most one open transaction over them.

    length: positions held in every layer; the anchor is never among them.
    kept:   positions of the last committed block, which `shrink` may still shorten; 0 once they are final.
    closed: why the cache cannot be used any more, or None.
    """

    def __init__(self, entries: list, length: int) -> None:
        self.entries = entries
        self.length = length
        self.kept = 0
        self.closed: str | None = None
        self.states = layer_states(entries)
        self._width: int | None = None  # of the open transaction

    @property
    def is_open(self) -> bool:
        return self._width is not None

    def begin(self, width: int) -> None:
        """Announce a forward over `width` positions."""
        self._check(open=False)
        if width < 1:
            raise ValueError(f"`width` has to be 1 or more, got {width}.")
        for state in self.states:
            state.begin(width)
        self._width = width

    def commit(self, keep: int) -> None:
        """Keep the first `keep` (1..width) of the positions just written."""
        width = self._check(open=True)
        if not 1 <= keep <= width:
            raise ValueError(f"`keep` has to be in 1..{width}, got {keep}.")
        self._in_every_layer(lambda state: state.keep(keep))
        self.length += keep
        self.kept, self._width = keep, None

    def shrink(self, keep: int) -> None:
        """Keep only the first `keep` positions of the last committed block; before the next `begin`."""
        self._check(open=False)
        if not 1 <= keep <= self.kept:
            raise ValueError(f"`keep` has to be in 1..{self.kept}, got {keep}.")
        self._in_every_layer(lambda state: state.keep(keep))
        self.length -= self.kept - keep
        self.kept = keep

    def abort(self) -> None:
        """After an exception: as if `begin` had not happened. A closed cache stays closed."""
        self._width = None
        if self.closed is None:
            self._in_every_layer(lambda state: state.abort())

    def trim_to(self, length: int) -> bool:
        """Keep the first `length` positions; False, and no change, if some layer cannot."""
        self._check(open=False)
        if length == self.length:
            return True
        if not all(state.can_trim_to(length) for state in self.states):
            return False
        self._in_every_layer(lambda state: state.trim_to(length))
        self.length, self.kept = length, 0
        return True

    def evaluate(self) -> None:
        """Force pending writes: prefill chunks, and before another thread may use the cache.

        What `shrink` would need of the last block is let go first, so that a long chunk's rows are not kept alive.
        """
        self.kept = 0
        for state in self.states:
            state.release()
        mx.eval([entry.state for entry in self.entries])

    def _in_every_layer(self, change: Callable[[LayerState], None]) -> None:
        """All layers or, after an interrupt in between, a closed cache."""
        self.closed = "The cache was left between two layers by an interrupt. Start again with a fresh cache."
        for state in self.states:
            change(state)
        self.closed = None

    def _check(self, *, open: bool) -> int:
        if self.closed is not None:
            raise CacheStateError(self.closed)
        if self.is_open != open:
            raise CacheStateError(
                f"The cache has {'no' if open else 'an'} open transaction. This is a bug in dflash_mlx: please "
                "report it with the command and the statistics that were printed."
            )
        return self._width or 0
