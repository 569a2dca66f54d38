"""Answers that no draft learns from: the prompts that a data set holds out, and what the target said to them greedily.

Which of them are used follows from the seed and the prompts alone, whatever shard they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dflash_mlx.training.blocks import Sample
from dflash_mlx.training.columns import opened
from dflash_mlx.training.dataset import Dataset, DatasetError
from dflash_mlx.training.decoder import Decoder
from dflash_mlx.training.features import FEATURES, read_rows, rounded
from dflash_mlx.training.prompts import HELD_OUT_SHARE, digest

_ROWS = 16  # answers that the target reads together
_CURE = "complete the data set (`python -m dflash_mlx.training.recompute`)"


class NothingHeldOut(DatasetError):
    """A data set has no answers to measure a draft with."""


@dataclass(frozen=True)
class StoredRows:
    """Rows start..stop-1 of a file of features, which are read when they are asked for and not kept."""

    path: Path
    start: int
    stop: int

    def read(self) -> np.ndarray:
        """[stop - start, F], as `Shard.features`. Raises DatasetError: the file is gone or damaged."""
        with opened(self.path, _CURE) as file:
            return read_rows(file, self.start, self.stop)


@dataclass(frozen=True)
class HeldOut:
    """One prompt and the target's greedy answer to it.

    tokens:   [length] int32, prompt and answer; of the answer `limit` tokens at most.
    limit:    tokens at which the target would have been stopped: `max_tokens` of a request that says the same.
    rows:     of features of the layers that a draft reads, but for the last token's; None: not asked for.
    """

    category: str
    tokens: np.ndarray
    prompt_length: int
    limit: int
    rows: StoredRows | np.ndarray | None = None

    @property
    def features(self) -> np.ndarray | None:
        """[positions, F], as `Shard.features`; read now if they are stored. Raises DatasetError as `StoredRows`."""
        return self.rows.read() if isinstance(self.rows, StoredRows) else self.rows

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_length].tolist()

    @property
    def said(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_length

    @property
    def anchors(self) -> np.ndarray:
        """Positions of all tokens of the answer that another one follows."""
        return np.arange(self.prompt_length, len(self.tokens) - 1)

    def sample(self) -> Sample:
        """For `blocks.assemble`."""
        features = self.features
        assert features is not None
        return Sample(self.tokens, self.prompt_length, features)


def positions_in(answers: Sequence[HeldOut]) -> int:
    """That have features, of all these answers together."""
    return sum(len(answer.tokens) - 1 for answer in answers)


def held_out(
    dataset: Dataset,
    *,
    numbers: Sequence[int] | None = None,
    per_category: int,
    max_tokens: int,
    seed: int = 0,
    layers: Sequence[int] = (),
    decoder: Decoder | None = None,
) -> list[HeldOut]:
    """Up to `per_category` held-out answers of each category, by category; which ones, the seed decides.

    Features that are stored are read whenever they are needed; those that are computed are kept in memory, 2 bytes per
    element or 4.

    Args:
        numbers: of the shards that count; None is all that are there.
        max_tokens: of an answer; what was answered after them does not count.
        layers: whose outputs are the features; without any, features are not read.
        decoder: of the target with `layers` as its taps, which computes features that are not stored.
    Raises:
        NothingHeldOut: no answer is held out.
        DatasetError: a shard is damaged, or lacks features that nothing can compute.
    """
    found: list[tuple[str, int, bytes, HeldOut, tuple[int, int]]] = []
    answers = 0
    topics: set[str] = set()
    for number in dataset.numbers() if numbers is None else numbers:
        shard = dataset.shard(number)
        answers += len(shard)
        topics.update(shard.topics)
        for index in np.flatnonzero(shard.held_out & (shard.numbers == 0)).tolist():
            prompt_length = int(shard.prompt_lengths[index])
            whole = shard.sequence(index).astype(np.int32)
            limit = max_tokens if shard.stopped[index] else min(max_tokens, len(whole) - prompt_length)
            one = HeldOut(shard.categories[index], whole[: prompt_length + max_tokens], prompt_length, limit)
            rank = digest(f"evaluate {seed} {shard.prompts[index]}")
            found.append((one.category, rank, whole.tobytes(), one, (number, index)))
    if not found:
        raise NothingHeldOut(
            f"{dataset.folder} has no held-out answers among its {answers} answers of {len(topics)} topics, so nothing "
            "would say how a draft does on what it did not learn. One topic of "
            f"{HELD_OUT_SHARE} is held out when prompts are read: generate answers to more prompts, of 100 different "
            "topics or more (prompts without a `topic` count as one each)."
        )
    found.sort(key=lambda each: each[:3])
    chosen, counts = [], dict.fromkeys((each[0] for each in found), 0)
    for category, _, _, one, place in found:
        if counts[category] < per_category:
            counts[category] += 1
            chosen.append((one, place))
    return _with_features(dataset, chosen, layers, decoder) if layers else [one for one, _ in chosen]


def _with_features(
    dataset: Dataset,
    chosen: Sequence[tuple[HeldOut, tuple[int, int]]],
    layers: Sequence[int],
    decoder: Decoder | None,
) -> list[HeldOut]:
    made: list[HeldOut | None] = [None] * len(chosen)
    missing = []
    places: dict[int, list[tuple[int, int]]] = {}
    for at, (_, (number, index)) in enumerate(chosen):
        if dataset.features_path(number, layers).exists():
            places.setdefault(number, []).append((at, index))
        else:
            missing.append(at)
    for number, wanted in places.items():
        offsets = dataset.shard(number).feature_offsets
        path = dataset.features_path(number, layers)
        _check_rows(path, int(offsets[-1]))
        for at, index in wanted:
            one, start = chosen[at][0], int(offsets[index])
            made[at] = replace(one, rows=StoredRows(path, start, start + len(one.tokens) - 1))
    if missing:
        if decoder is None or decoder.taps != tuple(layers):
            raise DatasetError(
                f"{len(missing)} held-out answers of {dataset.folder} have no features of the layers {list(layers)} "
                f"beside them, and no target is there to compute them. To have them, {_CURE}."
            )
        missing.sort(key=lambda at: len(chosen[at][0].tokens))
        for start in range(0, len(missing), _ROWS):
            group = missing[start : start + _ROWS]
            for at, features in zip(group, _computed(decoder, [chosen[at][0] for at in group]), strict=True):
                made[at] = replace(chosen[at][0], rows=features)
    return [one for one in made if one is not None]


def _check_rows(path: Path, rows: int) -> None:
    """Raises DatasetError if a file of features has not so many rows in all."""
    with opened(path, _CURE) as file:
        found = file.get_slice(FEATURES).get_shape()[0]
    if found != rows:
        raise DatasetError(
            f"{path} has {found} rows for {rows} tokens, so they are of other answers. Delete it, and {_CURE}."
        )


def _computed(decoder: Decoder, group: Sequence[HeldOut]) -> list[np.ndarray]:
    """What stands behind an answer's end does not change its features."""
    padded = np.zeros((len(group), max(len(one.tokens) for one in group) - 1), np.int64)
    for row, one in zip(padded, group, strict=True):
        row[: len(one.tokens) - 1] = one.tokens[:-1]
    features = decoder.read(padded).features
    assert features is not None
    taps = len(decoder.taps)
    return [rounded(each[: len(one.tokens) - 1], taps) for each, one in zip(features, group, strict=True)]
