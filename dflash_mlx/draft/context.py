"""The draft's context: keys and values of fused target features of committed positions, one pair per draft layer.

Append-only: rejected tokens never enter, so nothing is rolled back. Keys are rotated before they are stored, at
absolute positions, and rows stay in temporal order, never in a ring. What a layer keeps of the newest rows:

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

Rows = tuple[mx.array, mx.array]  # keys and values


class _Layer:
    """Rows in an mlx_lm `KVCache`, which grows in steps and is written in place."""

    def __init__(self) -> None:
        self._store = KVCache()

    @property
    def arrays(self) -> list[mx.array]:
        keys, values = self._store.keys, self._store.values
        return [] if keys is None or values is None else [keys, values]


class FullLayer(_Layer):
    """Everything; the block is written behind the context and forgotten, so the context is not copied."""

    def append(self, keys: mx.array, values: mx.array) -> None:
        """[1, heads, S, D] each."""
        self._store.update_and_fetch(keys, values)

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Context followed by the block's rows [1, heads, T, D]: [1, heads, rows + T, D]."""
        rows = self._store.offset
        try:
            return self._store.update_and_fetch(keys, values)
        finally:  # also after an interrupt
            self._store.offset = rows

    def drop(self, count: int) -> None:
        self._store.trim(count)

    def snapshot(self) -> None:
        return None  # it can be cut back

    def restore(self, snapshot: None, rows: int) -> None:
        self._store.trim(self._store.offset - rows)

    @property
    def held(self) -> Rows | None:
        return None if self._store.empty() else self._store.keys_and_values()

    def hold(self, rows: Rows | None) -> None:
        """Hold exactly these rows."""
        self._store = KVCache()
        if rows is not None:
            self.append(*rows)

    def rows_for(self, new: int) -> int:
        """How many of `new` rows have to be projected at all."""
        return new

    @property
    def rows(self) -> int:
        return self._store.offset


class SlidingLayer(_Layer):
    """The newest `limit` rows, oldest first.

    Older ones stay in the store for a while, unseen, so that it is not copied for every row.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._spare = min(limit, KVCache.step)  # rows between two copies
        self._rows = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        """[1, heads, S, D] each."""
        if self._store.offset + keys.shape[2] > self._limit + self._spare:
            self.hold(self.with_block(keys, values))
        else:
            self._store.update_and_fetch(keys, values)
            self._rows = min(self._rows + keys.shape[2], self._limit)

    def with_block(self, keys: mx.array, values: mx.array) -> Rows:
        """What is held, followed by the block's rows [1, heads, T, D]: [1, heads, rows + T, D]."""
        end = self._store.offset
        try:
            keys, values = self._store.update_and_fetch(keys, values)
        finally:  # also after an interrupt
            self._store.offset = end
        first = end - self._rows
        return keys[:, :, first:], values[:, :, first:]

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

    @property
    def held(self) -> Rows | None:
        if not self._rows:
            return None
        keys, values = self._store.keys_and_values()
        first = self._store.offset - self._rows
        return keys[:, :, first:], values[:, :, first:]

    def hold(self, rows: Rows | None) -> None:
        """Hold exactly these rows, or the newest of them."""
        self._store, self._rows = KVCache(), 0
        if rows is not None:
            keys, values = (part[:, :, -self._limit :] for part in rows)
            self._store.update_and_fetch(keys, values)
            self._rows = keys.shape[2]

    def rows_for(self, new: int) -> int:
        return min(new, self._limit)

    @property
    def rows(self) -> int:
        return self._rows


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

    length: the absolute position that the next committed token will have; equals the target cache's length.
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
