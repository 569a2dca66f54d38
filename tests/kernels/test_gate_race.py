"""A kernel opens only where it is right and clearly faster on this machine, at both of its widths."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_mlx.kernels.operation import Launch, MetalKernel
from dflash_mlx.kernels.race import chain, judge, linked, operands
from tests.kernels.fake_operation import CASE, Clock, Double, unwatched


def _faster(at_8: float, at_16: float) -> Double:
    return Double(stock_s=lambda rows: 1e-3 * (at_8 if rows == 8 else at_16), kernel_s=lambda rows: 1e-3)


def test_a_kernel_that_is_faster_at_both_widths_opens() -> None:
    """Else no kernel would ever run."""
    verdict = _faster(1.16, 1.2).judged()
    assert verdict.reason is None
    assert dict(verdict.speedups) == pytest.approx({8: 1.16, 16: 1.2})


@pytest.mark.parametrize(("at_8", "at_16"), [(1.14, 1.14), (1.16, 1.14), (1.14, 1.16), (0.5, 3.0)])
def test_a_kernel_that_is_not_faster_by_the_margin_at_every_width_stays_closed(at_8: float, at_16: float) -> None:
    """Else a cycle of the other width would be slower with the kernel than without it."""
    reason = _faster(at_8, at_16).judged().reason
    slow = 8 if at_8 < 1.15 else 16
    assert reason == f"{at_8 if slow == 8 else at_16:.2f} times as fast as stock at {slow} rows, below 1.15"


def test_a_slow_chain_does_not_decide() -> None:
    """Medians: another program that takes the GPU for a moment would open a bad kernel, or close a good one."""
    asked = list[int]()

    def stock_s(rows: int) -> float:
        asked.append(rows)
        return 1.14e-3 * (500 if 100 <= len(asked) < 104 else 1)

    double = Double(stock_s=stock_s, kernel_s=lambda rows: 1e-3)
    assert double.judged().reason == "1.14 times as fast as stock at 8 rows, below 1.15"
    assert len(asked) > 300


def test_a_chip_that_slows_down_slows_both_sides() -> None:
    """A B B A: with one side first and the other after it, heat would count against one of them."""
    double = Double()
    double.kernel_s = lambda rows: 1e-3 * (1 + double.clock.now)
    double.stock_s = lambda rows: 1.25e-3 * (1 + double.clock.now)
    assert dict(double.judged().speedups)[8] == pytest.approx(1.25, abs=0.02)


def test_a_launch_of_more_than_a_second_closes_the_kernel_however_slow_stock_is() -> None:
    """A launch that long freezes the screen of the whole machine."""
    reason = Double(stock_s=lambda rows: 9.0, kernel_s=lambda rows: 1.2).judged().reason
    assert reason is not None and reason.startswith("a launch took 1.2 s")
    assert Double(kernel_s=lambda rows: 1.2).judged().scope == "kernel"


def test_a_kernel_that_gives_other_bits_again_stays_closed() -> None:
    """A data race would make the text depend on luck."""
    double = Double(change=lambda y, calls: y + (calls == 3))
    assert "other bits again" in (double.judged().reason or "")


def test_a_kernel_that_is_farther_from_the_truth_than_twice_stock_stays_closed() -> None:
    """Else near-ties would go another way more often than rounding explains."""
    near = Double(change=lambda y, calls: (y.astype(mx.float32) * (1 + 2**-9)).astype(y.dtype))
    far = Double(change=lambda y, calls: (y.astype(mx.float32) * 1.02).astype(y.dtype))
    assert near.judged().reason is None
    assert "from a float32 computation" in (far.judged().reason or "")


def test_one_wrong_element_is_enough() -> None:
    """An index that is off by one spoils an edge and leaves the mean as it was."""
    double = Double(change=lambda y, calls: mx.where(mx.arange(32) == 31, y + 0.5, y).astype(y.dtype))
    assert "at worst" in (double.judged().reason or "")


def test_a_small_error_everywhere_is_found_by_its_mean() -> None:
    """Of values that stock rounds well: the worst element alone would hide it."""

    def biased(y: mx.array, calls: int) -> mx.array:
        worst = mx.abs(y).max() * 2**-9  # about stock's own worst rounding
        return (y.astype(mx.float32) + worst.astype(mx.float32)).astype(y.dtype)

    assert "typically" in (Double(change=biased).judged().reason or "")


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_a_kernel_that_overflows_stays_closed(value: float) -> None:
    """NaN compares as no error at all."""
    double = Double(change=lambda y, calls: mx.where(mx.arange(32) == 5, value, y).astype(y.dtype))
    assert "not a number" in (double.judged().reason or "")


def test_whole_numbers_have_to_be_equal() -> None:
    """An id that is off by one is another token."""
    assert "whole numbers" in (Double(wrong_ids=1).judged().reason or "")


def test_rows_that_depend_on_how_many_there_are_close_the_kernel() -> None:
    """The same token would get other logits in a longer block."""
    double = Double(change=lambda y, calls: y + mx.array(1e-2 * (len(y) == 5), y.dtype) * y)
    assert "first 5 rows alone" in (double.judged().reason or "")


def test_a_threadgroup_that_the_chip_does_not_take_closes_the_kernel_and_says_so() -> None:
    """MLX reports it only when the result is evaluated (M1 and M2 take fewer threads)."""
    text = "[custom_kernel] Threadgroup size (512) is greater than the maximum allowed threadgroup size (448)"

    def refuses(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        raise ValueError(text)

    double = Double()
    reason = judge(double.operation, CASE, refuses, unwatched, double.clock).reason
    assert reason == f"this chip takes no threadgroup of that size ({text})"


def test_a_kernel_that_does_not_compile_is_closed_and_load_goes_on() -> None:
    def fails(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: ...")

    reason = judge(Double().operation, CASE, fails, unwatched, Clock()).reason
    assert reason == "it failed here (RuntimeError: [metal::Device] Unable to build metal library from source)"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[malloc] Unable to allocate 4294967296 bytes."),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU...)"),
        MemoryError("std::bad_alloc"),
    ],
    ids=["malloc", "metal", "c++"],
)
def test_a_lack_of_memory_is_no_verdict_about_the_kernel(error: Exception) -> None:
    """The model may take most of it; remembered, the kernel would be lost for good."""

    def fails(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        raise error

    verdict = judge(Double().operation, CASE, fails, unwatched, Clock())
    assert verdict.scope == "moment" and str(error) in (verdict.reason or "")


def test_every_step_of_a_chain_waits_for_the_one_before_it() -> None:
    """Independent steps overlap on a GPU and hide what a step costs."""
    double = Double()
    calls = operands(double.operation, CASE, 8)
    assert len(calls) >= 3 and len({id(call.arguments[0]) for call in calls}) == len(calls)
    seen = list[mx.array]()

    def compute(call):  # type: ignore[no-untyped-def]
        seen.append(call.arguments[0])
        return double.reference(*call.arguments)

    chain(compute, calls)
    given = [call.arguments[0] for call in calls]
    assert seen[0] is given[0] and not any(step is array for step in seen[1:] for array in given)
    for step, array in enumerate(seen):
        assert mx.array_equal(array, given[step % len(given)])


def test_a_linked_call_is_the_same_call() -> None:
    """The race would else be over other values than the check."""
    call = operands(Double().operation, CASE, 8)[0]
    (x,) = linked(call, mx.array([3.0, 4.0])).arguments
    assert x is not call.arguments[0] and mx.array_equal(x, call.arguments[0]) and x.shape == (8, 32)
