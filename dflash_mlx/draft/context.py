"""The draft's context: keys and values of fused target features of committed positions, one pair per draft layer.

Keys are rotated before they are stored, at absolute positions, and rows stay in temporal order, never in a ring. Only
final tokens enter, but for the rows of a block whose verdict is still on the device: those are `ahead`, a draft sees as
many of them as the device says are final, and `settle` drops the rest. What a layer keeps of the newest rows:

    full layer                          all of them
    sliding layer of window W           W - 1: all that row 0 of a block can see
    full layer under `window` rows      `window`, and a block sees all that is kept
    sliding layer under `window` rows   min(`window`, W - 1)
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.config import SLIDING, DraftConfig
from dflash_mlx.kernels.sdpa_rows import Segment

Rows = tuple[mx.array, mx.array]  # keys and values


@dataclass(frozen=True)
class Ahead:
    """Rows that were appended before the host knows how many of them are final; the rest will be dropped.

    rows:  how many were appended.
    count: [1] int32, how many of the first are final.
    """

    rows: int
    count: mx.array


class _Layer:
    """Rows in an mlx_lm `KVCache`, which grows in steps of 256 and is written in place.

    ahead: the last append, until `settle` says what of it stays; None between cycles.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._store = KVCache()
        self._limit = limit
        self.ahead: Ahead | None = None

    @property
    def rows(self) -> int:
        """Rows that are held, those ahead included."""
        return self._store.offset

    def with_block(self, keys: mx.array, values: mx.array) -> Rows:
        """What is held, followed by the block's rows [1, heads, T, D]: [1, heads, rows + T, D].

        The block is written behind the context and forgotten, so the context is not copied.
        """
        end = self._store.offset
        first = end - self.rows
        try:
            keys, values = self._store.update_and_fetch(keys, values)
        finally:  # also after an interrupt
            self._store.offset = end
        return (keys[:, :, first:], values[:, :, first:]) if first else (keys, values)

    def places(self, block: int) -> tuple[mx.array, mx.array | None]:
        """Where the rows of `with_block` for a block of T rows are, counted from the block's first row.

        Returns:
            [rows + T] int32, negative for the context; and [rows + T] of bool, False for a row that the block must not
            see: one that is ahead and not final, or that the layer will have forgotten. None if it may see all.
        """
        index = mx.arange(-self.rows, block)
        if self.ahead is None:
            return index, None
        place = mx.where(index < 0, index + (self.ahead.rows - self.ahead.count), index)
        seen = (index >= 0) | (place < 0)
        return place, seen if self._limit is None else seen & (place >= -self._limit)

    @property
    def seen(self) -> Segment | None:
        """What a block sees, without a copy: the buffers, and which of their rows; None while it is empty.

        While rows are ahead they are counted on the device.
        """
        if not self.rows:
            return None
        stop: int | mx.array = self._store.offset
        first: int | mx.array = self._store.offset - self.rows
        if self.ahead is not None:
            stop = self._store.offset - self.ahead.rows + self.ahead.count
            first = mx.array([first], mx.int32) if self._limit is None else mx.maximum(first, stop - self._limit)
        keys, values = self.arrays
        return Segment(keys, values, stop, first)

    @property
    def held(self) -> Rows | None:
        if not self.rows:
            return None
        keys, values = self._store.keys_and_values()
        first = self._store.offset - self.rows
        return (keys[:, :, first:], values[:, :, first:]) if first else (keys, values)

    @property
    def arrays(self) -> list[mx.array]:
        keys, values = self._store.keys, self._store.values
        return [] if keys is None or values is None else [keys, values]


class FullLayer(_Layer):
    """Everything."""

    def append(self, keys: mx.array, values: mx.array, count: mx.array | None = None) -> None:
        """[1, heads, S, D] each; `count` [1] of them are final, and all without it."""
        self._store.update_and_fetch(keys, values)
        self.ahead = None if count is None else Ahead(keys.shape[2], count)

    def settle(self, kept: int) -> None:
        """Of the rows ahead the first `kept` are final."""
        if self.ahead is not None:
            self._store.trim(self.ahead.rows - kept)
            self.ahead = None

    def drop(self, count: int) -> None:
        self._store.trim(count)

    def snapshot(self) -> None:
        return None  # it can be cut back

    def restore(self, snapshot: None, rows: int) -> None:
        self._store.trim(self._store.offset - rows)

    def hold(self, rows: Rows | None) -> None:
        """Hold exactly these rows."""
        self._store = KVCache()
        if rows is not None:
            self.append(*rows)

    def rows_for(self, new: int) -> int:
        """How many of `new` rows have to be projected at all."""
        return new


class SlidingLayer(_Layer):
    """The newest `limit` rows, oldest first, and before as many as are ahead: what is dropped of these leaves no hole.

    Older ones stay in the store for a while, unseen, so that it is not copied for every row.
    """

    _limit: int

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._spare = min(limit, KVCache.step)  # rows between two copies
        self._rows = 0

    @property
    def rows(self) -> int:
        return self._rows

    def append(self, keys: mx.array, values: mx.array, count: mx.array | None = None) -> None:
        """[1, heads, S, D] each; `count` [1] of them are final, and all without it."""
        new = keys.shape[2]
        ahead = 0 if count is None else new
        if self._store.offset + new > self._limit + self._spare + ahead:
            self._hold(self.with_block(keys, values), self._limit + ahead)
        else:
            self._store.update_and_fetch(keys, values)
            self._rows = min(self._rows + new, self._limit + ahead)
        self.ahead = None if count is None else Ahead(new, count)

    def settle(self, kept: int) -> None:
        """Of the rows ahead the first `kept` are final."""
        if self.ahead is not None:
            self.drop(self.ahead.rows - kept)
            self._rows, self.ahead = min(self._rows, self._limit), None

    def drop(self, count: int) -> None:
        count = min(count, self._rows)
        self._store.trim(count)
        self._rows -= count

    def snapshot(self) -> Rows | None:
        """A copy; a view would have the next row copy the whole store."""
        held = self.held
        return held and (mx.contiguous(held[0]), mx.contiguous(held[1]))

    def restore(self, snapshot: Rows | None, rows: int) -> None:
        self.hold(snapshot)

    def hold(self, rows: Rows | None) -> None:
        """Hold exactly these rows, or the newest of them."""
        self._hold(rows, self._limit)

    def _hold(self, rows: Rows | None, limit: int) -> None:
        self._store, self._rows = KVCache(), 0
        if rows is not None:
            keys, values = (part[:, :, -limit:] for part in rows)
            self._store.update_and_fetch(keys, values)
            self._rows = keys.shape[2]

    def rows_for(self, new: int) -> int:
        return min(new, self._limit)


@dataclass(frozen=True)
class ContextSnapshot:
    """A place to come back to: rows of the sliding layers, None where a layer can be cut back."""

    length: int
    start: int
    layers: tuple[Rows | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for rows in self.layers if rows for array in rows)


class DraftContext:
    """All layers, and the position of the next row.

    length: the absolute position that the next committed token will have; equals the target cache's length. Rows that
            are ahead do not count until they are settled.
    start:  the first position whose features were ever given (0 unless the draft joined a filled cache late).
    window: how many rows every layer keeps at most, or None.
    """

    def __init__(self, config: DraftConfig, start: int = 0, window: int | None = None) -> None:
        self.length = self.start = start
        self.window = window
        self.layers: list[FullLayer | SlidingLayer] = []
        for kind in config.layer_types:
            seen = config.sliding_window - 1 if kind == SLIDING and config.sliding_window else None
            limits = [limit for limit in (seen, window) if limit is not None]
            self.layers.append(SlidingLayer(min(limits)) if limits else FullLayer())

    @property
    def ahead(self) -> Ahead | None:
        """The rows of the last block, while the host does not know how many of them are final."""
        return self.layers[0].ahead

    @property
    def position(self) -> int | mx.array:
        """Of the next block's first row: an int, or [1] int32 while rows are ahead."""
        return self.length if self.ahead is None else self.length + self.ahead.count

    def settle(self, kept: int) -> None:
        """Of the rows ahead the first `kept` are final, 0 for none; nothing happens if there are none."""
        if self.ahead is None:
            return
        start, self.length = self.length, -1  # after an interrupt between two layers it covers nothing
        for layer in self.layers:
            layer.settle(kept)
        self.length = start + kept if start >= 0 else -1

    def drop(self, count: int) -> None:
        """Forget the last `count` positions. A sliding layer does not get older rows back: quality only."""
        for layer in self.layers:
            layer.drop(count)
        self.length -= count
        self.start = min(self.start, self.length)

    def snapshot(self) -> ContextSnapshot:
        """This place, to come back to; layers that keep everything cost no memory. Computed by this thread."""
        layers = tuple(layer.snapshot() for layer in self.layers)
        mx.async_eval(*(array for rows in layers if rows for array in rows))
        return ContextSnapshot(self.length, self.start, layers)

    def restore(self, snapshot: ContextSnapshot) -> None:
        """Back to a snapshot, which has to be of a prefix of what is held; it may be used again."""
        for layer, place in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(place, snapshot.length - snapshot.start)  # type: ignore[arg-type]
        self.length, self.start = snapshot.length, snapshot.start

    @property
    def slides(self) -> bool:
        """Whether some layer forgets rows, so that dropping does not bring back what was seen then."""
        return any(isinstance(layer, SlidingLayer) for layer in self.layers)

    def covers(self, length: int) -> bool:
        """Whether the next row is that of position `length`, in every layer that keeps all of them."""
        rows = length - self.start
        return self.length == length and all(
            layer.rows == rows for layer in self.layers if isinstance(layer, FullLayer)
        )

    def evaluate(self) -> None:
        """Force pending writes: after a prefill chunk, and before another thread may use the context."""
        mx.eval(self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.arrays]
