"""Distributions and features of a data set that has only its tokens, as after a checkout on another machine.

    python -m dflash_mlx.training.recompute --data DIR --features 1,8,14

They equal those that were stored with the answers up to rounding: here a sequence is read in one piece. Stop it at any
moment, and start it again with the same arguments to go on.
"""

from __future__ import annotations

if __name__ == "__main__":  # before numpy is imported, whose BLAS reads its number of threads then
    import sys

    from dflash_mlx.training.recompute_command import main

    sys.exit(main())

from collections.abc import Callable, Sequence

import numpy as np

from dflash_mlx.training.batching import likeliest
from dflash_mlx.training.dataset import Dataset, Shard
from dflash_mlx.training.decoder import Decoder

_ROWS = 16  # sequences that are read together: what a CPU's caches like best
_HEAD_ROWS = 512  # positions whose logits are there at a time


def complete(
    dataset: Dataset,
    decoder: Decoder,
    *,
    top: int = 0,
    layers: Sequence[int] = (),
    numbers: Sequence[int] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Compute what is missing, shard by shard; it may be interrupted and called again.

    Args:
        decoder: of the target, with `layers` as its taps.
        numbers: of the shards that matter; None is all that are there.
        top: tokens kept of each distribution, 0 for none. layers: whose outputs are wanted.
    Raises:
        DatasetError: a shard is damaged.
        ValueError: `decoder` has other taps.
        OSError: the disk is full.
    """
    if layers and decoder.taps != tuple(layers):
        raise ValueError(
            f"`decoder` has to have the layers {tuple(layers)} as its taps, else other features would be stored under "
            f"their name, got {decoder.taps}."
        )
    for number in dataset.numbers() if numbers is None else numbers:
        soft = bool(top) and not dataset.soft_path(number, top).exists()
        features = bool(layers) and not dataset.features_path(number, layers).exists()
        if not soft and not features:
            continue  # and not read: features may be a terabyte
        shard = dataset.shard(number)
        order = np.argsort(np.diff(shard.offsets), kind="stable")
        found: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}
        for start in range(0, len(order), _ROWS):
            rows = [int(row) for row in order[start : start + _ROWS]]
            found |= zip(rows, _read(decoder, shard, rows, top if soft else 0), strict=True)
        parts = [found[row] for row in range(len(shard))]
        if soft:
            ids, logprobs = (np.concatenate([part[column] for part in parts]) for column in (0, 1))
            dataset.write_soft(number, ids, logprobs)
        if features:
            dataset.write_features(number, layers, np.concatenate([part[2] for part in parts if part[2] is not None]))
        tell(f"shard {number}: {len(shard)} answers read")


def _read(
    decoder: Decoder, shard: Shard, rows: Sequence[int], top: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Ids, log-probabilities and features of each row. What stands behind a sequence's end does not change it."""
    sequences = [shard.sequence(row) for row in rows]
    padded = np.zeros((len(rows), max(map(len, sequences)) - 1), np.int64)
    for each, sequence in zip(padded, sequences, strict=True):
        each[: len(sequence) - 1] = sequence[:-1]
    whole = decoder.read(padded)
    made = []
    for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        end = len(sequence) - 1
        hidden = whole.hidden[index, shard.prompt_lengths[row] - 1 : end]
        ids, logprobs = _likeliest(decoder, hidden, top) if top else (np.empty(0), np.empty(0))
        made.append((ids, logprobs, None if whole.features is None else whole.features[index, :end]))
    return made


def _likeliest(decoder: Decoder, hidden: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    pieces = [likeliest(decoder.logits(hidden[at : at + _HEAD_ROWS]), top) for at in range(0, len(hidden), _HEAD_ROWS)]
    return np.concatenate([ids for ids, _ in pieces]), np.concatenate([logprobs for _, logprobs in pieces])
