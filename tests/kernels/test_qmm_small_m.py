"""The quantised product for few rows, against MLX's own and against float64."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.kernels.operation import Call, Case, Runner
from dflash_mlx.kernels.qmm_small_m import OPERATION, _layout, races_of
from tests.kernels.checks import SEEDS, check, check_bytes, check_first_rows, runner

ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of the result, at most
LAYOUTS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def call_of(
    n: int,
    k: int,
    rows: int,
    *,
    bits: int = 4,
    group: int = 64,
    dtype: str = "float32",
    seed: int = 0,
    hard: bool = False,
) -> Call:
    sizes = (("n", n), ("k", k), ("group_size", group), ("bits", bits), ("rows", 16))
    return OPERATION.sample(Case("qmm_small_m", dtype, sizes), rows, seed, hard)


def exact(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """x . dequant(W)^T in float64, from the bits of the packed weight, and the size of what was added up."""
    x, w, scales, biases, group, bits = call.arguments
    places = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (np.array(w)[:, :, None] >> places) & np.uint32(2**bits - 1)  # lowest bits first
    codes = codes.reshape(len(w), -1).astype(np.float64)
    scale, bias = (np.repeat(float64(a), group, axis=1) for a in (scales, biases))
    weight, size = codes * scale + bias, np.abs(codes * scale) + np.abs(bias)
    return float64(x) @ weight.T, np.abs(float64(x)) @ size.T


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_close(run: Runner, call: Call) -> None:
    """Within one rounding of the result and the float32 roundings of what was added up, by both references.

    MLX's is asked for float32: on a CPU it adds up in the activations' type, which is far less exact than the kernel.
    """
    x, w, scales, biases, *layout = call.arguments
    (got,) = OPERATION.launch(run, *call.arguments)
    x32, scales32, biases32 = (a.astype(mx.float32) for a in (x, scales, biases))
    (stock,) = OPERATION.reference(x32, w, scales32, biases32, *layout)
    want, size = exact(call)
    allowed = ROUNDING[str(x.dtype).removeprefix("mlx.core.")] * np.abs(want) + 2e-6 * size + 1e-7
    assert got.shape == stock.shape == want.shape and got.dtype == x.dtype
    for reference in (want, float64(stock)):
        assert (np.abs(float64(got) - reference) <= allowed).all()


def small(n: int, k: int, rows: int, bits: int, group: int) -> Callable[[Runner], None]:
    return lambda run: assert_close(run, call_of(n, k, rows, bits=bits, group=group))


# One tile and two, one block of 8 rows and two, words of half a lane's codes and of more, one slice and two.
WITNESSES: list[Callable[[Runner], None]] = [
    small(16, 128, 3, 4, 32),
    small(8, 512, 10, 8, 64),
    small(24, 64, 2, 4, 64),
]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
@pytest.mark.parametrize("hard", [False, True], ids=["random", "hard"])
def test_every_layout_of_a_quantised_weight_is_read_right(dtype: str, bits: int, group: int, hard: bool):
    """A code taken from the wrong bits, or a scale of the wrong group, would change every answer of such a model."""
    for n, k, rows in ((16, 256, 5), (8, 512, 11)):
        call = call_of(n, k, rows, bits=bits, group=group, dtype=dtype, hard=hard)
        for seed in SEEDS:
            assert_close(runner(seed), call)


@pytest.mark.parametrize("n, k", [(8, 64), (24, 192), (80, 128), (16, 1024), (64, 512)])
def test_it_is_what_mlx_computes_whatever_the_thread_order(n: int, k: int):
    """The kernel stands in for mx.quantized_matmul; a result that depended on the schedule would not repeat."""
    call = call_of(n, k, 6)
    check(OPERATION, call, [exact(call)[0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n, k", [(16, 128), (8, 512)])
def test_a_row_has_the_same_bits_however_many_rows_there_are(n: int, k: int, dtype: str):
    """Verification in blocks of other widths would otherwise choose other tokens at near-ties."""
    call = call_of(n, k, 16, dtype=dtype, hard=True)
    check_first_rows(OPERATION, call, range(1, 17))
    for rows in range(1, 17):
        assert_close(runner(), OPERATION.first_rows(call, rows))


def test_a_row_is_not_touched_by_a_neighbour_that_is_not_a_number():
    """One broken position would spoil a whole block, and rows that fill up a tile are copies of the last one."""
    call = call_of(16, 128, 11)
    x, *rest = call.arguments
    (want,) = OPERATION.launch(runner(), *call.arguments)
    x = mx.where(mx.arange(11)[:, None] == 10, mx.nan, x)
    (got,) = OPERATION.launch(runner(), x, *rest)
    assert mx.array_equal(got[:, :10], want[:, :10])
    assert mx.isnan(got[:, 10]).all()


def test_views_and_leading_axes_are_taken_as_they_come():
    """The activations of an attention's output are a transposed view, and those of a batch have one axis more."""
    call = call_of(16, 128, 6)
    x, *rest = call.arguments
    (want,) = OPERATION.launch(runner(), *call.arguments)
    wide = mx.concatenate([x[..., :1], x, x], axis=-1)
    for view in (wide[..., 1:129], mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2), x.reshape(2, 3, 128)):
        (got,) = OPERATION.launch(runner(), view, *rest)
        assert got.shape == (*view.shape[:-1], 16)
        assert mx.array_equal(got.reshape(want.shape), want)


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize(("n", "k", "bits"), [(32, 128, 4), (24, 64, 8), (16, 1024, 4)])
def test_weights_are_fetched_once(n: int, k: int, bits: int, rows: int):
    """The kernel exists for that: MLX's own reads them again for every few rows."""
    call = call_of(n, k, rows, bits=bits)
    check_bytes(OPERATION, call)


def test_the_slices_of_k_depend_on_the_shape_only():
    """A number that followed the rows or the chip would change the order of sums, and with it bits."""
    assert _layout(8, 64, 64) == (1, 1, 1)
    assert _layout(1024, 5120, 64) == (2, 4, 8)
    assert _layout(12288, 4096, 64) == (2, 4, 1)
    assert _layout(17408, 5120, 64) == (4, 4, 1)
    assert _layout(151936, 4096, 128) == (4, 4, 1)
    assert _layout(151928, 4096, 128) == (1, 1, 1)
    for n, k in ((8, 8192), (24, 4096), (256, 1024)):
        tiles, simdgroups, slices = _layout(n, k, 64)
        assert n % (8 * tiles * simdgroups) == 0 and k // slices >= 256


def test_a_wide_weight_shares_its_reads_of_x_among_more_tiles():
    """The layout of heads and of the widest layers; small ones would leave a GPU half empty with it."""
    for rows in (8, 13):
        call = call_of(16384, 64, rows, bits=4, dtype="bfloat16")
        assert _layout(16384, 64, 64)[0] == 4
        assert_close(runner(1), call)
    check_bytes(OPERATION, call)


def test_rows_are_raced_in_classes_of_which_the_first_is_for_old_chips():
    """One verdict for 2 to 16 rows would open the kernel where MLX is faster, or close it where it pays."""
    for bits, ends in ((4, [(2, 4), (5, 8), (9, 16)]), (8, [(2, 5), (6, 8), (9, 16)])):
        _, w, *_ = call_of(16, 128, 4, bits=bits).arguments
        cases = races_of(w, mx.float32, 64, bits)
        assert [OPERATION.widths(case) for case in cases] == ends
        assert [OPERATION.newest(case) for case in cases] == [14, None, None]
        for rows in range(2, 17):
            (case,) = (case for case, (few, most) in zip(cases, ends, strict=True) if few <= rows <= most)
            assert OPERATION.case(*call_of(16, 128, rows, bits=bits).arguments) == case


def test_what_the_kernel_does_not_take_is_said():
    """A shape it would read wrongly has to go to MLX, with a reason that `doctor` can show."""
    good = call_of(16, 128, 4).arguments
    assert OPERATION.why_not(*good) is None
    x, w, scales, biases, *_ = good
    assert OPERATION.why_not(mx.zeros((1, 17, 128)), *good[1:]) == "17 rows are not 1 to 16"
    assert "of the activations' type" in OPERATION.why_not(x.astype(mx.bfloat16), *good[1:])
    assert "biases have to be there" in OPERATION.why_not(x, w, scales, None, 64, 4)
    assert "3 bits" in OPERATION.why_not(x, w, scales, biases, 64, 3)
    assert "12 x 128" in OPERATION.why_not(x, w[:12], scales[:12], biases[:12], 64, 4)
    assert "16 x 96" in OPERATION.why_not(x[..., :96], w[:, :12], scales[:, :3], biases[:, :3], 32, 4)


def test_the_reference_is_the_layers_own_product():
    """Grids pass with references swapped in because the bits are those of nn.QuantizedLinear."""
    import mlx.nn as nn

    layer = nn.QuantizedLinear(128, 24, bias=False, group_size=32, bits=8)
    layer.set_dtype(mx.bfloat16)
    x = mx.random.normal((1, 5, 128)).astype(mx.bfloat16)
    (got,) = OPERATION.reference(x, layer.weight, layer.scales, layer.biases, 32, 8)
    assert mx.array_equal(got, layer(x))
