"""Random walks over one prompt cache: whatever happened to it, the next answer is that of a cold run.

An operation is a turn (blocks of any width, spoiled at any depth; left, broken off or cancelled anywhere), a cut, or a
forward that is thrown away. After each one tokens, lengths, keys, values, states and the draft's context are those of
a run that was only ever given what is held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from os.path import commonprefix
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import make_prompt_cache as make_entries

from dflash_mlx import make_prompt_cache
from dflash_mlx.cache import KVQuantization, TargetCache
from dflash_mlx.decode import Commit, Session, decode
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.options import Options
from dflash_mlx.proposal import Proposal
from dflash_mlx.proposers import Proposer
from dflash_mlx.request import plan
from dflash_mlx.targets import target_for
from tests.conftest import tiny_draft
from tests.families import BY_NAME, SAME_TOKENS, VOCAB, prompt_of, reference, tiny
from tests.plain import check_close, check_rows, loose, prefilled

WINDOW = 8  # of the draft's sliding layer
ENDLESS = 1000


@dataclass(frozen=True)
class Turn:
    """Take back `back` tokens of what was said, add `new` ones, and answer.

    step:      prefill_step_size.
    stable:    tokens at the end of the prompt that the next turn will not repeat; None is not known.
    cycles:    (width, first wrong draft) of each cycle; width 1 is a plain step.
    mode:      of the request; "plain" makes every cycle one.
    taken:     how many tokens of the last commit the caller takes; None is all of them.
    broken:    the cache entry at which the cycle after the last one breaks off.
    cancelled: the call of the progress callback that raises.
    """

    back: int
    new: int
    step: int = 64
    stable: int | None = None
    cycles: tuple[tuple[int, int], ...] = ()
    mode: str = "dflash"
    taken: int | None = None
    broken: int | None = None
    cancelled: int | None = None


@dataclass(frozen=True)
class Cut:
    """Reuse what was said but for the last `back` tokens, and ask nothing."""

    back: int


@dataclass(frozen=True)
class Abort:
    """A forward over `width` rows that is thrown away; `broken` is the cache entry at which it broke off."""

    width: int
    broken: int | None = None


Operation = Turn | Cut | Abort


class Interrupted(Exception):
    pass


class Broken:
    """A cache entry that raises when a layer has written its first array into it."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __getitem__(self, index: int) -> Any:
        return self._entry[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._entry[index] = value
        raise Interrupted

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
        self._entry.update_and_fetch(keys, values)
        raise Interrupted


@contextmanager
def breaking(cache: TargetCache, index: int | None) -> Iterator[None]:
    """Forwards break off at one entry: those before it were written, those behind it were not."""
    if index is None:
        yield
        return
    index %= len(cache.entries)
    entry = cache.entries[index]
    cache.entries[index] = Broken(entry)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        cache.entries[index] = entry


@dataclass
class Guide:
    """Schedule and proposer of a turn: the real draft runs, and what it says is replaced by the truth, spoiled."""

    draft: Proposer
    truth: list[int]
    start: int  # position of truth[0]
    cycles: list[tuple[int, int]]
    done: int = 0

    @property
    def current(self) -> tuple[int, int]:
        return self.cycles[self.done] if self.done < len(self.cycles) else (4, 2)

    def limit(self) -> int:
        return self.current[0] - 1

    def record(self, **facts: float) -> None:
        self.done += 1

    def propose(self, anchor: int, limit: int, position: int) -> Proposal:
        assert len(self.draft.propose(anchor, limit, position)) == max(limit, 0)
        first, depth = position - self.start, self.current[1]
        tokens = self.truth[first : first + max(limit, 0)]
        if depth < len(tokens):
            tokens[depth] = (tokens[depth] + 1) % VOCAB
        return Proposal(mx.array(tokens, dtype=mx.int32))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)


@lru_cache
def draft_for(name: str) -> DraftModel:
    """A sliding and a full layer."""
    layers = target_for(tiny(name)).spec.n_layers
    kinds = ["sliding_attention", "full_attention"]
    return tiny_draft(num_target_layers=layers, layer_types=kinds, sliding_window=WINDOW)


@dataclass
class Walk:
    """A prompt cache, and what it has to hold; the oracle is a cold run of mlx_lm.

    said: the tokens that it stands for.
    rows: of the draft's sliding layer: the window, but for what was taken back and is not computed again.
    """

    name: str
    dtype: mx.Dtype
    said: list[int] = field(default_factory=list)
    rows: int = 0
    length: int = 0
    quantization: KVQuantization | None = None
    _rows_at: dict[int, int] = field(default_factory=dict)  # per snapshot
    _count: int = 0

    def __post_init__(self) -> None:
        self.model = self.build()
        self.draft = draft_for(self.name)
        self.held = make_prompt_cache(self.model, self.draft)

    def build(self) -> nn.Module:
        return tiny(self.name, self.dtype)

    def do(self, operation: Operation) -> None:
        self._count += 1
        if isinstance(operation, Turn):
            self.turn(operation)
        elif isinstance(operation, Cut):
            self.reuse(self.said[: max(len(self.said) - operation.back, 0)] or [1])
        else:
            self.abort(operation)
        self.compare()

    def reuse(self, ids: list[int], stable: int | None = None) -> int:
        """What can be cut back is cut back, and otherwise the nearest snapshot is taken."""
        cache = self.held.cache
        shared = min(len(commonprefix([self.said, ids])), cache.length, len(ids) - 1)
        cut = cache.can_trim_to(shared)
        reused = self.held.reuse(ids, stable)
        assert reused == (shared if cut else max((p for p in self._rows_at if p <= shared), default=0))
        if cut:
            self.follow()
        else:
            self.rows, self.length = self._rows_at.get(reused, 0), reused
        self._rows_at = {p: rows for p, rows in self._rows_at.items() if p <= reused}
        self.said = ids[:reused]
        return reused

    def follow(self) -> None:
        """The cache has grown or shrunk."""
        change = self.held.cache.length - self.length
        self.rows = max(min(self.rows + change, WINDOW - 1), 0)
        self.length += change

    def turn(self, turn: Turn) -> None:
        ids = self.said[: max(len(self.said) - turn.back, 0)] + prompt_of(turn.new, seed=100 + self._count) or [1]
        stable = None if turn.stable is None else max(len(ids) - turn.stable, 0)
        reused = self.reuse(ids, stable)
        cycles = [(1, 0) if turn.mode == "plain" else cycle for cycle in turn.cycles]
        truth = self.truth(ids, 5 + sum(min(width, depth + 1) for width, depth in cycles), turn)
        options = Options(max_tokens=ENDLESS, mode=turn.mode, quantization=self.quantization)
        request = plan(self.model, self.draft, options, self.held)
        session = request.open(())
        guide = Guide(session.proposer, truth, len(ids), cycles)
        session.proposer, session.schedule = guide, guide
        try:
            said = self.answer(session, turn, ids[reused:], guide)
        finally:
            request.close(session)
        self.follow()
        self.said = ids[: self.length] if said is None else ids + said
        self._rows_at = {p: rows for p, rows in self._rows_at.items() if p in self.held.snapshots}

    def answer(self, session: Session, turn: Turn, new: list[int], guide: Guide) -> list[int] | None:
        """What the caller got, or None if prefill was cancelled."""
        said, calls = list[int](), itertools.count()

        def progress(done: int, total: int) -> None:
            if next(calls) == turn.cancelled:
                raise Interrupted

        commits = decode(session, new, max_tokens=ENDLESS, prefill_step_size=turn.step, progress=progress)
        try:
            commit = self.prefill(commits)
            for _, depth in [(1, 0), *guide.cycles]:
                if commit is None:
                    return None
                if said:
                    commit = next(commits)
                assert list(commit.tokens) == guide.truth[len(said) :][: len(commit.tokens)]
                assert commit.accepted == min(depth, commit.drafted)
                assert session.position == session.cache.length + 1
                said += commit.tokens
                session.undelivered = 0
            taken = len(commit.tokens) if turn.taken is None else min(turn.taken, len(commit.tokens))
            session.undelivered = len(commit.tokens) - taken
            if session.undelivered:
                del said[-session.undelivered :]
            elif turn.broken is not None:
                with breaking(session.cache, turn.broken):
                    for commit in commits:  # one may have been ahead
                        said += commit.tokens
                        session.undelivered = 0
            return said
        finally:
            commits.close()
            self.follow()

    def prefill(self, commits: Iterator[Commit]) -> Commit | None:
        """The first commit, or None if prefill was cancelled; snapshots on the way are noted."""
        try:
            return next(commits)
        except Interrupted:
            return None
        finally:
            for place in self.held.snapshots:
                if place > self.length:
                    self._rows_at[place] = min(self.rows + place - self.length, WINDOW - 1)

    def abort(self, abort: Abort) -> None:
        cache, taps = self.held.cache, self.draft.config.target_layer_ids
        cache.begin(abort.width)
        with breaking(cache, abort.broken):
            ids = mx.array([prompt_of(abort.width, seed=self._count)])
            mx.eval(self.held.target.forward(ids, cache, taps).hidden)
        cache.abort()

    def truth(self, ids: list[int], count: int, turn: Turn) -> list[int]:
        return reference(self.name, ids, count, self.dtype)

    def compare(self) -> None:
        held = self.held
        length, context = held.cache.length, held.context
        assert held.tokens == self.said
        assert len(self.said) - length in (0, 1)
        assert context is not None and context.length == length and context.start == 0
        assert [layer.rows for layer in context.layers] == [self.rows, length]
        if length:
            self.compare_arrays(self.said[:length])

    def compare_arrays(self, ids: list[int]) -> None:
        """With one forward over all that is held."""
        check_rows(self.held.cache.entries, prefilled(self.name, ids, self.dtype), self.name, self.dtype, len(ids))
        cache = TargetCache(self.held.target.make_entries(), 0)
        cache.begin(len(ids))
        features = self.held.target.forward(mx.array([ids]), cache, self.draft.config.target_layer_ids).features
        expected = self.draft.make_context()
        assert features is not None and self.held.context is not None
        self.draft.extend(expected, features)
        tolerance = loose(self.name, self.dtype, len(ids))
        for index, (ours, theirs) in enumerate(zip(self.held.context.layers, expected.layers, strict=True)):
            for a, b in zip(ours.held or (), theirs.held or (), strict=ours.held is not None):
                check_close(a, b[:, :, b.shape[2] - ours.rows :], tolerance, f"context {index} at {len(ids)}")


def a_turn() -> st.SearchStrategy[Turn]:
    never = st.none()
    return st.builds(
        Turn,
        back=st.just(0) | st.integers(0, 45),
        new=st.integers(0, 25),
        step=st.sampled_from((64, 7, 3, 1)),
        stable=never | st.integers(0, 12),
        cycles=st.lists(st.tuples(st.sampled_from((1, 2, 3, 5, 8, 16)), st.integers(0, 15)), max_size=5).map(tuple),
        mode=st.sampled_from(("dflash", "dflash", "plain")),
        taken=never | st.integers(0, 6),
        broken=never | never | st.integers(0, 6),
        cancelled=never | never | never | st.integers(0, 4),
    )


WALKS = st.lists(
    a_turn()
    | a_turn()
    | st.builds(Cut, st.integers(0, 45))
    | st.builds(Abort, st.integers(1, 16), st.none() | st.integers(0, 6)),
    min_size=2,
    max_size=6,
)


def kind(name: str) -> str:
    if any(isinstance(entry, ArraysCache) for entry in make_entries(tiny(name))):
        return "recurrent"
    return "sliding" if BY_NAME[name].window else "full"


KINDS = {kind(p.values[0]): [] for p in SAME_TOKENS}
for p in SAME_TOKENS:
    KINDS[kind(p.values[0])].append((p.values[0], p.values[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk(kind: str) -> None:
    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(KINDS[kind]), WALKS)
    def walk(target, operations) -> None:
        w = Walk(*target)
        for operation in operations:
            w.do(operation)

    walk()
