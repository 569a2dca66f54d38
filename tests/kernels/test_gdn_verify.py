"""The gated delta rule with a tape: what a block leaves is, bit for bit, what its kept rows fed one by one leave."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.kernels import gdn_verify
from dflash_mlx.kernels.gdn_verify import OPERATION
from dflash_mlx.kernels.operation import Arrays, Call, Runner
from tests.kernels.checks import check, check_bytes, check_first_rows, close, numbers, runner, same_bits

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROUNDING = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.2e-2}  # of y; states and changes are float32 always


def call_of(
    dtype: mx.Dtype, rows: int, heads: tuple[int, int] = (1, 2), values: int = 8, seed: int = 0, hard: bool = False
) -> Call:
    return OPERATION.sample(gdn_verify.case_of(dtype, *heads, values), rows, seed, hard)


def batched(*calls: Call) -> Call:
    """Calls of one sequence each, as one call."""
    return Call(tuple(mx.concatenate(arrays) for arrays in zip(*(call.arguments for call in calls), strict=True)))


def keeping(call: Call, *counts: int) -> Call:
    return Call((*call.arguments[:-1], mx.array(counts, mx.int32)))


def expected(call: Call) -> list[np.ndarray]:
    """In float64, a head and a row at a time, as the paper writes it: S = S g (I - beta k k^T) + beta v k^T."""
    q, k, v, g, beta, state, tk, tg, tdelta, kept = (numbers(a) for a in call.arguments)
    batch, rows, heads, _ = v.shape
    y, committed, delta = np.zeros_like(v), state.copy(), np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            key_head = h * k.shape[2] // heads
            S = committed[b, h]
            for t in range(kept[b]):
                S *= tg[b, t, h]
                S += np.outer(tdelta[b, t, h], tk[b, t, key_head])
            S = S.copy()
            for t in range(rows):
                key = k[b, t, key_head]
                delta[b, t, h] = beta[b, t, h] * (v[b, t, h] - g[b, t, h] * S @ key)
                S = g[b, t, h] * S @ (np.eye(len(key)) - beta[b, t, h] * np.outer(key, key))
                S += beta[b, t, h] * np.outer(v[b, t, h], key)
                y[b, t, h] = S @ q[b, t, key_head]
    return [y, committed, delta]


def meets(call: Call, dtype: mx.Dtype, outputs: Arrays | list[mx.array]) -> None:
    """y as its type rounds, the rest as float32 does."""
    for index, (output, value) in enumerate(zip(outputs, expected(call), strict=True)):
        tolerance = ROUNDING[dtype] if index == 0 else 1e-5
        size = max(float(np.abs(value).max()), 1e-6)
        close(numbers(output), value, tolerance, tolerance * size, f"output {index} beside numpy")


def test_the_reference_is_the_gated_delta_rule() -> None:
    """Both standards would be wrong together."""
    for dtype in DTYPES:
        for hard in (False, True):
            call = batched(*(call_of(dtype, 5, (2, 4), 16, seed, hard) for seed in (0, 1)))
            for counts in ((0, 5), (3, 4)):
                kept = keeping(call, *counts)
                meets(kept, dtype, OPERATION.reference(*kept.arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_every_width_meet_both_references(dtype: mx.Dtype) -> None:
    """A hybrid would verify with other numbers than it was trained to give. Odd and even counts of SIMD-groups."""
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17):
        for hard in (False, True):
            call = call_of(dtype, rows, values=8 if rows % 2 else 16, seed=rows, hard=hard)
            assert OPERATION.why_not(*call.arguments) is None
            tolerance = ROUNDING[dtype] * (100 if hard else 1)  # of states of a hundred; `meets` measures by size
            meets(call, dtype, check(OPERATION, call, rtol=tolerance, atol=tolerance))


@pytest.mark.parametrize("values", [8, 24, 64, 128, 256])
def test_every_number_of_value_rows_and_shared_heads_is_served(values: int) -> None:
    """A group of value heads would read another group's keys, or a group of rows the wrong state."""
    for heads in ((1, 1), (2, 2), (1, 3), (2, 4)) if values < 128 else ((1, 2),):
        calls = [call_of(mx.float16, 2, heads, values, seed) for seed in (0, 1)]
        call = keeping(batched(*calls), 2, 1)
        meets(call, mx.float16, check(OPERATION, call, rtol=2e-3, atol=2e-3))


def test_arrays_that_are_views_of_others_are_read_as_they_are_meant() -> None:
    """Keys and values are slices of one projection."""
    call = keeping(batched(*(call_of(mx.bfloat16, 4, (2, 4), 8, seed) for seed in (0, 1))), 2, 4)

    def view(array: mx.array) -> mx.array:
        return mx.concatenate([array, array], axis=-1)[..., : array.shape[-1]] if array.ndim > 1 else array

    plain = OPERATION.launch(runner(), *call.arguments)
    views = OPERATION.launch(runner(), *map(view, call.arguments))
    for index, pair in enumerate(zip(views, plain, strict=True)):
        same_bits(*pair, f"output {index}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_after_it(dtype: mx.Dtype) -> None:
    """Greedy text would depend on the block size."""
    check_first_rows(OPERATION, call_of(dtype, 17), (1, 2, 8, 16))


Commit = Callable[..., mx.array]
WAYS = [
    pytest.param(lambda *a: OPERATION.launch(runner(), *a), lambda *a: gdn_verify.commit(runner(), *a), id="kernel"),
    pytest.param(OPERATION.reference, gdn_verify.reference_commit, id="reference"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("run", "commit"), WAYS)
def test_a_replayed_count_is_the_same_bits_as_rows_fed_one_by_one(
    run: Callable[..., Arrays], commit: Commit, dtype: mx.Dtype
) -> None:
    """A state would drift from the one that plain decoding has, for some counts only. Also what a flush gives."""
    first, second = (call_of(dtype, rows, (1, 2), 8, seed) for rows, seed in ((6, 1), (4, 2)))
    nothing = first.arguments[6:9]
    state = first.arguments[5]
    tape = run(*first.arguments[:6], *nothing, mx.array([0], mx.int32))
    same_bits(tape[1], state, "with no row kept the state")
    k, g, delta = first.arguments[1], first.arguments[3], tape[2]
    for count in range(7):
        kept = mx.array([count], mx.int32)
        y, committed, _ = run(*second.arguments[:5], state, k, g, delta, kept)
        same_bits(commit(state, k, g, delta, kept), committed, f"a flush of {count}")
        chain, fed, rows = nothing, state, []
        singles = [[a[:, t : t + 1] for a in first.arguments[:5]] for t in range(count)]
        singles += [[a[:, t : t + 1] for a in second.arguments[:5]] for t in range(4)]
        for index, single in enumerate(singles):
            out, fed, change = run(*single, fed, *chain, mx.array([min(index, 1)], mx.int32))
            chain = (single[1], single[3], change)
            rows.append(out)
            if index == count:
                same_bits(committed, fed, f"the state after {count} rows")
        same_bits(y, mx.concatenate(rows[count:], axis=1), f"the block after {count} rows")


def test_the_state_is_read_once_and_the_rejected_part_of_the_tape_not_at_all() -> None:
    """The kernel would cost what it was built to save."""
    for counts in ((0, 1), (4, 2)):
        call = batched(*(call_of(mx.bfloat16, 4, (2, 4), 16, seed) for seed in (0, 1)))
        (count,) = check_bytes(OPERATION, keeping(call, *counts))
        state = call.arguments[5].nbytes
        assert count.fetched["state"] == state and count.stored["state_out"] == state


def test_what_the_kernel_does_not_take_is_refused_in_words() -> None:
    """It would compute something else, or read past a buffer."""
    good = list(call_of(mx.bfloat16, 2).arguments)

    def refused(**changes: mx.array) -> str:
        names = ("q", "k", "v", "g", "beta", "state", "tk", "tg", "tdelta", "ncommit")
        return OPERATION.why_not(*({**dict(zip(names, good, strict=True)), **changes}[name] for name in names)) or ""

    assert refused() == ""
    for size in (64, 256):
        assert f"key heads of {size} channels" in refused(k=mx.zeros((1, 2, 1, size), mx.bfloat16))
    assert "2 value heads of 12 channels" in refused(v=mx.zeros((1, 2, 2, 12), mx.bfloat16))
    assert "2 value heads of 8 channels over 3 key heads" in refused(k=mx.zeros((1, 2, 3, 128), mx.bfloat16))
    assert "float16" in refused(tk=good[6].astype(mx.float16))
    assert "state or tape of" in refused(state=good[5].astype(mx.bfloat16))


def _witness(dtype: mx.Dtype, heads: tuple[int, int], counts: tuple[int, int]) -> Callable[[Runner], None]:
    def witness(run: Runner) -> None:
        call = keeping(batched(*(call_of(dtype, 3, heads, 8, seed) for seed in (0, 1))), *counts)
        outputs = OPERATION.launch(run, *call.arguments)
        meets(call, dtype, outputs)
        flushed = gdn_verify.commit(run, *call.arguments[5:])
        same_bits(flushed, outputs[1], "a flush")

    return witness


WITNESSES: list[Callable[[Runner], None]] = [_witness(mx.float32, (2, 4), (3, 1))]


def test_the_witnesses_see_nothing_wrong_with_the_kernel_as_it_is() -> None:
    """They would catch no spoiled copy of it."""
    for witness in WITNESSES:
        witness(runner())
