"""The pipelined cycle: what it gives is what the simple one gives, and the next draft is on its way before the read.

Every family, script, block and ending in both cycles is `tests/test_suite.py`; what is held after turns that were left,
broken off or cut is `tests/test_walk.py`. Here real drafts run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import make_sampler, stream_generate
from dflash_mlx.accept import _Reader, make_decider
from dflash_mlx.blocksize import AdaptiveBlock, Costs, FixedBlock
from dflash_mlx.decode import Session, decode
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.rope import make_rope
from dflash_mlx.kernels.choice import STOCK, Kernels, references
from dflash_mlx.options import Options
from dflash_mlx.proposal import Proposal
from dflash_mlx.proposers import DraftsAhead, NullProposer
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.request import plan
from dflash_mlx.sampling import Draws, Position, SamplingPolicy
from tests.conftest import (
    DFLASH2,
    OWN_PARTS,
    draft_config,
    draft_for,
    greedy_session,
    special_draft,
    tiny_draft,
    tokens_of,
)
from tests.families import SCRIPTS, VOCAB, ScriptedProposer, prompt_of, reference, tiny
from tests.generating import paying, stream
from tests.test_decode import count_synchronisations
from tests.test_health import poisoned
from tests.test_quantized_kv import wide
from tests.test_threads import run as run_in_a_process

__all__ = ["paying"]  # a fixture
PROMPT = prompt_of(21)
COUNT = 60
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def windowed() -> DraftModel:
    draft = tiny_draft(**SLIDING)
    draft.context_window = 9
    return draft


DRAFTS = {
    "full": tiny_draft(),
    "sliding": tiny_draft(**SLIDING),
    "causal": tiny_draft(**SLIDING, is_causal=True),
    "window": windowed(),
    "yarn": tiny_draft(rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}),
    "dflash2": special_draft(DFLASH2),
    "own parts": special_draft(OWN_PARTS),
}


@dataclass
class Seen:
    """One block that a draft made: where, how long, and what came out of it before anything was replaced."""

    position: mx.array
    rows: mx.array
    tokens: mx.array

    @property
    def key(self) -> tuple[int, int]:
        return self.position.item(), len(self.tokens)


@dataclass
class Helped(BlockProposer):
    """The real draft, whose tokens are replaced by the truth up to a depth that depends on the position."""

    truth: mx.array = field(default_factory=lambda: mx.array([0]))
    seen: list[Seen] = field(default_factory=list)

    def __init__(self, draft: DraftModel, session: Session, truth: list[int], kernels: Kernels = STOCK) -> None:
        super().__init__(draft, session.target, draft.make_context(), kernels=kernels)
        self.truth, self.seen = mx.array([0] * len(PROMPT) + truth + [0] * 32, mx.int32), []

    def _denoise(self, anchor: mx.array, limit: int) -> mx.array:
        self.hidden = super()._denoise(anchor, limit)
        return self.hidden

    def _draft(self, anchor: mx.array, limit: int, position: Position) -> Proposal:
        own = super()._draft(anchor, limit, position).tokens
        place = mx.array(position).reshape(1)
        self.seen.append(Seen(place, self.hidden, own))
        depth = (place.astype(mx.uint32) * 2654435761 >> 15) % (limit + 1)
        index = mx.arange(limit)
        truth = self.truth[place + index] + 0 * own  # so that the real draft is computed
        return Proposal(mx.where(index < depth, truth, (truth + 1) % VOCAB))


def helped(name: str, draft: DraftModel, block: int, pipelined: bool, count: int = COUNT) -> Session:
    truth = reference(name, PROMPT, count)
    session = greedy_session(name, NullProposer(), pipelined=pipelined)
    session.schedule = FixedBlock(block)
    session.proposer = Helped(draft, session, truth)
    assert tokens_of(decode(session, PROMPT, max_tokens=count)) == truth
    session.finish()
    return session


@pytest.mark.parametrize("block", [2, 5, 16])
@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama", kind) for kind in DRAFTS), ("llama-sliding", "sliding"), ("qwen3_5", "window"), ("qwen3_5", "full")],
)
def test_a_draft_sees_the_same_context_in_both_cycles(name: str, kind: str, block: int) -> None:
    """A row too many, one too few or one at another position would cost acceptance and show nowhere else."""
    simple, pipelined = (helped(name, DRAFTS[kind], block, way) for way in (False, True))
    assert pipelined.stats == simple.stats
    assert len(simple.stats.histogram) >= min(block, 4)  # many kinds of endings of a block
    drafted = {seen.key: seen for seen in pipelined.proposer.seen}  # type: ignore[attr-defined]
    for seen in simple.proposer.seen:  # type: ignore[attr-defined]
        same = drafted[seen.key]
        np.testing.assert_allclose(np.array(same.rows), np.array(seen.rows), atol=2e-5)
        assert same.tokens.tolist() == seen.tokens.tolist()
    for ours, theirs in zip(*(s.proposer.context.layers for s in (pipelined, simple)), strict=True):
        assert ours.rows == theirs.rows and ours.ahead is None
        for a, b in zip(ours.held or (), theirs.held or (), strict=True):
            assert mx.array_equal(a, b)


class Timed(AdaptiveBlock):
    """On a machine where blocks are cheap, then dear from three rows on, then dear whatever they hold, and again."""

    def record(self, *, drafted: int, accepted: int | None, emitted: int, seconds: float, position: int) -> None:
        seconds = 0.1 + drafted * (0.001, 0.001 + 0.1 * (drafted > 1), 1.0)[position // 40 % 3]
        super().record(drafted=drafted, accepted=accepted, emitted=emitted, seconds=seconds, position=position)


@pytest.mark.parametrize("rule", ["greedy", "match"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "own parts"), ("llama-sliding", "sliding"), ("qwen3_5", "window"), ("llama", "dflash2")],
)
def test_widths_that_change_with_what_cycles_cost_change_nothing_else(name: str, kind: str, rule: str) -> None:
    """The text is that of plain decoding, greedy and with a seed; what is held goes on as after it; the draft finds the
    same in both cycles, whether or not one that was made ahead was too long."""
    policy = make_sampler(0.0 if rule == "greedy" else 1.0, seed=5)
    assert isinstance(policy, SamplingPolicy)

    def session(proposer: BlockProposer | NullProposer | None = None, pipelined: bool = False) -> Session:
        made = greedy_session(name, proposer, pipelined=pipelined)
        made.decider = make_decider(policy, (), Draws.for_policy(policy), rule="match")
        return made

    truth = tokens_of(decode(session(), PROMPT, max_tokens=220))
    runs = []
    for pipelined in (False, True):
        run = session(NullProposer(), pipelined)
        run.schedule = Timed(8, Costs())
        run.proposer = helper = Helped(DRAFTS[kind], run, truth)
        helper.rows = 7
        assert tokens_of(decode(run, PROMPT, max_tokens=180)) == truth[:180]
        run.finish()
        assert run.position == run.cache.length + 1 and helper.context.covers(run.cache.length)
        runs.append(run)
    simple, ahead = runs
    assert ahead.stats == simple.stats
    assert len(simple.stats.blocks) >= 3 and 10 < simple.stats.plain_steps < simple.stats.cycles - 20
    drafted = {seen.key: seen for seen in ahead.proposer.seen}  # type: ignore[attr-defined]
    for seen in simple.proposer.seen:  # type: ignore[attr-defined]
        assert drafted[seen.key].tokens.tolist() == seen.tokens.tolist()
    for ours, theirs in zip(*(run.proposer.context.layers for run in (ahead, simple)), strict=True):
        assert ours.rows == theirs.rows and ours.ahead is None
        for a, b in zip(ours.held or (), theirs.held or (), strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-5)
    for run in runs:  # plainly, from what is held
        run.schedule = FixedBlock(1)
        assert tokens_of(decode(run, [run.tokens.pop()], max_tokens=40)) == truth[180:]


def test_only_the_last_drafts_are_made_twice() -> None:
    """Where the budget shortens the block; a pipeline that always dropped its drafts would pass every other test."""
    simple, pipelined = (helped("llama", DRAFTS["full"], 4, way) for way in (False, True))
    assert 0 <= len(pipelined.proposer.seen) - len(simple.proposer.seen) <= 3  # type: ignore[attr-defined]
    assert pipelined.stats.cycles > 15


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_next_draft_is_submitted_before_the_read_and_what_is_read_before_the_draft(
    pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read per cycle, and it has to wait for the verdict only: MLX waits for all arrays of one submission."""
    truth = reference("llama", PROMPT, COUNT)
    session = greedy_session("llama", ScriptedProposer(truth, SCRIPTS["mixed"]), 4, pipelined=pipelined)
    commits = decode(session, PROMPT, max_tokens=COUNT)
    next(commits), next(commits)
    events, propose_after, read, submit = [], ScriptedProposer.propose_after, _Reader.read, mx.async_eval

    def ahead(self, *args):
        proposal = propose_after(self, *args)
        events.append("draft")
        return proposal

    def spy(self, values):
        events.append("read")
        return read(self, values)

    def submitted(*arrays):
        events.append(f"submit {len(arrays)}")
        return submit(*arrays)

    monkeypatch.setattr(ScriptedProposer, "propose_after", ahead)
    monkeypatch.setattr(_Reader, "read", spy)
    monkeypatch.setattr(mx, "async_eval", submitted)
    next(commits)
    expected = ["submit 1", "draft", "submit 1", "read"] if pipelined else ["read"]
    assert events[:-1] == expected
    assert events[-1].startswith("submit")  # what the commit left to compute


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_host_synchronisation_per_cycle(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real draft, greedy and with the distribution of the draft."""
    options = Options(policy=make_sampler(temperature, seed=3), mode="dflash", pipelined=True)
    session = plan(tiny("llama"), tiny_draft(**SLIDING), options).open(())
    commits = decode(session, PROMPT, max_tokens=15)  # before anybody wonders why a random draft does not work
    next(commits)
    calls = count_synchronisations(monkeypatch)
    rest = list(commits)
    assert len(calls) == len(rest) == session.stats.host_syncs > 5


ASKED = {
    "greedy": dict(block_size=6),
    "rejection": dict(block_size=6, sampler=make_sampler(4.0, seed=7)),
    "rejection, filters": dict(block_size=9, sampler=make_sampler(4.0, 0.99, 0.001, top_k=200, seed=8)),
    "match": dict(block_size=4, sampler=make_sampler(1.0, seed=7), rule="match"),
    "references of the kernels": dict(block_size=6, kernels=references()),
    "rejection, references": dict(block_size=6, kernels=references(), sampler=make_sampler(4.0, seed=7)),
    "exact": dict(block_size=6, exact=0.5),
}


@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize(("name", "kind"), [("llama", "full"), ("qwen3_5", "sliding"), ("llama", "dflash2")])
def test_text_and_counts_are_those_of_the_simple_cycle(name: str, kind: str, how: str, tokenizer) -> None:
    """Draws are keyed by the position, which only the device knows when the next draft is drawn."""
    answers = [
        list(stream(name, tokenizer, max_tokens=48, draft_model=DRAFTS[kind], pipelined=way, **ASKED[how]))
        for way in (False, True)
    ]
    simple, pipelined = ([(r.token, r.cycle, r.accepted, r.drafted) for r in answer] for answer in answers)
    assert pipelined == simple
    assert answers[1][-1].pipelined and not answers[0][-1].pipelined
    assert answers[1][-1].stats == answers[0][-1].stats
    if how.startswith("rejection") and kind != "dflash2":  # the candidates of a random walk are few
        assert answers[1][-1].stats.accepted > 5


@pytest.mark.parametrize("start", [24, 30, 45])
def test_a_block_does_not_cross_the_border_of_quantisation(start: int, tokenizer) -> None:
    """What was drafted ahead is longer than the room that is left: it is dropped."""
    model, draft = wide("llama"), draft_for("llama")
    kv = dict(kv_bits=4, quantized_kv_start=start)
    plain, pipelined = (
        [r.token for r in stream_generate(model, tokenizer, PROMPT, 40, draft, mode=mode, pipelined=way, **kv)]
        for mode, way in (("plain", False), ("dflash", True))
    )
    assert pipelined == plain


@pytest.mark.parametrize("insists", [True, False])
def test_a_draft_that_does_not_work_is_found_in_the_same_cycle(insists: bool, paying, tokenizer) -> None:
    """By the tokens of the block that was verified: those of the one in flight would have to be waited for."""
    mode = "dflash" if insists else "auto"
    answers = [
        list(stream("llama", tokenizer, max_tokens=40, draft_model=poisoned(), block_size=6, mode=mode, pipelined=way))
        for way in (False, True)
    ]
    assert [r.token for r in answers[1]] == [r.token for r in answers[0]] == reference("llama", PROMPT, 40)
    assert answers[1][-1].notes == answers[0][-1].notes and "NaN" in str(answers[0][-1].notes)
    assert answers[1][-1].stats.drafted == answers[0][-1].stats.drafted


def test_not_finite_waits_for_no_draft_in_flight(tokenizer) -> None:
    """`last` is the block that is being judged until it is settled."""
    session = helped("llama", DRAFTS["full"], 4, pipelined=False)
    proposer, taken = session.proposer, []
    assert isinstance(proposer, BlockProposer) and isinstance(proposer, DraftsAhead)
    first = proposer.last
    features = mx.zeros((1, 4, 128))
    proposal = proposer.propose_after(features, mx.array([2]), mx.array([5]), 3, session.position)
    taken.append(proposer.last is first)
    proposer.settle(2)
    taken.append(proposer.last is proposal.tokens)
    assert taken == [True, True]
    assert proposer.context.length == session.cache.length + 2


def test_a_schedule_that_rests_changes_no_text(paying, tokenizer) -> None:
    """Where the next cycle is a plain step, what was drafted ahead is dropped; and a step ahead is no draft."""
    session = greedy_session("llama", NullProposer(), pipelined=True)
    truth = reference("llama", PROMPT, 80)

    class Resting(FixedBlock):
        def record(self, *, drafted: int, **facts: object) -> None:
            self.block_size = {3: 1, 0: 4}[drafted] if len(session.tokens) % 3 == 0 else self.block_size

    session.proposer, session.schedule = Helped(DRAFTS["sliding"], session, truth), Resting(4)
    assert tokens_of(decode(session, PROMPT, max_tokens=80)) == truth
    assert session.stats.plain_steps > 5 and session.stats.cycles - session.stats.plain_steps > 5
    *_, last = stream("llama", tokenizer, max_tokens=60, draft_model=DRAFTS["full"], mode="auto", pipelined=True)
    assert last.stats.plain_steps and last.pipelined


def test_an_exception_before_the_verdict_leaves_cache_and_context_as_before(monkeypatch) -> None:
    """The draft in flight saw rows that nobody will commit."""
    truth = reference("qwen3_5", PROMPT, COUNT)
    for broken_at in ("propose_after", "read"):
        session = greedy_session("qwen3_5", NullProposer(), 4, pipelined=True)
        session.schedule = FixedBlock(5)
        session.proposer = Helped(DRAFTS["sliding"], session, truth)
        commits = decode(session, PROMPT, max_tokens=COUNT)
        said = [token for _ in range(4) for token in next(commits).tokens]
        length = session.cache.length

        def fail(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if broken_at == "read":
                patch.setattr(_Reader, "read", fail)
            else:
                patch.setattr(BlockProposer, "_draft", fail)
                patch.setattr(Helped, "_draft", fail)
            with pytest.raises(KeyboardInterrupt):
                next(commits)
        session.undelivered = 0
        session.retract()
        assert said == truth[: len(said)]
        assert session.cache.length == length == session.proposer.context.length
        assert session.proposer.context.ahead is None and session.proposer.context.covers(length)
        assert not session.cache.is_open and session.cache.closed is None


@pytest.mark.parametrize("pipelined", [False, True], ids=["simple", "pipelined"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_keys_and_values_are_written_in_place(name: str, pipelined: bool) -> None:
    """Whoever kept an old array of the cache would have MLX copy all of it in every cycle, of the draft's context too.

    Buffers change where they grow, by 256 rows, and not in between.
    """
    prompt, count = prompt_of(200), 120
    truth = reference(name, prompt, count)
    session = greedy_session(name, NullProposer(), 4, pipelined=pipelined)
    session.schedule = FixedBlock(4)
    session.proposer = proposer = Helped(DRAFTS["sliding"], session, [0] * (len(prompt) - len(PROMPT)) + truth)
    places: dict[tuple[str, int], set[int]] = {}
    for _ in decode(session, prompt, max_tokens=count):
        full = [entry for entry in session.cache.entries if hasattr(entry, "keys_and_values")]
        stores = {"target": full[0], "draft": proposer.context.layers[1]._store}
        for kind, store in stores.items():
            mx.eval(store.keys, store.values)
            for array in (store.keys, store.values):
                at = np.array(array, copy=False).ctypes.data
                places.setdefault((f"{kind} {array is store.keys}", array.shape[2]), set()).add(at)
    assert session.stats.cycles > 20 and len(places) == 8  # two kinds, keys and values, before and after one growth
    assert {where: len(at) for where, at in places.items()} == dict.fromkeys(places, 1)


SCALINGS = {
    "plain": None,
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64),
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_rotation_by_a_position_on_the_device_has_the_same_bits(scaling: str) -> None:
    """A scaling that looked at the position would have to read it."""
    rope = make_rope(draft_config(rope_scaling=SCALINGS[scaling]))
    x = mx.random.normal((1, 2, 5, 16), key=mx.random.key(0))
    for position in (0, 1, 77, 1900):
        there = 40 + mx.array([position - 40], mx.int32)
        assert mx.array_equal(rope(x, offset=there), rope(x, offset=position))
    assert not mx.array_equal(rope(x, offset=77), rope(x, offset=78))


@pytest.mark.parametrize("start", [0, 2**31 - 40])
@pytest.mark.parametrize("seed", [0, 7, 2**63])
def test_a_position_on_the_device_draws_what_the_same_position_on_the_host_draws(seed: int, start: int) -> None:
    """The position is added to a word of 32 bits, which wraps."""
    draws, weights = Draws(seed), mx.random.normal((6, 50), key=mx.random.key(1))
    purposes = [f"draft {i}" for i in range(8)]
    for purpose in purposes:
        for count in (0, 1, 33):
            there = start + mx.array([count], mx.int32)
            assert mx.array_equal(draws.key(purpose, there), draws.key(purpose, start + count))
            here = draws.categorical(weights, purpose, start + count)
            assert mx.array_equal(draws.categorical(weights, purpose, there), here)
    words = [int(draws.key(purpose, start)[0].item()) for purpose in purposes]
    assert start == 0 or min(words) < 2**31 < max(words)  # some have wrapped


def test_an_opaque_sampler_runs_in_the_simple_cycle_and_says_so(tokenizer) -> None:
    """It has to be called for one position after the other, with the host in between."""
    answers = [
        list(stream("llama", tokenizer, max_tokens=20, sampler=lambda rows: mx.argmax(rows, axis=-1), pipelined=way))
        for way in (False, True)
    ]
    assert [r.token for r in answers[1]] == [r.token for r in answers[0]]
    assert not answers[1][0].pipelined and any("not pipelined: this sampler" in n for n in answers[1][0].notes)
    assert not any("pipelined" in note for note in answers[0][0].notes)
    *_, plain = stream("llama", tokenizer, max_tokens=3, mode="plain", pipelined=True)
    assert not plain.pipelined and any("not pipelined: there are no drafts" in note for note in plain.notes)
    with pytest.raises(ValueError, match=r"`pipelined` has to be True or False, got 1\."):
        stream("llama", tokenizer, pipelined=1)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_generator_may_move_to_another_thread_with_a_draft_in_flight(seed: int | None) -> None:
    """A thread can compute nothing of another one's: the distribution of drafts is submitted with the drafts."""
    out = run_in_a_process(
        f"""
        from tests.conftest import byte_tokenizer, draft_for
        from tests.families import prompt_of, tiny
        from dflash_mlx import make_sampler, stream_generate
        def answer(pipelined):
            sampler = None if {seed} is None else make_sampler(1.0, seed={seed})
            kwargs = dict(mode="dflash", sampler=sampler, pipelined=pipelined, block_size=6)
            return stream_generate(tiny("qwen3_5"), byte_tokenizer(), prompt_of(21), 40, draft_for("qwen3_5"), **kwargs)
        here = [r.token for r in answer(False)]
        for pipelined in (False, True):
            responses = answer(pipelined)
            print([in_thread(next, responses).token for _ in range(40)] == here)
            responses.close()
        """
    )
    assert out == "True\nTrue\n"
