"""Head norm and rotary embedding at positions of their own, against mlx's operations and against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.kernels.operation import Call, Case, Runner
from dflash_mlx.kernels.qk_norm_rope import OPERATION, Heads, reference
from dflash_mlx.kernels.rotation import Rotation, rotation_of
from tests.kernels.checks import check, check_bytes, check_first_rows, numbers, runner, same_bits

UNIT = {"float32": 2.0**-18, "float16": 2.0**-9, "bfloat16": 2.0**-6}  # a few roundings of values of one head
SHAPES = [  # heads, kv_heads, dim, rotary, normed, table
    (4, 2, 64, 64, 1, 0),
    (3, 0, 128, 128, 1, 1),
    (2, 1, 256, 64, 1, 0),
    (5, 3, 80, 32, 0, 1),
    (1, 1, 128, 128, 0, 0),
]


def call_of(shape: tuple[int, ...], rows: int, dtype: str, hard: bool = False, seed: int = 0) -> Call:
    names = ("heads", "kv_heads", "dim", "rotary", "normed", "table")
    return OPERATION.sample(Case("qk_norm_rope", dtype, tuple(zip(names, shape, strict=True))), rows, seed, hard)


def at(call: Call, positions: mx.array | int) -> Call:
    """The call with other positions."""
    return Call((replace(call.arguments[0], positions=positions),))


def in_two(call: Call) -> Call:
    """The call with its rows as those of two sequences; positions are still to be set."""
    (heads,) = call.arguments
    queries, keys = (None if x is None else x.reshape(2, -1, *x.shape[2:]) for x in (heads.queries, heads.keys))
    return Call((replace(heads, queries=queries, keys=keys),))


def expected(call: Call) -> list[np.ndarray]:
    """The definition in float64: normalise, scale, turn every pair as a complex number."""
    (heads,) = call.arguments
    rotation, positions = heads.rotation, heads.positions
    half = rotation.dims // 2
    if rotation.freqs is None:
        speed = np.float64(rotation.base) ** (-np.arange(half) / half)
    else:
        speed = 1 / numbers(rotation.freqs)
    rows = numbers(positions) + (np.arange(heads.queries.shape[1]) if positions.shape[1] == 1 else 0)
    turn = np.exp(1j * rotation.scale * rows[:, :, None, None] * speed)  # [B, L, 1, half]

    def turned(rows: mx.array, norm: mx.array | None) -> np.ndarray:
        x = numbers(rows)
        if norm is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + heads.eps) * numbers(norm)
        z = (x[..., :half] + 1j * x[..., half : 2 * half]) * rotation.mscale * turn
        return np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1).swapaxes(1, 2)

    first = turned(heads.queries, heads.query_norm)
    return [first] if heads.keys is None else [first, turned(heads.keys, heads.key_norm)]


def tolerance(call: Call, dtype: str) -> float:
    """Of all values, since a turned value is the sum of two that may be much larger."""
    return UNIT[dtype] * max(float(np.abs(value).max()) for value in expected(call))


def witness(
    shape: tuple[int, ...], rows: int, rotation: Rotation | None = None, places: int | None = None
) -> Callable[[Runner], None]:
    """Two sequences, each at positions of its own, for all rows or the first `places`."""

    def run_and_compare(run: Runner) -> None:
        sampled = in_two(call_of(shape, 2 * rows, "float32")).arguments[0]
        positions = mx.arange(5, 5 + 2 * rows, dtype=mx.int32).reshape(2, rows)
        turn = rotation or sampled.rotation
        call = Call((replace(sampled, positions=positions[:, :places], rotation=turn, eps=0.5),))
        for got, want in zip(OPERATION.launch(run, *call.arguments), expected(call), strict=True):
            assert np.allclose(numbers(got), want, rtol=0, atol=1e-4)

    return run_and_compare


# Both launches; every constant different; a head of two trees with a tail that does not turn; periods from a table.
WITNESSES = [
    witness((2, 3, 64, 64, 1, 0), 4, Rotation(64, 100.0, scale=0.5, mscale=1.5)),
    witness((1, 0, 256, 128, 1, 1), 2),
    witness((2, 0, 80, 32, 0, 1), 3),
    witness((1, 1, 64, 64, 0, 0), 2, places=1),
]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("hard", [False, True], ids=["random", "hard"])
def test_every_head_is_normed_and_turned_as_defined(dtype: str, shape: tuple[int, ...], hard: bool):
    """Attention would look at the wrong distance: drafts get worse, and verification disagrees with plain decoding."""
    for rows in (1, 2, 7, 17):
        call = call_of(shape, rows, dtype, hard, seed=rows)
        positions = call.arguments[0].positions
        call = at(call, positions - positions[0, 0] + 3)  # small angles, which float32 knows well
        assert OPERATION.why_not(*call.arguments) is None
        check(OPERATION, call, expected(call), rtol=0, atol=tolerance(call, dtype))


@pytest.mark.parametrize("positions", [[[0, 0, 3, 2, 2]], [[40_000, 7, 39_999, 40_001, 8]]], ids=["tree", "far"])
@pytest.mark.parametrize("table", [0, 1])
def test_every_row_has_its_own_position(positions: list[list[int]], table: int):
    """Siblings of a tree share a position: a row turned by its index would be another token's neighbour."""
    call = at(call_of((2, 1, 64, 64, 1, table), 5, "float32"), mx.array(positions, mx.int32))
    # Far away one unit in the last place of an angle is 0.004.
    check(OPERATION, call, expected(call), rtol=0, atol=1e-5 if positions[0][0] == 0 else 0.05)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rows_count_from_the_position_of_the_first(rows: int):
    """A block starts where the context ends, which only the device knows."""
    call = at(in_two(call_of((2, 1, 64, 64, 1, 0), 2 * rows, "float32")), mx.array([[11], [5]], mx.int32))
    outputs = check(OPERATION, call, expected(call), rtol=0, atol=1e-4)
    each = mx.array([[11], [5]], mx.int32) + mx.arange(rows, dtype=mx.int32)
    for got, want in zip(OPERATION.launch(runner(), *at(call, each).arguments), outputs, strict=True):
        same_bits(got, want, "positions of every row")


@pytest.mark.parametrize("rows", [1, 5])
def test_a_position_that_the_host_knows_needs_no_array(rows: int):
    """The draft's layers ask in every cycle; where the kernel is closed an array for it would be made for nothing."""
    call = call_of((2, 1, 64, 64, 1, 0), rows, "float32")
    here, there = at(call, 11), at(call, mx.array([[11]], mx.int32))
    assert OPERATION.why_not(*here.arguments) is None
    assert OPERATION.case(*here.arguments) == OPERATION.case(*there.arguments)
    for compute in (OPERATION.reference, partial(OPERATION.launch, runner())):
        for got, want in zip(compute(*here.arguments), compute(*there.arguments), strict=True):
            same_bits(got, want, "position 11")


def test_slices_of_a_wider_projection_are_read_where_they_are():
    """Queries next to their gates, keys inside a fused projection: a copy or a wrong stride would cost or be wrong."""
    whole = mx.random.normal((2, 3, 4, 128), key=mx.random.key(1))  # queries and gates side by side
    fused = mx.random.normal((2, 2, 3, 64), key=mx.random.key(2))  # [B, Hkv, L, D]
    weights = mx.random.uniform(0.5, 1.5, (2, 64), key=mx.random.key(3))
    positions = mx.array([[3, 100], [1, 200], [4, 300]], mx.int32).T
    arguments = (weights[0], weights[1], positions, Rotation(48, 100.0), 1e-5)
    call = Call((Heads(whole[..., :64], fused.transpose(0, 2, 1, 3), *arguments),))
    check(OPERATION, call, expected(call), rtol=0, atol=1e-4)


SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    },
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"] if s else "plain")
def test_at_consecutive_positions_the_reference_has_the_bits_of_the_modules_it_replaces(
    dtype: str, scaling: dict[str, Any] | None
):
    """A draft that runs with kernels switched on, but on none, has to propose the same tokens."""
    dims = 64 if scaling and scaling["rope_type"] == "proportional" else 32
    rope, norm = initialize_rope(dims, 1e4, False, scaling, 256), nn.RMSNorm(64, eps=1e-6)
    norm.weight = mx.random.uniform(0.5, 1.5, (64,), key=mx.random.key(4)).astype(getattr(mx, dtype))
    x = mx.random.normal((2, 6, 3, 64), key=mx.random.key(5)).astype(getattr(mx, dtype))
    rotation = rotation_of(rope)
    assert rotation is not None
    positions = mx.broadcast_to(mx.arange(1000, 1006, dtype=mx.int32)[None], (2, 6))
    heads = Heads(x, None, norm.weight, None, positions, rotation, norm.eps)
    (got,) = reference(heads)
    same_bits(got, rope(norm(x).transpose(0, 2, 1, 3), offset=1000), "reference beside modules")
    (counted,) = reference(replace(heads, positions=positions[:, :1]))
    same_bits(counted, got, "positions of the first rows only")
    assert mx.abs(got - x.transpose(0, 2, 1, 3)).max().item() > 0.1  # something was turned
    call = Call((heads,))
    assert OPERATION.why_not(*call.arguments) is None
    # The angles near position 1000 are known to 1e-4 in float32.
    check(OPERATION, call, expected(call), rtol=0, atol=tolerance(call, dtype) + 1e-3)


def test_an_unknown_rope_is_not_guessed():
    """A subclass may turn by another rule."""

    class Other(nn.RoPE):
        pass

    assert rotation_of(Other(64)) is None
    assert rotation_of(initialize_rope(64, 1e4, False, {"rope_type": "dynamic", "factor": 2.0}, 64)) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_how_many_there_are(dtype: str):
    """A draft position would change with the block size."""
    check_first_rows(OPERATION, call_of((2, 1, 128, 64, 1, 0), 17, dtype), (1, 2, 8, 16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_read_once(shape: tuple[int, ...]):
    """The contract's floor."""
    check_bytes(OPERATION, call_of(shape, 5, "bfloat16"))


def test_what_the_kernel_does_not_know_goes_to_the_reference():
    """Neighbours that turn together, mixed types and odd sizes would come out wrong or not compile."""
    (heads,) = call_of((2, 1, 64, 64, 1, 0), 2, "float32").arguments

    def refused(**changes: Any) -> str:
        return OPERATION.why_not(replace(heads, **changes)) or ""

    assert "neighbouring" in refused(rotation=Rotation(64, 100.0, traditional=True))
    narrow = heads.queries[..., :62]
    assert "62" in refused(queries=narrow, keys=None, query_norm=None, key_norm=None, rotation=Rotation(32, 100.0))
    assert "float16" in refused(query_norm=heads.query_norm.astype(mx.float16))
    assert "one of" in refused(key_norm=None)
    assert "int64" in refused(query_norm=None, key_norm=None, positions=heads.positions.astype(mx.int64))
