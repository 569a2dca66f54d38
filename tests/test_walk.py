"""Random walks over one prompt cache: whatever happened to it, the next answer is that of a cold run.

An operation is a turn (blocks of any width, spoiled at any depth; left, broken off or cancelled anywhere), a cut, or a
forward that is thrown away. After each one tokens, lengths, keys, values, states and the draft's context are those of
a run that was only ever given what is held (`tests/walking.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import mlx.core as mx
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

from dflash_mlx import make_prompt_cache, stream_generate
from dflash_mlx.cache import KVQuantization
from tests.conftest import KERNELS, draft_for
from tests.families import BY_NAME, SAME_TOKENS, prompt_of, tiny
from tests.test_quantized_kv import wide
from tests.walking import Abort, Cut, Operation, QuantizedWalk, Turn, Walk


def a_turn() -> st.SearchStrategy[Turn]:
    never = st.none()
    return st.builds(
        Turn,
        back=st.just(0) | st.integers(0, 16) | st.integers(0, 60),
        new=st.integers(0, 6) | st.sampled_from((13, 14, 15, 16, 17, 18, 33)),  # the targets' window is 16
        step=st.sampled_from((64, 7, 3, 1)),
        stable=never | st.integers(0, 16),
        cycles=st.lists(st.tuples(st.sampled_from((1, 2, 3, 5, 8, 16)), st.integers(0, 15)), max_size=8).map(tuple),
        mode=st.sampled_from(("dflash", "dflash", "plain")),
        taken=never | st.integers(0, 6),
        broken=never | never | st.integers(0, 6),
        cancelled=never | never | never | never | st.integers(0, 4),
        whole=st.just(True) | st.booleans(),
        pipelined=st.booleans(),
        kernels=st.sampled_from(tuple(KERNELS)),
    )


def a_walk() -> st.SearchStrategy[list[Operation]]:
    cut = st.builds(Cut, st.integers(0, 16) | st.integers(0, 60))
    abort = st.builds(Abort, st.integers(1, 16), st.none() | st.integers(0, 6), st.sampled_from(tuple(KERNELS)))
    return st.lists(a_turn() | a_turn() | a_turn() | cut | abort, min_size=3, max_size=8)


def kind(name: str) -> str:
    """What limits how a target is cut back."""
    if any(isinstance(entry, ArraysCache) for entry in mlx_lm_cache(tiny(name))):
        return "recurrent"
    return "sliding" if BY_NAME[name].window else "full"


TARGETS: dict[str, list[tuple[str, mx.Dtype]]] = {"full": [], "sliding": [], "recurrent": []}
for case in SAME_TOKENS:
    TARGETS[kind(case.values[0])].append((case.values[0], case.values[1]))
WIDE = [("llama", mx.float32), ("qwen3", mx.float32), ("qwen3_5", mx.float32)]


def explore(start: Callable[[str, mx.Dtype], Walk], targets: Sequence[tuple[str, mx.Dtype]], examples: int) -> None:
    """Walk `examples` times, the same ways every time; a failure names the target and few operations."""

    @seed(crc32(repr(targets).encode()))  # each kind goes other ways
    @settings(max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.shrink))
    @given(target=st.sampled_from(targets), operations=a_walk())
    def walk(target: tuple[str, mx.Dtype], operations: list[Operation]) -> None:
        walker = start(*target)
        for operation in operations:
            walker.do(operation)

    walk()


ONES = ((1, 0),)
HARD = [
    Turn(back=0, new=33, step=7, stable=2, cycles=ONES * 4),  # above every window; snapshots at 31 and 32
    Turn(back=6, new=2, mode="plain", cycles=ONES * 6),  # back to 32, and single rows over what a snapshot held
    Turn(back=9, new=1, cycles=((8, 2), *ONES, (5, 0), (16, 9), (3, 1), (8, 6)), taken=3),  # back to 32 once more
    Abort(width=1),
    Abort(width=5, broken=2),
    Turn(back=0, new=0, step=1, cycles=((8, 3), (8, 0), (2, 1)), broken=3),
    Cut(back=2),
    Turn(back=0, new=7, step=3, stable=0, cycles=((16, 11), *ONES * 3, (8, 7)), taken=0),
    Turn(back=0, new=9, step=3, cancelled=2),
    Abort(width=16),
    Turn(back=60, new=3, cycles=((5, 4), (5, 2), *ONES * 2, (16, 12)), taken=1),  # below every window, from nothing
    Turn(back=4, new=0, cycles=((3, 0), (16, 6)), broken=0),
    Turn(back=0, new=2, cycles=((8, 7),), whole=False),
    Turn(back=1, new=2, cycles=((8, 7),)),
    Turn(back=2, new=3, cycles=((8, 3), (8, 7), (8, 0), (8, 5), (8, 6)), taken=2),  # equally wide: drafted ahead
    Turn(back=5, new=1, cycles=((5, 2), (5, 4), (5, 0), (5, 3)), broken=1),
]


# Cycle, and what runs blocks: with "turns" another one from operation to operation, on the same cache.
HOW = [("simple", "stock"), ("pipelined", "references")]
ALL = itertools.product(("simple", "pipelined"), (*KERNELS, "turns"))
HOW += [pytest.param(*way, marks=pytest.mark.slow) for way in ALL if way not in HOW]


def take(walk: Walk, cycle: str, kernels: str) -> None:
    turns = itertools.cycle(KERNELS if kernels == "turns" else (kernels,))
    for operation in HARD:
        if isinstance(operation, Turn):
            operation = replace(operation, pipelined=cycle == "pipelined")
        walk.do(operation if isinstance(operation, Cut) else replace(operation, kernels=next(turns)))


@pytest.mark.parametrize(("cycle", "kernels"), HOW)
@pytest.mark.parametrize("name", [case.values[0] for case in SAME_TOKENS if case.values[1] == mx.float32])
def test_a_hard_walk_with_every_family(name: str, cycle: str, kernels: str) -> None:
    """Everything once, near and above the window, so that no family waits for its turn in a random walk."""
    take(Walk(name, mx.float32), cycle, kernels)


@pytest.mark.parametrize("name", ["llama-4bit", "qwen3_5", "qwen3_next"])
def test_a_cache_goes_from_stock_modules_to_kernels_and_back(name: str) -> None:
    """A tape that one request left behind is not what the modules of the next one start from."""
    take(Walk(name, mx.float32), "simple", "turns")


@pytest.mark.parametrize(("cycle", "kernels"), HOW)
@pytest.mark.parametrize(("name", "dtype"), WIDE, ids=[name for name, _ in WIDE])
def test_a_hard_walk_over_quantised_keys(name: str, dtype: mx.Dtype, cycle: str, kernels: str) -> None:
    """A block that crossed the border would see keys that plain decoding had quantised by then."""
    take(QuantizedWalk(name, dtype, quantization=KVQuantization(4, start=45)), cycle, kernels)  # in a block of turn 3


@pytest.mark.parametrize("kind", TARGETS)
def test_any_walk_ends_where_a_cold_run_does(kind: str) -> None:
    """Rollback, retract, trim, snapshots and the draft's context, in any order."""
    explore(Walk, TARGETS[kind], 16)


def test_any_walk_over_quantised_keys_equals_plain_decoding_with_the_same_history() -> None:
    explore(QuantizedWalk, WIDE, 16)


def test_a_cache_left_at_the_border_of_quantisation_and_cut_back_goes_on_as_after_plain_decoding(tokenizer) -> None:
    """Plain decoding had quantised it: a step was in flight when the caller left."""
    model, draft, kv = wide("llama"), draft_for("llama"), dict(kv_bits=4, quantized_kv_start=30)
    answers = []
    for mode in ("plain", "dflash"):
        cache = make_prompt_cache(model, draft)
        first = stream_generate(model, tokenizer, prompt_of(23), 60, draft, mode=mode, prompt_cache=cache, **kv)
        assert len(list(itertools.islice(first, 8))) == 8
        first.close()
        assert cache.cache.length == 30
        turn = [*cache.tokens[:26], 1]
        rest = turn[cache.reuse(turn) :]
        second = stream_generate(model, tokenizer, rest, 12, draft, mode="plain", prompt_cache=cache, **kv)
        answers.append([response.token for response in second])
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TARGETS, "quantised"])
def test_hundreds_of_walks(kind: str) -> None:
    explore(*((QuantizedWalk, WIDE) if kind == "quantised" else (Walk, TARGETS[kind])), 120)
