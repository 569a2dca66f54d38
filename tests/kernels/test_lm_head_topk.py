"""The best tokens of every row straight from the head's weights, against materialised logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.kernels.choice import STOCK
from dflash_mlx.kernels.lm_head_topk import OPERATION, Best, Head, reference
from dflash_mlx.kernels.modules.head import head_of
from dflash_mlx.kernels.operation import Call, Case, Runner
from tests.kernels.checks import check, check_bytes, check_first_rows, numbers, runner, same_bits

UNIT = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-6}  # of the largest logit: a few roundings
LAYOUTS = [(0, 1), (4, 32), (4, 64), (8, 64), (8, 128)]  # bits (0: dense), group


def sample_of(
    vocab: int,
    width: int,
    rows: int,
    k: int,
    *,
    layout: tuple[int, int] = (4, 32),
    dtype: str = "float32",
    hard: bool = False,
    seed: int = 0,
    **parts: bool,
) -> Best:
    """`parts`: which of mask, cap and lse it has."""
    bits, group = layout
    sizes = dict(vocab=vocab, hidden=width, bits=bits, group=group, k=k, mask=False, cap=False, lse=False) | parts
    sizes["rows"] = 16
    case = Case("lm_head_topk", dtype, tuple((name, int(size)) for name, size in sizes.items()))
    (best,) = OPERATION.sample(case, rows, seed, hard).arguments
    if hard:
        return best
    # Not whole numbers, which `whole_numbers` is for.
    hidden = mx.random.normal(best.hidden.shape, key=mx.random.key(seed)).astype(best.hidden.dtype)
    return replace(best, hidden=hidden)


def whole_numbers(
    vocab: int, width: int, rows: int, k: int, bits: int, dtype: str, bitmask: mx.array | None = None
) -> Best:
    """Weights and rows of small whole numbers: sums have no rounding in any type or order, and many logits tie."""
    rng = np.random.default_rng(vocab + rows)
    hidden = mx.array(rng.integers(-1, 2, (rows, width)) * (rng.random((rows, width)) < 0.3)).astype(getattr(mx, dtype))
    values = rng.integers(0, 16, (vocab, width))
    if not bits:
        return Best(hidden, Head(mx.array(values - 8).astype(hidden.dtype)), k, bitmask)
    lanes = values.reshape(vocab, -1, 32 // bits) << np.arange(0, 32, bits)
    ones = mx.ones((vocab, width // 32), hidden.dtype)
    return Best(hidden, Head(mx.array(lanes.sum(-1), mx.uint32), ones, -8 * ones, bits, 32), k, bitmask)


def weights_of(head: Head) -> tuple[np.ndarray, np.ndarray]:
    """[V, H] in float64 from the bits: codes times scales, and biases; or the weights, and zeros."""
    weight = numbers(head.weight)
    if not head.bits:
        return weight, np.zeros_like(weight)
    codes = weight[:, :, None] >> np.arange(0, 32, head.bits, dtype=np.uint32) & (2**head.bits - 1)
    scales, biases = (np.repeat(numbers(a), head.group_size, axis=1) for a in (head.scales, head.biases))
    return codes.reshape(len(weight), -1) * scales, biases


def logits_of(best: Best) -> np.ndarray:
    """[M, V] in float64, unrounded; forbidden ones are -inf."""
    z, cap = numbers(best.hidden) @ sum(weights_of(best.head)).T, best.softcap
    z = z if cap is None else np.tanh(z / cap) * cap
    if best.bitmask is None:
        return z
    allowed = np.unpackbits(np.array(best.bitmask).view(np.uint8), axis=1, bitorder="little")[:, : z.shape[1]]
    return np.where(allowed, z, -np.inf)


def largest(z: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of each row, of equal ones the lowest index first."""
    ids = np.lexsort((np.broadcast_to(np.arange(z.shape[1]), z.shape), -z), axis=1)[:, :k]
    return np.take_along_axis(z, ids, axis=1), ids


def assert_best(run: Runner, best: Best, tolerance: float) -> None:
    """Up to rounding: the ids have these logits, which descend, and none that was left out is better."""
    z, k = logits_of(best), best.k
    values, ids, *lse = OPERATION.launch(run, best)
    chosen = np.take_along_axis(z, np.array(ids), axis=1)
    added_up = np.abs(numbers(best.hidden)) @ sum(map(np.abs, weights_of(best.head))).T
    allowed = tolerance * max(1.0, float(np.abs(z[np.isfinite(z)]).max())) + 2.0**-23 * float(added_up.max())
    near = np.isclose(numbers(values), chosen, rtol=0, atol=allowed)
    assert near.all(), f"{(~near).sum()} values are not the logits of their ids"
    assert (numbers(values)[:, 1:] <= numbers(values)[:, :-1]).all()
    assert all(len(set(row)) == k for row in np.array(ids).tolist())
    assert (largest(z, k)[0][:, -1] - allowed <= chosen[:, -1]).all()
    for got in lse:
        top = z.max(1, keepdims=True)
        assert np.allclose(numbers(got), (np.log(np.exp(z - top).sum(1, keepdims=True)) + top)[:, 0], atol=allowed)


def exact_witness(best: Best) -> Callable[[Runner], None]:
    def run_and_compare(run: Runner) -> None:
        for got, want in zip(OPERATION.launch(run, best), largest(logits_of(best), best.k), strict=True):
            assert np.array_equal(numbers(got), want)

    return run_and_compare


NONE_ALLOWED = mx.zeros((2, 3), mx.uint32)
# Two tiles, the last one not full; lists of one and of four, also where all is forbidden; a soft cap with a mask and
# the sum; both row counts.
WITNESSES: list[Callable[[Runner], None]] = [
    exact_witness(whole_numbers(70, 32, 2, 1, 0, "float32")),
    exact_witness(whole_numbers(67, 64, 2, 4, 4, "float32")),
    exact_witness(whole_numbers(66, 32, 2, 1, 0, "float32", NONE_ALLOWED)),
    exact_witness(whole_numbers(66, 32, 2, 4, 4, "float32", NONE_ALLOWED)),
    lambda run: assert_best(run, sample_of(66, 64, 2, 4, mask=True, cap=True, lse=True), 1e-5),
    lambda run: assert_best(run, sample_of(130, 128, 9, 1, layout=(8, 64)), 1e-5),
]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_of_equal_logits_the_lowest_ids_are_chosen(dtype: str, bits: int):
    """In bfloat16 many logits are equal: another choice than `mx.argmax` makes would be another draft."""
    for rows, k, vocab in ((1, 1, 65), (5, 4, 130), (8, 3, 64), (16, 16, 150), (9, 8, 71)):
        best = whole_numbers(vocab, 64, rows, k, bits, dtype)
        z = logits_of(best)
        assert k == 1 or len(np.unique(z[0])) < vocab  # there are ties
        check(OPERATION, Call((best,)), largest(z, k), rtol=0, atol=0)
        assert bits or mx.array_equal(reference(best)[1][:, 0], mx.argmax(best.head.logits(best.hidden), 1))


@pytest.mark.parametrize("order", ["ascending", "descending", "last place"])
@pytest.mark.parametrize("k", [1, 4, 8, 16])
def test_lists_fill_up_whatever_order_the_logits_come_in(k: int, order: str):
    """Each better than all before it, the last token best; each worse; or each only better than the list's last."""
    ids = mx.arange(60)  # of one tile, not full
    logits = {"ascending": ids, "descending": -ids, "last place": mx.where(ids < k - 1, 1000 - ids, ids)}[order]
    for rows in (2, 9):
        weight = mx.zeros((60, 32)).at[:, 0].add(logits)
        best = Best(mx.ones((rows, 32)), Head(weight), k)
        check(OPERATION, Call((best,)), largest(logits_of(best), k), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("hard", [False, True], ids=["random", "hard"])
def test_values_are_the_logits_of_the_ids_and_none_is_better(dtype: str, layout: tuple[int, int], hard: bool):
    """A code from the wrong bits or a scale of the wrong group would propose tokens at random."""
    for rows, k, vocab, width in ((2, 1, 129, 128), (7, 4, 66, 256), (11, 8, 65, 128), (16, 16, 200, 128)):
        best = sample_of(vocab, width, rows, k, layout=layout, dtype=dtype, hard=hard, seed=rows)
        assert OPERATION.why_not(best) is None
        assert_best(runner(rows), best, UNIT[dtype])


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("k", [1, 5])
def test_mask_cap_and_sum_are_of_the_logits_that_are_compared(dtype: str, k: int):
    """A grammar would be broken by a forbidden token; a confidence would be of other logits than the draft's."""
    for rows in (3, 16):
        best = sample_of(131, 64, rows, k, dtype=dtype, mask=True, cap=True, lse=True, hard=rows == 3, seed=k)
        assert_best(runner(1), best, UNIT[dtype])
        values, _, lse = OPERATION.launch(runner(0), best)
        assert (values[:, 0] <= lse).all().item()
        for got, again in zip(OPERATION.launch(runner(2), best)[::2], (values, lse), strict=True):
            same_bits(got, again, "another order of threads")


def test_where_almost_everything_is_forbidden_the_lowest_forbidden_ids_fill_up():
    """Ids that are no tokens would be embedded next."""
    mask = mx.array([[0, 1 << 5, 0, 0], [0, 0, 0, 0]], mx.uint32)
    best = replace(whole_numbers(100, 32, 2, 4, 4, "float32", mask), lse=True)
    values, ids, lse = check(OPERATION, Call((best,)), rtol=0, atol=0)
    assert ids.tolist() == [[37, 0, 1, 2], [0, 1, 2, 3]]
    assert lse.tolist() == [values[0, 0].item(), -np.inf]


def test_nan_and_infinity_have_a_place_in_the_order():
    """Comparisons with NaN are all false: a row could end up with no token."""
    best = whole_numbers(70, 32, 3, 4, 0, "float32")
    hidden = mx.where(mx.arange(3)[:, None] == 1, mx.nan, best.hidden)
    weight = mx.where(mx.arange(70)[:, None] == 66, mx.inf, best.head.weight)
    best = Best(mx.abs(hidden) + 1, Head(weight), best.k, lse=True)
    _, ids, lse = check(OPERATION, Call((best,)), rtol=0, atol=0)
    assert ids[1].tolist() == [0, 1, 2, 3] and ids[0, 0].item() == 66
    assert lse.tolist() == [np.inf, -np.inf, np.inf]


@pytest.mark.parametrize("layout", [(0, 1), (4, 32)], ids=str)
def test_a_row_does_not_depend_on_how_many_there_are(layout: tuple[int, int]):
    """A draft would change with the block size."""
    best = sample_of(130, 128, 16, 4, layout=layout, dtype="bfloat16", mask=True, lse=True)
    check_first_rows(OPERATION, Call((best,)), (1, 2, 8, 9))


def test_a_large_vocabulary_is_cut_into_wider_tiles():
    """Tile borders in the wrong place would lose tokens, and a thousand tiles are enough."""
    weight = mx.random.randint(-3, 4, (65_537, 32), key=mx.random.key(0)).astype(mx.float32)
    best = Best(mx.array([[1.0, -2.0, 0.5, 4.0] * 8]), Head(weight), 4)
    for got, want in zip(OPERATION.launch(runner(1), best), largest(logits_of(best), 4), strict=True):
        assert np.array_equal(numbers(got), want)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [2, 16])
def test_every_weight_is_read_once(layout: tuple[int, int], rows: int):
    """The head is the largest matrix of a draft: reading it once is what this kernel is for."""
    best = sample_of(150, 128, rows, 4, layout=layout, dtype="bfloat16", mask=True, lse=True)
    check_bytes(OPERATION, Call((best,)))


@pytest.mark.parametrize(("rows", "k", "lse", "per_pass"), [(8, 16, True, 32), (9, 8, False, 32), (16, 16, False, 16)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pass_over_the_rows_serves_many_tokens(layout: tuple[int, int], rows: int, k: int, lse: bool, per_pass: int):
    """They come from caches, but there are gigabytes of it where every pass serves a few: counted load by load."""
    best = sample_of(128, 256, rows, k, layout=layout, dtype="bfloat16", lse=lse)
    head = best.head
    scales = 0 if head.scales is None else 4 * (head.scales.nbytes + head.biases.nbytes)  # of the four lanes of a row
    block = 2 * 256 * (8 if rows <= 8 else 16)  # rows beyond the last are read as well
    search, _ = check_bytes(OPERATION, Call((best,)))
    assert search.loaded <= 1.05 * (head.weight.nbytes + scales + block * 128 // per_pass)


def test_classes_of_rows_are_raced_on_their_own():
    """Where the kernel wins with 16 rows and loses with 8, a block of 8 has to stay with MLX."""
    best = sample_of(70, 64, 16, 4)
    cases = {rows: OPERATION.case(best.first(rows)) for rows in range(2, 17)}
    ends = [OPERATION.widths(case) for case in dict.fromkeys(cases.values())]
    assert ends == [(2, 4), (5, 8), (9, 16)]
    assert all(few <= rows <= most for rows, case in cases.items() for few, most in [OPERATION.widths(case)])


@pytest.mark.parametrize("tied", [False, True], ids=["head", "embedding"])
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_has_the_bits_of_the_head_it_replaces(tied: bool, bits: int, dtype: str):
    """A draft that runs with kernels switched on, but on none, has to propose the same tokens."""
    mx.random.seed(3)
    module = nn.Embedding(90, 64) if tied else nn.Linear(64, 90, bias=False)
    module.set_dtype(getattr(mx, dtype))
    if bits:
        module = module.to_quantized(group_size=32, bits=bits)
    head = head_of(module, STOCK)
    assert head is not None
    hidden = mx.random.normal((7, 64)).astype(getattr(mx, dtype))
    logits = (module.as_linear if tied else module)(hidden[None])[0]
    same_bits(head.logits(hidden), logits, "logits")
    values, ids = reference(Best(hidden, head, 1))
    same_bits(ids[:, 0], mx.argmax(logits, axis=-1).astype(mx.int32), "best")
    same_bits(values[:, 0], logits.max(axis=-1).astype(mx.float32), "its logit")
    assert OPERATION.why_not(Best(hidden, head, 1)) is None
    assert_best(runner(0), Best(hidden, head, 4), UNIT[dtype])


def test_what_the_kernel_does_not_know_goes_to_the_reference():
    """A bias that is forgotten or a code of three bits read as four would choose other tokens."""
    best = whole_numbers(70, 32, 2, 4, 4, "float32")
    assert head_of(nn.Linear(64, 70), STOCK) is None
    assert head_of(nn.Linear(64, 70, bias=False).to_quantized(32, 4, mode="mxfp4"), STOCK) is None
    assert "17 rows" in (OPERATION.why_not(replace(best, hidden=mx.zeros((17, 32)))) or "")
    assert "48 values" in (OPERATION.why_not(Best(mx.zeros((2, 48)), Head(mx.zeros((70, 48))), 4)) or "")
    assert "20 tokens" in (OPERATION.why_not(replace(best, k=20)) or "")
    assert "bfloat16" in (OPERATION.why_not(replace(best, hidden=best.hidden.astype(mx.bfloat16))) or "")
    three = head_of(nn.Linear(64, 70, bias=False).to_quantized(32, 3), STOCK)
    assert three is not None and "3 bits" in (OPERATION.why_not(Best(mx.zeros((2, 64)), three, 4)) or "")
