"""The suite of exactness: families x dtypes x scripts x blocks x prompts x ways to end x both cycles x stock modules or
the references of kernels, against mlx_lm.

A case decodes speculatively until a budget, a stop token or a caller ends it, then takes a second turn on the same
cache. Tokens, cache, the draft's features and the counts have to be those of a run that never drafted. The default run
takes a sample of the product that has every pair of values; `-m slow` takes most of the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import pytest

from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import Session, decode
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.operation import Operation
from dflash_mlx.stats import Stats
from dflash_mlx.targets import target_for
from tests.conftest import KERNELS, greedy_session, tokens_of
from tests.covering import Product, Rule, pairs_of
from tests.families import (
    BY_NAME,
    FAMILIES,
    PROBED,
    QUANTISED,
    SAME_TOKENS,
    SCRIPTS,
    Script,
    ScriptedProposer,
    prompt_of,
    tiny,
)
from tests.plain import Plain, check_close, check_rows, loose, plain_run

BLOCKS = (1, 2, 3, 4, 8, 16)
TAPS = (0, 2)
COUNT = 44  # tokens of a baseline; more than two windows
NEW = [7, 8, 9]  # what the second turn adds

# How a case ends: at a budget, at a stop token in a certain place of its cycle, or by a caller who leaves.
BUDGETS = {"budget-1": 1, "budget-2": 2, "budget-18": 18, "budget-41": 41}
STOPS = ("stop-prefill", "stop-first", "stop-middle", "stop-last", "stop-correction", "stop-bonus", "stop-alone")
LEAVES = ("leave-none", "leave-one", "leave-all-but-one")
ENDS = (*BUDGETS, *STOPS, *LEAVES)
CYCLES = ("simple", "pipelined")


@dataclass(frozen=True)
class Cycle:
    """What a script makes of one cycle: tokens start.. of the baseline, `accepted` of `drafted`, and one more."""

    start: int
    accepted: int
    drafted: int

    @property
    def stop(self) -> int:
        return self.start + self.accepted + 1

    def place(self, index: int) -> str:
        """What token `index` of the baseline is in this cycle."""
        offset = index - self.start
        if offset < self.accepted:
            return "first" if offset == 0 else "last" if offset == self.accepted - 1 else "middle"
        return "correction" if self.accepted < self.drafted else "bonus" if self.drafted else "alone"


def cycles_of(script: Script, block: int, count: int) -> list[Cycle]:
    """Every cycle that makes `count` tokens after the one of prefill, worked out from the script alone."""
    cycles, done = list[Cycle](), 1
    for depth in itertools.cycle(script):
        if done >= count:
            return cycles
        drafted = 0 if depth == "empty" else min(block - 1, count - done - 1)
        accepted = min(depth, drafted) if isinstance(depth, int) else drafted
        cycles.append(Cycle(done, accepted, drafted))
        done = cycles[-1].stop
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Ending:
    """budget: max_tokens; delivered: tokens that the caller gets; stop: the last of them is a stop token."""

    budget: int
    delivered: int
    stop: bool = False


def endings(end: str, script: Script, block: int) -> list[Ending]:
    """Every place where a case can end in this way; none where the script never makes one."""
    if end in BUDGETS:
        return [Ending(BUDGETS[end], BUDGETS[end])]
    if end == "stop-prefill":
        return [Ending(COUNT, 1, stop=True)]
    cycles = cycles_of(script, block, COUNT)
    if end in STOPS:
        return [
            Ending(COUNT, index + 1, stop=True)
            for cycle in cycles
            for index in range(cycle.start, cycle.stop)
            if f"stop-{cycle.place(index)}" == end and cycle.stop < COUNT
        ]
    part = {"leave-none": lambda made: 0, "leave-one": lambda made: 1, "leave-all-but-one": lambda made: made - 1}[end]
    least = {"leave-none": 1, "leave-one": 2, "leave-all-but-one": 3}[end]
    return [
        Ending(COUNT, c.start + part(c.stop - c.start)) for c in cycles if c.stop - c.start >= least and c.stop < COUNT
    ]


def lengths(name: str) -> tuple[int, ...]:
    """Prompts: the shortest, around convolution kernels and the window, and well above."""
    family = BY_NAME[name]
    if family.window is None:
        return (1, 2, 3, 4, 5, 21)
    return (1, 2, 3, *range(family.window - 2, family.window + 3), 2 * family.window + 9)


@dataclass(frozen=True)
class Case:
    name: str
    dtype: mx.Dtype
    length: int
    script: str
    block: int
    end: str
    step: int  # prefill_step_size
    cycle: str = "simple"
    kernels: str = "stock"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        how = f"{self.script}-block{self.block}-{self.end}-step{self.step}-{self.cycle}-{self.kernels}"
        return f"{self.name}-{dtype}-prompt{self.length}-{how}"

    @property
    def pipelined(self) -> bool:
        return self.cycle == "pipelined"


TARGETS = tuple((p.values[0], p.values[1], length) for p in SAME_TOKENS for length in lengths(p.values[0]))
WAYS = tuple(
    way for way in itertools.product(sorted(SCRIPTS), BLOCKS, ENDS) if endings(way[2], SCRIPTS[way[0]], way[1])
)


def product() -> Product:
    factors = dict(
        name=[family.name for family in FAMILIES + QUANTISED if any(family.name == name for name, *_ in TARGETS)],
        dtype=sorted({dtype for _, dtype, _ in TARGETS}, key=str),
        length=sorted({length for *_, length in TARGETS}),
        script=sorted(SCRIPTS),
        block=BLOCKS,
        end=ENDS,
        step=(2048, 5),
        cycle=CYCLES,
        kernels=tuple(KERNELS),
    )
    return Product(factors, [Rule(("name", "dtype", "length"), TARGETS), Rule(("script", "block", "end"), WAYS)])


@lru_cache
def sample() -> list[Case]:
    cases = [Case(**choice) for choice in product().sample()]
    return sorted(cases, key=lambda c: (c.name, str(c.dtype), c.length))  # baselines are shared


SPARE = [  # rows that other adapters than their own serve
    Case(family.name, mx.float32, lengths(family.name)[-2], "wide", 8, end, 2048, cycle, kernels)
    for family in PROBED
    for end, cycle, kernels in (("budget-41", "simple", "stock"), ("leave-one", "pipelined", "references"))
]


@lru_cache(maxsize=8)
def baseline(name: str, dtype: mx.Dtype, length: int, seed: int) -> Plain:
    return plain_run(name, prompt_of(length, seed), COUNT, dtype)


@pytest.mark.parametrize("case", [*sample(), *SPARE], ids=str)
def test_speculation_is_exact(case: Case) -> None:
    """A draft that was rejected shows up in tokens, cache, features or counts; a second turn is as good as a first."""
    check(case)


def test_the_sample_has_every_pair_of_values() -> None:
    """A family that never met a script, a length or an ending would be a hole that nobody sees."""
    cases = sample()
    assert set().union(*(pairs_of(vars(case)) for case in cases)) >= product().pairs()
    for name, dtype in ((p.values[0], p.values[1]) for p in SAME_TOKENS):
        own = [case for case in cases if case.name == name]
        assert dtype in {case.dtype for case in own}
        assert {case.length for case in own} == set(lengths(name))
        assert {case.kernels for case in own if case.block > 1} == set(KERNELS)
        for factor, values in {"script": SCRIPTS, "block": BLOCKS, "end": ENDS}.items():
            assert {getattr(case, factor) for case in own} == set(values), name
    for script in SCRIPTS:
        assert {c.end for c in cases if c.script == script} == {end for s, _, end in WAYS if s == script}
    assert all(any(end == other for *_, other in WAYS) for end in ENDS)
    assert len(cases) < 400


class Asked(Kernels):
    """The references, and which operations were asked for."""

    def __init__(self) -> None:
        super().__init__(True, lambda operation, case: "references only")
        self.operations: set[str] = set()

    def closed(self, operation: Operation, *arguments: object, **options: object) -> str | None:
        self.operations.add(operation.name)
        return super().closed(operation, *arguments, **options)


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("llama", {"sdpa_rows"}),
        ("llama-sliding", {"sdpa_rows"}),
        ("qwen3", {"sdpa_rows"}),
        ("llama-4bit", {"sdpa_rows", "qmm_small_m"}),
        ("qwen3_moe-4bit", {"sdpa_rows", "qmm_small_m"}),
        ("qwen3_next", {"sdpa_rows", "gdn_prework", "gdn_verify"}),
        ("qwen3_5-4bit", {"sdpa_rows", "gdn_prework", "gdn_verify", "qmm_small_m"}),
        ("gemma4", set()),
    ],
)
def test_with_references_operations_are_really_asked_for(name: str, operations: set[str]) -> None:
    """Else the cases above would hold mlx_lm's modules against themselves."""
    plain, kernels = baseline(name, mx.float32, 5, 7), Asked()
    session = greedy_session(name, ScriptedProposer(plain.tokens, SCRIPTS["mixed"], TAPS), 4, kernels=kernels)
    assert tokens_of(decode(session, plain.prompt, max_tokens=12)) == plain.tokens[:12]
    assert kernels.operations == operations | {"accept"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.values[0] for case in SAME_TOKENS if case.values[1] == mx.float32])
def test_every_prompt_with_every_script_and_block_is_exact(name: str) -> None:
    """All of length x script x block x cycle x kernels in float32, each with an ending that the prompt chooses."""
    for turn, length in enumerate(lengths(name)):
        for script, block, cycle, kernels in itertools.product(sorted(SCRIPTS), BLOCKS, CYCLES, KERNELS):
            ends = [end for s, b, end in WAYS if (s, b) == (script, block)]
            case = Case(name, mx.float32, length, script, block, ends[turn % len(ends)], 2048, cycle, kernels)
            try:
                check(case)
            except AssertionError as error:
                raise AssertionError(str(case)) from error


def check(case: Case) -> None:
    plain, ending = begin(case)
    script = SCRIPTS[case.script]
    proposer = ScriptedProposer(plain.tokens, script, TAPS)
    session = greedy_session(case.name, proposer, case.block, case.dtype, case.pipelined, KERNELS[case.kernels])
    run(session, plain, ending, case)
    said = plain.prompt + plain.tokens[: ending.delivered]
    assert session.tokens == said
    # Of a block that was not delivered at all the anchor's row may stay.
    assert session.cache.length == len(said) - (case.end != "leave-none")
    check_session(session, plain, case)

    turn = plain_run(case.name, said + NEW, 12, case.dtype)
    proposer = ScriptedProposer(turn.tokens, script, TAPS)
    proposer.observed = session.proposer.observed  # type: ignore[attr-defined]
    second = Session(
        session.target,
        session.cache,
        proposer,
        session.decider,
        session.schedule,
        tokens=session.tokens,
        pipelined=case.pipelined,
    )
    run(second, turn, Ending(12, 12), case, new=NEW)
    assert session.cache.length == len(session.tokens) - 1
    check_session(second, turn, case)


def begin(case: Case) -> tuple[Plain, Ending]:
    """A baseline, and the middle one of the places where this case can end; a stop token must not come earlier."""
    ways = endings(case.end, SCRIPTS[case.script], case.block)
    for seed in itertools.count(7):
        plain = baseline(case.name, case.dtype, case.length, seed)
        fresh = [w for w in ways if not w.stop or plain.tokens.index(plain.tokens[w.delivered - 1]) == w.delivered - 1]
        if fresh:
            return plain, fresh[len(fresh) // 2]
    raise AssertionError("unreachable")


def run(session: Session, plain: Plain, ending: Ending, case: Case, new: Sequence[int] | None = None) -> None:
    """Decode to the ending; every commit is the one that follows from the script."""
    stop = {plain.tokens[ending.delivered - 1], 999} if ending.stop else ()
    commits = decode(session, new or plain.prompt, max_tokens=ending.budget, stop=stop, prefill_step_size=case.step)
    stats = Stats(emitted=1)
    for cycle in [None, *cycles_of(SCRIPTS[case.script], case.block, ending.budget)]:
        start, end = (0, 1) if cycle is None else (cycle.start, cycle.stop)
        commit = next(commits)
        if ending.stop:
            end = min(end, ending.delivered)
        assert list(commit.tokens) == plain.tokens[start:end]
        assert (commit.drafted, commit.accepted) == (
            (0, 0) if cycle is None else (cycle.drafted, min(cycle.accepted, end - start))
        )
        assert session.position == session.cache.length + 1 == len(plain.prompt) + end
        assert rows_seen(session) == session.cache.length, "the draft saw exactly the committed positions"
        delivered = min(end, ending.delivered) - start
        session.undelivered -= delivered
        if cycle is not None and delivered:
            stats.record(drafted=cycle.drafted, accepted=min(cycle.accepted, delivered), emitted=delivered)
        last = start + delivered == ending.delivered and (ending.stop or end == ending.budget)
        assert commit.finish_reason == (("stop" if ending.stop else "length") if last else None)
        if delivered < end - start:
            break  # the caller leaves
        if last:
            assert next(commits, None) is None
            break
    commits.close()
    session.retract()
    stats.host_syncs = session.stats.host_syncs
    assert session.stats == stats


def rows_seen(session: Session) -> int:
    return sum(features.shape[1] for features in session.proposer.observed)  # type: ignore[attr-defined]


def check_session(session: Session, plain: Plain, case: Case) -> None:
    """Cache and features are those of a run that was only ever given these tokens."""
    length, name, dtype = session.cache.length, case.name, case.dtype
    check_rows(session.cache.entries, plain.held(length), name, dtype, length)
    stock = target_for(tiny(name, dtype))
    fresh = TargetCache(stock.make_entries(), 0)
    fresh.begin(length)
    expected = stock.forward(mx.array([session.tokens[:length]]), fresh, TAPS).features
    assert expected is not None and rows_seen(session) == length
    features = mx.concatenate(session.proposer.observed, axis=1)  # type: ignore[attr-defined]
    check_close(features, expected, loose(name, dtype, length), "features")
