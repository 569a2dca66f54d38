"""The data set that a training learns from, as complete as its recipe needs it: generated, or one that is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.config import DraftConfig
from dflash_mlx.targets import Target
from dflash_mlx.training.asked import Asked
from dflash_mlx.training.batching import Sample
from dflash_mlx.training.dataset import Dataset, DatasetError
from dflash_mlx.training.decoder import decoder_for
from dflash_mlx.training.generate import Settings, generate, prompt_ids
from dflash_mlx.training.generation_memory import chosen
from dflash_mlx.training.memory import memory_here
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.prompts.sources import read_prompts
from dflash_mlx.training.recompute import complete
from dflash_mlx.training.recompute_command import check_target
from dflash_mlx.training.run_folder import RunFolder
from dflash_mlx.training.target_identity import identity

CACHED, COMPUTED = "cached", "computed"
_ROOM = 1 << 30  # bytes of the disk that stay free
_TRIED = 64  # prompts that are encoded to know how long they are

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """A target that is in memory. config: of the draft to be made for it."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    target: Target
    config: DraftConfig

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.config.target_layer_ids)

    def feature_bytes(self, positions: int) -> int:
        """That features of so many positions take on the disk, as float16."""
        return 2 * positions * len(self.taps) * self.target.spec.hidden_size


@dataclass(frozen=True)
class Gaps:
    """What a training's shards of a data set lack. top: tokens of the distributions that are wanted, 0 for none.
    soft, features: shards without them. positions: of these shards' features."""

    top: int
    soft: int
    features: int
    positions: int
    numbers: Sequence[int]

    @classmethod
    def of(cls, dataset: Dataset, asked: Asked, taps: Sequence[int], run: RunFolder) -> Gaps:
        """run: the training; one that was begun has its shards and distributions, which others may have joined since.

        Raises:
            DatasetError: a shard is damaged. TrainingError: run.json cannot be read.
        """
        there, tops = dataset.numbers(), dataset.tops()
        numbers = sorted(set(run.shards()) & set(there)) if run.started else there  # of those that are gone, `begin`
        whole = [top for top in tops if all(dataset.soft_path(number, top).exists() for number in numbers)]
        top = (whole or tops or [Settings().top])[-1] if asked.recipe.soft else 0
        top = run.top() if run.started else top
        soft = [number for number in numbers if top and not dataset.soft_path(number, top).exists()]
        features = [number for number in numbers if not dataset.features_path(number, taps).exists()]
        positions = sum(int(dataset.shard(number).feature_offsets[-1]) for number in features)
        return cls(top, len(soft), len(features), positions, numbers)

    def line(self, loaded: Loaded, features: str) -> str | None:
        """What has to be computed first; None if nothing has."""
        parts = [f"the distributions of {self.soft} shards"] if self.soft else []
        if self.features and features == CACHED:
            size = loaded.feature_bytes(self.positions) / 1e9
            parts.append(f"the features of {self.features} shards ({size:.2f} GB on the disk)")
        return f"computed first, since the data set lacks them: {' and '.join(parts)}" if parts else None


def prompts_of(asked: Asked, tell: Tell) -> list[Prompt]:
    """What the target is asked. Raises PromptsError, FetchError: it cannot be read."""
    return read_prompts(asked.data, asked.answers, asked.recipe.seed, tell)


def check(asked: Asked, loaded: Loaded, dataset: Dataset) -> None:
    """Refuse a data set that a draft of this target cannot learn from.

    Raises:
        DatasetError: it is empty, or another target made it; says what differs.
    """
    check_target(dataset, identity(asked.target, asked.revision, loaded.model), loaded.tokenizer)
    if not dataset.numbers():
        raise DatasetError(f"{dataset.folder} has no answers yet, so there is nothing to learn from. Generate some.")


def where_features_are(asked: Asked, positions: int, loaded: Loaded, folder: Path) -> tuple[str, str]:
    """Cached or computed, and the sentence that says so.

    Args:
        positions: whose features are not stored. folder: that they would be in.
    """
    size = loaded.feature_bytes(positions)
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    facts = f"up to {size / 1e9:.2f} GB, {free / 1e9:.1f} GB are free"
    if asked.features is not None:
        return asked.features, f"{asked.features}, as asked" + (f" ({facts})" if asked.features == CACHED else "")
    if size + _ROOM <= free:
        return CACHED, f"stored beside the answers ({facts}); --features computed does without"
    return COMPUTED, f"computed in every step, since the disk has no room for them ({facts}); that takes longer"


def prompt_lengths(prompts: Sequence[Prompt], tokenizer: TokenizerWrapper) -> list[int]:
    """In tokens, of the first ones: their order is mixed, so they stand for all."""
    return [len(prompt_ids(tokenizer, Sample(prompt))) for prompt in prompts[:_TRIED]]


def positions_of(prompts: Sequence[Prompt], asked: Asked, tokenizer: TokenizerWrapper) -> int:
    """Of all answers to be generated, about, and if each is as long as it may be."""
    lengths = prompt_lengths(prompts, tokenizer)
    mean = -(-sum(lengths) // max(1, len(lengths)))
    return len(prompts) * asked.samples * (mean + asked.max_tokens)


def batch_of(asked: Asked, loaded: Loaded, prompts: Sequence[Prompt], folder: Path) -> tuple[int, str]:
    """The rows of a batch of answers in a folder, and the sentence that says what they need.

    Raises:
        TooLarge: those that are asked for do not fit into the memory. ValueError, DatasetError: as `answered`.
    """
    begun = Dataset.open(folder) if (folder / "manifest.json").exists() else None
    settings = asked.settings(loaded.taps if asked.features == CACHED else ())
    return chosen(asked.batch, begun, loaded.target, loaded.tokenizer, prompts, settings, memory_here())


def answered(asked: Asked, loaded: Loaded, prompts: Sequence[Prompt], folder: Path, tell: Tell) -> Dataset:
    """The target's answers to the prompts, in a folder; those that are there already are kept.

    Raises:
        DatasetError: the folder holds something else. ValueError: `max_tokens` does not fit the target.
    """
    layers = loaded.taps if asked.features == CACHED else ()
    target = identity(asked.target, asked.revision, loaded.model)
    dataset = generate(
        loaded.model,
        loaded.tokenizer,
        prompts,
        folder,
        asked.settings(layers),
        target=target,
        source=asked.data,
        tell=tell,
    )
    if not dataset.numbers():
        raise DatasetError(
            f"None of the {len(prompts)} prompts could be answered: each is empty, or too long for {asked.target}. "
            "There would be nothing to learn from. Give other prompts."
        )
    return dataset


def fill(asked: Asked, loaded: Loaded, dataset: Dataset, run: RunFolder, tell: Tell) -> None:
    """Compute what the data set lacks for this training.

    Raises:
        DatasetError: a shard is damaged. OSError: the disk is full, or the data set cannot be written.
    """
    gaps = Gaps.of(dataset, asked, loaded.taps, run)
    cached = asked.features == CACHED and gaps.features > 0
    if not gaps.soft and not cached:
        return
    layers = loaded.taps if cached else ()
    decoder = decoder_for(loaded.model, layers)
    complete(dataset, decoder, top=gaps.top, layers=layers, numbers=gaps.numbers, tell=tell)
