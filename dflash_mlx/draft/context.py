"""The draft's context: keys and values of fused target features of committed positions, one pair per draft layer.

Append-only: rejected tokens never enter, so nothing is rolled back. Keys are rotated before they are stored, at
absolute positions. Full layers keep everything in an mlx_lm `KVCache`; sliding layers keep the last W - 1 rows in
temporal order (all that row 0 of a block can see), never in a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.config import SLIDING, DraftConfig

Rows = tuple[mx.array, mx.array]  # keys and values


class FullLayer:
    """Everything; the block is written behind the context and forgotten, so the context is not copied."""

    def __init__(self) -> None:
        self._store = KVCache()

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

    @property
    def arrays(self) -> list[mx.array]:
        keys, values = self._store.keys, self._store.values
        return [] if keys is None or values is None else [keys, values]


class SlidingLayer:
    """The last window - 1 rows, oldest first."""

    def __init__(self, window: int) -> None:
        self._limit = window - 1
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array) -> None:
        keys, values = self.with_block(keys, values)
        self._keys, self._values = keys[:, :, -self._limit :], values[:, :, -self._limit :]

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._keys is None or self._values is None:
            return keys, values
        return mx.concatenate([self._keys, keys], axis=2), mx.concatenate([self._values, values], axis=2)

    def drop(self, count: int) -> None:
        if self._keys is not None and self._values is not None:
            keep = max(self.rows - count, 0)
            self._keys, self._values = self._keys[:, :, :keep], self._values[:, :, :keep]

    def snapshot(self) -> Rows | None:
        return self.held  # rows are replaced, never written in place

    def restore(self, snapshot: Rows | None, rows: int) -> None:
        self.hold(snapshot)

    @property
    def held(self) -> Rows | None:
        return None if self._keys is None or self._values is None else (self._keys, self._values)

    def hold(self, rows: Rows | None) -> None:
        """Hold exactly these rows."""
        self._keys, self._values = rows or (None, None)

    def rows_for(self, new: int) -> int:
        return min(new, self._limit)

    @property
    def rows(self) -> int:
        return 0 if self._keys is None else self._keys.shape[2]

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self._keys is None or self._values is None else [self._keys, self._values]


@dataclass(frozen=True)
class ContextSnapshot:
    """A place to come back to: rows of the sliding layers, None where a layer can be cut back."""

    length: int
    start: int
    layers: tuple[Rows | None, ...]


class DraftContext:
    """All layers, and the position of the next row.

    length: the absolute position that the next committed token will have; equals the target cache's length.
    start:  the first position whose features were ever given (0 unless the draft joined a filled cache late).
    """

    def __init__(self, config: DraftConfig, start: int = 0) -> None:
        self.length = self.start = start
        self.layers: list[FullLayer | SlidingLayer] = [
            SlidingLayer(config.sliding_window) if kind == SLIDING and config.sliding_window else FullLayer()
            for kind in config.layer_types
        ]

    def drop(self, count: int) -> None:
        """Forget the last `count` positions. A sliding layer does not get older rows back: quality only."""
        for layer in self.layers:
            layer.drop(count)
        self.length -= count
        self.start = min(self.start, self.length)

    def snapshot(self) -> ContextSnapshot:
        """This place, to come back to; it costs no memory while the context only grows."""
        return ContextSnapshot(self.length, self.start, tuple(layer.snapshot() for layer in self.layers))

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
