"""One layer's part of the cache transaction: what it keeps of a block, undoes, cuts back and comes back to.

The entries are mlx_lm's own cache objects. Which state serves an entry is decided by its type; a type with no exact
rollback is refused by name before the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from dflash_mlx.errors import CacheStateError, UnsupportedTarget
from dflash_mlx.threads import this_thread


class LayerState(Protocol):
    """One layer's part of the transaction.

    needs_snapshot: whether there are places that cannot be cut back to, only restored.
    """

    needs_snapshot: bool

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

    def pending(self) -> list[mx.array]:
        """Arrays that `keep` may have left to compute."""
        ...

    def can_trim_to(self, length: int) -> bool:
        """Whether, outside a transaction, the first `length` positions can be kept alone."""
        ...

    def trim_to(self, length: int) -> None:
        """Keep the first `length` positions; only where `can_trim_to`."""
        ...

    def snapshot(self) -> Any:
        """What `restore` needs to come back to this place; outside a transaction, with nothing pending.

        A cache entry of mlx_lm's, or None for a layer that can be cut back instead.
        """
        ...

    def restore(self, snapshot: Any, length: int) -> None:
        """Back to where the first `length` positions were held; the snapshot may be used again."""
        ...


class AppendState:
    """A KV cache that only grows, quantised or not: rows past its offset are dead."""

    needs_snapshot = False

    def __init__(self, entry: KVCache | QuantizedKVCache) -> None:
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

    def pending(self) -> list[mx.array]:
        return []  # the forward that wrote the rows computed them, and keeping is a matter of the offset

    def can_trim_to(self, length: int) -> bool:
        return True

    def trim_to(self, length: int) -> None:
        self.entry.trim(self.entry.offset - length)

    def snapshot(self) -> None:
        return None

    def restore(self, snapshot: None, length: int) -> None:
        self.trim_to(length)


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

    needs_snapshot = True

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

    def pending(self) -> list[mx.array]:
        e = self.entry
        return [] if e.keys is None or e.values is None else [e.keys, e.values]

    def can_trim_to(self, length: int) -> bool:
        return length == self.entry.offset or self.entry.is_trimmable()

    def trim_to(self, length: int) -> None:
        if length != self.entry.offset:
            self.entry.trim(self.entry.offset - length)

    def snapshot(self) -> RotatingKVCache:
        copy = _copy(self.entry)
        if copy.keys is not None and copy.keys.shape[2] > copy.max_size:
            # A chunk left more rows than the window has; what no later position sees is not kept, nor its buffer.
            rows = copy.max_size
            copy.keys, copy.values = (mx.contiguous(a[..., -rows:, :]) for a in (copy.keys, copy.values))
            copy._idx = rows
        return copy

    def restore(self, snapshot: RotatingKVCache, length: int) -> None:
        self.entry.state = _copy(snapshot).state


class Replay(Protocol):
    """Brings a recurrent entry from its checkpoint to where `count` rows of the recorded block lead.

    The adapters' replay runs the layer's own module again (reference); a layer that keeps a `Tape` needs none.
    """

    def __call__(self, count: int) -> object: ...


class Tape(Protocol):
    """What a layer wrote down of a block while it ran: enough for its state after any number of the rows."""

    def after(self, count: int) -> list[mx.array]:
        """The entry's arrays after the first `count` rows, not computed yet, from what the forward computed."""
        ...


class Deferred:
    """An entry's arrays after `count` rows of a tape, which nobody may ever need: the next block takes the tape."""

    def __init__(self, tape: Tape, count: int) -> None:
        self.tape, self.count = tape, count
        self.arrays: list[Any] = tape.after(count)
        self._thread = this_thread()  # the only one that could compute them

    def fills(self, entry: ArraysCache) -> bool:
        """Whether the entry still holds these very arrays."""
        return all(held is own for held, own in zip(entry.cache, self.arrays, strict=True))

    def here(self) -> Deferred:
        """The same, for this thread to compute."""
        return self if self._thread is this_thread() else Deferred(self.tape, self.count)


class RecurrentState:
    """A state that its layer replaces at every step: gated delta rule, Mamba-2, short convolution.

    mlx_lm puts new arrays into the entry and never writes into old ones, so references are a free checkpoint. To keep
    part of a block its rows are replayed from there: `record` says how. A layer that records a `Tape` leaves the entry
    alone; it gets its arrays when the block is kept, and whoever reads them has the replay computed. The layer's next
    block does not: it starts from `deferred`.
    """

    needs_snapshot = True

    def __init__(self, entry: ArraysCache) -> None:
        self.entry = entry
        self.deferred: Deferred | None = None  # what the entry holds, where that is the end of a tape
        self._before = list(entry.cache)
        self._width = 0
        self._record: Replay | Tape | None = None

    def begin(self, width: int) -> None:
        self._refresh()
        self._before, self._width, self._record = list(self.entry.cache), width, None

    def record(self, record: Replay | Tape) -> None:
        """The layer ran in this transaction; the record leads to the state after its first rows."""
        self._record = record

    def keep(self, count: int) -> None:
        record = self._record
        if record is not None and not callable(record):
            self.deferred = Deferred(record, count)
            self.entry.cache = list(self.deferred.arrays)
            self._before = []  # frees the block before
            return
        self.deferred = None
        if count == self._width:
            return  # what the forward left is what is kept; a later call with fewer starts from the checkpoint
        if record is None:
            raise CacheStateError("A recurrent layer was not recorded in this block, so it cannot be cut back.")
        self.entry.cache = list(self._before)
        record(count)

    def abort(self) -> None:
        self.entry.cache = list(self._before)

    def release(self) -> None:
        self._refresh()
        self._before, self._record, self.deferred = [], None, None

    def pending(self) -> list[mx.array]:
        if self.deferred is not None:
            return []  # the forward that wrote the tape computed what the next block needs
        arrays: list[mx.array | None] = self.entry.cache  # type: ignore[assignment]
        return [array for array in arrays if array is not None]

    def can_trim_to(self, length: int) -> bool:
        return False  # what a state has forgotten does not come back

    def trim_to(self, length: int) -> None:
        raise CacheStateError("A recurrent state cannot be cut back.")

    def snapshot(self) -> ArraysCache:
        return _copy(self.entry)

    def restore(self, snapshot: ArraysCache, length: int) -> None:
        self.entry.state = _copy(snapshot).state

    def _refresh(self) -> None:
        """The entry may have been given other arrays, and this thread may not be the one that kept the block."""
        if self.deferred is None or not self.deferred.fills(self.entry):
            self.deferred = None
            return
        self.deferred = self.deferred.here()
        self.entry.cache = list(self.deferred.arrays)


def _copy(entry: Any) -> Any:
    """A cache entry of its own: what is written in place into one of the two is not seen by the other."""
    return type(entry).from_state(tree_map(lambda a: mx.array(a) if isinstance(a, mx.array) else a, entry.state))


_STATES: dict[type, Callable[..., LayerState]] = {
    KVCache: AppendState,
    QuantizedKVCache: AppendState,
    RotatingKVCache: WindowState,
    ArraysCache: RecurrentState,
}


def layer_states(entries: Sequence[object]) -> list[LayerState]:
    """One state per mlx_lm cache entry.

    Raises:
        UnsupportedTarget: an entry's type has no exact rollback, or it holds a batch; the message names the entry.
    """
    states = []
    for index, entry in enumerate(entries):
        make = _STATES.get(type(entry))
        if isinstance(entry, ArraysCache) and (entry.lengths is not None or entry.left_padding is not None):
            raise UnsupportedTarget(
                f"Cache entry {index} was prepared for a batch of padded prompts, and one prompt at a time is decoded "
                "here. Make a fresh cache, or generate with mlx_lm."
            )
        if make is None:
            raise UnsupportedTarget(
                f"Cache entry {index} is a {type(entry).__name__}, for which no exact rollback is known "
                f"(known: {', '.join(t.__name__ for t in _STATES)}). Rejected draft tokens would stay in it, so the "
                "answer would change. Generate with mlx_lm, or add a LayerState to dflash_mlx/layer_state.py."
            )
        states.append(make(entry))
    return states


def positions_held(entries: Sequence[Any]) -> int:
    """Positions that an mlx_lm cache list holds: those of its first attention layer (a recurrent one cannot say)."""
    return next((entry.offset for entry in entries if isinstance(entry, _ATTENTION)), 0)


_ATTENTION = (KVCache, QuantizedKVCache, RotatingKVCache)
