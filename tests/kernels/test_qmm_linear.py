"""Quantised layers whose blocks go to the kernel: what they share, and when they are MLX's own to the bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx.kernels.choice import Kernels, references, through
from dflash_mlx.kernels.modules.linear import RowsEmbedding, RowsLinear, cases_of, linear, swap
from dflash_mlx.kernels.operation import Case, Launch, MetalKernel, Operation
from dflash_mlx.kernels.qmm_small_m import OPERATION
from tests.kernels.checks import runner


def layer_of(bias: bool = True, dtype: mx.Dtype = mx.float32, **quantised: object) -> nn.QuantizedLinear:
    mx.random.seed(5)
    layer = nn.Linear(128, 24, bias=bias).to_quantized(**{"group_size": 32, "bits": 4, **quantised})
    layer.set_dtype(dtype)
    return layer


def rows_of(count: int, batch: int = 1, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((batch, count, 128), key=mx.random.key(count)).astype(dtype)


def refuse(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
    raise AssertionError(f"{kernel.name} was launched")


def test_a_swapped_layer_is_the_layer_over_the_same_arrays():
    """A second copy of the weights would double the memory of a large model; a lost setting would change its text."""
    for layer in (layer_of(), nn.QuantizedEmbedding(24, 128, 32, 8)):
        before = dict(layer.items())
        swapped = swap(layer, references())
        assert isinstance(swapped, type(layer)) and type(swapped) in (RowsLinear, RowsEmbedding)
        assert dict.keys(swapped) == before.keys()
        assert all(swapped[key] is array for key, array in before.items())
        assert (swapped.group_size, swapped.bits, swapped.mode) == (layer.group_size, layer.bits, layer.mode)
        assert dict(layer.items()) == before and type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        assert str(swapped).split("(", 1)[1] == str(layer).split("(", 1)[1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_single_rows_prompts_and_batches_stay_with_mlx(dtype: mx.Dtype):
    """Plain decoding and prefill have to be mlx_lm's to the bit, and several sequences are not a block."""
    layer, kernels = layer_of(dtype=dtype), through(refuse)
    swapped = swap(layer, kernels)
    for x in (rows_of(1), rows_of(17), rows_of(40), rows_of(4, batch=2), rows_of(1)[0], rows_of(1)[0, 0]):
        x = x.astype(dtype)
        assert mx.array_equal(swapped(x), layer(x)), x.shape
        assert mx.array_equal(linear(layer, x, kernels), layer(x)), x.shape


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_a_block_comes_from_the_kernel(bias: bool):
    """Otherwise the kernel would pass its tests and never run; its bias is added once, as the layer adds it."""
    launched: list[str] = []

    def run(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        launched.append(kernel.name)
        return runner()(kernel, launch)

    layer, kernels = layer_of(bias), through(run)
    if bias:
        layer.bias = mx.random.normal((24,))
    for rows in (2, 9, 16):
        x = rows_of(rows)
        for got in (swap(layer, kernels)(x), linear(layer, x, kernels)):
            assert mx.allclose(got, layer(x), rtol=1e-5, atol=1e-5)
    assert launched == ["dflash_qmm_small_m"] * 6


def test_a_tied_head_comes_from_the_kernel_and_looking_up_does_not():
    """The head of a small model is its largest weight; embeddings are rows, not products."""
    embedding = nn.QuantizedEmbedding(40, 128, 32, 4)
    swapped, ids, x = swap(embedding, through(runner())), mx.array([[3, 39, 0]]), rows_of(3)
    assert mx.array_equal(swapped(ids), embedding(ids))
    assert mx.allclose(swapped.as_linear(x), embedding.as_linear(x), rtol=1e-5, atol=1e-5)
    closed = swap(embedding, references())
    assert mx.array_equal(closed.as_linear(x), embedding.as_linear(x))
    assert mx.array_equal(swap(embedding, through(refuse)).as_linear(x[:, :1]), embedding.as_linear(x[:, :1]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_closed_kernel_leaves_the_layers_bits(dtype: mx.Dtype):
    """The grids of exactness pass with references swapped in only if nothing at all changes."""
    layer, x = layer_of(dtype=dtype), rows_of(5, dtype=dtype)
    assert mx.array_equal(swap(layer, references())(x), layer(x))
    assert mx.array_equal(linear(layer, x, references()), layer(x))


def test_activations_of_another_type_stay_with_mlx():
    """It promotes to the wider type, and the kernel would read the scales as another; which comes first is chance."""
    layer, kernels = layer_of(dtype=mx.bfloat16), through(runner())
    swapped, odd, even = swap(layer, kernels), rows_of(4), rows_of(4, dtype=mx.bfloat16)
    (want,) = OPERATION.launch(runner(), even, layer.weight, layer.scales, layer.biases, 32, 4)
    for x in (odd, even, odd):
        for got in (swapped(x), linear(layer, x, kernels)):
            assert mx.array_equal(got, want + layer.bias if x is even else layer(x))


class Own(nn.QuantizedLinear):
    """A model's own kind of layer, which may compute anything."""


def test_what_is_not_exactly_a_layer_of_mlx_is_left_alone():
    """A subclass may compute something else, and other formats have another layout."""
    kernels = references()
    for other in (
        nn.Linear(128, 24),
        nn.Embedding(24, 128),
        Own(128, 24, group_size=32),
        layer_of(bits=6),
        layer_of(bits=3),
        nn.QuantizedLinear(128, 24, mode="mxfp4"),
        nn.QuantizedLinear(128, 20),
        nn.QuantizedEmbedding(24, 96, 32),
    ):
        assert swap(other, kernels) is None, other
    x = rows_of(4)
    for other in (nn.Linear(128, 24), layer_of(bits=6), nn.QuantizedLinear(128, 24, mode="mxfp4")):
        assert mx.array_equal(linear(other, x, through(refuse)), other(x)), other


class Asked(Kernels):
    """Closed; counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(True, lambda operation, case: "slower here", refuse)
        self.times = 0

    def closed(self, operation: Operation, *arguments: Any, **options: Any) -> str | None:
        self.times += 1
        return super().closed(operation, *arguments, **options)


def test_a_layer_decides_once_and_names_its_race():
    """Every linear runs in every cycle: asking again would cost host time, and another answer would change bits."""
    layer, kernels = layer_of(), Asked()
    swapped = swap(layer, kernels)
    for rows in (1, 2, 16, 17, 6, 2, 16):
        assert mx.array_equal(swapped(rows_of(rows)), layer(rows_of(rows)))
    assert kernels.times == 3
    assert kernels.reasons == dict.fromkeys(swapped.cases(), "slower here")
    assert set(cases_of(layer, mx.float32)) == set(swapped.cases())
    for case, rows in zip(swapped.cases(), (4, 8, 16), strict=True):
        assert case.dtype == "float32" and dict(case.sizes) == dict(n=24, k=128, group_size=32, bits=4, rows=rows)


def test_a_kernel_that_wins_for_few_rows_only_is_used_for_those():
    """MLX reads the weights again for every few rows: one verdict for all would close what pays, or open a loss."""
    launched = list[int]()

    def run(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        launched.append(launch.inputs[0].shape[0])
        return runner()(kernel, launch)

    def only_8(operation: Operation, case: Case) -> str | None:
        return None if dict(case.sizes)["rows"] == 8 else "slower here"

    layer = layer_of()
    swapped, kernels = swap(layer, Kernels(True, only_8, run)), Kernels(True, only_8, run)
    for rows in (4, 5, 8, 9, 16):
        swapped(rows_of(rows))
        linear(layer, rows_of(rows), kernels)
    assert launched == [5, 5, 8, 8]
