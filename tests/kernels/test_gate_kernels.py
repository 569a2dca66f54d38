"""The gate's check of numbers on the kernels themselves: each passes it, and a spoiled one does not."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from dflash_mlx.kernels import accept
from dflash_mlx.kernels.numerics import arrays_of, call_in_float32, why_wrong
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.race import linked
from dflash_mlx.kernels.registry import OPERATIONS
from tests.kernels.checks import runner
from tests.kernels.fake_operation import unwatched

SMALL = [
    Case("accept", "int32", ()),
    Case("qmm_small_m", "bfloat16", (("n", 16), ("k", 64), ("group_size", 32), ("bits", 4), ("rows", 16))),
    Case(
        "qk_norm_rope",
        "bfloat16",
        (("heads", 2), ("kv_heads", 1), ("dim", 64), ("rotary", 64), ("normed", 1), ("table", 1)),
    ),
    Case(
        "sdpa_rows",
        "bfloat16",
        (("head_dim", 64), ("heads", 2), ("kv_heads", 1), ("capacity", 64), ("mode", 1), ("window", 0)),
    ),
    Case(
        "lm_head_topk",
        "bfloat16",
        (
            ("vocab", 128),
            ("hidden", 64),
            ("bits", 4),
            ("group", 32),
            ("k", 4),
            ("mask", 0),
            ("cap", 0),
            ("lse", 1),
            ("rows", 8),
        ),
    ),
    Case("gdn_verify", "bfloat16", (("Hk", 1), ("Hv", 1), ("Dv", 8), ("Dk", 128))),
    Case(
        "lm_head_topk",
        "bfloat16",
        (
            ("vocab", 150),
            ("hidden", 64),
            ("bits", 8),
            ("group", 32),
            ("k", 6),
            ("mask", 1),
            ("cap", 0),
            ("lse", 1),
            ("rows", 16),
        ),
    ),
    # In bfloat16 its sigmoid rounds as MLX's does on Metal, three times, and the reference here runs on a CPU.
    Case("gdn_prework", "float32", (("Hk", 1), ("Hv", 1), ("Dv", 128), ("W", 4), ("Dk", 128))),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.operation}-{case.dtype}")
def test_the_kernels_pass_the_check_of_numbers(case: Case) -> None:
    """Else the gate would close on every Mac what these tests call right."""
    assert why_wrong(OPERATIONS[case.operation], case, runner(), unwatched) is None


def test_a_kernel_with_one_wrong_comparison_does_not_pass() -> None:
    """In the text of the kernel itself."""
    assert "<" in accept.KERNEL.header
    body = accept.KERNEL.body.replace("eos_shape[0]", "0")
    spoiled = replace(accept.KERNEL, name="dflash_accept_spoiled", body=body)

    def run(kernel, launch):  # type: ignore[no-untyped-def]
        return runner()(spoiled, launch)

    assert "whole numbers" in (why_wrong(OPERATIONS["accept"], SMALL[0], run, unwatched) or "")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.operation}-{case.dtype}")
def test_calls_can_be_widened_and_linked(case: Case) -> None:
    """Arrays may be inside the dataclasses that operations take; one that is overlooked is not linked, nor widened."""
    call = OPERATIONS[case.operation].sample(case, 8, 0, False)
    arrays = arrays_of(call)
    assert len(arrays) >= dict(sdpa_rows=7, qk_norm_rope=6).get(case.operation, 3)
    assert all(array.dtype not in (mx.bfloat16, mx.float16) for array in arrays_of(call_in_float32(call)))
    after = arrays_of(linked(call, mx.array([1.0])))
    changed = [index for index, (one, other) in enumerate(zip(arrays, after, strict=True)) if one is not other]
    assert len(changed) >= 1 and all(mx.array_equal(arrays[i], after[i]) for i in changed)
