"""How good a draft in training is, on answers that it did not learn from.

    teacher_forced   what it proposes at places of known answers
    walked           that at all places, and what the decode loop would make of it: the target's own greedy answers are
                     what the loop would write, so its cycles can be counted without the target
    accepted         the decode loop itself, with target and draft as they are served

`walked` and `accepted` count the same cycles, up to rounding, as stored features are float16.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing

import numpy as np

from dflash_mlx.decode import decode
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.options import Options
from dflash_mlx.request import plan
from dflash_mlx.targets import Target
from dflash_mlx.training.evaluation import Count as Count
from dflash_mlx.training.evaluation import Evaluation as Evaluation
from dflash_mlx.training.held_out import HeldOut
from dflash_mlx.training.matches import Matches


def teacher_forced(
    matches: Matches,
    answers: Sequence[HeldOut],
    *,
    block_size: int,
    anchors: int | None = None,
    seed: int = 0,
    step: int = 0,
) -> Evaluation:
    """What the draft proposes where the answer so far is known.

    Args:
        anchors: blocks of each answer, at places that the seed decides; None is everywhere.
        block_size: 2..the draft's.
    """
    started = time.perf_counter()
    _check_block(matches.draft, block_size)
    random = np.random.default_rng(seed)
    places = [answer.anchors for answer in answers]
    if anchors is not None:
        places = [np.sort(random.choice(each, min(anchors, len(each)), replace=False)) for each in places]
    right = matches.of(answers, places, block_size)
    accuracy, length = _shares(answers, places, right)
    return Evaluation(step, accuracy, length, seconds=time.perf_counter() - started)


def walked(matches: Matches, answers: Sequence[HeldOut], *, block_size: int, step: int = 0) -> Evaluation:
    """As `teacher_forced` everywhere, with the cycles that the decode loop would take for the same answers.

    The loop goes from anchor to anchor, by the accepted proposals and one more token. Near the end of its limit it asks
    for fewer proposals, which may be others than in a whole block, so they are computed for themselves.
    """
    started = time.perf_counter()
    _check_block(matches.draft, block_size)
    places = [answer.anchors for answer in answers]
    right = matches.of(answers, places, block_size)
    walks = [_Walk(answer, block_size - 1, _runs(each)) for answer, each in zip(answers, right, strict=True)]
    for narrow in range(block_size - 2, 0, -1):
        there = [walk for walk in walks if not walk.over and walk.limit == narrow]
        at = [np.array([walk.position]) for walk in there]
        for walk, each in zip(there, matches.of([walk.answer for walk in there], at, narrow + 1), strict=True):
            walk.advance(int(_runs(each)[0]))
    for walk in walks:
        if not walk.over:  # its last cycle has no room for proposals
            walk.advance(0)
    accuracy, length = _shares(answers, places, right)
    categories = _pooled((walk.answer.category, walk.count) for walk in walks)
    return Evaluation(step, accuracy, length, categories, time.perf_counter() - started)


class _Walk:
    """The decode loop over one answer: where it is, and how many cycles it took."""

    def __init__(self, answer: HeldOut, proposals: int, runs: np.ndarray) -> None:
        """runs: right proposals of a whole block at each anchor. Goes on while whole blocks are asked for."""
        self.answer, self._proposals = answer, proposals
        self._made = 1  # tokens of the answer; the first one comes from the prompt
        self._cycles = 0
        while not self.over and self.limit == proposals:
            self.advance(int(runs[self._made - 1]))

    @property
    def over(self) -> bool:
        return self._made >= self.answer.said

    @property
    def limit(self) -> int:
        """Proposals that the next cycle asks for, as `decode` does."""
        return min(self._proposals, self.answer.limit - self._made - 1)

    @property
    def position(self) -> int:
        """Of the anchor."""
        return self.answer.prompt_length + self._made - 1

    def advance(self, accepted: int) -> None:
        self._made = min(self._made + accepted + 1, self.answer.said)
        self._cycles += 1

    @property
    def count(self) -> Count:
        return Count(1, self._made - 1, self._cycles)


def _runs(right: np.ndarray) -> np.ndarray:
    """[.., K] bool -> [..], how many are right before the first that is not."""
    return np.logical_and.accumulate(right, axis=-1).sum(axis=-1)


def _shares(
    answers: Sequence[HeldOut], places: Sequence[np.ndarray], right: Sequence[np.ndarray]
) -> tuple[tuple[float, ...], float]:
    """Accuracy and expected length; a position behind an answer's end counts in neither."""
    positions = np.arange(1, right[0].shape[1] + 1)
    there = np.concatenate(
        [at[:, None] + positions < len(answer.tokens) for answer, at in zip(answers, places, strict=True)]
    )
    hits = np.concatenate(right)
    seen = there.sum(axis=0)
    runs = np.logical_and.accumulate(hits, axis=1).sum(axis=0)
    with np.errstate(invalid="ignore"):
        accuracy = hits.sum(axis=0) / seen
    return tuple(accuracy.tolist()), 1 + float((runs / np.maximum(seen, 1)).sum())


def _pooled(counts: Iterable[tuple[str, Count]]) -> dict[str, Count]:
    found: dict[str, Count] = {}
    for category, count in counts:
        found[category] = found.get(category, Count()) + count
    return dict(sorted(found.items()))


def _check_block(draft: DraftModel, block_size: int) -> None:
    most = draft.config.block_size
    if not 2 <= block_size <= most:
        raise ValueError(f"`block_size` has to be in 2..{most} (that of the draft in training), got {block_size}.")


def accepted(
    target: Target,
    draft: DraftModel,
    answers: Sequence[HeldOut],
    *,
    stop: Collection[int],
    block_size: int,
    max_tokens: int,
) -> dict[str, Count]:
    """What the decode loop makes of the prompts, greedily and with a draft in every cycle, by category.

    Args:
        draft: as it will be loaded. stop: ids that end an answer.
        max_tokens: of an answer.
    Raises:
        ValueError: an argument is out of range. IncompatiblePair: the draft is not for this target.
    """
    _check_block(draft, block_size)
    options = Options(max_tokens=max_tokens, block_size=block_size, mode="dflash", kernels="off")
    request = plan(target.model, draft, options)
    counts = []
    for answer in answers:
        session = request.open(stop)
        try:
            with closing(decode(session, answer.prompt, max_tokens=max_tokens, stop=stop)) as commits:
                for commit in commits:
                    session.undelivered -= len(commit.tokens)  # what was not delivered is not counted
        finally:
            request.close(session)
        counts.append((answer.category, Count(1, session.stats.emitted - 1, session.stats.cycles)))
    return _pooled(counts)
