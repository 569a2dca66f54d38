"""The target's cache as a transaction: begin(width) -> forward -> commit(keep), or abort().

Invariant: after `commit` every layer holds exactly the positions that were kept, as if nothing else had ever been
written. Nothing is rolled back "by the difference": the caller says what to keep, each layer state knows how.
A committed block may still be shortened with `shrink` until the next `begin` (a consumer that stops mid-block).

The entries are mlx_lm's own cache objects, so mlx_lm's code can use them before and after. What one layer does is
`dflash_mlx.layer_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache

from dflash_mlx.errors import CacheStateError
from dflash_mlx.layer_state import LayerState, layer_states
from dflash_mlx.layer_state import RecurrentState as RecurrentState
from dflash_mlx.layer_state import positions_held as positions_held

_BETWEEN_LAYERS = "The cache was left between two layers by an interrupt. Start again with a fresh cache."


@dataclass(frozen=True)
class KVQuantization:
    """Keys and values of attention layers in `bits` bits once `start` positions are held, as in mlx_lm."""

    bits: int
    group_size: int = 64
    start: int = 5000


@dataclass(frozen=True)
class Snapshot:
    """A place to come back to: one entry per layer, None where the layer can be cut back."""

    length: int
    layers: tuple[Any, ...]


class TargetCache:
    """Per-layer mlx_lm cache entries and at most one open transaction over them.

    length: positions held in every layer; the anchor is never among them.
    kept:   positions of the last committed block, which `shrink` may still shorten; 0 once they are final.
    closed: why the cache cannot be used any more, or None.
    quantization: what becomes of long attention caches, or None.
    """

    def __init__(self, entries: list, length: int, quantization: KVQuantization | None = None) -> None:
        self.entries = entries
        self.length = length
        self.kept = 0
        self.closed: str | None = None
        self.states: list[LayerState] = layer_states(entries)
        self._width: int | None = None  # of the open transaction
        self.quantize_from_now(quantization)

    @property
    def is_open(self) -> bool:
        return self._width is not None

    @property
    def room(self) -> int | None:
        """Widest block that does not cross the border of quantisation, or None: plain decoding would see other keys."""
        border = self.quantization.start - self.length if self.quantization else 0
        return border if border > 0 else None

    def begin(self, width: int) -> None:
        """Announce a forward over `width` positions."""
        self._check(open=False)
        if width < 1:
            raise ValueError(f"`width` has to be 1 or more, got {width}.")
        self.quantize()
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
        self.kept, self._width, self._due = keep, None, True

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

    def can_trim_to(self, length: int) -> bool:
        """Whether the first `length` positions can be kept alone."""
        return length == self.length or all(state.can_trim_to(length) for state in self.states)

    def trim_to(self, length: int) -> bool:
        """Keep the first `length` positions; False, and no change, if some layer cannot."""
        self._check(open=False)
        if length == self.length:
            return True
        if not self.can_trim_to(length):
            return False
        self._in_every_layer(lambda state: state.trim_to(length))
        self.length, self.kept = length, 0
        return True

    def snapshot(self) -> Snapshot:
        """This place, to come back to where a layer cannot be cut back; evaluate first."""
        self._check(open=False)
        layers = tuple(state.snapshot() for state in self.states)
        mx.eval([layer.state for layer in layers if layer is not None])
        return Snapshot(self.length, layers)

    def restore(self, snapshot: Snapshot) -> None:
        """Back to a snapshot, which has to be of a prefix of what is held; it may be used again."""
        self._check(open=False)
        places = iter(snapshot.layers)
        self._in_every_layer(lambda state: state.restore(next(places), snapshot.length))
        self.length, self.kept = snapshot.length, 0

    def evaluate(self) -> None:
        """Force pending writes: prefill chunks, and before another thread may use the cache.

        What `shrink` would need of the last block is let go first, so that a long chunk's rows are not kept alive.
        """
        self.kept = 0
        for state in self.states:
            state.release()
        mx.eval([entry.state for entry in self.entries])

    @property
    def pending(self) -> list[mx.array]:
        """What `commit` may have left to compute: replayed states and cut windows."""
        return [array for state in self.states for array in state.pending()]

    def quantize(self) -> None:
        """Quantise the attention layers that are due, in the caller's list too; windows and states stay as they are."""
        q = self.quantization
        if q is None or not self._due or self.length < q.start:
            return
        self.closed = _BETWEEN_LAYERS
        for index, entry in enumerate(self.entries):
            if type(entry) is KVCache:
                due = [entry]
                maybe_quantize_kv_cache(due, q.start, q.group_size, q.bits)
                self.entries[index] = due[0]
                self.states[index : index + 1] = layer_states(due)
        self.closed = None

    def quantize_from_now(self, quantization: KVQuantization | None) -> None:
        """A request starts: what is held is quantised after its first forward, not before, as in mlx_lm."""
        self.quantization, self._due = quantization, False

    def _in_every_layer(self, change: Callable[[LayerState], None]) -> None:
        """All layers or, after an interrupt in between, a closed cache."""
        self.closed = _BETWEEN_LAYERS
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
