"""An MLX array as the bytes that a kernel is given: the extent of its view, and where its first element lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

HOLE = 0xFF  # bytes of the extent that belong to no element: NaN in every floating type


@dataclass(frozen=True)
class Extent:
    """The memory from a view's lowest to its highest byte.

    data:    uint8, the elements' bytes; bytes between them are HOLE.
    first:   offset of element [0, 0, ...] in `data`, not 0 where a stride is negative.
    skew:    address of data[0], modulo 16, in an allocation that is aligned to 16 bytes.
    shape:   int32.
    strides: int64, in elements.
    """

    data: np.ndarray
    first: int
    skew: int
    shape: np.ndarray
    strides: np.ndarray


def extent(array: mx.array, contiguous: bool) -> Extent:
    """The view as it is, or where `contiguous` and it is not, the copy that MLX would make."""
    bits = _bits(array)
    skew = (bits.__array_interface__["data"][0] - _fresh()) % 16 if bits.size else 0
    if contiguous and not bits.flags.c_contiguous:
        bits, skew = np.ascontiguousarray(bits), 0
    strides = [stride if size > 1 else 0 for size, stride in zip(bits.shape, bits.strides, strict=True)]
    reach = [stride * (size - 1) for size, stride in zip(bits.shape, strides, strict=True)]
    low, high = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    data = np.full(high - low + bits.itemsize if bits.size else 0, HOLE, np.uint8)
    if bits.size:
        np.ndarray(bits.shape, bits.dtype, data, -low, tuple(strides))[...] = bits
    return Extent(
        data=data,
        first=-low,
        skew=(skew + low) % 16,
        shape=np.array(bits.shape, np.int32),
        strides=np.array(bits.strides, np.int64) // bits.itemsize,
    )


def empty(shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    """The bits of an output, not initialised."""
    return np.empty(shape, _bits(mx.zeros((), dtype)).dtype)


def array(bits: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """An MLX array of `dtype` with these bits."""
    made = mx.array(bits)
    return made.view(dtype) if dtype == mx.bfloat16 else made


def _bits(array: mx.array) -> np.ndarray:
    """The array's own memory, evaluated; numpy has no bfloat16, whose bits are uint16."""
    array = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(array)
    return np.asarray(memoryview(array))  # type: ignore[arg-type]


@cache
def _fresh() -> int:
    """Address of an allocation of MLX's, modulo 16: on the CPU its size stands before it. On Metal that is 0."""
    return int(_bits(mx.zeros((64,))).__array_interface__["data"][0] % 16)
