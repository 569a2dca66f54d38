"""Attention of few query rows over two segments: what a buffer holds already, and the block's own keys and values.

    sdpa_rows(Attend(queries, segment, keys, values, scale=..., sight=..., joined=...)) -> out

out [B, L, Hq * D] is of the queries' type. Row j of the segment is at position j, row j of the block at stop + j, and
query row i at position + i, which is stop + L1 - L + i unless `Sight.position` says otherwise; only differences of
positions matter. `stop`, `first` and `position` are ints, or [B] int32 on the device, whose values nothing waits for.

The kernel packs the rows of all heads of a key/value head; each SIMD-group reads a segment once for 8 * TILES of them
(16 for D 64, else 8), and those of a threadgroup read the same part of it, for caches to serve. It cuts a segment into
splits by its capacity alone, and a second launch puts the splits together. A row's bits depend neither on the number of
rows nor, up to 8192 rows of capacity, on the capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

import mlx.core as mx

from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Runner, name_of
from dflash_mlx.metal import source

MODES = ("full", "causal", "tree")
ROWS = 32
HEAD_DIMS = (64, 128, 256)
CAPACITIES = (1024, 4096, 16384)  # classes of capacity; a race at more would take gigabytes
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_LANES, _SIMDGROUPS = 32, 8  # of a threadgroup at most
_STAGED = 16384  # bytes of queries that a threadgroup keeps at most: half of what every chip gives it
_FREE = 40  # rows of a sample's buffer that are not held: more than a block has
_WIDTH, _SPLITS = 256, 32  # rows of a split at least, splits of a segment at most

Count = int | mx.array  # one for all sequences, or [B] int32
Joined = Callable[[], tuple[mx.array, mx.array, mx.array | str | None]]


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows `first` <= j < `stop` of buffers [B, kv_heads, C, D], which are not copied."""

    keys: mx.array
    values: mx.array
    stop: Count
    first: Count = 0


@dataclass(frozen=True, eq=False)
class Sight:
    """What a query row sees.

    mode:      of its block: "full", everything; "causal", what is not after it; "tree", its ancestors.
    window:    only what is less than this many positions before it, in both segments; not in a tree.
    position:  of row 0, if not that which makes the last row the block's last key.
    ancestors: [B, L] uint32: bit j of row i says that it sees the block's key j; its own bit is among them.
    """

    mode: str = "causal"
    window: int | None = None
    position: Count | None = None
    ancestors: mx.array | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"`mode` has to be one of {', '.join(MODES)}, got {self.mode!r}.")
        if (self.mode == "tree") != (self.ancestors is not None):
            raise ValueError(f"`ancestors` belong to a tree and to nothing else, got mode {self.mode!r}.")
        if self.window is not None and (self.mode == "tree" or self.window < 1):
            raise ValueError(f"`window` has to be 1 or more, and not in a tree, got {self.window} in {self.mode!r}.")


CAUSAL = Sight()


@dataclass(frozen=True, eq=False)
class Attend:
    """The arguments of one call, which every function here takes.

    queries: [B, Hq, L, D]; for the kernel L is 1 to 32 and D 64, 128 or 256; float32, float16, bfloat16; any strides.
    segment: keys and values [B, Hkv, C, D] of earlier positions: rows first <= j < stop of them; None: none.
    keys, values: [B, Hkv, L1, D], the block's own, of the queries' type; any strides; L1 up to 32 for ancestors.
    scale:   of the scores.
    sight:   what a row sees of its block, within which window.
    joined:  () -> keys, values and mask of both together, where the caller has them so; for the reference only.
    """

    queries: mx.array
    segment: Segment | None
    keys: mx.array
    values: mx.array
    _: KW_ONLY
    scale: float
    sight: Sight = CAUSAL
    joined: Joined | None = None

    @property
    def held(self) -> Segment:
        """The segment, or one of no rows, of which nothing is read."""
        return self.segment or Segment(self.keys, self.values, 0)

    @property
    def own(self) -> int:
        """Rows of the block's keys."""
        return self.keys.shape[2]


_INPUTS = ("q", "k0", "v0", "k1", "v1", "first", "stop", "position", "ancestors", "window", "width", "scale")

PARTS = MetalKernel(
    name="dflash_sdpa_rows",
    inputs=_INPUTS,
    outputs=("o_part", "ml_part"),
    body="""
    threadgroup T queries[SIMDGROUPS * 8 * TILES * D];
    sdpa_rows<T, D, GQA, MODE, WINDOW, TILES>(
        q, q_strides, q_shape, k0, k0_strides, k0_shape, v0, v0_strides, k1, k1_strides, k1_shape, v1, v1_strides,
        first, stop, position, ancestors, window, width, scale,
        queries + simdgroup_index_in_threadgroup * 8 * TILES * D, o_part, ml_part, threadgroup_position_in_grid,
        threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup,
        thread_index_in_simdgroup);
    """,
    header=source("sdpa_rows"),
    contiguous=False,
    partial=("o_part",),
)
COMBINE = MetalKernel(
    name="dflash_sdpa_combine",
    inputs=("o_part", "ml_part"),
    outputs=("out",),
    body="""
    const uint heads = o_part_shape[1], rows = o_part_shape[2], splits = o_part_shape[3];
    const uint head = threadgroup_position_in_grid.y / rows, row = threadgroup_position_in_grid.y % rows;
    const uint batch = threadgroup_position_in_grid.z;
    const uint at = (batch * heads + head) * rows + row;
    sdpa_combine<T, D>(
        o_part + size_t(at) * splits * D, ml_part + size_t(at) * splits * 2,
        out + size_t((batch * rows + row) * heads + head) * D, splits, thread_index_in_simdgroup);
    """,
    header=source("sdpa_rows"),
)


def reference(attend: Attend) -> Arrays:
    """MLX's attention over the rows that are held, followed by the block's; where only the device knows which are held,
    over the whole capacity under a mask."""
    queries, segment, keys, values, sight = attend.queries, attend.segment, attend.keys, attend.values, attend.sight
    mask: mx.array | str | None
    if attend.joined is not None:
        keys, values, mask = attend.joined()
    else:
        mask = _mask(queries, segment, attend.own, sight)
        if segment is not None:
            rows = slice(None) if _on_device(segment, sight) else slice(segment.first, segment.stop)
            keys = mx.concatenate([segment.keys[:, :, rows], keys], axis=2)
            values = mx.concatenate([segment.values[:, :, rows], values], axis=2)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=attend.scale, mask=mask)
    return (out.transpose(0, 2, 1, 3).reshape(queries.shape[0], queries.shape[2], -1),)


def stock(attend: Attend) -> Arrays:
    """What a cycle without the kernel runs, for races: attention over a buffer that has the block in it already.

    Of a sample: the rows of its segment that follow those that are held stand for the block's.
    """
    queries, segment, sight, own = attend.queries, attend.segment, attend.sight, attend.own
    if segment is None:
        return reference(replace(attend, joined=None))
    stop = segment.keys.shape[2] - _FREE
    first = 0 if sight.window is None else max(0, stop - sight.window + 1)
    keys, values = (part[:, :, first : stop + own] for part in (segment.keys, segment.values))
    seen = Sight(sight.mode, sight.window, ancestors=sight.ancestors)
    mask = _mask(queries, Segment(keys, values, stop - first), own, seen)
    return reference(Attend(queries, None, keys, values, scale=attend.scale, joined=lambda: (keys, values, mask)))


def _on_device(segment: Segment, sight: Sight) -> bool:
    return any(isinstance(count, mx.array) for count in (segment.first, segment.stop, sight.position))


def _mask(queries: mx.array, segment: Segment | None, own: int, sight: Sight) -> mx.array | str | None:
    """[B, 1, L, rows of the segment + own] of bool; "causal" or None where those say the same."""
    batch, _, rows, _ = queries.shape
    known = segment is None or not _on_device(segment, sight)
    if known and sight.window is None and sight.position is None and sight.mode != "tree":
        return "causal" if sight.mode == "causal" else None
    first, stop = (0, 0) if segment is None else (_column(segment.first), _column(segment.stop))
    held = mx.arange(first, stop) if known or segment is None else mx.arange(segment.keys.shape[2])  # positions
    block = mx.arange(own)
    here = mx.arange(rows)[:, None] + (stop + own - rows if sight.position is None else _column(sight.position))
    seen_held = (held >= first) & (held < stop)
    seen_block = mx.array(True)
    if sight.ancestors is not None:
        seen_block = (sight.ancestors[:, None, :, None] >> block.astype(mx.uint32)) & 1 == 1
    if sight.mode == "causal":
        seen_block = stop + block <= here
    if sight.window is not None:
        seen_held = seen_held & (here - held < sight.window)
        seen_block = seen_block & (here - (stop + block) < sight.window)
    seen = ((seen_held, len(held)), (seen_block, own))
    return mx.concatenate([mx.broadcast_to(part, (batch, 1, rows, width)) for part, width in seen], axis=-1)


def _column(count: Count) -> Any:
    return count.reshape(-1, 1, 1, 1) if isinstance(count, mx.array) else count


def why_not(attend: Attend) -> str | None:
    queries, segment, keys, values = attend.queries, attend.segment, attend.keys, attend.values
    _, heads, rows, dim = queries.shape
    if not 1 <= rows <= ROWS:
        return f"{rows} rows are not 1 to {ROWS}"
    if dim not in HEAD_DIMS or values.shape[-1] != dim:
        return f"heads of {dim} and {values.shape[-1]} are not of 64, 128 or 256"
    held = () if segment is None else (segment.keys, segment.values)
    if queries.dtype not in _DTYPES or any(part.dtype != queries.dtype for part in (keys, values, *held)):
        return f"queries, keys and values have to be of one type of float, and the queries are of {queries.dtype}"
    if heads % keys.shape[1]:
        return f"{heads} heads do not share {keys.shape[1]} key heads evenly"
    if attend.sight.mode == "tree" and attend.own > ROWS:
        return f"{attend.own} rows of a tree are more than {ROWS}"
    return None


def _width(capacity: int) -> int:
    """Rows of a split: by the capacity's class alone, so that equal contents give equal bits."""
    width = _WIDTH
    while width * _SPLITS < capacity:
        width *= 2
    return width


def _tiles(dim: int) -> int:
    """Of 8 query rows per SIMD-group: by the registers that a lane has, see the .metal file."""
    return max(1, 128 // dim)


def _most(dim: int, size: int) -> int:
    """SIMD-groups of a threadgroup, at `size` bytes per number; a template value, so not by the number of rows."""
    return min(_SIMDGROUPS, _STAGED // (8 * _tiles(dim) * dim * size))


def _simdgroups(queries: mx.array, keys: mx.array) -> int:
    """That have to read a key/value head's rows."""
    packed = queries.shape[1] // keys.shape[1] * queries.shape[2]
    return ceil(ceil(packed / 8) / _tiles(queries.shape[3]))


def _counts(count: Count, batch: int) -> mx.array:
    """[B] int32, one after the other in memory: the kernel knows the strides of heads only."""
    if not isinstance(count, mx.array):
        return mx.array([count] * batch, mx.int32)
    count = count.astype(mx.int32)
    return mx.contiguous(count) if batch > 1 else count


def launch(run: Runner, attend: Attend) -> Arrays:
    queries, keys, sight, held = attend.queries, attend.keys, attend.sight, attend.held
    batch, heads, rows, dim = queries.shape
    kv_heads, own = keys.shape[1:3]
    first, stop = _counts(held.first, batch), _counts(held.stop, batch)
    ancestors = first if sight.ancestors is None else mx.contiguous(sight.ancestors)
    position = sight.position
    if position is None:
        position = stop if own == rows else held.stop + (own - rows)
    capacity = held.keys.shape[2]
    width = _width(capacity)
    splits = ceil(capacity / width) + 1
    simdgroups = _simdgroups(queries, keys)
    most = _most(dim, queries.dtype.size)
    groups = ceil(simdgroups / most)  # threadgroups, of equal size
    threads = _LANES * ceil(simdgroups / groups)
    parts = Launch(
        inputs=(
            *(queries, held.keys, held.values, keys, attend.values),
            *(first, stop, _counts(position, batch), ancestors),
            *(mx.array(sight.window or 0, mx.int32), mx.array(width, mx.int32), mx.array(attend.scale, mx.float32)),
        ),
        shapes=((batch, heads, rows, splits, dim), (batch, heads, rows, splits, 2)),
        dtypes=(mx.float32, mx.float32),
        grid=(threads * groups, kv_heads, batch * splits),
        threadgroup=(threads, 1, 1),
        template=(
            ("T", queries.dtype),
            ("D", dim),
            ("GQA", heads // kv_heads),
            ("MODE", MODES.index(sight.mode)),
            ("WINDOW", sight.window is not None),
            ("TILES", _tiles(dim)),
            ("SIMDGROUPS", most),
        ),
    )
    o_part, ml_part = run(PARTS, parts)
    combine = Launch(
        inputs=(o_part, ml_part),
        shapes=((batch, rows, heads * dim),),
        dtypes=(queries.dtype,),
        grid=(_LANES, heads * rows, batch),
        threadgroup=(_LANES, 1, 1),
        template=(("T", queries.dtype), ("D", dim)),
    )
    return tuple(run(COMBINE, combine))


def case(attend: Attend) -> Case:
    """One race per class of capacity: short contexts gain nothing. See `case_of`."""
    queries, segment, sight = attend.queries, attend.segment, attend.sight
    rows = 0 if segment is None else segment.keys.shape[2]
    heads = (queries.shape[1], attend.keys.shape[1])
    return case_of(queries.dtype, queries.shape[3], *heads, rows, mode=sight.mode, window=sight.window)


@lru_cache
def case_of(
    dtype: mx.Dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    capacity: int,
    *,
    mode: str = "causal",
    window: int | None = None,
) -> Case:
    """The race for a module's sizes, at a capacity of the segment in rows.

    More rows than the largest class has count as it: from there on both sides' time is that of reading the rows.
    """
    classes = _capacities(window)
    rows = next((most for most in classes if capacity <= most), classes[-1])
    sizes = (
        *(("head_dim", head_dim), ("heads", heads), ("kv_heads", kv_heads), ("capacity", rows)),
        *(("mode", MODES.index(mode)), ("window", window or 0)),
    )
    return Case("sdpa_rows", name_of(dtype), sizes)


def cases_of(
    dtype: mx.Dtype, head_dim: int, heads: int, kv_heads: int, *, mode: str = "causal", window: int | None = None
) -> list[Case]:
    """The races of a layer, one per class of capacity; a window keeps a segment short."""
    if head_dim not in HEAD_DIMS or dtype not in _DTYPES or heads % kv_heads:
        return []
    sizes = (dtype, head_dim, heads, kv_heads)
    return [case_of(*sizes, rows, mode=mode, window=window) for rows in _capacities(window)]


@lru_cache
def _capacities(window: int | None) -> tuple[int, ...]:
    """The classes that are raced; a window keeps a segment short."""
    return tuple(rows for rows in CAPACITIES if window is None or rows < 4 * (window + _WIDTH))


def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
    """Normal numbers, a segment that is nearly full; hard: scores of hundreds, equal keys, values of very different
    size, and half of the segment not to be seen."""
    sizes, dtype = case.size, case.type
    dim, capacity = sizes["head_dim"], sizes["capacity"]
    random = iter(mx.random.split(mx.random.key(seed), 5))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal((1, *shape, dim), key=next(random)).astype(dtype)

    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    queries, keys, values = (normal(rows, n).transpose(0, 2, 1, 3) for n in (heads, kv_heads, kv_heads))  # projected
    held = [normal(kv_heads, capacity) for _ in range(2)]
    stop = capacity - _FREE
    if hard:
        queries = queries * 16
        held[0] = mx.where((mx.arange(capacity) % 7 == 3)[:, None], held[0][:, :, :1], held[0])
        size = mx.power(2.0, mx.arange(capacity) % 21 - 10)[:, None]
        held[1] = held[1] * size.astype(dtype)
    segment = Segment(held[0], held[1], mx.array([stop], mx.int32), mx.array([stop // 2 if hard else 0], mx.int32))
    tree = MODES[sizes["mode"]] == "tree"
    sight = Sight(
        MODES[sizes["mode"]],
        sizes["window"] or None,
        mx.array([stop], mx.int32),
        mx.array([[_ancestors(row) for row in range(rows)]], mx.uint32) if tree else None,
    )
    return Call((Attend(queries, segment, keys, values, scale=dim**-0.5, sight=sight),))


def _ancestors(row: int) -> int:
    """The bits of a node of a binary tree in the order of its levels."""
    return 1 << row | (_ancestors((row - 1) // 2) if row else 0)


def first_rows(call: Call, rows: int) -> Call:
    """Without the last query rows and, in a causal block, without their keys; `position` has to be given."""
    (attend,) = call.arguments
    queries, keys, values, sight = attend.queries, attend.keys, attend.values, attend.sight
    if sight.mode == "causal":
        own = attend.own - queries.shape[2] + rows
        keys, values = keys[:, :, :own], values[:, :, :own]
    if sight.ancestors is not None:
        sight = replace(sight, ancestors=sight.ancestors[:, :rows])
    return Call((replace(attend, queries=queries[:, :, :rows], keys=keys, values=values, sight=sight),))


def floor(attend: Attend) -> dict[str, int]:
    """Keys and values once for every SIMD-group that has to have them, which has 8 * TILES of the packed query rows
    of a key/value head; queries and partial results once per split in which something is seen."""
    queries, keys, sight, held = attend.queries, attend.keys, attend.sight, attend.held
    batch, heads, rows, dim = queries.shape
    kv_heads, own = keys.shape[1:3]
    capacity, size = held.keys.shape[2], queries.dtype.size
    width, simdgroups = _width(capacity), _simdgroups(queries, keys)
    seen, used = 0, 0  # rows of the segment, splits
    for sequence in range(batch):
        first, stop = _host(held.first, sequence), min(_host(held.stop, sequence), capacity)
        if sight.window is not None:
            at = stop + own - rows if sight.position is None else _host(sight.position, sequence)
            first = max(first, at - sight.window + 1)
        seen += max(stop - first, 0)
        used += 1 + (ceil(stop / width) - first // width if stop > first else 0)
    splits = ceil(capacity / width) + 1
    every = batch * splits * kv_heads * simdgroups
    row = dim * size * kv_heads * simdgroups
    return {
        "q": used * heads * rows * dim * size,
        "k0": seen * row,
        "v0": seen * row,
        "k1": batch * own * row,
        "v1": batch * own * row,
        **dict.fromkeys(("first", "stop", "position", "window", "width", "scale"), 4 * every),
        "ancestors": 0 if sight.ancestors is None else 4 * rows * used * kv_heads * simdgroups,
        "o_part": used * heads * rows * dim * 4,
        "ml_part": batch * splits * heads * rows * 8,
    }


def _host(count: Count, sequence: int) -> int:
    return int(count.tolist()[sequence]) if isinstance(count, mx.array) else count  # type: ignore[index, arg-type]


OPERATION = Operation(
    name="sdpa_rows",
    kernels=(PARTS, COMBINE),
    why_not=why_not,
    reference=reference,
    launch=launch,
    case=case,
    sample=sample,
    first_rows=first_rows,
    floor=floor,
    stock=stock,
    matrix=True,
)
