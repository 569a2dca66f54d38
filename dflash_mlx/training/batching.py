"""Batches of samples, and decoding one.

All rows of a batch are at the same position. Prompts need not be equally long for that: the shortest are read at once,
and a longer one goes on reading its own tokens while the others answer already. A row that has ended is taken out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_mlx.training.decoder import Decoder, Rows
from dflash_mlx.training.prompts import Prompt

_CHUNK = 16  # batches that are sorted by length together
_LEAVE_SHARE = 8  # rows are taken out when one of so many has ended: each time, keys and values are copied


@dataclass(frozen=True)
class Choosing:
    """How tokens are chosen. temperature 0 is greedy; min_p as in `SamplingPolicy`; top: kept of each distribution."""

    temperature: float = 0.0
    min_p: float = 0.0
    top: int = 0


@dataclass(frozen=True)
class Sample:
    """One answer to be made. number: 0 is greedy, others are drawn at the temperature."""

    prompt: Prompt
    number: int = 0


@dataclass(frozen=True)
class Answer:
    """tokens: prompt and response, the stop token included if it ended with one.

    top_ids, top_logprobs: [response tokens, k], what each token was chosen from, most likely first; missing are -inf.
    features: [len(tokens) - 1, F] float16, or float32 where they overflow that; None.
    """

    sample: Sample
    prompt_length: int
    tokens: np.ndarray
    stopped: bool
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    features: np.ndarray | None


def samples(prompts: Sequence[Prompt], count: int) -> list[Sample]:
    """`count` answers of each prompt, of a held-out one only the greedy one."""
    return [Sample(prompt, n) for prompt in prompts for n in range(1 if prompt.held_out else count)]


def chunks(planned: Sequence[Sample], batch: int, seed: int) -> list[list[Sample]]:
    """The samples in an order that is mixed anywhere, cut into the pieces that `batches` sorts."""
    shuffled = list(planned)
    random.Random(f"{seed} samples").shuffle(shuffled)
    size = _CHUNK * batch
    return [shuffled[start : start + size] for start in range(0, len(shuffled), size)]


def batches(lengths: Sequence[int], batch: int, seed: int) -> list[list[int]]:
    """Indices of samples with prompts of these lengths: batches of nearly equal ones, in mixed order."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    cut = [order[start : start + batch] for start in range(0, len(order), batch)]
    random.Random(f"{seed} {len(lengths)}").shuffle(cut)
    return cut


class _Row:
    """One answer in the making."""

    def __init__(self, sample: Sample, prompt: Sequence[int], seed: int, limit: int) -> None:
        self.sample, self.tokens, self.prompt_length = sample, list(prompt), len(prompt)
        name = f"{seed} {sample.number} {sample.prompt.key}"
        # What is drawn depends on nothing but the sample: not on the batch, nor on where it is in it.
        self.uniform = random.Random(name)
        self.limit = len(prompt) + limit
        self.top: list[tuple[np.ndarray, np.ndarray]] = []
        self.features: list[np.ndarray] = []
        self.stopped = False

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.tokens) >= self.limit

    def answer(self) -> Answer:
        ids, logprobs = (np.stack([pair[part] for pair in self.top]) for part in (0, 1))
        features = np.concatenate(self.features) if self.features else None
        tokens = np.array(self.tokens, np.uint32)
        return Answer(self.sample, self.prompt_length, tokens, self.stopped, ids, logprobs, features)


def decode(
    decoder: Decoder,
    batch: Sequence[tuple[Sample, Sequence[int]]],
    *,
    choosing: Choosing,
    stops: frozenset[int],
    max_tokens: int,
    seed: int,
) -> list[Answer]:
    """Answers in the order of the batch.

    Args:
        batch: samples with the ids of their prompts, one id or more each.
        stops: ids that end an answer. max_tokens: the longest answer, 1 or more.
    """
    rows = [_Row(sample, prompt, seed, max_tokens) for sample, prompt in batch]
    shared = min(row.prompt_length for row in rows)
    live = list(rows)
    capacity = max(row.limit for row in rows)
    read = decoder.start(np.array([row.tokens[:shared] for row in rows]), capacity)
    position = shared  # of the ids that are read next
    while True:
        _take(live, read, position, choosing, stops)
        going = [index for index, row in enumerate(live) if not row.ended]
        if not going:
            return [row.answer() for row in rows]
        if len(live) - len(going) >= max(1, len(live) // _LEAVE_SHARE):
            decoder.keep(going)
            live = [live[index] for index in going]
        # A row that has ended and is still here reads its last token again; nothing of that is used.
        read = decoder.extend(np.array([row.tokens[min(position, len(row.tokens) - 1)] for row in live]))
        position += 1


def _take(live: Sequence[_Row], read: Rows, position: int, choosing: Choosing, stops: frozenset[int]) -> None:
    """Give every row what was read of it, and its next token if its prompt is over."""
    answering = []
    for index, row in enumerate(live):
        if row.ended:
            continue
        if read.features is not None:
            row.features.append(read.features[index])
        if len(row.tokens) == position:
            answering.append(index)
    if not answering:
        return
    logits = read.logits if len(answering) == len(live) else read.logits[answering]
    for index, distribution in zip(answering, _distributions(logits, choosing), strict=True):
        row = live[index]
        token = distribution.choose(row, choosing)
        row.top.append(distribution.top(choosing.top))
        row.tokens.append(token)
        row.stopped = token in stops


_LEAST = np.float32(-12.0)  # log-probability relative to the most likely token; what is below is not stored


@dataclass(frozen=True)
class _Distribution:
    """ids and logits of the tokens that matter, in the order of the ids; total: logsumexp of all logits."""

    ids: np.ndarray
    logits: np.ndarray
    total: float

    def choose(self, row: _Row, choosing: Choosing) -> int:
        """The token; ties go to the lowest id."""
        if row.sample.number == 0 or choosing.temperature == 0:
            return int(self.ids[self.logits.argmax()])
        best = self.logits.max()
        kept = self.logits - best
        if choosing.min_p > 0:
            kept = np.where(kept >= np.log(choosing.min_p), kept, -np.inf)
        weights = np.cumsum(np.exp(kept.astype(np.float64) / choosing.temperature))
        drawn = np.searchsorted(weights, row.uniform.random() * weights[-1], side="right")
        return int(self.ids[min(int(drawn), len(self.ids) - 1)])

    def top(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """([count] uint32, [count] float16), most likely first; -inf where there are fewer that matter."""
        order = np.argsort(-self.logits, kind="stable")[:count]
        ids, logprobs = np.zeros(count, np.uint32), np.full(count, -np.inf, np.float16)
        ids[: len(order)] = self.ids[order]
        logprobs[: len(order)] = self.logits[order] - self.total
        return ids, logprobs


def likeliest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """[R, V] -> [R, count] ids and log-probabilities, as an `Answer` has them."""
    rows = [distribution.top(count) for distribution in _distributions(logits, Choosing())]
    return np.stack([ids for ids, _ in rows]), np.stack([logprobs for _, logprobs in rows])


def _distributions(logits: np.ndarray, choosing: Choosing) -> Iterator[_Distribution]:
    """[R, V] -> one per row. With a `min_p` below `_LEAST`, temperature draws need the whole vocabulary."""
    best = logits.max(axis=-1, keepdims=True)
    least = _LEAST if choosing.min_p >= np.exp(_LEAST) or choosing.temperature == 0 else np.float32(-np.inf)
    totals = np.log(np.exp(logits - best).sum(axis=-1)) + best[:, 0]
    for row, bound, total in zip(logits, best[:, 0] + least, totals, strict=True):
        ids = np.flatnonzero(row >= bound)
        yield _Distribution(ids, row[ids], float(total))
