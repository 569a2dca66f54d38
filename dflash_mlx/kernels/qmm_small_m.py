"""Quantised matrix product for few rows: y = x . dequant(W)^T, each weight read once.

    qmm_small_m(x, w, scales, biases, group_size, bits) -> y

| argument | what |
|---|---|
| x [..., K]     | activations; all leading axes together are M rows, 1 to 16 for the kernel; any strides |
| w [N, K * bits / 32] | packed codes, uint32, MLX's affine layout |
| scales, biases [N, K / group_size] | of x's dtype: float32, float16, bfloat16 |
| group_size, bits | 32, 64, 128; 4, 8 |

y [..., N] is of x's dtype. The kernel takes K % 64 == 0 and N % 8 == 0. It sums in float32; a row's bits do not depend
on the number of rows. Where N is small, K is cut into slices, as many as N, K and the group size say, and a second
launch adds them up in order.

Three classes of rows are raced on their own. Up to 4 (8 bits: 5) MLX's vector kernels read the weights once from M3
on, and only M1 and M2 are raced there; from 9 on a block of 16 rows is computed whatever their number.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import mlx.core as mx

from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Rows, Runner, name_of
from dflash_mlx.metal import source

ROWS = 16
CLASSES = {4: Rows((4, 8, ROWS)), 8: Rows((5, 8, ROWS))}  # by bits
_LANES = 32
_SIMDGROUPS = 4  # of a threadgroup, at most
_ENOUGH = 512  # SIMD-groups that fill a large GPU; below, K is cut into slices
_SLICES, _SLICE = 32, 256  # at most so many, of at least so many k

KERNEL = MetalKernel(
    name="dflash_qmm_small_m",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    body="""
    qmm_small_m<T, BITS, GROUP, TILES, BLOCKS>(
        x, w, scales, biases, y, uint(x_shape[0]), uint(x_shape[1]), uint(w_shape[0]),
        threadgroup_position_in_grid.y * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup,
        threadgroup_position_in_grid.z, threadgroups_per_grid.z, thread_index_in_simdgroup);
    """,
    header=source("qmm_small_m"),
)
SUM = MetalKernel(
    name="dflash_qmm_split_sum",
    inputs=("parts",),
    outputs=("y",),
    body="""
    qmm_split_sum<T>(
        parts, y, uint(parts_shape[0]), uint(parts_shape[1]) * uint(parts_shape[2]), thread_position_in_grid.x);
    """,
    header=source("qmm_small_m"),
)


def reference(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int
) -> Arrays:
    return (
        mx.quantized_matmul(
            x, w, scales=scales, biases=biases, transpose=True, group_size=group_size, bits=bits, mode="affine"
        ),
    )


def why_not(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int
) -> str | None:
    rows = x.size // x.shape[-1]
    if not 1 <= rows <= ROWS:
        return f"{rows} rows are not 1 to {ROWS}"
    if biases is None or not x.dtype == scales.dtype == biases.dtype:
        return f"scales ({scales.dtype}) and biases have to be there, and of the activations' type ({x.dtype})"
    return _why_not(len(w), x.shape[-1], x.dtype, group_size, bits)


@lru_cache
def _why_not(n: int, k: int, dtype: mx.Dtype, group_size: int, bits: int) -> str | None:
    if dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return f"activations of {dtype}"
    if bits not in (4, 8) or group_size not in (32, 64, 128):
        return f"{bits} bits in groups of {group_size} are not 4 or 8 in groups of 32, 64 or 128"
    if k % 64 or k % group_size or n % 8:
        return f"a weight of {n} x {k} is not a multiple of 8 x 64 and of the group of {group_size}"
    return None


@lru_cache
def _layout(n: int, k: int, group_size: int) -> tuple[int, int, int]:
    """Tiles of 8 weight rows per SIMD-group, SIMD-groups per threadgroup, slices of K: by shape only."""
    if n % 32 == 0 and n // 32 >= _ENOUGH:
        return 4, gcd(n // 32, _SIMDGROUPS), 1
    tiles = 2 if n % 16 == 0 else 1
    units, slices = n // (8 * tiles), 1
    while slices < _SLICES and units * slices < _ENOUGH and k >= 2 * slices * max(_SLICE, group_size):
        slices *= 2
    return tiles, gcd(units, _SIMDGROUPS), slices


def launch(
    run: Runner, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> Arrays:
    k, n = x.shape[-1], len(w)
    flat = x.reshape(-1, k)
    rows = len(flat)
    tiles, simdgroups, slices = _layout(n, k, group_size)
    call = Launch(
        inputs=(flat, w, scales, biases),
        shapes=((rows, n) if slices == 1 else (slices, rows, n),),
        dtypes=(x.dtype if slices == 1 else mx.float32,),
        grid=(_LANES * simdgroups, n // (8 * tiles * simdgroups), slices),
        threadgroup=(_LANES * simdgroups, 1, 1),
        template=(
            ("T", x.dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("TILES", tiles),
            ("BLOCKS", 1 if rows <= 8 else 2),
        ),
    )
    (y,) = run(KERNEL, call)
    if slices > 1:
        (y,) = run(SUM, _sum_of(y, x.dtype))
    return (y.reshape(*x.shape[:-1], n),)


def _sum_of(parts: mx.array, dtype: mx.Dtype) -> Launch:
    _, rows, n = parts.shape
    whole = -(-rows * n // 256)
    return Launch(
        inputs=(parts,),
        shapes=((rows, n),),
        dtypes=(dtype,),
        grid=(256 * whole, 1, 1),
        threadgroup=(256, 1, 1),
        template=(("T", dtype),),
    )


def case(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int) -> Case:
    rows = CLASSES[bits].of(x.size // x.shape[-1])
    return _case(len(w), x.shape[-1], x.dtype, group_size, bits, rows)


@lru_cache
def _case(n: int, k: int, dtype: mx.Dtype, group_size: int, bits: int, rows: int) -> Case:
    sizes = (("n", n), ("k", k), ("group_size", group_size), ("bits", bits), ("rows", rows))
    return Case("qmm_small_m", name_of(dtype), sizes)


def races_of(weight: mx.array, dtype: mx.Dtype, group_size: int, bits: int) -> list[Case]:
    """The races of a weight [N, K * bits / 32] and activations of `dtype`: of each class of rows."""
    n, k = len(weight), weight.shape[-1] * 32 // bits
    return [_case(n, k, dtype, group_size, bits, rows) for rows in CLASSES[bits].most]


def widths(case: Case) -> tuple[int, int]:
    sizes = case.size
    return CLASSES[sizes["bits"]].ends(sizes["rows"])


def newest(case: Case) -> int | None:
    """M2: with affine weights MLX reads them once per row there, and from M3 on once for a few rows."""
    return 14 if case.size["rows"] < 8 else None


def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
    """Normal activations and weights; hard: rows of very different size, one of zeros, one constant, and outliers."""
    sizes, dtype = case.size, case.type
    keys = mx.random.split(mx.random.key(seed), 3)
    weight = mx.random.normal((sizes["n"], sizes["k"]), key=keys[0]) * sizes["k"] ** -0.5
    x = mx.random.normal((1, rows, sizes["k"]), key=keys[1])
    if hard:
        x = x * mx.array([0.0, 0.05, 1.0, 30.0])[mx.arange(rows) % 4][:, None]
        x = mx.where(mx.arange(rows)[:, None] % 4 == 2, 1.0, x)
        x = x * mx.where(mx.random.uniform(shape=(sizes["k"],), key=keys[2]) < 0.02, 50.0, 1.0)
        weight = weight * mx.array([0.05, 0.0, 1.0, 8.0])[mx.arange(sizes["n"]) % 4][:, None]
    w, scales, biases = mx.quantize(weight.astype(dtype), group_size=sizes["group_size"], bits=sizes["bits"])
    return Call((x.astype(dtype), w, scales, biases, sizes["group_size"], sizes["bits"]))


def first_rows(call: Call, rows: int) -> Call:
    x, *rest = call.arguments
    return Call((x.reshape(1, -1, x.shape[-1])[:, :rows], *rest))


def floor(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> dict[str, int]:
    """Weights once; the activations once for each 8, 16 or 32 weight rows; the slices' sums once."""
    k, n = x.shape[-1], len(w)
    tiles, _, slices = _layout(n, k, group_size)
    parts = {"parts": 4 * slices * (x.size // k) * n} if slices > 1 else {}
    once = {"w": w.nbytes, "scales": scales.nbytes, "biases": biases.nbytes}
    return {"x": x.nbytes * (n // (8 * tiles)), **once, **parts}


OPERATION = Operation(
    name="qmm_small_m",
    kernels=(KERNEL, SUM),
    why_not=why_not,
    reference=reference,
    launch=launch,
    case=case,
    sample=sample,
    first_rows=first_rows,
    floor=floor,
    widths=widths,
    newest=newest,
    matrix=True,
)
