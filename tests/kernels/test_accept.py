"""Acceptance on the device, against the rule that the decode loop applies on the host."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.kernels.accept import OPERATION, SPENT, STOPPED
from dflash_mlx.kernels.operation import Call, Runner
from dflash_mlx.proposal import Verdict
from tests.kernels.checks import SEEDS, check, check_bytes, runner

MASK = 99
ANCHOR, PLENTY = 50, 1 << 30
Rows = Sequence[Sequence[int]]


def call_of(
    drafts: Rows, targets: Rows, eos: Sequence[int], budget: Sequence[int], rows: int, dtype: mx.Dtype = mx.int32
) -> Call:
    """drafts [B, L - 1] after the anchor, targets [B, L]."""
    blocks = [[ANCHOR, *row] for row in drafts]
    return Call(
        (
            mx.array(blocks, dtype),
            mx.array(targets, dtype),
            mx.array(list(eos), mx.int32),
            mx.array(list(budget), mx.int32),
            MASK,
            rows,
        )
    )


def expected(call: Call) -> list[np.ndarray]:
    """Row by row with `Verdict.truncate`, which is what ends a request."""
    blocks, targets, eos, budget = (np.array(a).tolist() for a in call.arguments[:4])
    mask, rows = call.arguments[4:]
    counts, commits, following, flags = [], [], [], []
    for (anchor, *drafts), target, room in zip(blocks, targets, budget, strict=True):
        matched = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, target, strict=False))
        )
        verdict = Verdict(matched, tuple(target[: matched + 1])).truncate(room, eos)
        tokens = list(verdict.tokens)
        counts.append(verdict.accepted)
        commits.append(tokens + [-1] * (len(target) - len(tokens)))
        following.append([[anchor, *tokens][-1]] + [mask] * (rows - 1))
        stopped = bool(tokens) and tokens[-1] in eos
        flags.append(STOPPED * stopped + SPENT * (len(tokens) >= room))
    return [np.array(a) for a in (counts, commits, following, flags)]


def assert_same(run: Runner, call: Call) -> None:
    for got, want in zip(OPERATION.launch(run, *call.arguments), expected(call), strict=True):
        assert np.array(got).tolist() == want.tolist()


def witness(call: Call) -> Callable[[Runner], None]:
    return lambda run: assert_same(run, call)


# Two kept and a correction, everything kept, nothing kept; cut by a stop token, by the budget, to nothing; one row.
WITNESSES = [
    witness(call_of([[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 9, 4, 5], [1, 2, 3, 4, 5]], [7], [PLENTY, PLENTY], 3)),
    witness(call_of([[1, 2, 3], [4, 5, 6]], [[1, 2, 3, 4], [7, 5, 6, 0]], [8, 2], [3, 2], 40)),
    witness(call_of([[1, 2], [1, 2], [1, 3]], [[1, 2, 3], [1, 2, 3], [1, 2, 3]], [], [2, 0, 3], 1)),
    witness(call_of([[]], [[6]], [5, 6], [1], 2)),
]


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 16, 17, 31, 32])
def test_the_device_keeps_exactly_what_the_host_rule_keeps(columns: int):
    """Another count here and the cache would hold tokens that the caller was never given."""
    choose = random.Random(columns)
    for sequences in (1, 3, 9):
        targets = [[choose.randrange(4) for _ in range(columns)] for _ in range(sequences)]
        # Each block follows the target up to a depth of its own, from nothing to everything.
        depths = [choose.randrange(columns + 1) for _ in range(sequences)]
        drafts = [
            [token if place < depth else choose.randrange(4) for place, token in enumerate(row[:-1])]
            for row, depth in zip(targets, depths, strict=True)
        ]
        for eos in ([], [3], [5, 6, 7, 8, 9, 10, 11, 2]):
            budget = [choose.choice([0, 1, 2, columns, columns + 1, PLENTY]) for _ in range(sequences)]
            call = call_of(drafts, targets, eos, budget, choose.choice([1, columns, 40]))
            assert OPERATION.why_not(*call.arguments) is None
            check(OPERATION, call, expected(call), rtol=0, atol=0)


@pytest.mark.parametrize("kept", range(9))
def test_every_depth_ends_in_the_targets_own_token(kept: int):
    """The token after the last draft that holds is the target's; the next block starts from it."""
    target = list(range(10, 19))
    drafts = [token if place < kept else 1 for place, token in enumerate(target[:-1])]
    call = call_of([drafts], [target], [77], [PLENTY], 4)
    for seed in SEEDS:
        n, commit, following, flags = OPERATION.launch(runner(seed), *call.arguments)
        assert n.tolist() == [kept] and flags.tolist() == [0]
        assert commit.tolist() == [target[: kept + 1] + [-1] * (8 - kept)]
        assert following.tolist() == [[target[kept], MASK, MASK, MASK]]


def test_a_stop_token_among_rejected_drafts_stops_nothing():
    """The answer would end early because the draft, not the target, thought of the end."""
    assert_same(runner(0), call_of([[1, 7, 7]], [[1, 2, 7, 7]], [7], [PLENTY], 2))
    *_, flags = OPERATION.launch(runner(0), *call_of([[1, 7, 7]], [[1, 2, 7, 7]], [7], [PLENTY], 2).arguments)
    assert flags.tolist() == [0]


def test_ids_of_argmax_are_taken_as_they_are():
    """`mx.argmax` gives uint32: a conversion would cost a launch, a wrong reading every token."""
    call = call_of([[1, 2, 3]], [[1, 2, 9, 4]], [9], [PLENTY], 4, mx.uint32)
    check(OPERATION, call, expected(call), rtol=0, atol=0)


def test_long_blocks_and_wide_ids_are_left_to_the_reference():
    """A SIMD-group has 32 lanes; the 33rd row would be forgotten."""
    long = call_of([[1] * 32], [[1] * 33], [], [PLENTY], 4)
    wide = call_of([[1]], [[1, 2]], [], [PLENTY], 4, mx.int64)
    assert "33 rows" in (OPERATION.why_not(*long.arguments) or "")
    assert "int64" in (OPERATION.why_not(*wide.arguments) or "")
    for call in (long, wide):
        for got, want in zip(OPERATION.reference(*call.arguments), expected(call), strict=True):
            assert np.array(got).tolist() == want.tolist()


@pytest.mark.parametrize("rows", [1, 8, 17])
@pytest.mark.parametrize("hard", [False, True], ids=["random", "hard"])
def test_samples_are_inside_the_contract_and_read_nothing_twice(rows: int, hard: bool):
    """The race would compare times of something else."""
    case = OPERATION.case(*call_of([[1]], [[1, 2]], [], [1], 2).arguments)
    call = OPERATION.sample(case, rows, 0, hard)
    check(OPERATION, call, expected(call), rtol=0, atol=0)
    check_bytes(OPERATION, call)
