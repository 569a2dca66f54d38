"""MLX's own kernels, from the installed package, run through the simulator: right results and no false reports.

They use more of Metal than ours do. Function constants are replaced by literals; their threadgroups are larger than
this project allows itself, and their headers declare threadgroup variables.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.checks import close, numbers, simulator
from tests.kernels.simulator import Rules
from tests.kernels.simulator.snippets import run

ROOT = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
IN_THE_PRELUDE = {"utils.h", "bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h"}
RULES = dict(threads=1024, memory=1 << 17, whole_groups=False, linted=False, whole_kernels=True)
SCALE = 64**-0.5


@pytest.fixture(autouse=True)
def needs_the_simulator() -> None:
    simulator()


@cache
def text(*names: str) -> str:
    """These headers and what they include, once each, without what MLX's prelude already holds."""
    seen: set[Path] = set()

    def inlined(path: Path) -> str:
        if path in seen or (path.name in IN_THE_PRELUDE and path.parent == ROOT):
            return ""
        seen.add(path)
        lines = path.read_text().splitlines(keepends=True)
        root = ROOT.parents[3]
        return "".join(
            inlined(root / m[1]) if (m := re.match(r'\s*#include "(mlx/.*)"', line)) else line
            for line in lines
            if "#pragma once" not in line
        )

    joined = "".join(inlined(ROOT / name) for name in names)
    joined = re.sub(
        r"constant bool (\w+)\s*\[\[function_constant\(\d+\)\]\];",
        lambda m: f"constant bool {m[1]} = {'true' if 'align' in m[1] else 'false'};",
        joined,
    )
    return re.sub(r"constant int (\w+)\s*\[\[function_constant\(\d+\)\]\];", r"constant int \1 = 32;", joined)


def launched(header: str, body: str, inputs: dict[str, mx.array], *, initialised: bool = True, **options) -> np.ndarray:
    return numbers(run(body, inputs, header=header, rules=Rules(**RULES, initialised=initialised), **options))


def random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def attention(q: mx.array, k: mx.array, v: mx.array) -> np.ndarray:
    q, k, v = (a.astype(mx.float32) for a in (q, k, v))
    return numbers(mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE))


def test_attention_of_one_query():
    """sdpa_vector: 1024 threads, SIMD-group sums, threadgroup memory written twice."""
    heads, kv_heads, keys, dim = 4, 2, 75, 64
    shapes = [(heads, 1), (kv_heads, keys), (kv_heads, keys)]
    q, k, v = (random(*shape, dim, dtype=mx.bfloat16, seed=seed) for seed, shape in enumerate(shapes))
    u64 = mx.uint64
    scalars = dict(
        gqa=mx.array(heads // kv_heads),
        n=mx.array(keys),
        ks=mx.array(keys * dim, dtype=u64),
        ss=mx.array(dim, dtype=u64),
        sc=mx.array(SCALE),
    )
    body = """
    sdpa_vector<bfloat16_t, 64>(q, k, v, out, gqa, n, ks, ss, ks, ss, sc, (const device bool*)q, q, n, n, n, q, n,
        threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """
    got = launched(
        text("sdpa_vector.h"),
        body,
        dict(q=q, k=k, v=v, **scalars),
        grid=(1024 * heads, 1, 1),
        threadgroup=(1024, 1, 1),
        shape=q.shape,
        dtype=mx.bfloat16,
    )
    close(got, attention(q[None], k[None], v[None])[0], 0, 0.02, "sdpa_vector")


@pytest.mark.parametrize("dtype, name", [(mx.bfloat16, "bfloat16_t"), (mx.float16, "half"), (mx.float32, "float")])
def test_quantised_products(dtype: mx.Dtype, name: str):
    """qmv_fast for one row, and qmm_t for 40: threadgroup tiles and SIMD-group matrices."""
    n, k = 64, 512
    w, scales, biases = mx.quantize(random(n, k), group_size=64, bits=4)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    header = text("quantized_utils.h", "steel/gemm/gemm.h", "quantized.h")
    tolerance = 1e-3 if dtype == mx.float32 else 1.0

    def wanted(x: mx.array) -> np.ndarray:
        parts = (a.astype(mx.float32) for a in (scales, biases))
        return numbers(mx.quantized_matmul(x.astype(mx.float32), w, *parts))

    x = random(1, k, dtype=dtype)
    body = f"""
    qmv_fast_impl<{name}, 64, 4>(w, s, b, x, out, kk, nn, threadgroup_position_in_grid,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """
    arrays = dict(w=w, s=scales, b=biases, x=x, kk=mx.array(k), nn=mx.array(n))
    got = launched(header, body, arrays, grid=(32, 2 * n // 8, 1), threadgroup=(32, 2, 1), shape=(1, n), dtype=dtype)
    close(got, wanted(x), 0, tolerance, "qmv_fast")

    x = random(40, k, dtype=dtype)
    size = f"32 * (32 + 16 / sizeof({name}))"
    body = f"""
    threadgroup {name} Xs[{size}], Ws[{size}];
    qmm_t_impl<{name}, 64, 4, true>(w, s, b, x, out, Xs, Ws, kk, nn, mm, kk, threadgroup_position_in_grid,
        thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """
    arrays |= dict(x=x, mm=mx.array(40))
    got = launched(header, body, arrays, grid=(32 * n // 32, 4, 2), threadgroup=(32, 2, 2), shape=(40, n), dtype=dtype)
    close(got, wanted(x), 0, tolerance, "qmm_t")


def test_softmax():
    """A row that is no multiple of the reads of a thread."""
    x = random(3, 777, dtype=mx.float16)
    body = """
    softmax_single_row<half, float>(x, out, (constant int&)n, threadgroup_position_in_grid.x,
        thread_position_in_threadgroup.x, thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
    """
    got = launched(
        text("softmax.h"),
        body,
        dict(x=x, n=mx.array(777)),
        grid=(224 * 3, 1, 1),
        threadgroup=(224, 1, 1),
        shape=x.shape,
        dtype=mx.float16,
    )
    close(got, numbers(mx.softmax(x.astype(mx.float32), axis=-1)), 0, 1e-3, "softmax")


def test_sort():
    """Many barriers, threadgroup memory used over and over."""
    x = random(3, 513)
    body = """
    block_sort<float, float, false, 128, 8>(x, out, n, o, o, n, n, threadgroup_position_in_grid,
        thread_position_in_threadgroup);
    """
    got = launched(
        text("sort.h"),
        body,
        dict(x=x, n=mx.array(513), o=mx.array(1)),
        grid=(128, 3, 1),
        threadgroup=(128, 1, 1),
        shape=x.shape,
    )
    np.testing.assert_array_equal(got, np.sort(numbers(x), axis=-1))


def test_cumulative_sum():
    """It reads slots of threadgroup memory that nobody wrote, and drops them, which is allowed by request only."""
    x = random(3, 513)
    body = """
    contiguous_scan<float, float, CumSum<float>, 4, true, false>(x, out, n, threadgroup_position_in_grid,
        threadgroups_per_grid, thread_position_in_threadgroup, threads_per_threadgroup, thread_index_in_simdgroup,
        simdgroup_index_in_threadgroup);
    """
    arrays = dict(x=x, n=mx.array(513, dtype=mx.uint64))
    got = launched(
        text("scan.h"), body, arrays, grid=(160, 3, 1), threadgroup=(160, 1, 1), shape=x.shape, initialised=False
    )
    close(got, numbers(x).cumsum(-1), 0, 1e-3, "scan")


def test_matrix_product():
    """Steel: tiles in threadgroup memory, two barriers per step."""
    m, n, k = 64, 96, 80
    a, b = random(m, k, dtype=mx.bfloat16), random(k, n, dtype=mx.bfloat16)
    words = struct.pack("<iiiiiiiiqqqiii4x", m, n, k, k, n, n, n // 32, m // 32, 0, 0, 0, 0, k // 16, 0) + bytes(64)
    body = """
    using G = mlx::steel::GEMMKernel<bfloat16_t, bfloat16_t, 32, 32, 16, 2, 2, false, false, true, true>;
    threadgroup bfloat16_t As[G::tgp_mem_size_a]; threadgroup bfloat16_t Bs[G::tgp_mem_size_b];
    G::run(a, b, out, (const constant mlx::steel::GEMMParams*)(ulong)p, As, Bs, thread_index_in_simdgroup,
        simdgroup_index_in_threadgroup, threadgroup_position_in_grid, thread_position_in_threadgroup);
    """
    arrays = dict(a=a, b=b, p=mx.array(np.frombuffer(words, np.int64).copy()))
    got = launched(
        text("steel/gemm/gemm.h"),
        body,
        arrays,
        grid=(32 * n // 32, 2 * m // 32, 2),
        threadgroup=(32, 2, 2),
        shape=(m, n),
        dtype=mx.bfloat16,
    )
    close(got, numbers(a) @ numbers(b), 0, 0.3, "steel gemm")


def test_attention_of_many_queries():
    """Steel attention; two of its pointers are moved by an object that converts to int, which clang does not take."""
    heads, queries, keys, dim = 2, 40, 70, 64
    shapes = [(1, heads, queries), (1, 1, keys), (1, 1, keys)]
    q, k, v = (random(*shape, dim, dtype=mx.float16, seed=seed) for seed, shape in enumerate(shapes))
    header = text("steel/attn/kernels/steel_attention.h")
    for old, new in (
        ("src += str_y;", "src += int(str_y);"),
        ("dst += str_y;", "dst += int(str_y);"),
        ("constant bool align_Q = true", "constant bool align_Q = false"),
        ("constant bool align_K = true", "constant bool align_K = false"),
    ):
        header = header.replace(old, new)
    sizes = (1, heads, dim, queries, keys, heads, SCALE, 2, 3, 1, 2, queries - 32, keys - 64, keys - queries)
    strides = [stride for _, h, rows in (*shapes, shapes[0]) for stride in (h * rows * dim, rows * dim, dim)]
    words = struct.pack("<iiiiiifiiiiiii12q", *sizes, *strides)
    words += bytes(-len(words) % 8)
    body = """
    attention<half, 32, 32, 64, 64, 4, 1>(q, k, v, out, (const constant mlx::steel::AttnParams*)(ulong)p,
        (const constant mlx::steel::AttnMaskParams*)(ulong)p, (const device float*)(ulong)p, q, (device float*)out,
        thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threadgroup_position_in_grid,
        thread_position_in_threadgroup);
    """
    arrays = dict(q=q, k=k, v=v, p=mx.array(np.frombuffer(words, np.int64).copy()))
    got = launched(
        header, body, arrays, grid=(64, 4 * heads, 1), threadgroup=(32, 4, 1), shape=q.shape, dtype=mx.float16
    )
    close(got, attention(q, k, v), 0, 5e-3, "steel attention")
