"""Each layer state against the oracle: a fresh cache that was only ever given the kept rows."""

from __future__ import annotations

import weakref

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from dflash_mlx.cache import TargetCache
from dflash_mlx.errors import CacheStateError, UnsupportedTarget

WINDOW = 8


def rows(start: int, count: int) -> mx.array:
    """[1, 1, count, 4] rows that name their own position."""
    return mx.broadcast_to(mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None], (1, 1, count, 4))


def write(cache: TargetCache, start: int, count: int) -> None:
    for entry in cache.entries:
        entry.update_and_fetch(rows(start, count), -rows(start, count))


def positions(entry: KVCache | RotatingKVCache) -> list[int]:
    """Positions that the next single token would attend to, oldest first."""
    if isinstance(entry, RotatingKVCache):
        kept = entry._temporal_order(entry.keys)[0, 0, :, 0].tolist()
        return [int(p) for p in kept][-(WINDOW - 1) :]
    return [int(p) for p in entry.keys[0, 0, : entry.offset, 0].tolist()]


def check(cache: TargetCache, length: int) -> None:
    assert cache.length == length
    for entry in cache.entries:
        assert entry.offset == length
        if length:
            first = max(0, length - (WINDOW - 1)) if isinstance(entry, RotatingKVCache) else 0
            assert positions(entry) == list(range(first, length))


def fresh() -> TargetCache:
    return TargetCache([KVCache(), RotatingKVCache(max_size=WINDOW)], 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12)), max_size=12))
def test_any_sequence_of_blocks_leaves_exactly_the_kept_rows(blocks: list[tuple[int, int, int]]) -> None:
    """width written, keep of them, then shrink to fewer; 0 kept aborts where that is possible."""
    cache, length = fresh(), 0
    for width, keep, fewer in blocks:
        cache.begin(width)
        write(cache, length, width)
        if keep == 0:
            cache.abort()
        else:
            kept = min(max(keep, 1), width)
            cache.commit(kept)
            length += kept
            if 1 <= fewer <= kept:
                cache.shrink(fewer)
                length -= kept - fewer
        check(cache, length)


def test_rejected_keys_never_reappear_after_the_window_wraps() -> None:
    """What mlx_lm's own `trim` gets wrong, silently."""
    cache = fresh()
    cache.begin(11)
    write(cache, 0, 11)
    cache.commit(11)
    cache.begin(5)
    write(cache, 100, 5)  # rejected rows carry other positions
    cache.abort()
    cache.begin(4)
    block = mx.concatenate([rows(11, 1), rows(200, 3)], axis=2)
    for entry in cache.entries:
        entry.update_and_fetch(block, block)
    cache.commit(1)
    for position in range(12, 16):
        cache.begin(1)
        write(cache, position, 1)
        cache.commit(1)
        check(cache, position + 1)


@pytest.mark.parametrize("first", range(1, 21))
@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_single_row_written_in_place_can_be_undone(first: int, after: int) -> None:
    """The slot it took is one that no later position sees: whatever is written next covers or drops it."""
    cache = fresh()
    cache.begin(first)
    write(cache, 0, first)
    cache.commit(first)
    for _ in range(3):
        cache.begin(1)
        write(cache, 500, 1)
        cache.abort()
        assert cache.length == first
    length = first
    for width in (after, 1, 1, after, 1):
        cache.begin(width)
        write(cache, length, width)
        cache.commit(width)
        length += width
        check(cache, length)


def test_abort_before_the_layer_was_reached_changes_nothing() -> None:
    """A forward that broke in the first layer wrote nothing to the others."""
    cache = fresh()
    cache.begin(9)
    write(cache, 0, 9)
    cache.commit(9)
    cache.begin(4)
    cache.entries[0].update_and_fetch(rows(50, 4), rows(50, 4))
    cache.abort()
    check(cache, 9)
    cache.begin(1)
    cache.abort()
    check(cache, 9)


def test_order_of_calls_is_enforced() -> None:
    cache = fresh()
    with pytest.raises(CacheStateError, match="has no open transaction"):
        cache.commit(1)
    cache.begin(2)
    with pytest.raises(CacheStateError, match="has an open transaction"):
        cache.begin(2)
    with pytest.raises(ValueError, match=r"`keep` has to be in 1\.\.2, got 3"):
        cache.commit(3)
    with pytest.raises(ValueError, match=r"`keep` has to be in 1\.\.2, got 0"):
        cache.commit(0)
    write(cache, 0, 2)
    cache.commit(2)
    with pytest.raises(ValueError, match=r"`keep` has to be in 1\.\.2, got 3"):
        cache.shrink(3)


@pytest.mark.parametrize("length", [0, 3, 6])
def test_trim_cuts_a_ring_that_has_not_wrapped(length: int) -> None:
    cache = fresh()
    cache.begin(7)
    write(cache, 0, 7)
    cache.commit(7)
    assert cache.trim_to(length)
    check(cache, length)
    for position in range(length, length + 12):
        cache.begin(1)
        write(cache, position, 1)
        cache.commit(1)
        check(cache, position + 1)


def test_trim_refuses_a_wrapped_ring_and_says_so() -> None:
    cache = fresh()
    cache.begin(12)
    write(cache, 0, 12)
    cache.commit(12)
    assert cache.trim_to(12), "nothing to cut is always possible"
    assert not cache.trim_to(5)
    check(cache, 12)


def test_an_interrupt_between_two_layers_closes_the_cache() -> None:
    """Half of the layers were cut: nothing may be built on it."""
    cache = fresh()
    cache.begin(3)
    write(cache, 0, 3)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    cache.states[1].keep = interrupt
    with pytest.raises(KeyboardInterrupt):
        cache.commit(1)
    cache.abort()
    with pytest.raises(CacheStateError, match="between two layers by an interrupt"):
        cache.begin(1)


def test_a_cache_type_without_exact_rollback_is_refused_by_name() -> None:
    """Before the first token."""
    with pytest.raises(UnsupportedTarget, match=r"entry 1 is a ChunkedKVCache.*KVCache, RotatingKVCache, ArraysCache"):
        TargetCache([KVCache(), ChunkedKVCache(8)], 0)


class Accumulator:
    """A recurrent layer in miniature: its state is the sum of all rows, and how many there were."""

    def __init__(self, entry: ArraysCache) -> None:
        self.entry, self.runs = entry, 0

    def __call__(self, values: list[int]) -> None:
        self.runs += 1
        old = self.entry[0] if self.entry[0] is not None else mx.zeros((2,))
        self.entry[0] = old + mx.array([sum(values), len(values)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)), max_size=8))
def test_a_recurrent_state_is_that_of_the_kept_rows(blocks: list[tuple[int, int, int]]) -> None:
    """Rejected tokens must not stay in a state that cannot be trimmed."""
    entry, held, value = ArraysCache(1), list[int](), 0
    cache, layer = TargetCache([entry], 0), Accumulator(entry)
    for width, keep, fewer in blocks:
        rows = list(range(value, value + width))
        value += width
        cache.begin(width)
        layer(rows)
        cache.states[0].record(lambda count, rows=rows: layer(rows[:count]))
        if keep == 0:
            cache.abort()
        else:
            kept = min(keep, width)
            cache.commit(kept)
            if 1 <= fewer <= kept:
                cache.shrink(fewer)
                kept = fewer
            held += rows[:kept]
        state = [0, 0] if entry[0] is None else entry[0].tolist()
        assert state == [sum(held), len(held)] and cache.length == len(held)
        assert cache.trim_to(len(held)), "nothing to cut"
        assert not held or not cache.trim_to(len(held) - 1)


def test_an_evaluated_block_is_final_and_keeps_no_rows_alive() -> None:
    """The rows of a prefill chunk, of every recurrent layer at once, would be gigabytes on a large target."""
    entry = ArraysCache(1)
    cache, layer = TargetCache([entry], 0), Accumulator(entry)
    cache.begin(3)
    layer([1, 2, 3])
    rows = Accumulator(entry)
    alive = weakref.ref(rows)
    cache.states[0].record(rows)
    del rows
    cache.commit(3)
    assert alive() is not None, "until then it may be shortened"
    cache.evaluate()
    assert alive() is None and cache.kept == 0
    with pytest.raises(ValueError, match="`keep` has to be in"):
        cache.shrink(1)


def test_a_wholly_accepted_block_is_not_replayed() -> None:
    entry = ArraysCache(1)
    cache, layer = TargetCache([entry], 0), Accumulator(entry)
    cache.begin(3)
    layer([1, 2, 3])
    cache.states[0].record(lambda count: layer([1, 2, 3][:count]))
    cache.commit(3)
    assert layer.runs == 1


def test_a_recurrent_layer_that_was_not_recorded_is_noticed() -> None:
    cache = TargetCache([ArraysCache(1)], 0)
    cache.begin(3)
    with pytest.raises(CacheStateError, match="was not recorded"):
        cache.commit(2)
