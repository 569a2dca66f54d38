"""What the simulator makes of Metal's language and library, beside numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.checks import numbers, simulator
from tests.kernels.simulator import Rules
from tests.kernels.simulator.snippets import run

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
SYNC = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
N = np.arange(64)
X = N.astype(np.float64)
LANES = X.reshape(2, 32)
QUADS = X.reshape(16, 4)


@pytest.fixture(autouse=True)
def needs_the_simulator() -> None:
    simulator()


def each(values) -> np.ndarray:
    """One value for each SIMD-group, in all its lanes."""
    return np.repeat(values, 32)


def bfloat(values: np.ndarray) -> np.ndarray:
    return numbers(mx.array(values.astype(np.float32)).astype(mx.bfloat16))


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16)


SIMD = {
    "sum": ("out[i] = simd_sum(x[i]);", each(LANES.sum(1))),
    "max and min": ("out[i] = simd_max(x[i]) - simd_min(x[i]);", each(LANES.max(1) - LANES.min(1))),
    "product": ("out[i] = simd_product(x[i] < 2 ? x[i] + 2 : 1.0f);", each([6, 1])),
    "inclusive prefix": ("out[i] = simd_prefix_inclusive_sum(x[i]);", LANES.cumsum(1).ravel()),
    "exclusive prefix": ("out[i] = simd_prefix_exclusive_sum(x[i]);", (LANES.cumsum(1) - LANES).ravel()),
    "shuffle": ("out[i] = simd_shuffle(x[i], ushort(31 - i % 32));", LANES[:, ::-1].ravel()),
    "shuffle_xor": ("out[i] = simd_shuffle_xor(x[i], 5);", LANES[:, np.arange(32) ^ 5].ravel()),
    "shuffle_down": (
        "out[i] = simd_shuffle_down(x[i], 3);",
        np.concatenate([LANES[:, 3:], LANES[:, 29:]], 1).ravel(),
    ),
    "shuffle_up": ("out[i] = simd_shuffle_up(x[i], 2);", np.concatenate([LANES[:, :2], LANES[:, :30]], 1).ravel()),
    "rotate": ("out[i] = simd_shuffle_rotate_down(x[i], 3);", np.roll(LANES, -3, 1).ravel()),
    "fill up": (
        "out[i] = simd_shuffle_and_fill_up(x[i], -x[i], 1);",
        np.concatenate([-LANES[:, 31:], LANES[:, :31]], 1).ravel(),
    ),
    "broadcast": ("out[i] = simd_broadcast(x[i], 7);", each(LANES[:, 7])),
    "broadcast_first": ("out[i] = simd_broadcast_first(x[i]);", each(LANES[:, 0])),
    "any and all": ("out[i] = (simd_any(x[i] == 3) ? 1 : 0) + (simd_all(x[i] < 32) ? 2 : 0);", each([3, 0])),
    "ballot": (
        "simd_vote v = simd_ballot(i % 2 == 1); out[i] = popcount(uint((simd_vote::vote_t)v));",
        each([16, 16]),
    ),
    "is_first": ("out[i] = simd_is_first() ? 1 : 0;", N % 32 == 0),
    "and, or, xor": (
        "out[i] = simd_or(uint(x[i])) + simd_and(uint(x[i])) + simd_xor(uint(x[i]));",
        each([31, 63 + 32]),
    ),
    "quad": (
        "out[i] = quad_sum(x[i]) + quad_shuffle_xor(x[i], 1) + quad_broadcast(x[i], 2);",
        np.repeat(QUADS.sum(1) + QUADS[:, 2], 4) + X[N ^ 1],
    ),
    "of a vector": (
        "float4 v = simd_sum(float4(x[i], 1, 2, 3)); out[i] = v.x + v.y + v.z + v.w;",
        each(LANES.sum(1) + 32 * 6),
    ),
    "of integers": ("out[i] = simd_sum(int(x[i])) + float(simd_max(ulong(i)));", each(LANES.sum(1) + [31, 63])),
    "of half": ("out[i] = float(simd_sum(half(1.0h)));", each([32, 32])),
    "of bfloat": ("bfloat16_t b = bfloat16_t(x[i]); out[i] = simd_max(b);", each([31, 63])),
}

VECTORS = {
    "swizzles": (
        "float4 v(0); v.xy = float2(x[i], 2); v.zw = v.yx; v.w += 1; v.rgb *= 2.0f; float3 t = v.zyx;"
        "out[i] = t.x + 10 * t.y + 100 * t.z + 1000 * v.a;",
        X * 200 + 44 + 1000 * (X + 1),
    ),
    "constructors": (
        "float4 a = float4(float2(1, 2), float2(3, 4)); float4 b = float4(a.xyz, x[i]); int4 c = int4(b);"
        "float3 d = float3(1, a.yz); half4 h = half4(b); out[i] = dot(b, float4(c)) + d.z + float(h.w);",
        14 + X * X + 3 + X,
    ),
    "direct initialisation": ("float2 v(x[i], 1.0f); out[i] = v.x + v.y;", X + 1),
    "braces": ("float4 v = {1, 2, 3, x[i]}; float2 w{v.x, v.w}; out[i] = w.y;", X),
    "choice": (
        "float4 v = float4(x[i]); float4 r = i < 4 ? v : float4(0.0f);"
        "r = select(r, float4(7), r == float4(2.0f)); out[i] = r.z;",
        np.where(N < 4, np.where(N == 2, 7, X), 0),
    ),
    "all and any": (
        "uint4 v = uint4(i, i, i, i); out[i] = all(v < uint4(5)) ? 1 : any(v == uint4(7, 8, 9, 10)) ? 2 : 0;",
        np.where(N < 5, 1, np.where((N >= 7) & (N <= 10), 2, 0)),
    ),
    "bool4": (
        "bool4 m = bool4(float4(x[i]) < float4(3)); bool4 n = !m; out[i] = m.x && !n[1] ? 1 : 0;",
        N < 3,
    ),
    "with scalars": ("float4 a = float4(1, 2, 3, 4) * x[i] + 1; a = 2 * a; a -= 1.0f; out[i] = a.w;", 8 * X + 1),
    "static_cast": ("half4 h = static_cast<half4>(float4(x[i])); out[i] = static_cast<float>(h.x);", X),
    "indices": (
        "float4 v = float4(1, 2, 3, 4); v[i % 4] = x[i]; out[i] = v[0] + v[1] + v[2] + v[3];",
        10 - (N % 4 + 1) + X,
    ),
    "bfloat4": ("bfloat4 b = bfloat4(float4(x[i])); float4 g = float4(b); out[i] = g.x + float(b.y);", 2 * X),
    "packed": (
        "const device packed_float3* p = (const device packed_float3*)x;"
        "if (i < 63) { float3 v = p[i / 3]; out[i] = v[i % 3]; } else out[i] = 0;",
        np.where(N < 63, X, 0),
    ),
    "unpacked bytes": (
        "uchar4 v = as_type<uchar4>(uint(0x04030201u)); float4 w = float4(v) * x[i]; out[i] = w.x + w.y + w.z + w.w;",
        10 * X,
    ),
    "as_type": ("ushort2 u = as_type<ushort2>(0x3f800000u + i); out[i] = u.y + u.x;", 0x3F80 + X),
    "attributes": ("uint2 p = thread_position_in_grid.xy; out[p.x] = p.y + x[p.x];", X),
}

SCALARS = {
    "bfloat arithmetic": (
        "bfloat16_t b = bfloat16_t(x[i]); b = i % 2 ? b : bfloat16_t(0); b += bfloat16_t(1); b = b * 2;"
        "out[i] = float(b) + b * 0.5f;",
        (np.where(N % 2, X, 0) + 1) * 3,
    ),
    "bfloat rounding": (
        "bfloat a = bfloat(1.0f + 1.0f / 256), b = bfloat(x[i]); bfloat c = a + b; out[i] = float(c);",
        bfloat(bfloat(np.float64(1 + 1 / 256)) + X),
    ),
    "half rounding": (
        "half a = half(0.1f); half b = half(x[i]); half c = a * b + a; out[i] = c;",
        half(half(half(np.float64(0.1)) * half(X)) + half(np.float64(0.1))),
    ),
    "literals are float": ("auto d = 0.5; out[i] = sizeof(d) + sizeof(1.0h) + x[i] * .25 + 1e1;", 16 + X * 0.25),
    "as_type": ("out[i] = as_type<float>(as_type<uint>(x[i]) ^ 0x80000000u);", -X),
    "bits": (
        "out[i] = popcount(i) + clz(i | 1) + ctz(i | 64) + extract_bits(i, 1u, 3u) + reverse_bits(i << 26);",
        [
            i.bit_count()
            + 32
            - (i | 1).bit_length()
            + ((i | 64) & -(i | 64)).bit_length()
            - 1
            + (i >> 1 & 7)
            + int(f"{i << 26:032b}"[::-1], 2)
            for i in range(64)
        ],
    ),
    "mathematics": (
        "out[i] = metal::exp(-x[i]) + metal::rsqrt(x[i] + 1) + fast::tanh(x[i]) + precise::log(x[i] + 1)"
        "+ metal::fma(x[i], 2.0f, 1.0f) + clamp(x[i], 1.0f, 5.0f) + sign(x[i] - 3) + fract(x[i] * .25f);",
        np.exp(-X)
        + (X + 1) ** -0.5
        + np.tanh(X)
        + np.log(X + 1)
        + 2 * X
        + 1
        + np.clip(X, 1, 5)
        + np.sign(X - 3)
        + X * 0.25 % 1,
    ),
    "integers": (
        "int a = int(i); out[i] = min(a, 5) + max(uint(a), 7u) + abs(a - 10) + clamp(a, 3, 6);",
        np.minimum(N, 5) + np.maximum(N, 7) + abs(N - 10) + np.clip(N, 3, 6),
    ),
    "wide and narrow integers": (
        "int64_t a = int64_t(i) << 33; uint8_t b = uint8_t(250 + i); out[i] = float(a >> 33) + b;",
        N + (250 + N) % 256,
    ),
    "loops and switch": (
        "int n = 0; uint k = i; while (k) { k &= k - 1; n++; }"
        "switch (n) { case 0: out[i] = -1; break; case 1: out[i] = 1; break; default: out[i] = n; }",
        [-1 if i == 0 else i.bit_count() for i in range(64)],
    ),
    "pragmas": (
        "float s = 0;\n#pragma unroll\nfor (short k = 0; k < 4; ++k) s += k;\n"
        "#pragma clang loop unroll(full)\nfor (int k = 0; k < 4; ++k) s += k;\nout[i] = s;",
        np.full(64, 12),
    ),
    "union": ("union { uint u; float g; } c; c.u = 0x3f800000u; out[i] = c.g;", np.ones(64)),
    "lambda": ("float k = 2; auto f = [&](float a) { return a * k; }; out[i] = f(x[i]);", 2 * X),
    "deduced pointers": (
        "float a[2] = {x[i], 1}; thread auto& r = a[1]; r += a[0]; const device auto* p = x + i; out[i] = a[1] + p[0];",
        2 * X + 1,
    ),
    "array": ("array<float, 3> a = {1, 2, x[i]}; out[i] = a[2] + a[0];", X + 1),
    "OpenCL's words are free": (
        "float local = x[i], global = 1, generic = 2; out[i] = local + global + generic;",
        X + 3,
    ),
    "casts of pointers": (
        "const device uint2* p = reinterpret_cast<const device uint2*>(x); uint2 v = p[i / 2];"
        "out[i] = as_type<float>(i % 2 ? v.y : v.x);",
        X,
    ),
    "MLX's prelude": (
        "out[i] = ceildiv(int(i), 5) + (Limits<float>::finite_max > 0 ? 0 : 1)"
        "+ elem_to_loc(i, x_shape, x_strides, x_ndim);",
        -(-N // 5) + N,
    ),
}

THREADGROUPS = {
    "scoped": (
        f"if (true) {{ threadgroup float s[2][32]; s[i / 32][i % 32] = x[i]; {SYNC} out[i] = s[1 - i / 32][i % 32]; }}",
        np.roll(X, 32),
    ),
    "several at once": (
        "threadgroup float a[64], b[64]; threadgroup vec<float, 4> c[16]; threadgroup uchar raw[64];"
        f"a[i] = x[i]; b[i] = 1; if (i < 16) c[i] = float4(i); raw[i] = uchar(i); {SYNC}"
        "out[i] = a[63 - i] + b[0] + c[i / 4].x + ((threadgroup ushort*)raw)[0];",
        63 - X + 1 + N // 4 + 256,
    ),
    "alignas": (
        f"alignas(16) threadgroup float a[64]; a[i] = x[i]; {SYNC} out[i] = ((threadgroup float4*)a)[15].w;",
        np.full(64, 63),
    ),
    "simdgroup_barrier": (
        "threadgroup float a[64]; a[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = a[i ^ 1];",
        X[N ^ 1],
    ),
    "barrier for device memory": (
        "out[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); float v = out[63 - i];"
        "threadgroup_barrier(mem_flags::mem_device); out[i] = v;",
        X[::-1],
    ),
    "atomics": (
        "threadgroup atomic_uint c; if (i == 0) atomic_store_explicit(&c, 0u, memory_order_relaxed);"
        f"{SYNC} atomic_fetch_add_explicit(&c, 1u, memory_order_relaxed); {SYNC}"
        "out[i] = atomic_load_explicit(&c, memory_order_relaxed);",
        np.full(64, 64),
    ),
    "dynamic sizes by template": (
        f"threadgroup T s[K * 2]; s[i] = T(x[i]); {SYNC} out[i] = float(s[K * 2 - 1 - i]);",
        X[::-1],
        dict(template=[("T", mx.float16), ("K", 32)]),
    ),
}

HEADERS = {
    "macro": ("out[i] = SQ(x[i]);", X * X, dict(header="#define SQ(a) ((a) * (a))\n")),
    "constant tables": (
        "out[i] = lut[i % 4] + lut4[i % 2].y + K;",
        N % 4 + 1 + np.where(N % 2, 6, 2) + 5,
        dict(
            header="constant float lut[4] = {1, 2, 3, 4};\n"
            "constant float4 lut4[2] = {float4(1, 2, 3, 4), float4(5, 6, 7, 8)};\n"
            "static constexpr constant int K = 5;\n"
        ),
    ),
    "helpers for every address space": (
        f"threadgroup float s[64]; s[i] = x[i]; {SYNC} float l[2] = {{1, 2}};"
        "out[i] = shared(s, i) + loaded<float>(x, i) + own(l) + Pair<float>{3}.get();",
        X[::-1] + X + 6,
        dict(
            header="float shared(threadgroup const float* p, uint i) { return p[63 - i]; }\n"
            "template <typename T> T loaded(const device T* p, uint i) { return p[i]; }\n"
            "float own(thread float* p) { p[0] += p[1]; return p[0]; }\n"
            "template <typename T> struct Pair { T v; T get() const thread { return v; } };\n"
        ),
    ),
    "struct in device memory": (
        "const device S* s = (const device S*)x; S t = s[i]; out[2 * i] = t.b; out[2 * i + 1] = s[i].a;",
        X.reshape(-1, 2)[:, ::-1].ravel(),
        dict(grid=(32, 1, 1), threadgroup=(32, 1, 1), header="struct S { float a; float b; };\n"),
    ),
    "template values": (
        "T v = T(x[i]); if constexpr (B) { out[i] = float(v) * K; } else { out[i] = 0; }",
        3 * X,
        dict(template=[("T", mx.float16), ("K", 3), ("B", True)]),
    ),
}

MATRICES = {
    "diagonal": (
        "simdgroup_matrix<float, 8, 8> m(2.0f); simdgroup_store(m, out + 64 * (i / 32));",
        np.tile(2 * np.eye(8).ravel(), 2),
        dict(shape=(128,)),
    ),
    "transposed load": (
        "simdgroup_matrix<float, 8, 8> m, n(1.0f), d; simdgroup_load(m, x, 8, ulong2(0, 0), true);"
        "simdgroup_multiply(d, m, n); simdgroup_store(d, out);",
        X.reshape(8, 8).T.ravel(),
        dict(grid=(32, 1, 1), threadgroup=(32, 1, 1)),
    ),
    "product": (
        "simdgroup_matrix<float, 8, 8> a, b, c(1.0f); simdgroup_load(a, x, 8); simdgroup_load(b, x, 8);"
        "simdgroup_multiply_accumulate(c, a, b, c); simdgroup_store(c, out);",
        (X.reshape(8, 8) @ X.reshape(8, 8) + np.eye(8)).ravel(),
        dict(grid=(32, 1, 1), threadgroup=(32, 1, 1)),
    ),
    "elements of a lane": (
        "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, x, 8); thread auto& e = m.thread_elements();"
        "out[2 * i] = e[0]; out[2 * i + 1] = e[1];",
        [8 * ((lane // 4 & 4) + lane // 2 % 4) + (lane // 4 & 2) * 2 + lane % 2 * 2 + k
         for lane in range(32) for k in (0, 1)],
        dict(grid=(32, 1, 1), threadgroup=(32, 1, 1)),
    ),
}  # fmt: skip

TABLES = {
    "SIMD-group": SIMD,
    "vector": VECTORS,
    "scalar": SCALARS,
    "threadgroup": THREADGROUPS,
    "header": HEADERS,
    "matrix": MATRICES,
}
ROWS = [pytest.param(*row, id=f"{table}: {name}") for table, rows in TABLES.items() for name, row in rows.items()]


@pytest.mark.parametrize("row", [pytest.param(p.values, id=p.id) for p in ROWS])
def test_metal_means_what_it_should(row: tuple):
    """A wrong shuffle, swizzle or rounding here would let a wrong kernel pass, or fail a right one."""
    body, wanted, *options = row
    output = run(I + body, **(options[0] if options else {}))
    np.testing.assert_allclose(numbers(output), np.asarray(wanted, np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.uint16, mx.int64, mx.bool_])
def test_every_dtype_comes_back_as_it_went_in(dtype: mx.Dtype):
    """A buffer read with another type's width or rounding would show first on bfloat16, which numpy has not."""
    values = (mx.arange(64) - 30).astype(dtype)
    output = run(I + "out[i] = x[i];", {"x": values}, dtype=dtype)
    assert mx.array_equal(output, values)


def test_edge_threadgroups_see_their_own_size():
    """MLX dispatches threads, so that the last threadgroups of a grid can be smaller; kernels of others rely on it."""
    body = """
    uint3 p = thread_position_in_grid;
    out[p.y * threads_per_grid.x + p.x] = threads_per_threadgroup.x + 100 * threadgroup_position_in_grid.y
        + 10000 * thread_index_in_threadgroup;
    """
    output = run(body, grid=(7, 5, 1), threadgroup=(4, 2, 1), shape=(5, 7), rules=Rules(whole_groups=False))
    wanted = [
        [(4 if c < 4 else 3) + 100 * (r // 2) + 10000 * (r % 2 * (4 if c < 4 else 3) + c % 4) for c in range(7)]
        for r in range(5)
    ]
    assert output.tolist() == wanted
