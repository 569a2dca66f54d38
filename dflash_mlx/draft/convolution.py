"""DFlash 2's grouped dynamic causal convolution: one on each side of every attention and MLP sublayer.

It mixes a row of a block with the rows just before it, through kernels that the rows themselves choose. Context rows
never enter it, and before row 0 there are zeros. Source: z-lab `dflash` 0.1.0 (`DFlash2DraftModel`), whose names and
index order these are.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.config import Convolution


class DynamicConvolution(nn.Module):
    """Wraps one sublayer. A fresh one changes nothing: the first tap is 1, all else 0.

    base_kernel: [2, taps, H], before and after the sublayer.
    kernel_projection: H -> 2 * taps * groups, in the order (side, tap, group); added to `base_kernel` per row, one
        value for the channels of a group.
    """

    def __init__(self, hidden_size: int, shape: Convolution) -> None:
        super().__init__()
        taps, self._group_size = shape.kernel_size, shape.group_size
        groups = hidden_size // shape.group_size
        self.base_kernel = mx.zeros((2, taps, hidden_size))
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * groups, bias=False)
        self.kernel_projection.weight = mx.zeros_like(self.kernel_projection.weight)

    def around(self, sublayer: Callable[[mx.array], mx.array], rows: mx.array) -> mx.array:
        """conv_after(sublayer(conv_before(rows))).

        Args:
            rows: [1, T, H], normalised: what the sublayer would get without convolutions, and what both sides'
                kernels are made of.
        Returns:
            [1, T, H], to be added to the residual stream.
        """
        before, after = self._kernels(rows)
        return _convolve(after, sublayer(_convolve(before, rows)))

    def _kernels(self, rows: mx.array) -> list[mx.array]:
        """[1, T, H] -> for each side [1, T, taps, H], in the dtype of the rows."""
        batch, count, hidden = rows.shape
        _, taps, _ = self.base_kernel.shape
        dynamic = self.kernel_projection(rows).reshape(batch, count, 2, taps, -1, 1)
        base = self.base_kernel.astype(rows.dtype).reshape(2, taps, -1, self._group_size)
        sides = (base + dynamic).reshape(batch, count, 2, taps, hidden)
        return [sides[:, :, side] for side in range(2)]


def _convolve(kernel: mx.array, rows: mx.array) -> mx.array:
    """Row t of the result: sum over taps i of kernel [1, T, taps, H] at (t, i) times row t - i of rows [1, T, H]."""
    count, taps = rows.shape[1], kernel.shape[2]
    mixed = kernel[:, :, 0] * rows
    for tap in range(1, min(taps, count)):
        earlier = mx.pad(rows[:, : count - tap], [(0, 0), (tap, 0), (0, 0)])
        mixed = mixed + kernel[:, :, tap] * earlier
    return mixed
