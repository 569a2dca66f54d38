"""Small kernels for the simulator's own tests: a body, one threadgroup, one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from dflash_mlx.kernels.operation import Launch, MetalKernel
from tests.kernels.simulator.launch import Rules, Simulator

X = mx.arange(64, dtype=mx.float32)  # the input `x` where a snippet names no other


def launch(
    body: str,
    inputs: Mapping[str, mx.array] | None = None,
    *,
    header: str = "",
    grid: tuple[int, int, int] = (64, 1, 1),
    threadgroup: tuple[int, int, int] = (64, 1, 1),
    shape: tuple[int, ...] = (64,),
    dtype: mx.Dtype = mx.float32,
    template: Sequence[tuple[str, int | bool | mx.Dtype]] = (),
    contiguous: bool = True,
) -> tuple[MetalKernel, Launch]:
    """A kernel `snippet` with output `out`, and its launch."""
    arrays = {"x": X} if inputs is None else dict(inputs)
    kernel = MetalKernel("snippet", tuple(arrays), ("out",), body, header, contiguous)
    return kernel, Launch(tuple(arrays.values()), (shape,), (dtype,), grid, threadgroup, tuple(template))


def run(body: str, *arguments, seed: int = 3, rules: Rules | None = None, **options) -> mx.array:
    """The output of a snippet."""
    (output,) = Simulator(seed, rules)(*launch(body, *arguments, **options))
    return output
