"""The answers of a data set that a draft learns from, one at a time, from shards that need not fit into memory.

Tokens are kept in memory, which are two bytes or four each; distributions and features are read where they are needed.
Features that are not stored are computed by the target, and rounded as they would be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from dflash_mlx.training.blocks import Draw, Sample
from dflash_mlx.training.columns import opened
from dflash_mlx.training.dataset import Dataset, DatasetError, Shard
from dflash_mlx.training.decoder import Decoder
from dflash_mlx.training.features import FEATURES, read_rows, rounded
from dflash_mlx.training.recipe import Recipe

_OPEN = 64  # shards whose files are open at a time
_CURE = "complete the data set"


@dataclass(frozen=True)
class _Place:
    """Where an answer is: its shard, and its number in that."""

    shard: int
    index: int


class Answers:
    """Those that are not held out, of the shards with these numbers.

    Args:
        layers: whose outputs are the features.
        top: tokens of each stored distribution; 0 does without.
        decoder: of the target, with `layers` as its taps; where features are not stored it computes them.
    Raises:
        DatasetError: a shard is damaged, or it lacks what is needed.
    """

    def __init__(
        self, dataset: Dataset, numbers: Sequence[int], layers: Sequence[int], top: int, decoder: Decoder | None
    ) -> None:
        self._dataset, self._layers, self._top, self._decoder = dataset, tuple(layers), top, decoder
        self._tokens: dict[int, Shard] = {}
        self._places: list[_Place] = []
        for number in numbers:
            self._check(number)
            shard = self._tokens[number] = dataset.shard(number)
            self._check_rows(number, shard)
            self._places += [_Place(number, int(index)) for index in np.flatnonzero(~shard.held_out)]
        self._file = lru_cache(maxsize=_OPEN)(_open)

    def _check(self, number: int) -> None:
        soft, features = self._paths(number)
        if self._top and not soft.exists():
            raise DatasetError(
                f"Shard {number} of {self._dataset.folder} has no distributions of {self._top} tokens beside it, and "
                "the recipe learns from them (`soft`). Complete the data set, or set `soft` to 0."
            )
        if self._decoder is None and not features.exists():
            raise DatasetError(
                f"Shard {number} of {self._dataset.folder} has no features of the layers {list(self._layers)} beside "
                "it, and no target is there to compute them. Complete the data set."
            )

    def _check_rows(self, number: int, shard: Shard) -> None:
        """What lies beside a shard has a row for each of its tokens; of other answers, a draft would learn noise."""
        offsets = shard.response_offsets, shard.feature_offsets
        for path, name, rows in zip(self._paths(number), ("top_ids", FEATURES), offsets, strict=True):
            if not path.exists():
                continue
            with opened(path, _CURE) as file:
                found = file.get_slice(name).get_shape()[0]
            if found != rows[-1]:
                raise DatasetError(
                    f"{path} has {found} rows for {rows[-1]} tokens, so they are of other answers. Delete it, and "
                    f"{_CURE}."
                )

    def _paths(self, number: int) -> tuple[Path, Path]:
        """Of the distributions and the features."""
        return self._dataset.soft_path(number, self._top), self._dataset.features_path(number, self._layers)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lengths(self) -> np.ndarray:
        """[n] of the answers with their prompts."""
        return np.array([len(self._sequence(place)) for place in self._places], np.int64)

    @property
    def prompt_lengths(self) -> np.ndarray:
        """[n]."""
        return np.array([self._tokens[p.shard].prompt_lengths[p.index] for p in self._places], np.int64)

    @property
    def positions(self) -> int:
        """Rows of features of all answers, those that are held out too."""
        return sum(int(shard.feature_offsets[-1]) for shard in self._tokens.values())

    def counts(self, vocabulary: int) -> np.ndarray:
        """[vocabulary]: how often each token is in the answers, without their prompts."""
        found = np.zeros(vocabulary, np.int64)
        for number, places in groupby(self._places, lambda place: place.shard):
            prompts = self._tokens[number].prompt_lengths
            answers = [self._sequence(place)[prompts[place.index] :] for place in places]
            found += np.bincount(np.concatenate(answers), minlength=vocabulary)
        return found

    def reader(self, draws: Sequence[Draw], recipe: Recipe) -> Callable[[int], Sample]:
        """What gives each answer of a micro-batch; features that are not stored are computed for all of them now."""
        missing = [draw for draw in draws if not self._paths(self._places[draw.sample].shard)[1].exists()]
        computed = self._compute(missing) if missing else {}
        return lambda sample: self._sample(sample, computed.get(sample), recipe)

    def _compute(self, draws: Sequence[Draw]) -> dict[int, np.ndarray]:
        """Features of the positions before the last anchor, [n, F] each, as `Shard.features`."""
        assert self._decoder is not None
        sequences = [self._sequence(self._places[draw.sample])[: int(draw.anchors[-1])] for draw in draws]
        padded = np.zeros((len(draws), max(map(len, sequences))), np.int64)
        for row, sequence in zip(padded, sequences, strict=True):
            row[: len(sequence)] = sequence  # what stands behind an answer's end does not change it
        whole = self._decoder.read(padded).features
        assert whole is not None
        return {
            draw.sample: rounded(features[: len(sequence)], len(self._layers))
            for draw, features, sequence in zip(draws, whole, sequences, strict=True)
        }

    def _sample(self, number: int, features: np.ndarray | None, recipe: Recipe) -> Sample:
        place = self._places[number]
        shard = self._tokens[place.shard]
        soft_path, features_path = self._paths(place.shard)
        if features is None:
            start, end = (int(each) for each in shard.feature_offsets[place.index : place.index + 2])
            features = read_rows(self._file(features_path), start, min(end, start + recipe.longest))
        ids = logprobs = None
        if self._top:
            start, end = (int(each) for each in shard.response_offsets[place.index : place.index + 2])
            file = self._file(soft_path)
            ids = file.get_slice("top_ids")[start:end].astype(np.int32)
            logprobs = file.get_slice("top_logprobs")[start:end].astype(np.float32)
        tokens = self._sequence(place).astype(np.int32)[: recipe.longest]
        return Sample(tokens, int(shard.prompt_lengths[place.index]), features, ids, logprobs)

    def _sequence(self, place: _Place) -> np.ndarray:
        return self._tokens[place.shard].sequence(place.index)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "numpy").__enter__()
    except Exception as error:  # SafetensorError, OSError
        raise DatasetError(f"{path} is damaged ({error}). Delete it, and complete the data set.") from error
