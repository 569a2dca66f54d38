"""Operations on a prompt cache, and walks over them that know what it has to hold.

`Walk` compares with cold runs of mlx_lm; `QuantizedWalk`, where what is held depends on how it came to be, with
mlx_lm over a cache that has the same history.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import make_prompt_cache as make_entries

from dflash_mlx import make_prompt_cache
from dflash_mlx.cache import KVQuantization, TargetCache
from dflash_mlx.decode import Commit, Session, decode
from dflash_mlx.options import Options
from dflash_mlx.proposal import Proposal
from dflash_mlx.proposers import Proposer
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.request import plan
from dflash_mlx.rounding import Decoding
from dflash_mlx.targets import target_for
from tests.conftest import DRAFT_WINDOW, KERNELS, draft_for
from tests.families import VOCAB, prompt_of, reference, tiny
from tests.plain import check_close, check_rows, loose, prefilled, visible
from tests.test_quantized_kv import wide

ENDLESS = 1000


@dataclass(frozen=True)
class Turn:
    """Take back `back` tokens of what was said, add `new` ones, and answer.

    pipelined: the next draft is submitted before a verdict is read, where two cycles are equally wide.
    kernels:   by name in `KERNELS`, what runs blocks of target and draft.
    whole:     the conversation is handed to `reuse`; otherwise only what is new follows, and nothing is taken back.
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
    whole: bool = True
    pipelined: bool = False
    kernels: str = "stock"


@dataclass(frozen=True)
class Cut:
    """Reuse what was said but for the last `back` tokens, and ask nothing."""

    back: int


@dataclass(frozen=True)
class Abort:
    """A forward over `width` rows that is thrown away; `broken` is the cache entry at which it broke off."""

    width: int
    broken: int | None = None
    kernels: str = "stock"


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
    entry, state = cache.entries[index], cache.states[index]

    def record(what: Any) -> None:
        type(state).record(state, what)  # type: ignore[attr-defined]
        if not callable(what):
            raise Interrupted  # a tape is all that its layer writes

    cache.entries[index] = Broken(entry)
    vars(state)["record"] = record
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        cache.entries[index] = entry
        del vars(state)["record"]


@dataclass
class Guide:
    """Schedule and proposer of a turn: the real draft runs, and what it says is replaced by the truth, spoiled."""

    draft: Proposer
    truth: list[int]
    start: int  # position of truth[0]
    cycles: list[tuple[int, int]]
    done: int = 0

    def cycle(self, index: int) -> tuple[int, int]:
        return self.cycles[index] if index < len(self.cycles) else (4, 2)

    def limit(self) -> int:
        return self.cycle(self.done)[0] - 1

    def record(self, **facts: float) -> None:
        self.done += 1

    def propose(self, anchor: int, limit: int, position: int) -> Proposal:
        assert len(self.draft.propose(anchor, limit, position)) == max(limit, 0)
        return self.spoiled(mx.array(position, mx.int32), max(limit, 0), self.cycle(self.done)[1])

    def propose_after(
        self, features: mx.array | None, count: mx.array, anchor: mx.array, limit: int, position: int
    ) -> Proposal:
        assert isinstance(self.draft, BlockProposer)
        assert len(self.draft.propose_after(features, count, anchor, limit, position)) == limit
        return self.spoiled(position + count, limit, self.cycle(self.done + 1)[1])

    def spoiled(self, position: mx.array, count: int, depth: int) -> Proposal:
        """`count` tokens of the truth from `position`, of which one is wrong."""
        truth = mx.array(self.truth + [0] * 32, mx.int32)
        tokens = truth[position - self.start + mx.arange(count)]
        return Proposal(mx.where(mx.arange(count) == depth, (tokens + 1) % VOCAB, tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)


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
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.said, ids, strict=False))
        shared = min(len(list(same)), cache.length, len(ids) - 1)
        cut = cache.can_trim_to(shared)
        reused = self.held.reuse(ids, stable)
        assert reused == (shared if cut else max((p for p in self._rows_at if p <= shared), default=0))
        if cut and reused not in self._rows_at:
            self.follow()
        elif reused < self.length:
            self.rows, self.length = self._rows_at.get(reused, 0), reused
        self._rows_at = {p: rows for p, rows in self._rows_at.items() if p <= reused}
        self.said = ids[:reused]
        return reused

    def follow(self) -> None:
        """The cache has grown or shrunk."""
        change = self.held.cache.length - self.length
        self.rows = max(min(self.rows + change, DRAFT_WINDOW - 1), 0)
        self.length += change

    def turn(self, turn: Turn) -> None:
        new, border = prompt_of(turn.new, seed=100 + self._count), None
        if turn.whole:
            ids = self.said[: max(len(self.said) - turn.back, 0)] + new or [1]
            border = None if turn.stable is None else max(len(ids) - turn.stable, 0)
            new = ids[self.reuse(ids, border) :]
            self.compare()
        else:
            new = new or [1]
            ids = self.said + new
        cycles = [(1, 0) if turn.mode == "plain" else cycle for cycle in turn.cycles]
        truth = self.truth(ids, 5 + sum(min(width, depth + 1) for width, depth in cycles), turn.step, border)
        kernels = KERNELS[turn.kernels]
        options = Options(max_tokens=ENDLESS, mode=turn.mode, quantization=self.quantization, kernels=kernels)
        request = plan(self.model, self.draft, options, self.held)
        session = request.open(())
        guide = Guide(session.proposer, truth, len(ids), cycles)
        session.proposer, session.schedule, session.pipelined = guide, guide, turn.pipelined
        places = {place for place in (border or 0, len(ids) - 1) if self.length < place < len(ids)}
        try:
            said = self.answer(session, turn, new, guide)
        finally:
            request.close(session)
        assert said is None or places <= set(self.held.snapshots)
        self.follow()
        self.said = ids[: max(self.length, len(self.said))] if said is None else ids + said
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
                assert len(commit.tokens) - 1 == commit.accepted == min(depth, commit.drafted)
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
                    self._rows_at[place] = min(self.rows + place - self.length, DRAFT_WINDOW - 1)

    def abort(self, abort: Abort) -> None:
        cache, taps = self.held.cache, self.draft.config.target_layer_ids
        cache.begin(abort.width)
        with breaking(cache, abort.broken):
            ids = mx.array([prompt_of(abort.width, seed=self._count)])
            mx.eval(target_for(self.model, KERNELS[abort.kernels]).forward(ids, cache, taps).hidden)
        cache.abort()

    def truth(self, ids: list[int], count: int, step: int, border: int | None) -> list[int]:
        """What plain decoding says after `ids`, of which `length` are held."""
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


class QuantizedWalk(Walk):
    """With quantised keys, which depend on how they came to be: the oracle is mlx_lm over a cache with that history.

    Its cache, the twin, is fed as plain decoding feeds it: a prompt in the same chunks, then token by token.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        q = self.quantization = self.quantization or KVQuantization(bits=4, group_size=64, start=30)
        self.decoding = Decoding(kv_bits=q.bits, kv_group_size=q.group_size, quantized_kv_start=q.start)
        self.twin, self.fed = make_entries(self.model), 0
        self._chunks: list[int] = []  # where those of the latest prompt end
        self._states: dict[int, dict[int, ArraysCache]] = {}  # recurrent entries at those places

    def build(self) -> nn.Module:
        return wide(self.name, self.dtype)

    def reuse(self, ids: list[int], stable: int | None = None) -> int:
        reused = super().reuse(ids, stable)
        recurrent = any(isinstance(entry, ArraysCache) for entry in self.twin)
        if recurrent and reused == 0:
            self.twin = make_entries(self.model)
        elif reused < self.fed:
            for index, entry in enumerate(self.twin):
                if isinstance(entry, ArraysCache):
                    self.twin[index] = copy.deepcopy(self._states[reused][index])
                else:
                    entry.trim(self.fed - reused)
        self.fed = reused
        return reused

    def truth(self, ids: list[int], count: int, step: int, border: int | None) -> list[int]:
        last, place = len(ids) - 1, self.fed
        self._chunks = []
        while place < last:
            place = min(place + step, *(b for b in (border or last, last) if b > place))
            self._chunks.append(place)
        entries = copy.deepcopy(self.twin)
        self.feed(entries, ids, self.fed, last)
        tokens = ids[-1:]
        for _ in range(count):
            logits = self.decoding.forward(self.model, tokens[-1:], entries)
            tokens.append(mx.argmax(logits - mx.logsumexp(logits, keepdims=True)).item())
        return tokens[1:]

    def feed(self, entries: list, ids: list[int], start: int, stop: int) -> None:
        """Positions start..stop of `ids`, as plain decoding would."""
        last = self._chunks[-1] if self._chunks else start
        ends = [end for end in (*self._chunks, *range(max(last, start) + 1, stop + 1)) if start < end <= stop]
        for a, b in itertools.pairwise([start, *ends]):
            self.decoding.forward(self.model, ids[a:b], entries)
            self._states[b] = {i: copy.deepcopy(e) for i, e in enumerate(entries) if isinstance(e, ArraysCache)}

    def compare_arrays(self, ids: list[int]) -> None:
        """With the twin."""
        self.feed(self.twin, ids, self.fed, len(ids))
        self.fed = len(ids)
        check_rows(self.held.cache.entries, [visible(e) for e in self.twin], self.name, self.dtype, len(ids))
