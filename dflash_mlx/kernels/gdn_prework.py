"""What a gated delta layer does between its projections and its recurrence: convolution, SiLU, norms, gates.

    gdn_prework(qkv, win, ncommit, conv_w, a, b, A_log, dt_bias, key_heads=Hk, key_size=Dk)
        -> q, k, v, g, beta, win_out

| argument | what |
|---|---|
| qkv [B, T, C]     | projected queries, keys, values, C = 2 Hk Dk + Hv Dv |
| win [B, N, C]     | what went into the convolution before: the W - 1 rows from row `ncommit` on are taken |
| ncommit [B]       | int32, 0..N - W + 1: how many rows of the previous block were kept |
| conv_w [C, W, 1]  | `nn.Conv1d`'s weight, one group per channel, no bias |
| a, b [B, T, Hv]   | of qkv's type |
| A_log, dt_bias [Hv] | |

| result | what |
|---|---|
| q, k [B, T, Hk, Dk], v [B, T, Hv, Dv] | of qkv's type |
| g, beta [B, T, Hv] | float32, beta rounded to b's type before |
| win_out [B, W - 1 + T, C] | the next block's `win` |

The reference calls what mlx_lm's modules call. The kernel rounds where they round, and takes Dk 128.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Runner, name_of
from dflash_mlx.metal import source

DK = 128
EPS = 1e-6  # of the norm, in mlx_lm's modules too
_TYPES = (mx.float32, mx.float16, mx.bfloat16)
_GROUPS = 4  # SIMD-groups of a threadgroup

KERNEL = MetalKernel(
    name="dflash_gdn_prework",
    inputs=("qkv", "win", "ncommit", "conv_w", "a", "b", "A_log", "dt_bias"),
    outputs=("q", "k", "v", "g", "beta", "win_out"),
    body="""
    constexpr int gates = 2 * Hk + (Hv * Dv + 127) / 128;
    const int group = int(thread_position_in_grid.y);
    const int row = int(thread_position_in_grid.z);
    const int lane = int(thread_index_in_simdgroup);
    if (group < gates) {
        gdn_convolve<T, Hk, Hv, Dv, W>(
            qkv, win, ncommit, conv_w, q, k, v, win_out, qkv_shape[1], win_shape[1], row, group, lane);
    } else if (group == gates) {
        gdn_gates<G, T, Hv>(a, b, A_log, dt_bias, g, beta, row, lane);
    }
    """,
    header=source("gdn_prework"),
)


def reference(
    qkv: mx.array,
    win: mx.array,
    ncommit: mx.array,
    conv_w: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    *,
    key_heads: int,
    key_size: int,
) -> Arrays:
    batch, rows, channels = qkv.shape
    before = conv_w.shape[1] - 1
    places = (ncommit[:, None] + mx.arange(before))[..., None]  # [B, W - 1, 1]
    win_out = mx.concatenate([mx.take_along_axis(win, places, axis=1), qkv], axis=1)
    mixed = nn.silu(mx.conv1d(win_out, conv_w, groups=channels))
    keys = key_heads * key_size
    q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (x.reshape(batch, rows, key_heads, key_size) for x in (q, k))
    q, k = normalize_qk(q, k, inv_scale=key_size**-0.5, eps=EPS)
    g, beta = compute_g(A_log, a, dt_bias), mx.sigmoid(b)
    return q, k, v.reshape(batch, rows, a.shape[2], -1), g.astype(mx.float32), beta.astype(mx.float32), win_out


def why_not(*arguments: mx.array, key_heads: int, key_size: int) -> str | None:
    if key_size != DK:
        return f"key heads of {key_size} channels (the kernel's have {DK})"
    qkv, win, _, conv_w, a, b, A_log, dt_bias = arguments
    types = {x.dtype for x in (qkv, win, conv_w, a, b)}
    if qkv.dtype not in _TYPES or len(types) > 1:
        return f"activations and convolution of {', '.join(sorted(map(str, types)))}"
    if any(x.dtype not in _TYPES for x in (A_log, dt_bias)):
        return f"gates of {A_log.dtype} and {dt_bias.dtype}"
    return None


def launch(run: Runner, *arguments: mx.array, key_heads: int, key_size: int) -> Arrays:
    qkv, _, _, conv_w, a, _, _, dt_bias = arguments
    batch, rows, channels = qkv.shape
    width, heads = conv_w.shape[1], a.shape[2]
    values = (channels - 2 * key_heads * DK) // heads
    groups = 2 * key_heads + -(-heads * values // DK) + 1
    keyed, gates = (batch, rows, key_heads, DK), (batch, rows, heads)
    call = Launch(
        inputs=arguments,
        shapes=(keyed, keyed, (batch, rows, heads, values), gates, gates, (batch, width - 1 + rows, channels)),
        dtypes=(qkv.dtype, qkv.dtype, qkv.dtype, mx.float32, mx.float32, qkv.dtype),
        grid=(32, -(-groups // _GROUPS) * _GROUPS, batch * rows),
        threadgroup=(32, _GROUPS, 1),
        template=(
            ("T", qkv.dtype),
            ("G", qkv.dtype if dt_bias.dtype == qkv.dtype else mx.float32),
            ("Hk", key_heads),
            ("Hv", heads),
            ("Dv", values),
            ("W", width),
        ),
    )
    return tuple(run(KERNEL, call))


def case(*arguments: mx.array, key_heads: int, key_size: int) -> Case:
    qkv, _, _, conv_w, a = arguments[:5]
    heads = a.shape[2]
    values = (qkv.shape[2] - 2 * key_heads * key_size) // heads
    return case_of(qkv.dtype, key_heads, heads, values, conv_w.shape[1], key_size)


def case_of(dtype: mx.Dtype, key_heads: int, value_heads: int, value_size: int, width: int, key_size: int = DK) -> Case:
    sizes = (("Hk", key_heads), ("Hv", value_heads), ("Dv", value_size), ("W", width), ("Dk", key_size))
    return Case("gdn_prework", name_of(dtype), sizes)


def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
    """A block of `rows` after one of as many, of which the last row was rejected.

    hard: large and tiny activations, gates far on either side, a head of zeros.
    """
    size, dtype = case.size, case.type
    key_heads, heads, width = size["Hk"], size["Hv"], size["W"]
    channels = 2 * key_heads * size["Dk"] + heads * size["Dv"]
    keys = iter(mx.random.split(mx.random.key(seed), 8))

    def normal(*shape: int, scale: float = 1.0) -> mx.array:
        a = mx.random.normal(shape, key=next(keys)) * scale
        return a.astype(dtype)

    qkv, win = normal(1, rows, channels), normal(1, width - 1 + rows, channels)
    if hard:
        scale = mx.array([1e-3, 30.0, 1.0, 0.0])[mx.arange(channels) // size["Dk"] % 4]
        qkv, win = (qkv * scale).astype(dtype), (win * scale).astype(dtype)
    gates = normal(1, rows, heads, scale=12 if hard else 1), normal(1, rows, heads, scale=12 if hard else 1)
    decays = mx.log(1e-3 + 16 * mx.random.uniform(shape=(heads,), key=next(keys)))
    kept = mx.array([rows - 1], mx.int32)
    arguments = (qkv, win, kept, normal(channels, width, 1, scale=0.5), *gates, decays, normal(heads))
    return Call(arguments, dict(key_heads=key_heads, key_size=size["Dk"]))


def first_rows(call: Call, rows: int) -> Call:
    qkv, win, ncommit, conv_w, a, b, *rest = call.arguments
    return Call((qkv[:, :rows], win, ncommit, conv_w, a[:, :rows], b[:, :rows], *rest), call.options)


def floor(*arguments: mx.array, key_heads: int, key_size: int) -> dict[str, int]:
    """Each row is convolved apart, so it reads W rows of channels, and its convolution weights."""
    qkv, _, _, conv_w, a, b, A_log, dt_bias = arguments
    batch, rows, channels = qkv.shape
    before = conv_w.shape[1] - 1
    heads = a.shape[2]
    groups = 2 * key_heads + -(-(channels - 2 * key_heads * DK) // DK)
    window_reads = sum(max(before - t, 0) for t in range(rows))
    return {
        "qkv": batch * (rows * (before + 1) - window_reads) * channels * qkv.itemsize,
        "win": batch * window_reads * channels * qkv.itemsize,
        "ncommit": 4 * batch * rows * groups,
        "conv_w": batch * rows * conv_w.nbytes,
        "a": a.nbytes,
        "b": b.nbytes,
        "A_log": batch * rows * heads * A_log.itemsize,
        "dt_bias": batch * rows * heads * dt_bias.itemsize,
    }


OPERATION = Operation(
    name="gdn_prework",
    kernels=(KERNEL,),
    why_not=why_not,
    reference=reference,
    launch=launch,
    case=case,
    sample=sample,
    first_rows=first_rows,
    floor=floor,
)
