"""What a step learns from: blocks that begin at random places of the target's answers.

A block is an anchor, which is a token of an answer, and the tokens after it, which the draft has to find; it may read
the target's features of all positions before its anchor, in the same answer, and nothing else. A micro-batch holds
rows of features, padded to one length: a row is one answer, or several if they are packed.

Which answers and anchors belong to a micro-batch follows from seed, epoch and number alone, so that a training that
was interrupted goes on as if it had not been. Source: DFlash paper (arXiv 2602.06036) section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dflash_mlx.training.recipe import Recipe

_MIXED = 16  # micro-batches among whose answers those of like length are put together
ROUND = 32  # features are padded to a multiple of it: few shapes, so that few buffers are made


@dataclass(frozen=True)
class Sample:
    """An answer of the target.

    tokens:        [length] int32, prompt and answer.
    prompt_length: positions of the prompt.
    soft_ids, soft_logprobs: [answer, T], what each answer token was chosen from; None if it is not known.
    features:      [length - 1, F] or longer, of the positions from 0.
    """

    tokens: np.ndarray
    prompt_length: int
    features: np.ndarray
    soft_ids: np.ndarray | None = None
    soft_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class Blocks:
    """A micro-batch: N rows of L positions with A anchors; B is the block size, K = B - 1.

    features: [N, L, F] as stored. segments: [N, L] int32, the answer that a position belongs to, -1 for padding.
    positions: [N, L] int32, in its own answer.
    anchor_segments, anchor_positions: [N, A] int32; segment -1 is no anchor.
    tokens: [N, A, B] int32, the anchor and what follows it, -1 past the end.
    soft_ids [N, A, K, T] int32, soft_logprobs [N, A, K, T] float32, -inf for none: what tokens[.., 1 + k] was chosen
        from. None if it is not known.
    """

    features: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    anchor_segments: np.ndarray
    anchor_positions: np.ndarray
    tokens: np.ndarray
    soft_ids: np.ndarray | None = None
    soft_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class Draw:
    """One answer of a micro-batch: which one, and the positions of its anchors, ascending."""

    sample: int
    anchors: np.ndarray


class Plan:
    """Which answers and anchors every micro-batch has.

    Args:
        lengths: [n] of the answers with their prompts.
        prompt_lengths: [n].
    Raises:
        ValueError: no answer is long enough to have an anchor and a token after it.
    """

    def __init__(self, lengths: np.ndarray, prompt_lengths: np.ndarray, recipe: Recipe) -> None:
        self._recipe = recipe
        self._ends = np.minimum(lengths, recipe.longest)
        self._prompts = prompt_lengths
        self._usable = np.flatnonzero(self._ends - prompt_lengths >= 2)
        if not len(self._usable):
            raise ValueError(
                f"None of the {len(lengths)} answers has two tokens within `longest` ({recipe.longest}). Generate "
                "longer answers, or raise `longest`."
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @property
    def samples(self) -> np.ndarray:
        """Indices of the answers that are used."""
        return self._usable

    @property
    def micro_batches(self) -> int:
        """Of an epoch. The last answers of an epoch that fill none wait for another epoch."""
        return max(1, len(self._usable) // self._recipe.sequences)

    @property
    def steps(self) -> int:
        """Of the whole training."""
        if self._recipe.steps:
            return self._recipe.steps
        return max(1, round(self._recipe.epochs * self.micro_batches / self._recipe.accumulate))

    def reached(self, number: int) -> np.ndarray:
        """Indices of the answers that are learned from in this many micro-batches, ascending."""
        found = np.zeros(len(self._ends), bool)
        for epoch in range(-(-number // self.micro_batches)):
            for chosen in self._order(epoch)[: number - epoch * self.micro_batches]:
                found[chosen] = True
            if found.sum() == len(self._usable):
                break
        return np.flatnonzero(found)

    def tokens(self, samples: np.ndarray) -> int:
        """Of these answers, without their prompts and what is cut off."""
        return int((self._ends - self._prompts)[samples].sum())

    def epoch(self, number: int) -> float:
        """Passes over the answers that are done when this many micro-batches are."""
        return number / self.micro_batches

    def draws(self, number: int) -> list[Draw]:
        """Of the micro-batch with this number, from 0, through all epochs."""
        epoch, index = divmod(number, self.micro_batches)
        chosen = self._order(epoch)[index]
        return [Draw(int(sample), self._anchors(epoch, int(sample))) for sample in chosen]

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        """The answers of each micro-batch: random, but of like length, so that little is padded."""
        size = self._recipe.sequences
        random = np.random.default_rng((self._recipe.seed, epoch))
        order = random.permutation(self._usable)
        made = []
        for start in range(0, len(order), size * _MIXED):
            group = order[start : start + size * _MIXED]
            group = group[np.argsort(self._ends[group], kind="stable")]
            made += [group[at : at + size] for at in range(0, len(group), size)]
        full = [each for each in made if len(each) == size] or made
        return [full[index] for index in random.permutation(len(full))]

    def _anchors(self, epoch: int, sample: int) -> np.ndarray:
        """Anchors in an answer: one in each of as many stretches of like length, at a random place.

        The first is at the answer's first token at the earliest, the last before its last.
        """
        first, last = int(self._prompts[sample]), int(self._ends[sample]) - 2
        count, wanted = last - first + 1, self._recipe.anchors
        if count <= wanted:
            return np.arange(first, last + 1)
        random = np.random.default_rng((self._recipe.seed, epoch, sample))
        edges = (np.arange(wanted) + random.random(wanted)) * count / wanted
        return first + np.unique(np.minimum(edges.astype(np.int64), count - 1))


def assemble(draws: Sequence[Draw], sample_of: Callable[[int], Sample], recipe: Recipe) -> Blocks:
    """The micro-batch of these draws."""
    samples = [sample_of(draw.sample) for draw in draws]
    rows = rows_of([int(draw.anchors[-1]) for draw in draws], recipe.pack)
    anchors = max(sum(len(draws[index].anchors) for index in row) for row in rows)
    return _filled(rows, draws, samples, anchors, recipe.block_size)


def rows_of(context: Sequence[int], pack: int) -> list[list[int]]:
    """Which of the answers share a row: as many in turn as have room for their context."""
    if not pack:
        return [[index] for index in range(len(context))]
    rows: list[list[int]] = [[]]
    used = 0
    for index, length in enumerate(context):
        if rows[-1] and used + length > pack:
            rows.append([])
            used = 0
        rows[-1].append(index)
        used += length
    return rows


def _filled(
    rows: Sequence[Sequence[int]], draws: Sequence[Draw], samples: Sequence[Sample], anchors: int, block: int
) -> Blocks:
    """A row holds the context of its answers one after the other: all positions before their last anchors."""
    contexts = [int(draw.anchors[-1]) for draw in draws]
    longest = max(sum(contexts[index] for index in row) for row in rows)
    length = -(-longest // ROUND) * ROUND
    count, width = len(rows), samples[0].features.shape[1]
    features = np.zeros((count, length, width), np.result_type(*(sample.features for sample in samples)))
    segments = np.full((count, length), -1, np.int32)
    positions = np.zeros((count, length), np.int32)
    anchor_segments = np.full((count, anchors), -1, np.int32)
    anchor_positions = np.zeros((count, anchors), np.int32)
    tokens = np.full((count, anchors, block), -1, np.int32)
    top = None if samples[0].soft_ids is None else samples[0].soft_ids.shape[1]
    soft_ids = None if top is None else np.zeros((count, anchors, block - 1, top), np.int32)
    soft_logprobs = None if top is None else np.full((count, anchors, block - 1, top), -np.inf, np.float32)
    for at, row in enumerate(rows):
        start = placed = 0
        for segment, index in enumerate(row):
            draw, sample, end = draws[index], samples[index], start + contexts[index]
            features[at, start:end] = sample.features[: contexts[index]]
            segments[at, start:end] = segment
            positions[at, start:end] = np.arange(contexts[index])
            own = slice(placed, placed + len(draw.anchors))
            anchor_segments[at, own], anchor_positions[at, own] = segment, draw.anchors
            tokens[at, own] = _windows(sample.tokens, draw.anchors, block, -1)
            if soft_ids is not None and soft_logprobs is not None:
                first = draw.anchors + 1 - sample.prompt_length
                soft_ids[at, own] = _windows(sample.soft_ids, first, block - 1, 0)
                soft_logprobs[at, own] = _windows(sample.soft_logprobs, first, block - 1, -np.inf)
            start, placed = end, own.stop
    return Blocks(features, segments, positions, anchor_segments, anchor_positions, tokens, soft_ids, soft_logprobs)


def _windows(values: np.ndarray | None, starts: np.ndarray, size: int, fill: float) -> np.ndarray:
    """[A, size, ..]: the values from each start, `fill` past the end."""
    assert values is not None
    places = starts[:, None] + np.arange(size)
    inside = places < len(values)
    found = values[np.minimum(places, len(values) - 1)]
    return np.where(inside.reshape(*inside.shape, *[1] * (values.ndim - 1)), found, np.array(fill).astype(found.dtype))
