"""Attention over two segments, against MLX's own over one and against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.kernels.operation import Call, Case, Runner
from dflash_mlx.kernels.sdpa_rows import OPERATION, Attend, Segment, Sight, case_of, reference, why_not
from tests.kernels.checks import check, check_bytes, check_first_rows, numbers, runner, same_bits

ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # of the result, at most
STOCK = {mx.float32: 4e-6, mx.float16: 4e-3, mx.bfloat16: 4e-2}  # MLX on a CPU adds up in the type itself


@dataclass(frozen=True)
class Shape:
    """One call; `capacity`, `first` and `stop` are the segment's."""

    dtype: mx.Dtype = mx.float32
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    rows: int = 3
    capacity: int = 64
    first: int = 0
    stop: int = 35
    mode: str = "causal"
    window: int | None = None
    own: int | None = None
    batch: int = 1

    def attend(self, seed: int = 0, dirt: float = float("nan")) -> Attend:
        """Normal numbers as projections leave them; rows of the segment that do not hold are `dirt`."""
        random = iter(mx.random.split(mx.random.key(seed), 5))
        own = self.own or self.rows

        def projected(rows: int, heads: int) -> mx.array:
            x = mx.random.normal((self.batch, rows, heads, self.dim), key=next(random))
            return x.astype(self.dtype).transpose(0, 2, 1, 3)

        at = mx.arange(self.capacity)[:, None]
        held = [
            mx.random.normal((self.batch, self.kv_heads, self.capacity, self.dim), key=next(random)) for _ in range(2)
        ]
        keys, values = (mx.where((at >= self.first) & (at < self.stop), part, dirt).astype(self.dtype) for part in held)
        ancestors = None
        if self.mode == "tree":  # of a binary tree, whose nodes are numbered level by level
            bits = [0] * self.rows
            for row in range(self.rows):
                bits[row] = 1 << row | (bits[(row - 1) // 2] if row else 0)
            ancestors = mx.array([bits] * self.batch, mx.uint32)
        return Attend(
            projected(self.rows, self.heads),
            Segment(keys, values, self._device(self.stop), self._device(self.first)),
            projected(own, self.kv_heads),
            projected(own, self.kv_heads),
            scale=self.dim**-0.5,
            sight=Sight(self.mode, self.window, self._device(self.stop + own - self.rows), ancestors),
        )

    def _device(self, count: int) -> mx.array:
        return mx.array([count] * self.batch, mx.int32)


def exact(attend: Attend) -> tuple[np.ndarray, np.ndarray]:
    """The attention in float64, row by row over the list of what it sees, and the size of what was added up."""
    segment, sight = attend.segment, attend.sight
    q, k, v = numbers(attend.queries), numbers(attend.keys), numbers(attend.values)
    batch, heads, rows, dim = q.shape
    shared, own = heads // k.shape[1], k.shape[2]
    held = (np.zeros((batch, k.shape[1], 0, dim)),) * 2 if segment is None else map(numbers, segment_arrays(segment))
    held_k, held_v = held
    out, size = np.zeros((2, batch, rows, heads, dim))
    for b in range(batch):
        stop = 0 if segment is None else at(segment.stop, b)
        first = 0 if segment is None else at(segment.first, b)
        position = stop + own - rows if sight.position is None else at(sight.position, b)
        for i in range(rows):
            here = position + i
            far = -(10**9) if sight.window is None else here - sight.window
            context = [j for j in range(first, stop) if j > far]
            block = [j for j in range(own) if stop + j > far]
            if sight.mode == "causal":
                block = [j for j in block if stop + j <= here]
            if sight.mode == "tree":
                block = [j for j in block if int(sight.ancestors[b, i].item()) >> j & 1]
            for h in range(heads):
                g = h // shared
                seen_k = np.concatenate([held_k[b, g, context], k[b, g, block]])
                seen_v = np.concatenate([held_v[b, g, context], v[b, g, block]])
                scores = seen_k @ q[b, h, i] * attend.scale
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[b, i, h] = weights @ seen_v
                size[b, i, h] = weights @ np.abs(seen_v) * (1 + np.abs(scores).max())
    return out.reshape(batch, rows, -1), size.reshape(batch, rows, -1)


def segment_arrays(segment: Segment) -> tuple[mx.array, mx.array]:
    return segment.keys, segment.values


def at(count: int | mx.array, sequence: int) -> int:
    return int(count[sequence].item()) if isinstance(count, mx.array) else count


def clean(attend: Attend) -> Attend:
    """The same with zeros where the segment does not hold: MLX multiplies what it masks."""
    segment = attend.segment
    parts = (mx.where(mx.isnan(part), 0, part).astype(part.dtype) for part in segment_arrays(segment))
    return replace(attend, segment=Segment(*parts, segment.stop, segment.first))


def assert_close(run: Runner, attend: Attend) -> None:
    """Within one rounding of the result and the float32 roundings of what was added up."""
    (got,) = OPERATION.launch(run, attend)
    want, size = exact(attend)
    allowed = ROUNDING[got.dtype] * np.abs(want) + 2e-6 * size + 1e-7
    assert got.shape == want.shape
    assert (np.abs(numbers(got) - want) <= allowed).all()


def whole(attend: Attend) -> None:
    """Three schedules with equal bits, MLX's result, and float64's."""
    dtype = attend.queries.dtype
    check(OPERATION, Call((attend,)), [exact(attend)[0]], rtol=STOCK[dtype], atol=STOCK[dtype])
    assert_close(runner(), attend)


# Of one template each. Together all types, head sizes, modes, with and without a window, 1 to 8 heads per key head.
TEMPLATES = [
    Shape(mx.float32, 64, heads=4, kv_heads=2, mode="causal"),
    Shape(mx.bfloat16, 128, heads=4, kv_heads=1, mode="full", window=20),
    Shape(mx.float16, 256, heads=1, kv_heads=1, mode="causal"),
    Shape(mx.bfloat16, 64, heads=3, kv_heads=1, mode="tree"),
    Shape(mx.float32, 128, heads=2, kv_heads=2, mode="causal", window=9),
    Shape(mx.float16, 64, heads=8, kv_heads=1, mode="full"),
]
IDS = [f"{str(s.dtype).split('.')[-1]}-{s.dim}-{s.mode}{'-window' if s.window else ''}" for s in TEMPLATES]

TINY = Shape(heads=2, kv_heads=1, rows=3, capacity=300, first=5, stop=270)
# Two key heads and sequences, more tiles than a SIMD-group has, two splits, a window, a tree, columns that are strided,
# and scores of a thousand.
WITNESSES: list[Callable[[Runner], None]] = [
    lambda run: assert_close(run, _strided(replace(TINY, heads=4, kv_heads=2, rows=9, batch=2).attend())),
    lambda run: assert_close(run, _loud(replace(TINY, mode="full", window=60).attend())),
    lambda run: assert_close(run, replace(TINY, mode="tree", rows=5, stop=20).attend()),
    lambda run: assert_close(run, replace(TINY, own=4, stop=5).attend()),
]


def _loud(attend: Attend) -> Attend:
    """The same with large scores: where the largest so far is lost, a power of two overflows."""
    return replace(attend, queries=attend.queries * 300)


def _strided(attend: Attend) -> Attend:
    """The same numbers in views: columns two apart, rows and heads the other way round, sequences of a larger array;
    and the two sequences see different parts of their segments."""

    def spread(x: mx.array) -> mx.array:
        wide = mx.stack([x, mx.full(x.shape, 7, x.dtype)], axis=-1).reshape(*x.shape[:-1], -1)
        wide = mx.contiguous(mx.concatenate([wide[:1], wide], axis=0).transpose(0, 2, 1, 3))
        return wide.transpose(0, 2, 1, 3)[1:, :, :, ::2]

    queries, segment, keys, values = attend.queries, attend.segment, attend.keys, attend.values
    first, stop = segment.first + mx.array([0, 258]), segment.stop - mx.array([0, 3])
    held = Segment(spread(segment.keys), spread(segment.values), stop, first)
    sight = replace(attend.sight, position=stop + keys.shape[2] - queries.shape[2])
    return Attend(spread(queries), held, spread(keys), spread(values), scale=attend.scale, sight=sight)


@pytest.mark.parametrize("shape", TEMPLATES, ids=IDS)
def test_every_number_of_rows_attends_as_one_long_attention_would(shape: Shape):
    """A wrong packing of rows and heads, mask or split would change what a target verifies, or what a draft sees."""
    for rows in range(1, 18):
        stop = (35, 0, 7, 300, 256)[rows % 5]
        first = 3 if rows % 3 == 0 and stop else 0
        whole(clean(replace(shape, rows=rows, stop=stop, first=first, capacity=64 if stop < 64 else 320).attend(rows)))


@pytest.mark.parametrize("shape", TEMPLATES[:4], ids=IDS[:4])
def test_large_scores_and_equal_keys_do_not_overflow_or_drift(shape: Shape):
    """Scores of hundreds are 2^500 without the largest taken off, and a lost rescaling shows when the largest grows."""
    for rows in (2, 9):
        sizes = case_of(shape.dtype, shape.dim, shape.heads, shape.kv_heads, 0, mode=shape.mode, window=shape.window)
        small = Case(sizes.operation, sizes.dtype, tuple((n, 96 if n == "capacity" else v) for n, v in sizes.sizes))
        (attend,) = OPERATION.sample(small, rows, rows, True).arguments
        assert np.isfinite(exact(attend)[0]).all()
        assert_close(runner(), attend)


def test_rows_that_do_not_hold_are_never_read():
    """Behind the context lies what was rejected, or nothing that was ever written: here it is NaN."""
    for shape in (TINY, replace(TINY, window=40), replace(TINY, mode="tree"), replace(TINY, first=270)):
        attend = shape.attend(dirt=float("nan"))
        assert_close(runner(), attend)


def test_a_context_may_be_empty_or_missing():
    """The first block of a prompt has no context; its splits then have nothing to add."""
    empty = replace(TINY, first=0, stop=0).attend()
    assert_close(runner(), empty)
    missing = replace(empty, segment=None, sight=Sight())
    assert_close(runner(), missing)
    same_bits(*(OPERATION.launch(runner(), attend)[0] for attend in (empty, missing)), "none")


@pytest.mark.parametrize("part", ["keys", "values"])
def test_one_strided_part_is_read_with_its_strides(part: str):
    """The kernel has a body for columns that are next to each other; the other part's alone must not choose it."""
    attend = TINY.attend()
    wide = getattr(attend.segment, part)
    strided = mx.stack([wide, mx.zeros_like(wide)], axis=-1).reshape(*wide.shape[:-1], -1)[..., ::2]
    assert_close(runner(), replace(attend, segment=replace(attend.segment, **{part: strided})))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_more_query_rows_than_a_threadgroup_has_room_for(dtype: mx.Dtype):
    """Heads of 256 fill its memory with 2 or 4 tiles of query rows; 9 tiles are several threadgroups."""
    attend = Shape(dtype, 256, heads=4, kv_heads=1, rows=17, capacity=40).attend()
    assert_close(runner(), attend)
    check_first_rows(OPERATION, Call((attend,)), [3])


def test_sequences_of_a_batch_have_contexts_of_their_own():
    assert_close(runner(), _strided(replace(TINY, heads=4, kv_heads=2, batch=2).attend()))


@pytest.mark.parametrize("counts", ["column", "broadcast"])
def test_counts_on_the_device_may_be_views(counts: str):
    """A column of a table, or one length for all: read as if in one piece, a sequence would have another's length."""
    attend = replace(TINY, heads=4, kv_heads=2, batch=2, first=0, stop=270).attend(dirt=0.0)
    table = mx.array([[270, 5, 270, 9], [31, 2, 31, 9]], mx.int32)
    first, stop, position = table[:, 1], table[:, 0], table[:, 2]
    if counts == "broadcast":
        first, stop, position = (mx.broadcast_to(mx.array([n], mx.int32), (2,)) for n in (5, 31, 31))
    held = Segment(*segment_arrays(attend.segment), stop, first)
    assert_close(runner(), replace(attend, segment=held, sight=Sight("causal", None, position)))


def test_ancestors_may_be_a_view():
    """Every other column of a wider table, for two sequences with trees of their own."""
    attend = replace(TINY, mode="tree", rows=5, stop=20, batch=2).attend()
    chain = mx.array([[(2 << row) - 1 for row in range(5)]], mx.uint32)
    trees = mx.concatenate([attend.sight.ancestors[:1], chain])
    view = mx.stack([trees, mx.zeros_like(trees)], axis=-1).reshape(2, 10)[:, ::2]
    assert_close(runner(), replace(attend, sight=replace(attend.sight, ancestors=view)))


def test_a_block_may_bring_older_rows_of_its_own():
    """A small second segment may hold the newest rows of the context, so that the large one is not written."""
    whole(clean(replace(TINY, own=7).attend()))
    whole(clean(replace(TINY, own=7, window=6, stop=290).attend()))


@pytest.mark.parametrize("shape", TEMPLATES, ids=IDS)
def test_a_row_has_the_same_bits_however_many_rows_are_beside_it(shape: Shape):
    """Else a block would verify other tokens than a shorter one, and greedy text depend on the block size."""
    attend = replace(shape, rows=17, stop=300, capacity=320).attend()
    check_first_rows(OPERATION, Call((attend,)), [1, 2, 5, 8, 16])


def test_growing_a_buffer_changes_no_bits():
    """Splits have a fixed number of rows up to 8192, so the same context in a larger buffer gives the same bits."""
    attend = replace(TINY, capacity=8192, stop=300).attend()
    segment, results = attend.segment, []
    for capacity in (320, 1024, 8192):
        parts = (part[:, :, :capacity] for part in segment_arrays(segment))
        held = Segment(*parts, segment.stop, segment.first)
        results.append(OPERATION.launch(runner(), replace(attend, segment=held))[0])
    same_bits(results[0], results[1], "320 and 1024")
    same_bits(results[0], results[2], "320 and 8192")


def test_a_row_that_is_not_finite_spoils_no_other():
    """A draft of NaN is rejected row by row, so its neighbours have to stay what they are."""
    attend = TINY.attend()
    bad = replace(attend, queries=mx.where(mx.arange(3)[:, None] == 1, mx.nan, attend.queries))
    good, spoiled = (OPERATION.launch(runner(), one)[0] for one in (attend, bad))
    assert mx.isnan(spoiled[0, 1]).all().item()
    same_bits(good[:, ::2], spoiled[:, ::2], "rows 0 and 2")


@pytest.mark.parametrize("shape", TEMPLATES, ids=IDS)
def test_keys_and_values_are_read_once_for_all_heads_that_share_them(shape: Shape):
    """As often as the contract says: once for every 8 * TILES packed rows, and nothing that no row sees."""
    for rows in (2, 16):
        check_bytes(OPERATION, Call((replace(shape, rows=rows, stop=300, capacity=320).attend(),)))
    parts, _ = check_bytes(OPERATION, Call((replace(shape, rows=1, stop=300, capacity=320).attend(),)))
    seen = 300 if shape.window is None else shape.window - 1
    assert parts.fetched["k0"] == seen * shape.kv_heads * shape.dim * shape.dtype.size


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("window", [None, 8, 30])
@pytest.mark.parametrize("mode", ["full", "causal"])
def test_the_reference_is_the_attention_that_it_replaces(mode: str, window: int | None, dtype: mx.Dtype):
    """Bit for bit, with lengths on the host, with lengths on the device, and over rows that are in one piece."""
    attend = Shape(dtype, mode=mode, window=window, rows=5, first=2).attend(dirt=0.0)
    joined = [
        mx.concatenate([part[:, :, 2:35], own], axis=2)
        for part, own in zip(segment_arrays(attend.segment), (attend.keys, attend.values), strict=True)
    ]
    query, key = mx.arange(33, 38)[:, None], mx.arange(38)[None]
    mask = query >= key if mode == "causal" else mx.ones((5, 38), dtype=mx.bool_)
    if window is not None:
        mask = mask & (query - key < window)
    stock = mx.fast.scaled_dot_product_attention(attend.queries, *joined, scale=0.125, mask=mask)
    stock = stock.transpose(0, 2, 1, 3).reshape(1, 5, -1)
    host = replace(attend, segment=Segment(*segment_arrays(attend.segment), 35, 2), sight=Sight(mode, window))
    for name, (got,) in {
        "host": reference(host),
        "device": reference(attend),
        "one piece": reference(replace(host, joined=lambda: (*joined, mask))),
    }.items():
        same_bits(got, stock, name)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("mode", ["full", "causal"])
def test_races_are_run_against_what_would_run_instead(mode: str, window: int | None):
    """Against an attention that copies or masks a whole buffer, the kernel would win where it loses to MLX."""
    sizes = case_of(mx.float32, 64, 4, 2, 0, mode=mode, window=window).sizes
    small = Case("sdpa_rows", "float32", tuple((name, 96 if name == "capacity" else size) for name, size in sizes))
    (attend,) = OPERATION.sample(small, 8, 1, False).arguments
    stop = at(attend.segment.stop, 0)
    keys, values = (part[:, :, stop : stop + 8] for part in segment_arrays(attend.segment))
    attend = replace(attend, keys=keys, values=values)
    assert OPERATION.stock is not None
    (raced,), (wanted,) = (run(attend) for run in (OPERATION.stock, OPERATION.reference))
    same_bits(raced, wanted, mode)


def test_what_the_kernel_does_not_take_is_said():
    shape = Shape()
    assert why_not(shape.attend()) is None
    for change, words in (
        (replace(shape, rows=33), "33 rows"),
        (replace(shape, dim=80), "heads of 80"),
        (replace(shape, heads=5), "5 heads"),
        (replace(shape, mode="tree", own=40), "40 rows of a tree"),
    ):
        assert words in str(why_not(change.attend()))
    attend = shape.attend()
    assert "one type" in str(why_not(replace(attend, queries=attend.queries.astype(mx.float16))))


def test_a_sight_that_means_nothing_is_refused():
    for wrong in ({"mode": "trees"}, {"mode": "tree"}, {"window": 0}, {"ancestors": mx.zeros((1, 2), mx.uint32)}):
        with pytest.raises(ValueError, match="`"):
            Sight(**wrong)
