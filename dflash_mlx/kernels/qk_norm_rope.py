"""Head norm and rotary embedding of queries and keys in one launch, with a position of its own for every row.

    qk_norm_rope(heads) -> queries, keys; or only the first of them, if there are no keys

The argument is `Heads`, the results are [B, heads, L, D]. The kernel takes float16, bfloat16 and float32 (all arrays of
one type), L <= 32, D % 4 == 0, and the half-split rotation of an even number of dimensions. Values are rounded where
`mx.fast.rms_norm` and `mx.fast.rope` round them. The reference is these two; rows with positions of their own have the
bits of rows that follow each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx

from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Runner, name_of
from dflash_mlx.kernels.rotation import Rotation
from dflash_mlx.metal import source

_ROWS = 32  # of a block; more are a prompt, which MLX's own kernels are made for


@dataclass(frozen=True, eq=False)
class Heads:
    """What is normed and turned, by what, and where to.

    queries:    [B, L, Hq, D] projected rows, any strides.
    keys:       [B, L, Hkv, D] likewise, or None: then `queries` may be whatever is to be rotated.
    query_norm, key_norm: [D] RMS norm weights, or None for heads that are not normed (both, or neither).
    positions:  [B, L] int32, absolute, any order; [B, 1] or an int: of the first row, which the others follow.
    rotation:   how the values turn.
    eps:        the norms' epsilon.
    """

    queries: mx.array
    keys: mx.array | None
    query_norm: mx.array | None
    key_norm: mx.array | None
    positions: mx.array | int
    rotation: Rotation
    eps: float

    @property
    def with_norms(self) -> list[tuple[mx.array, mx.array | None]]:
        """Queries and, if there are any, keys, each beside its weights."""
        queries = (self.queries, self.query_norm)
        return [queries] if self.keys is None else [queries, (self.keys, self.key_norm)]


_HEAD = """
    const int row = int(threadgroup_position_in_grid.z);
    const int batch = row / queries_shape[1], place = row % queries_shape[1], rows = queries_shape[1];
    int head = int(thread_position_in_grid.y);
    const int lane = int(thread_index_in_simdgroup);
    const int own = positions_shape[1] > 1 ? place : 0;  // else it counts from the first row's
    const float position = float(
        positions[batch * positions_strides[0] + own * positions_strides[1]] + (place - own));
"""


def _turn(heads: str, norm: str, out: str) -> str:
    return f"""
        norm_rope_head<T, D, R, NORM, TABLE>(
            {heads} + batch * {heads}_strides[0] + place * {heads}_strides[1] + head * {heads}_strides[2],
            {heads}_strides[3], {norm}, position, freqs, constants,
            {out} + (int64_t(batch * {heads}_shape[2] + head) * rows + place) * D, lane);
    """


_COMMON = ("positions", "freqs", "constants")
_HEADER = source("qk_norm_rope")
ONE = MetalKernel(
    name="dflash_norm_rope",
    inputs=("queries", "query_norm", *_COMMON),
    outputs=("out",),
    body=_HEAD + _turn("queries", "query_norm", "out"),
    header=_HEADER,
    contiguous=False,
)
PAIR = MetalKernel(
    name="dflash_qk_norm_rope",
    inputs=("queries", "keys", "query_norm", "key_norm", *_COMMON),
    outputs=("out", "key_out"),
    body=f"""{_HEAD}
    if (head < queries_shape[2]) {{{_turn("queries", "query_norm", "out")}}} else {{
        head -= queries_shape[2];{_turn("keys", "key_norm", "key_out")}}}
    """,
    header=_HEADER,
    contiguous=False,
)


def reference(heads: Heads) -> Arrays:
    positions, rotation = heads.positions, heads.rotation

    def turned(x: mx.array, norm: mx.array | None) -> mx.array:
        if norm is not None:
            x = mx.fast.rms_norm(x, norm, heads.eps)
        batch, rows, count, dim = x.shape
        if isinstance(positions, int):
            return rotation(x.transpose(0, 2, 1, 3), positions)
        if positions.shape[1] == 1:
            return rotation(x.transpose(0, 2, 1, 3), positions[:, 0])
        single = x.reshape(batch * rows, count, 1, dim)  # every row a batch entry, which has an offset of its own
        out = rotation(single, positions.reshape(-1))
        return out.reshape(batch, rows, count, dim).transpose(0, 2, 1, 3)

    return tuple(turned(x, norm) for x, norm in heads.with_norms)


def why_not(heads: Heads) -> str | None:
    queries, rotation, positions = heads.queries, heads.rotation, heads.positions
    rows, dim = queries.shape[1], queries.shape[3]
    if not 0 < rows <= _ROWS:
        return f"{rows} rows are no block"
    if rotation.traditional:
        return "neighbouring dimensions turn together"
    if dim % 4 or rotation.dims % 2 or not 0 < rotation.dims <= dim:
        return f"{rotation.dims} of {dim} dimensions turn"
    if heads.keys is not None and (heads.query_norm is None) != (heads.key_norm is None):
        return "only one of queries and keys is normed"
    arrays = [a for a in (heads.keys, heads.query_norm, heads.key_norm) if a is not None]
    if queries.dtype not in (mx.float16, mx.bfloat16, mx.float32) or any(a.dtype != queries.dtype for a in arrays):
        return f"heads and norms of {', '.join(str(a.dtype) for a in (queries, *arrays))}"
    if isinstance(positions, int) or positions.dtype == mx.int32:
        return None
    return f"positions of {positions.dtype}"


def launch(run: Runner, heads: Heads) -> Arrays:
    batch, rows, _, dim = heads.queries.shape
    dtype, rotation, positions = heads.queries.dtype, heads.rotation, heads.positions
    if isinstance(positions, int):
        positions = mx.full((batch, 1), positions, mx.int32)
    base = 0.0 if rotation.base is None else math.log2(rotation.base)
    constants = mx.array([heads.eps, rotation.mscale, rotation.scale, base], mx.float32)
    freqs = constants if rotation.freqs is None else rotation.freqs  # a buffer has to be there; it is not read
    pairs = heads.with_norms
    norms = [constants if norm is None else norm for _, norm in pairs]
    total = sum(x.shape[2] for x, _ in pairs)
    call = Launch(
        inputs=(*(x for x, _ in pairs), *norms, positions, freqs, constants),
        shapes=tuple((batch, x.shape[2], rows, dim) for x, _ in pairs),
        dtypes=(dtype,) * len(pairs),
        grid=(32, total, batch * rows),
        threadgroup=(32, math.gcd(total, 8), 1),
        template=(
            ("T", dtype),
            ("D", dim),
            ("R", rotation.dims),
            ("NORM", heads.query_norm is not None),
            ("TABLE", rotation.freqs is not None),
        ),
    )
    return tuple(run(ONE if heads.keys is None else PAIR, call))


def case(heads: Heads) -> Case:
    queries, keys = heads.queries, heads.keys
    shape = (queries.shape[2], 0 if keys is None else keys.shape[2], queries.shape[3])
    return case_of(queries.dtype, *shape, heads.rotation, heads.query_norm is not None)


def case_of(dtype: mx.Dtype, heads: int, kv_heads: int, dim: int, rotation: Rotation, normed: bool) -> Case:
    return _case(dtype, heads, kv_heads, dim, rotation.dims, normed, rotation.freqs is not None)


@lru_cache
def _case(dtype: mx.Dtype, heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, table: bool) -> Case:
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "rotary": rotary,
        "normed": int(normed),
        "table": int(table),
    }
    return Case("qk_norm_rope", name_of(dtype), tuple(sizes.items()))


def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
    """Rows at positions 50.., whose angles float32 knows to 1e-5.

    hard: values of very different size, heads of zeros, positions that repeat.
    """
    size, dtype = case.size, case.type
    dim, rotary = size["dim"], size["rotary"]
    keys = iter(mx.random.split(mx.random.key(seed), 8))

    def values(count: int) -> mx.array:
        x = mx.random.normal((1, rows, count, dim), key=next(keys))
        if hard:
            x = x * mx.array([1e-3, 1.0, 0.0, 30.0])[mx.arange(rows * count) % 4].reshape(1, rows, count, 1)
        return x.astype(dtype)

    def norm() -> mx.array:
        return mx.random.uniform(0.5, 1.5, (dim,), key=next(keys)).astype(dtype)

    weights = (norm(), norm()) if size["normed"] else (None, None)
    freqs = 10_000.0 ** (mx.arange(0, rotary, 2) / rotary)
    rotation = Rotation(rotary, freqs=freqs, mscale=1.1) if size["table"] else Rotation(rotary, 10_000.0)
    positions = mx.arange(50, 50 + rows, dtype=mx.int32)[None]
    positions = positions // 2 if hard else positions
    heads = Heads(
        queries=values(size["heads"]),
        keys=values(size["kv_heads"]) if size["kv_heads"] else None,
        query_norm=weights[0],
        key_norm=weights[1] if size["kv_heads"] else None,
        positions=positions,
        rotation=rotation,
        eps=1e-6,
    )
    return Call((heads,))


def first_rows(call: Call, rows: int) -> Call:
    (heads,) = call.arguments
    keys = None if heads.keys is None else heads.keys[:, :rows]
    return Call((replace(heads, queries=heads.queries[:, :rows], keys=keys, positions=heads.positions[:, :rows]),))


def floor(heads: Heads) -> dict[str, int]:
    """Heads once; the small arrays once per row and head."""
    queries, keys, freqs = heads.queries, heads.keys, heads.rotation.freqs
    rows = queries.shape[0] * queries.shape[1]
    first, second = rows * queries.shape[2], 0 if keys is None else rows * keys.shape[2]
    return {
        "queries": queries.nbytes,
        "keys": 0 if keys is None else keys.nbytes,
        "query_norm": 0 if heads.query_norm is None else first * heads.query_norm.nbytes,
        "key_norm": 0 if heads.key_norm is None else second * heads.key_norm.nbytes,
        "positions": 4 * (first + second),
        "freqs": 0 if freqs is None else (first + second) * freqs.nbytes,
        "constants": 16 * (first + second),
    }


OPERATION = Operation(
    name="qk_norm_rope",
    kernels=(ONE, PAIR),
    why_not=why_not,
    reference=reference,
    launch=launch,
    case=case,
    sample=sample,
    first_rows=first_rows,
    floor=floor,
)
