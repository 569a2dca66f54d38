"""A data set of answers: a folder of shards, one per batch, each there whole or not at all.

    manifest.json             what the answers are of and how they were made; a folder never holds two kinds
    shards/00042.safetensors  tokens: small enough for a repository
    soft-16/00042.safetensors           the target's distributions, their 16 likeliest tokens
    features-1-8-14/00042.safetensors   outputs of these layers of the target

`shard.Shard` says what is in them. Only manifest and tokens matter: the rest can be computed again from them, is too
large for a repository and may be missing or deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.files import whole_file
from dflash_mlx.training import features as stored
from dflash_mlx.training.batching import Answer
from dflash_mlx.training.columns import DatasetError as DatasetError
from dflash_mlx.training.columns import load, opened, rows, save
from dflash_mlx.training.shard import Shard as Shard
from dflash_mlx.training.target_identity import what_decides

FORMAT = 1
_TOKENS = "shards"
_AGAIN = "generate again: only it is made anew"
_COMPLETE = "complete the data set (`python -m dflash_mlx.training.recompute`): only it is computed again"
_TEXTS = "samples"  # of a shard's metadata: JSON with a list per column of text


def _name(number: int) -> str:
    return f"{number:05d}.safetensors"


def _soft(top: int) -> str:
    return f"soft-{top}"


def _features(layers: Sequence[int]) -> str:
    return "-".join(["features", *map(str, layers)])


class Dataset:
    """A folder of shards."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest = dict(manifest)

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """An existing data set.

        Raises:
            DatasetError: there is none, or one of another format.
        """
        path = folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DatasetError(
                f"{folder} has no manifest.json, so it is no data set. Give a folder that was generated."
            ) from None
        except ValueError as error:
            raise DatasetError(
                f"{path} cannot be read ({error}). Restore it, or generate into another folder."
            ) from error
        made = manifest.get("format") if isinstance(manifest, dict) else None
        if made != FORMAT:
            raise DatasetError(
                f"{path} has format {made}, and this version reads {FORMAT}. Generate it again, or "
                "use the version that it was made with."
            )
        return cls(folder, manifest)

    @classmethod
    def create_or_resume(cls, folder: Path, manifest: Mapping[str, Any]) -> Dataset:
        """The data set with this manifest in `folder`, made if there is none.

        What names the same target and the same prompts otherwise, as on another machine, is the same manifest.

        Raises:
            DatasetError: the folder holds one that was made otherwise, and says what differs; or shards of which
                nothing says how they were made.
        """
        wanted = json.loads(json.dumps({"format": FORMAT, **manifest}))
        path = folder / "manifest.json"
        if path.exists():
            found = cls.open(folder)
            ours, theirs = what_decides(found.manifest, wanted)
            if ours != theirs:
                raise DatasetError(
                    f"{folder} holds a data set that was made otherwise: {_difference(ours, theirs)}. Two "
                    "kinds in one folder could not be told apart. Use the same settings to continue it, or another "
                    "folder."
                )
            return found
        made = cls(folder, wanted)
        if made.numbers():
            raise DatasetError(
                f"{folder} has shards, but no manifest.json that says how they were made, so they cannot be continued. "
                "Restore it, or generate into another folder."
            )
        (folder / _TOKENS).mkdir(parents=True, exist_ok=True)
        with whole_file(path) as aside:
            aside.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
            aside.chmod(0o644)
        return made

    def numbers(self) -> list[int]:
        """Of the shards that are there, ascending."""
        names = (re.fullmatch(r"(\d+)\.safetensors", path.name) for path in (self.folder / _TOKENS).glob("*"))
        return sorted(int(name[1]) for name in names if name)

    def write(self, number: int, answers: Sequence[Answer], layers: Sequence[int] = ()) -> None:
        """Store a batch, with its distributions and features if it has them.

        The tokens come last: a shard whose tokens are there is complete. layers: that the features are of.

        Raises:
            OSError: the disk is full, or it cannot be written.
        """
        if answers[0].top_ids.shape[1]:
            ids = np.concatenate([answer.top_ids for answer in answers])
            self.write_soft(number, ids, np.concatenate([answer.top_logprobs for answer in answers]))
        features = [answer.features for answer in answers if answer.features is not None]
        if features:
            self.write_features(number, layers, np.concatenate(features))
        prompts = [answer.sample.prompt for answer in answers]
        columns = {
            "tokens": self._narrow(np.concatenate([answer.tokens for answer in answers])),
            "lengths": np.array([len(answer.tokens) for answer in answers], np.uint32),
            "prompt_lengths": np.array([answer.prompt_length for answer in answers], np.uint32),
            "prompts": np.array([prompt.key for prompt in prompts], np.uint32),
            "numbers": np.array([answer.sample.number for answer in answers], np.uint16),
            "held_out": np.array([prompt.held_out for prompt in prompts], np.uint8),
            "stopped": np.array([answer.stopped for answer in answers], np.uint8),
        }
        texts = json.dumps({"categories": [p.category for p in prompts], "topics": [p.topic for p in prompts]})
        # One entry: safetensors writes several in an order that changes.
        save(self.folder / _TOKENS / _name(number), columns, {_TEXTS: texts})

    def write_soft(self, number: int, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Store the distributions of a shard, `Shard.top_ids` and `Shard.top_logprobs`."""
        columns = {"top_ids": self._narrow(top_ids), "top_logprobs": top_logprobs}
        save(self.folder / _soft(top_ids.shape[1]) / _name(number), columns)

    def write_features(self, number: int, layers: Sequence[int], features: np.ndarray) -> None:
        """Store the features of a shard, `Shard.features`; as they are, not divided by anything."""
        save(self.features_path(number, layers), stored.columns_of(features, len(layers)))

    def _narrow(self, ids: np.ndarray) -> np.ndarray:
        """As uint16 if they fit. A target's head may have more rows than its tokenizer has ids."""
        small = self.manifest["vocabulary"] <= 2**16 and ids.max() < 2**16
        return ids.astype(np.uint16 if small else np.uint32)

    def shard(self, number: int, *, top: int = 0, layers: Sequence[int] = ()) -> Shard:
        """One shard, with the distributions and the features that are asked for, or None for what is not there.

        Raises:
            DatasetError: it is damaged, or what lies beside its tokens is not of them.
        """
        name = _name(number)
        columns, metadata = load(self.folder / _TOKENS / name, _AGAIN)
        texts = json.loads(metadata[_TEXTS])
        lengths = columns.pop("lengths").astype(np.int64)
        extra: dict[str, np.ndarray] = {}
        for path in (self.soft_path(number, top), self.features_path(number, layers)):
            if path.exists():
                extra |= load(path, _COMPLETE)[0]
        features = extra.get(stored.FEATURES)
        shard = Shard(
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            tokens=columns["tokens"],
            prompt_lengths=columns["prompt_lengths"].astype(np.int64),
            prompts=columns["prompts"],
            numbers=columns["numbers"],
            held_out=columns["held_out"].astype(bool),
            stopped=columns["stopped"].astype(bool),
            categories=texts["categories"],
            topics=texts["topics"],
            top_ids=extra.get("top_ids"),
            top_logprobs=extra.get("top_logprobs"),
            features=None if features is None else stored.unscaled(features, extra.get(stored.SCALES)),
        )
        for found, offsets in ((shard.top_ids, shard.response_offsets), (shard.features, shard.feature_offsets)):
            if found is not None and len(found) != offsets[-1]:
                raise DatasetError(
                    f"Beside shard {name} of {self.folder} lie {len(found)} rows for {offsets[-1]} tokens, so they are "
                    f"of other answers. Delete what lies beside it, and {_COMPLETE}."
                )
        return shard

    def feature_rows(self, number: int, layers: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Rows of `Shard.features`, without reading the others.

        Raises:
            DatasetError: the file is not there, or damaged. ValueError: it has not so many rows.
        """
        with opened(self.features_path(number, layers), _COMPLETE) as file:
            return stored.read_rows(file, start, stop)

    def soft_rows(self, number: int, top: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of `Shard.top_ids` and `Shard.top_logprobs`, without reading the others. Raises as `feature_rows`."""
        with opened(self.soft_path(number, top), _COMPLETE) as file:
            return rows(file, "top_ids", start, stop), rows(file, "top_logprobs", start, stop)

    def tokens_path(self, number: int) -> Path:
        """Where the tokens of a shard are."""
        return self.folder / _TOKENS / _name(number)

    def soft_path(self, number: int, top: int) -> Path:
        """Where the distributions of a shard are, if they are stored: `top_ids` and `top_logprobs`."""
        return self.folder / _soft(top) / _name(number)

    def features_path(self, number: int, layers: Sequence[int]) -> Path:
        """Where the features of a shard are, if they are stored: `features`."""
        return self.folder / _features(layers) / _name(number)

    def tops(self) -> list[int]:
        """Tokens per distribution that some shard has distributions of, ascending."""
        names = (re.fullmatch(r"soft-(\d+)", path.name) for path in self.folder.glob("soft-*"))
        return sorted(int(name[1]) for name in names if name)

    def shards(self, *, top: int = 0, layers: Sequence[int] = ()) -> Iterator[Shard]:
        """All that are there, one at a time."""
        for number in self.numbers():
            yield self.shard(number, top=top, layers=layers)


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """The first entry that differs, with both values."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys(), key=lambda key: (key != "settings", key)):
            if found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
    return f"its {where} is {found!r}, asked for is {wanted!r}"
