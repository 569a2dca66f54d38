"""Quantised linear layers whose blocks of few rows go to `qmm_small_m`.

A module here is made from one of MLX's and shares its arrays and settings. It computes what MLX's does except for
blocks that the kernel takes: one sequence of 2 to 16 rows in the type of the scales. What was decided for a module is
kept with it, since every linear of a model is called in every cycle.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.qmm_small_m import OPERATION, ROWS, races_of


def swap(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """The module that takes the place of an affine nn.QuantizedLinear or nn.QuantizedEmbedding; None: not for us."""
    if type(module) is nn.QuantizedLinear and _fits(module):
        return RowsLinear(module, kernels)
    if type(module) is nn.QuantizedEmbedding and _fits(module):
        return RowsEmbedding(module, kernels)
    return None


def linear(module: nn.Module, x: mx.array, kernels: Kernels) -> mx.array:
    """`module(x)`, through the kernel where it is a quantised linear layer and the kernel is open.

    Args:
        x: [1, T, K]; only blocks of 2 to 16 rows are for the kernel.
    """
    if not kernels.wired or type(module) is not nn.QuantizedLinear or not _is_block(x) or module.mode != "affine":
        return module(x)
    (out,) = kernels.run(OPERATION, x, *_weights(module))
    return out + module["bias"] if "bias" in module else out


def cases_of(module: nn.Module, dtype: mx.Dtype) -> list[Case]:
    """The races that `linear` wants for this module and activations of `dtype`; none where it is not for the kernel."""
    if type(module) is not nn.QuantizedLinear or module["scales"].dtype != dtype or not _fits(module):
        return []
    return races_of(module["weight"], dtype, module.group_size, module.bits)


class _Rows(nn.Module):
    """The kernel's part of both classes below.

    _kernels: decides and runs. _open: what was decided, by number of rows.
    """

    _open: dict[int, bool]

    def __init__(self, module: nn.Module, kernels: Kernels) -> None:
        """Become `module`: its settings, and its arrays, which are shared and never written."""
        nn.Module.__init__(self)
        dict.update(self, module)
        vars(self).update(vars(module))
        self._kernels = kernels
        vars(self)["_open"] = {}  # an attribute that is a dict would be one of its parameters

    def _product(self, x: mx.array) -> mx.array | None:
        """x . dequant(W)^T from the kernel, or None where MLX's module has to compute it."""
        rows = x.shape[-2] if x.ndim > 1 else 1
        opened = self._open.get(rows)
        if opened is False or not _is_block(x) or x.dtype != self["scales"].dtype:
            return None
        weights = _weights(self)
        if opened is None:
            opened = self._open[rows] = self._kernels.closed(OPERATION, x, *weights) is None
        return OPERATION.launch(self._kernels.runner, x, *weights)[0] if opened else None

    def _races(self) -> list[Case]:
        return races_of(self["weight"], self["scales"].dtype, self.group_size, self.bits)


class RowsLinear(_Rows, nn.QuantizedLinear):
    """An nn.QuantizedLinear; its parameters are the original's arrays."""

    def cases(self) -> list[Case]:
        """The races that this module's blocks are for."""
        return self._races()

    def __call__(self, x: mx.array) -> mx.array:
        out = self._product(x)
        if out is None:
            return nn.QuantizedLinear.__call__(self, x)
        return out + self["bias"] if "bias" in self else out


class RowsEmbedding(_Rows, nn.QuantizedEmbedding):
    """An nn.QuantizedEmbedding, which may be a head as well; looking up is MLX's."""

    def head_cases(self) -> list[Case]:
        """The races that its blocks are for, where it is a head."""
        return self._races()

    def as_linear(self, x: mx.array) -> mx.array:
        out = self._product(x)
        return nn.QuantizedEmbedding.as_linear(self, x) if out is None else out


def _is_block(x: mx.array) -> bool:
    """Whether x is [.., T, K] of one sequence with 2 to 16 rows; a single row stays with MLX's own kernel."""
    return x.ndim >= 2 and 2 <= x.shape[-2] <= ROWS and x.size == x.shape[-2] * x.shape[-1]


def _weights(module: nn.Module) -> tuple[mx.array, mx.array, mx.array | None, int, int]:
    return module["weight"], module["scales"], module.get("biases"), module.group_size, module.bits


def _example(module: nn.Module) -> tuple[mx.array, mx.array, mx.array, mx.array | None, int, int]:
    """Arguments of a call with two rows; nothing is computed."""
    weights = _weights(module)
    width = weights[0].shape[-1] * 32 // module.bits
    return mx.zeros((1, 2, width), weights[1].dtype), *weights


def _fits(module: nn.Module) -> bool:
    return module.mode == "affine" and OPERATION.why_not(*_example(module)) is None
