"""A data set of answers: a folder of shards, one per batch, each there whole or not at all.

    manifest.json             what the answers are of and how they were made; a folder never holds two kinds
    shards/00042.safetensors  tokens: small enough for a repository
    soft-16/00042.safetensors           the target's distributions, their 16 likeliest tokens
    features-1-8-14/00042.safetensors   outputs of these layers of the target

`Shard` says what is in them. Only manifest and tokens matter: the rest can be computed again from them, is too large
for a repository and may be missing or deleted.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_mlx.errors import DFlashError
from dflash_mlx.files import check_written, whole_file
from dflash_mlx.training.batching import Answer

FORMAT = 1
_TOKENS = "shards"
_AGAIN = "generate again: only it is made anew"
_COMPLETE = "complete the data set (`training.recompute.complete`): only it is computed again"
_TEXTS = "samples"  # of a shard's metadata: JSON with a list per column of text


def _name(number: int) -> str:
    return f"{number:05d}.safetensors"


def _soft(top: int) -> str:
    return f"soft-{top}"


def _features(layers: Sequence[int]) -> str:
    return "-".join(["features", *map(str, layers)])


class DatasetError(DFlashError):
    """A data set is incomplete, damaged, or of something else than what was asked for."""


@dataclass(frozen=True)
class Shard:
    """Samples of one batch. Arrays over samples [n]: offsets [n + 1] into `tokens`; prompt_lengths; prompts (keys of
    the prompts), numbers (0 greedy, others drawn), held_out, stopped, and categories, topics as text.

    tokens: [all] uint16 or uint32, prompt and response of each sample.
    top_ids, top_logprobs: [all response tokens, k] uint16 or uint32, and float16: the distribution that each response
        token was chosen from, most likely first, -inf where fewer matter. None if they are not stored.
    features: [all tokens but the last of each sample, F] float16, or None.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    prompt_lengths: np.ndarray
    prompts: np.ndarray
    numbers: np.ndarray
    held_out: np.ndarray
    stopped: np.ndarray
    categories: list[str]
    topics: list[str]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    features: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def sequence(self, index: int) -> np.ndarray:
        """Prompt and response of a sample."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def response_offsets(self) -> np.ndarray:
        """[n + 1] into `top_ids` and `top_logprobs`."""
        return np.concatenate([[0], np.cumsum(np.diff(self.offsets) - self.prompt_lengths)])

    @property
    def feature_offsets(self) -> np.ndarray:
        """[n + 1] into `features`."""
        return np.concatenate([[0], np.cumsum(np.diff(self.offsets) - 1)])


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

        Raises:
            DatasetError: the folder holds one that was made otherwise, and says what differs; or shards of which
                nothing says how they were made.
        """
        wanted = json.loads(json.dumps({"format": FORMAT, **manifest}))
        path = folder / "manifest.json"
        if path.exists():
            found = cls.open(folder)
            if found.manifest != wanted:
                raise DatasetError(
                    f"{folder} holds a data set that was made otherwise: {_difference(found.manifest, wanted)}. Two "
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
        _save(self.folder / _TOKENS / _name(number), columns, {_TEXTS: texts})

    def write_soft(self, number: int, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Store the distributions of a shard, `Shard.top_ids` and `Shard.top_logprobs`."""
        columns = {"top_ids": self._narrow(top_ids), "top_logprobs": top_logprobs}
        _save(self.folder / _soft(top_ids.shape[1]) / _name(number), columns)

    def write_features(self, number: int, layers: Sequence[int], features: np.ndarray) -> None:
        """Store the features of a shard, `Shard.features`."""
        _save(self.folder / _features(layers) / _name(number), {"features": features})

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
        columns, metadata = _load(self.folder / _TOKENS / name, _AGAIN)
        texts = json.loads(metadata[_TEXTS])
        lengths = columns.pop("lengths").astype(np.int64)
        extra: dict[str, np.ndarray] = {}
        for path in (self.folder / _soft(top) / name, self.folder / _features(layers) / name):
            if path.exists():
                extra |= _load(path, _COMPLETE)[0]
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
            features=extra.get("features"),
        )
        for rows, offsets in ((shard.top_ids, shard.response_offsets), (shard.features, shard.feature_offsets)):
            if rows is not None and len(rows) != offsets[-1]:
                raise DatasetError(
                    f"Beside shard {name} of {self.folder} lie {len(rows)} rows for {offsets[-1]} tokens, so they are "
                    f"of other answers. Delete what lies beside it, and {_COMPLETE}."
                )
        return shard

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


def _save(path: Path, columns: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as aside:
        try:
            save_file(dict(columns), aside, metadata)
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(errno.EIO, f"cannot be written ({error}). Is the disk full?", str(path)) from error
        check_written(aside)
        aside.chmod(0o644)


def _load(path: Path, cure: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # SafetensorError, OSError
        raise DatasetError(f"{path} is damaged ({error}). Delete it, and {cure}.") from error
