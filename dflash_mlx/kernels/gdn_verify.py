"""The gated delta rule over a block, with a tape, and the replay of what was kept of the block before.

    gdn_verify(q, k, v, g, beta, state, tk, tg, tdelta, ncommit) -> y, state_out, delta

| argument | what |
|---|---|
| q, k [B, T, Hk, Dk] | this block's queries and keys, normalised and scaled (`gdn_prework`) |
| v [B, T, Hv, Dv]    | its values; q, k, v of one type |
| g, beta [B, T, Hv]  | its decays and gates, float32 |
| state [B, Hv, Dv, Dk] | float32, before the *previous* block |
| tk [B, P, Hk, Dk], tg [B, P, Hv], tdelta [B, P, Hv, Dv] | the previous block's keys, decays and changes |
| ncommit [B]         | int32, how many of its rows were kept, 0..P |

| result | what |
|---|---|
| y [B, T, Hv, Dv]    | of v's type |
| state_out [B, Hv, Dv, Dk] | float32: `state` after the kept rows, before this block |
| delta [B, T, Hv, Dv] | float32; (k, g, delta) is this block's tape |

`commit(run, state, tk, tg, tdelta, ncommit)` gives state_out alone, where no block follows (`reference_commit` without
a kernel). For every count, outputs and states are the same bits as of a run that was fed the kept rows one by one, in
the kernel and in the reference each; the reference computes what mlx_lm's operations compute (`gated_delta_ops`).

The kernel takes Dk 128, Dv a multiple of 8, float16, bfloat16 and float32.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel

from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Runner, name_of
from dflash_mlx.metal import source

DK = 128
_ROWS = 8  # value rows of a SIMD-group
_TYPES = (mx.float32, mx.float16, mx.bfloat16)
_TAPE = ("state", "tk", "tg", "tdelta", "ncommit")
_REPLAY = """
    const GdnPlace place = gdn_place<Hk, Hv>(thread_position_in_grid, thread_index_in_simdgroup);
    float S[GDN_COLUMNS];
    gdn_load<Hv, Dv>(S, state, place);
    gdn_replay<Hk, Hv, Dv>(S, tk, tg, tdelta, ncommit, tdelta_shape[1], place);
    gdn_store<Hv, Dv>(S, state_out, place);
"""

KERNEL = MetalKernel(
    name="dflash_gdn_verify",
    inputs=("q", "k", "v", "g", "beta", *_TAPE),
    outputs=("y", "state_out", "delta"),
    body=_REPLAY + "    gdn_forward<T, Hk, Hv, Dv>(S, q, k, v, g, beta, y, delta, v_shape[1], place);\n",
    header=source("gdn_verify"),
)
COMMIT = MetalKernel(
    name="dflash_gdn_commit", inputs=_TAPE, outputs=("state_out",), body=_REPLAY, header=source("gdn_verify")
)


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tk: mx.array,
    tg: mx.array,
    tdelta: mx.array,
    ncommit: mx.array,
) -> Arrays:
    committed = reference_commit(state, tk, tg, tdelta, ncommit)
    q, k = _per_value_head(q, v), _per_value_head(k, v)
    state, ys, deltas = committed, [], []
    for t in range(v.shape[1]):
        key = k[:, t, :, None]  # [B, Hv, 1, Dk]
        state = state * g[:, t, :, None, None]
        delta = (v[:, t] - (state * key).sum(axis=-1)) * beta[:, t, :, None]  # [B, Hv, Dv]
        state = state + key * delta[..., None]
        ys.append((state * q[:, t, :, None]).sum(axis=-1).astype(v.dtype))
        deltas.append(delta)
    tape = mx.stack(deltas, axis=1)
    return mx.depends(mx.stack(ys, axis=1), tape), committed, tape  # one launch in the kernel, so one evaluation here


def reference_commit(state: mx.array, tk: mx.array, tg: mx.array, tdelta: mx.array, ncommit: mx.array) -> mx.array:
    """`state` after the first `ncommit` rows of the tape."""
    tk = _per_value_head(tk, tdelta)
    kept = (mx.arange(tdelta.shape[1]) < ncommit[:, None])[..., None, None, None]  # [B, P, 1, 1, 1]
    for t in range(tdelta.shape[1]):
        stepped = state * tg[:, t, :, None, None] + tk[:, t, :, None] * tdelta[:, t, ..., None]
        state = mx.where(kept[:, t], stepped, state)
    return state


def _per_value_head(keys: mx.array, values: mx.array) -> mx.array:
    """[B, T, Hk, Dk] -> [B, T, Hv, Dk]"""
    groups = values.shape[2] // keys.shape[2]
    return mx.repeat(keys, groups, axis=2) if groups > 1 else keys


def why_not(*arguments: mx.array) -> str | None:
    q, k, v, g, beta, state, tk, tg, tdelta, _ = arguments
    key_heads, size = k.shape[2:]
    heads, values = v.shape[2:]
    if size != DK:
        return f"key heads of {size} channels (the kernel's have {DK})"
    if values % _ROWS or heads % key_heads:
        return f"{heads} value heads of {values} channels over {key_heads} key heads"
    if v.dtype not in _TYPES or {q.dtype, k.dtype, tk.dtype} != {v.dtype}:
        return f"q, k, v and the tape's keys are {q.dtype}, {k.dtype}, {v.dtype} and {tk.dtype}"
    narrow = [a.dtype for a in (g, beta, state, tg, tdelta) if a.dtype != mx.float32]
    return f"gates, state or tape of {narrow[0]} instead of float32" if narrow else None


def launch(run: Runner, *arguments: mx.array) -> Arrays:
    return _launch(run, KERNEL, arguments[:5], arguments[5:])


def commit(run: Runner, state: mx.array, tk: mx.array, tg: mx.array, tdelta: mx.array, ncommit: mx.array) -> mx.array:
    """The state that the next block's launch would begin with."""
    return _launch(run, COMMIT, (), (state, tk, tg, tdelta, ncommit))[0]


def _launch(run: Runner, kernel: MetalKernel, block: Arrays, tape: Arrays) -> Arrays:
    state, tk = tape[:2]
    batch, heads, values, _ = state.shape
    outputs = [(state.shape, mx.float32)]
    if block:
        v = block[2]
        outputs = [(v.shape, v.dtype), *outputs, (v.shape, mx.float32)]
    call = Launch(
        inputs=(*block, *tape),
        shapes=tuple(shape for shape, _ in outputs),
        dtypes=tuple(dtype for _, dtype in outputs),
        grid=(32, values // _ROWS, batch * heads),
        threadgroup=(32, 1 if values // _ROWS % 2 else 2, 1),
        template=(("T", tk.dtype), ("Hk", tk.shape[2]), ("Hv", heads), ("Dv", values)),
    )
    return tuple(run(kernel, call))


def case(*arguments: mx.array) -> Case:
    _, k, v = arguments[:3]
    return case_of(v.dtype, k.shape[2], v.shape[2], v.shape[3], k.shape[3])


def case_of(dtype: mx.Dtype, key_heads: int, value_heads: int, value_size: int, key_size: int = DK) -> Case:
    sizes = (("Hk", key_heads), ("Hv", value_heads), ("Dv", value_size), ("Dk", key_size))
    return Case("gdn_verify", name_of(dtype), sizes)


def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
    """A block of `rows` after one of as many, of which the last row was rejected.

    hard: keys that repeat, decays next to 0 and 1, gates of 0 and 1, a large state.
    """
    size, dtype = case.size, case.type
    keys = iter(mx.random.split(mx.random.key(seed), 12))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    def unit(heads: int, scale: float) -> mx.array:
        a = normal(1, 1 if hard else rows, heads, size["Dk"])
        a = mx.broadcast_to(a, (1, rows, heads, size["Dk"]))
        return (a * mx.rsqrt((a * a).sum(-1, keepdims=True)) * scale).astype(dtype)

    def gate(low: float, high: float) -> mx.array:
        uniform = mx.random.uniform(shape=(1, rows, size["Hv"]), key=next(keys))
        return mx.where(uniform < 0.5, low, high) if hard else low + (high - low) * uniform

    values = (1, rows, size["Hv"], size["Dv"])
    block = (unit(size["Hk"], size["Dk"] ** -0.5), unit(size["Hk"], 1.0), normal(*values).astype(dtype))
    gates = (gate(1e-6, 1.0), gate(0.0, 1.0)) if hard else (gate(0.8, 1.0), gate(0.1, 0.9))
    state = normal(1, size["Hv"], size["Dv"], size["Dk"]) * (100 if hard else 0.1)
    tape = (unit(size["Hk"], 1.0), gate(0.8, 1.0), normal(*values))
    return Call((*block, *gates, state, *tape, mx.array([rows - 1], mx.int32)))


def first_rows(call: Call, rows: int) -> Call:
    """Outputs are by row in y and delta; state_out is before the block and depends on no row of it."""
    q, k, v, g, beta, *rest = call.arguments
    return Call((*(a[:, :rows] for a in (q, k, v, g, beta)), *rest))


def floor(*arguments: mx.array) -> dict[str, int]:
    """The state, values and changes once; keys for every eight value rows that share them; of the tape, kept rows."""
    q, k, v, g, beta, state, tk, tg, tdelta, ncommit = arguments
    heads, values = v.shape[2:]
    groups = values // _ROWS  # SIMD-groups of a value head
    shared = groups * heads // k.shape[2]
    counts: list[int] = ncommit.tolist()  # type: ignore[assignment]
    kept, batch, rows = sum(counts), len(counts), tdelta.shape[1]
    return {
        "q": q.nbytes * shared,
        "k": k.nbytes * shared,
        "v": v.nbytes,
        "g": g.nbytes * groups,
        "beta": beta.nbytes * groups,
        "state": state.nbytes,
        "tk": tk.nbytes // (batch * rows) * kept * shared,
        "tg": tg.nbytes // (batch * rows) * kept * groups,
        "tdelta": tdelta.nbytes // (batch * rows) * kept,
        "ncommit": 4 * batch * heads * groups,
    }


def stock(*arguments: mx.array) -> Arrays:
    """What a block costs without this kernel on Metal: mlx_lm's launch for it, and one for the rows that were kept.

    Stands in for time only: the second launch is given the tape's changes where mlx_lm would have its values.
    """
    q, k, v, g, beta, state, tk, tg, tdelta, _ = arguments
    _, committed = gated_delta_kernel(tk, tk, tdelta, tg, tg, state)
    y, _ = gated_delta_kernel(q, k, v, g, beta, committed)
    return y, committed


OPERATION = Operation(
    name="gdn_verify",
    kernels=(KERNEL, COMMIT),
    why_not=why_not,
    reference=reference,
    launch=launch,
    case=case,
    sample=sample,
    first_rows=first_rows,
    floor=floor,
    stock=stock,
)
