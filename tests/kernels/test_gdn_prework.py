"""Convolution, activation, norms and gates in one launch: rounded where mlx_lm's operations round."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.kernels import gdn_prework
from dflash_mlx.kernels.gdn_prework import OPERATION
from dflash_mlx.kernels.operation import Call, Runner
from tests.kernels.checks import check, check_bytes, check_first_rows, close, numbers, runner, same_bits

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Beside float64 without any rounding in between, and beside the operations, which round after the same steps: a sum
# that is off by one place of float32 may fall on the other side of a place of the type, and so may the next step.
UNROUNDED = {mx.float32: 1e-5, mx.float16: 8e-3, mx.bfloat16: 6e-2}
ROUNDED = {mx.float32: 5e-6, mx.float16: 4e-3, mx.bfloat16: 3e-2}


def call_of(
    dtype: mx.Dtype,
    rows: int,
    heads: tuple[int, int] = (1, 2),
    values: int = 32,
    width: int = 4,
    seed: int = 0,
    hard: bool = False,
) -> Call:
    return OPERATION.sample(gdn_prework.case_of(dtype, *heads, values, width), rows, seed, hard)


def batched(call: Call, other: Call, *counts: int) -> Call:
    """Two sequences of the same layer."""
    whole = list(call.arguments)
    for index in (0, 1, 4, 5):
        whole[index] = mx.concatenate([call.arguments[index], other.arguments[index]])
    whole[2] = mx.array(counts, mx.int32)
    return Call(tuple(whole), call.options)


def expected(call: Call) -> list[np.ndarray]:
    """In float64, without any rounding."""
    qkv, win, kept, conv_w, a, b, A_log, dt_bias = (numbers(x) for x in call.arguments)
    heads, size = call.options["key_heads"], call.options["key_size"]
    batch, rows, _ = qkv.shape
    width = conv_w.shape[1]
    window = np.stack([win[i, kept[i] : kept[i] + width - 1] for i in range(batch)])
    x = np.concatenate([window, qkv], axis=1)
    summed = sum(x[:, w : w + rows] * conv_w[:, w, 0] for w in range(width))
    u = summed / (1 + np.exp(-summed))
    q, k, v = np.split(u, [heads * size, 2 * heads * size], axis=-1)
    q, k = (y.reshape(batch, rows, heads, size) for y in (q, k))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    g = np.exp(-np.exp(A_log) * np.logaddexp(0, a + dt_bias))
    return [q * size**-0.5, k, v.reshape(batch, rows, a.shape[2], -1), g, 1 / (1 + np.exp(-b)), x]


def meets(call: Call, outputs: list[mx.array], tolerance: float) -> None:
    for index, (output, value) in enumerate(zip(outputs, expected(call), strict=True)):
        size = float(np.abs(value).max())
        close(numbers(output), value, tolerance, tolerance * size, f"output {index} beside numpy")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_every_width_meet_both_references(dtype: mx.Dtype) -> None:
    """A hybrid would verify with other numbers than plain decoding has."""
    for rows in (1, 2, 3, 4, 5, 8, 13, 16, 17):
        for hard in (False, True):
            call = call_of(dtype, rows, seed=rows, hard=hard)
            assert OPERATION.why_not(*call.arguments, **call.options) is None
            outputs = check(OPERATION, call, rtol=ROUNDED[dtype], atol=ROUNDED[dtype] / 8)
            meets(call, outputs, UNROUNDED[dtype])


def test_heads_values_and_convolutions_of_other_sizes() -> None:
    """Channels past the end would be written, or a head take another's."""
    for heads, values, width in (((1, 1), 128, 4), ((2, 2), 64, 3), ((1, 3), 40, 2), ((2, 4), 256, 4), ((1, 40), 8, 4)):
        call = call_of(mx.float32, 3, heads, values, width)
        meets(call, check(OPERATION, call, rtol=5e-6, atol=1e-6), 1e-5)


def test_the_window_starts_where_the_block_before_was_cut() -> None:
    """Rejected rows would be convolved, or kept ones forgotten: from the first to the last, in each sequence."""
    for counts in ((0, 4), (1, 3), (2, 2)):
        call = batched(call_of(mx.float32, 4), call_of(mx.float32, 4, seed=1), *counts)
        meets(call, check(OPERATION, call, rtol=5e-6, atol=1e-6), 1e-5)


def test_a_window_that_another_block_left_leads_to_the_same_bits_as_single_rows() -> None:
    """What is left of the block before is its raw rows: nothing else remembers how many of them were kept."""
    for run in (lambda c: OPERATION.launch(runner(), *c.arguments, **c.options), lambda c: reference(c)):
        first, second = call_of(mx.bfloat16, 5), call_of(mx.bfloat16, 3, seed=1)
        left = run(first)[5]
        for count in range(6):
            kept = mx.array([count], mx.int32)
            whole = run(with_window(second, left, kept))
            window = mx.concatenate([first.arguments[1][:, 4:7], first.arguments[0]], axis=1)[:, count : count + 3]
            for t in range(3):
                single = run(with_window(row(second, t), window, mx.array([0], mx.int32)))
                for index in range(5):
                    same_bits(single[index][:, 0], whole[index][:, t], f"output {index}, row {t} after {count}")
                window = single[5][:, 1:]


def reference(call: Call) -> tuple[mx.array, ...]:
    return OPERATION.reference(*call.arguments, **call.options)


def with_window(call: Call, window: mx.array, kept: mx.array) -> Call:
    """The same layer for each: the convolution and the gates of a sample of seed 0."""
    layer = call_of(mx.bfloat16, 1).arguments
    qkv, _, _, _, a, b = call.arguments[:6]
    return Call((qkv, window, kept, layer[3], a, b, *layer[6:]), call.options)


def row(call: Call, t: int) -> Call:
    arguments = list(call.arguments)
    for index in (0, 4, 5):
        arguments[index] = arguments[index][:, t : t + 1]
    return Call(tuple(arguments), call.options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_after_it(dtype: mx.Dtype) -> None:
    check_first_rows(OPERATION, call_of(dtype, 17), (1, 2, 8, 16))


def test_gates_in_float32_over_activations_in_half_are_computed_in_float32() -> None:
    """Checkpoints keep A_log, some also dt_bias, wider than the activations."""
    call = call_of(mx.bfloat16, 3)
    wide = Call((*call.arguments[:7], call.arguments[7].astype(mx.float32)), call.options)
    g = check(OPERATION, wide, rtol=3e-2, atol=3e-3)[3]
    close(numbers(g), expected(wide)[3], 1e-5, 1e-6, "g beside numpy")
    narrow = Call((*call.arguments[:6], call.arguments[6].astype(mx.bfloat16), call.arguments[7]), call.options)
    check(OPERATION, narrow, rtol=3e-2, atol=3e-3)


def test_rounding_follows_the_operations_of_metal_step_by_step() -> None:
    """Without it hidden states drift. On Metal, unlike on a CPU, each step of a sigmoid rounds (MLX's unary_ops.h)."""
    for dtype in DTYPES[1:]:
        call = call_of(dtype, 8, (2, 4), 64)
        outputs = OPERATION.launch(runner(), *call.arguments, **call.options)
        for index, (ours, wanted) in enumerate(zip(outputs, rounded(call), strict=True)):
            equal = mx.isclose(ours, wanted, rtol=1e-5, atol=0).astype(mx.float32).mean().item()
            assert equal > 0.99, (dtype, index, equal)  # where a float32 step differs, so may a rounding


def rounded(call: Call) -> list[mx.array]:
    """In float32 operations, each rounded to the type of the activations."""
    qkv, win, kept, conv_w, a, b, A_log, dt_bias = call.arguments

    def to(x: mx.array) -> mx.array:
        return x.astype(qkv.dtype).astype(mx.float32)

    def sigmoid(x: mx.array) -> mx.array:
        small = to(1 / to(1 + to(mx.exp(mx.abs(x)))))
        return mx.where(x < 0, small, to(1 - small))

    rows = qkv.shape[1]
    x = mx.concatenate([win[:, kept.item() : kept.item() + 3], qkv], axis=1).astype(mx.float32)
    u = to(sum(x[:, w : w + rows] * conv_w[:, w, 0].astype(mx.float32) for w in range(4)))
    u = to(u * sigmoid(u))
    heads = u[..., :512].reshape(1, rows, 4, 128)
    normed = to(heads * mx.rsqrt((heads * heads).mean(-1, keepdims=True) + 1e-6 / 128))
    q, k = to(normed[:, :, :2] / 128), to(normed[:, :, 2:] * to(mx.array(128**-0.5)))
    shifted = to(a.astype(mx.float32) + dt_bias.astype(mx.float32))
    softplus = to(mx.maximum(shifted, 0) + to(mx.log1p(to(mx.exp(-mx.abs(shifted))))))
    g = mx.exp(-mx.exp(A_log) * softplus)
    v = u[..., 512:].reshape(1, rows, 4, 64)
    same = [y.astype(qkv.dtype) for y in (q, k, v)]
    return [*same, g, sigmoid(b.astype(mx.float32)), x.astype(qkv.dtype)]


def test_arrays_that_are_views_of_others_are_read_as_they_are_meant() -> None:
    call = batched(call_of(mx.bfloat16, 3), call_of(mx.bfloat16, 3, seed=1), 1, 2)
    views = [mx.concatenate([x, x], axis=-1)[..., : x.shape[-1]] if x.ndim > 2 else x for x in call.arguments]
    views[1] = mx.concatenate([views[1], views[1]], axis=1)[:, : call.arguments[1].shape[1]]
    plain = OPERATION.launch(runner(), *call.arguments, **call.options)
    for index, pair in enumerate(zip(OPERATION.launch(runner(), *views, **call.options), plain, strict=True)):
        same_bits(*pair, f"output {index}")


def test_a_row_reads_its_own_window_once() -> None:
    for rows in (1, 2, 5):
        (count,) = check_bytes(OPERATION, call_of(mx.bfloat16, rows, (2, 4), 64))
        assert count.stored["win_out"] == (3 + rows) * 6 * 128 * 2


def test_what_the_kernel_does_not_take_is_refused_in_words() -> None:
    call = call_of(mx.bfloat16, 2)

    def refused(index: int, array: mx.array, size: int = 128) -> str:
        arguments = list(call.arguments)
        arguments[index] = array
        return OPERATION.why_not(*arguments, key_heads=1, key_size=size) or ""

    for size in (64, 256):
        assert f"key heads of {size} channels" in refused(0, call.arguments[0], size)
    assert "float32" in refused(1, call.arguments[1].astype(mx.float32))
    assert "gates of" in refused(7, call.arguments[7].astype(mx.int32))


def _witness(run: Runner) -> None:
    call = batched(call_of(mx.float32, 3), call_of(mx.float32, 3, seed=1), 2, 3)
    meets(call, list(OPERATION.launch(run, *call.arguments, **call.options)), 1e-5)


WITNESSES: list[Callable[[Runner], None]] = [_witness]


def test_the_witness_sees_nothing_wrong_with_the_kernel_as_it_is() -> None:
    _witness(runner())


def test_the_reference_takes_the_weight_of_a_convolution_as_mlx_has_it() -> None:
    """`conv_w` is `nn.Conv1d`'s own array."""
    call = call_of(mx.float32, 3)
    channels = call.arguments[0].shape[2]
    conv = nn.Conv1d(channels, channels, 4, groups=channels, bias=False)
    assert conv.weight.shape == call.arguments[3].shape
