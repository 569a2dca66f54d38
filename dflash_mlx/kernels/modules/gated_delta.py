"""Gated delta layers of Qwen3-Next and Qwen3.5 whose blocks run on `gdn_prework` and `gdn_verify`, and leave a tape.

What mlx_lm's module does is unchanged: its projections, norm and weights are called. Single rows, prompts and whatever
the operations do not take go through it whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from dflash_mlx.kernels import gdn_prework, gdn_verify
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.operation import WIDEST, Arrays, Case, Runner

if TYPE_CHECKING:
    from dflash_mlx.layer_state import RecurrentState

Projections = tuple[mx.array, mx.array, mx.array, mx.array]  # qkv [B, T, C], z [B, T, Hv, Dv], a, b [B, T, Hv]


def swap(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """The module with taped blocks, or None: not one of these classes, or split over machines."""
    project = _PROJECTIONS.get(type(module))
    if project is None or getattr(module, "sharding_group", None) is not None:
        return None
    return TapedGatedDelta(module, kernels, project)


def _interleaved(module: Any, rows: mx.array) -> Projections:
    """Qwen3-Next projects everything at once, key head by key head."""
    mixed = module.fix_query_key_value_ordering(module.in_proj_qkvz(rows), module.in_proj_ba(rows))
    q, k, v, z, b, a = mixed
    return mx.concatenate([x.flatten(2) for x in (q, k, v)], axis=-1), z, a, b


def _apart(module: Any, rows: mx.array) -> Projections:
    """Qwen3.5 has a projection each."""
    z = module.in_proj_z(rows).reshape(*rows.shape[:2], module.num_v_heads, module.head_v_dim)
    return module.in_proj_qkv(rows), z, module.in_proj_a(rows), module.in_proj_b(rows)


_PROJECTIONS: dict[type, Callable[[Any, mx.array], Projections]] = {
    Qwen3NextGatedDeltaNet: _interleaved,
    GatedDeltaNet: _apart,
}


@dataclass(frozen=True)
class _Tape:
    """A block that was run, and the state before it.

    state:  [1, Hv, Dv, Dk] float32, before the block. k, g, delta: [1, T, ...], what `gdn_verify` takes.
    window: [1, W - 1 + T, C], what went into the convolution.
    runner: of the kernel that wrote it, which also replays it; None for the reference.
    """

    state: mx.array
    k: mx.array
    g: mx.array
    delta: mx.array
    window: mx.array
    runner: Runner | None = None

    @property
    def rows(self) -> Arrays:
        return self.k, self.g, self.delta

    def after(self, count: int) -> list[mx.array]:
        """As mlx_lm's module leaves its entry after the first `count` rows: window and state."""
        tape = (self.state, *self.rows, _count(count))
        state = gdn_verify.commit(self.runner, *tape) if self.runner else gdn_verify.reference_commit(*tape)
        before = self.window.shape[1] - self.k.shape[1]
        return [mx.contiguous(self.window[:, count : count + before]), state]


class TapedGatedDelta(nn.Module):
    """The call of mlx_lm's module, and `taped`, the same for a block of which part may be kept."""

    def __init__(self, original: Any, kernels: Kernels, project: Callable[[Any, mx.array], Projections]) -> None:
        super().__init__()
        self.original = original
        self._kernels, self._project = kernels, project
        self._opened: dict[mx.Dtype, bool] = {}

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        return self.original(inputs, mask, cache)

    def cases(self) -> list[Case]:
        """What has to be raced before kernels serve this layer."""
        dtype = self.original.conv1d.weight.dtype
        return [self._verify_case(dtype), self._prework_case(dtype)]

    def taped(self, rows: mx.array, mask: mx.array | None, state: RecurrentState) -> mx.array | None:
        """[1, T, H] -> [1, T, H], with a tape recorded in `state`, whose entry stays as it was.

        None where the block is not one for the operations: nothing was done.
        """
        batch, width, _ = rows.shape
        if mask is not None or batch > 1 or not 2 <= width <= WIDEST or not self._open(rows.dtype):
            return None
        module, kernels = self.original, self._kernels
        qkv, z, a, b = self._project(module, rows)
        before, count = self._start(state, qkv.dtype)
        q, k, v, g, beta, window = kernels.run(
            gdn_prework.OPERATION,
            *(qkv, before.window, count, module.conv1d.weight, a, b, module.A_log, module.dt_bias),
            key_heads=module.num_k_heads,
            key_size=module.head_k_dim,
        )
        block = (q, k, v, g, beta, before.state, *before.rows, count)
        runner = None if kernels.closed(gdn_verify.OPERATION, *block) else kernels.runner
        y, committed, delta = gdn_verify.launch(runner, *block) if runner else gdn_verify.reference(*block)
        state.record(_Tape(committed, k, g, delta, window, runner))
        return module.out_proj(module.norm(y, z).reshape(batch, width, -1))

    def _start(self, state: RecurrentState, dtype: mx.Dtype) -> tuple[_Tape, mx.array]:
        """The tape of the block before and how many of its rows were kept; or the entry's arrays, and no row."""
        if state.deferred is not None and isinstance(state.deferred.tape, _Tape):
            return state.deferred.tape, _count(state.deferred.count)
        m = self.original
        window, held = state.entry.cache
        if window is None:
            window = mx.zeros((1, m.conv_kernel_size - 1, m.conv_dim), dtype)
        if held is None:
            held = mx.zeros((1, m.num_v_heads, m.head_v_dim, m.head_k_dim), mx.float32)
        k, g, delta = _a_row(dtype, m.num_k_heads, m.num_v_heads, m.head_v_dim, m.head_k_dim)
        return _Tape(held, k, g, delta, window), _count(0)

    def _open(self, dtype: mx.Dtype) -> bool:
        """Whether blocks are taped. Without its kernel a GPU is better off with mlx_lm's, which keeps no tape; on a CPU
        the reference is what mlx_lm runs."""
        if dtype not in self._opened:
            sample = gdn_verify.sample(self._verify_case(dtype), 2, 0, False)
            closed = self._kernels.closed(gdn_verify.OPERATION, *sample.arguments)
            self._opened[dtype] = closed is None or mx.default_device() != mx.gpu
        return self._opened[dtype]

    def _verify_case(self, dtype: mx.Dtype) -> Case:
        m = self.original
        return gdn_verify.case_of(dtype, m.num_k_heads, m.num_v_heads, m.head_v_dim, m.head_k_dim)

    def _prework_case(self, dtype: mx.Dtype) -> Case:
        m = self.original
        sizes = (m.num_k_heads, m.num_v_heads, m.head_v_dim, m.conv_kernel_size, m.head_k_dim)
        return gdn_prework.case_of(dtype, *sizes)


@lru_cache
def _count(count: int) -> mx.array:
    """[1] int32, for any thread."""
    return mx.array([count], mx.int32)


@lru_cache
def _a_row(dtype: mx.Dtype, key_heads: int, heads: int, values: int, keys: int) -> Arrays:
    """A tape of one row that is not kept, for any thread: a buffer cannot be empty."""
    shapes = ((1, 1, key_heads, keys), dtype), ((1, 1, heads), mx.float32), ((1, 1, heads, values), mx.float32)
    row = tuple(mx.zeros(shape, kind) for shape, kind in shapes)
    mx.eval(row)
    return row
