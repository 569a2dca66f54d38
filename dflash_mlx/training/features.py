"""A target's features as they are stored: in float16, which the layers of some targets overflow.

Where they do, a tap is stored divided by a power of two, which changes no digit of what float16 can hold, and the file
says by which (`scales`). What is read is what the target gave: float16, or float32 where it does not fit into that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_mlx.training.columns import rows

_LARGEST = float(np.finfo(np.float16).max)
FEATURES, SCALES = "features", "scales"


def narrow(features: np.ndarray) -> np.ndarray:
    """float32 as float16, half as large, if nothing in it overflows that; else as it is."""
    with np.errstate(over="ignore"):
        half = features.astype(np.float16)
    return features if np.isinf(half).any() else half


def columns_of(features: np.ndarray, taps: int) -> dict[str, np.ndarray]:
    """What is stored of [T, taps * H]: float16, and the scale of each tap if there are any but 1.

    A tap that is not finite somewhere is stored unscaled as far as it is finite: there is nothing to learn from it.
    """
    if features.dtype == np.float16:
        return {FEATURES: features}
    split = features.reshape(len(features), taps, -1)
    largest = np.abs(np.where(np.isfinite(split), split, 0)).max(axis=(0, 2), initial=0)
    over = np.maximum(largest / _LARGEST, 1)
    scales = np.exp2(np.ceil(np.log2(over))).astype(np.float32)
    half = (split / scales[:, None]).astype(np.float16).reshape(features.shape)
    return {FEATURES: half} if (scales == 1).all() else {FEATURES: half, SCALES: scales}


def unscaled(stored: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """[.., taps * H] as stored, with the scale of each tap if there are any -> as the target gave it."""
    if scales is None:
        return stored
    split = stored.reshape(*stored.shape[:-1], len(scales), -1).astype(np.float32)
    return (split * scales[:, None]).reshape(stored.shape)


def rounded(features: np.ndarray, taps: int) -> np.ndarray:
    """[T, taps * H] with the digits that they would have if they had been stored."""
    columns = columns_of(features, taps)
    return unscaled(columns[FEATURES], columns.get(SCALES))


def read_rows(file: Any, start: int, stop: int) -> np.ndarray:
    """Positions start..stop-1 of an open file of features, [stop - start, F], as the target gave them.

    Raises:
        ValueError: there are not so many.
    """
    scales = file.get_tensor(SCALES) if SCALES in file.keys() else None  # noqa: SIM118
    return unscaled(rows(file, FEATURES, start, stop), scales)
