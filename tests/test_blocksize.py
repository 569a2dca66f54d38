"""The adaptive schedule drafts as much as pays, rests where nothing does, comes back, and never changes the text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import pytest
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.blocksize import Acceptance, AdaptiveBlock, BlockSchedule, Costs, FixedBlock, lasting_acceptance
from dflash_mlx.decode import decode
from tests.conftest import greedy_session, tokens_of
from tests.families import SCRIPTS, ScriptedProposer, prompt_of, reference
from tests.generating import know

# Seconds of a cycle by its drafts; 0 is a plain step.
COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda k: 0.15 if k else 0.10,  # memory-bound: every width pays from 1.5 tokens on
    "steep": lambda k: 0.10 + 0.04 * (k > 0) + 0.02 * k,  # every row costs
    "steps": lambda k: (0.10, 0.13, 0.16, 0.16, 0.20, 0.20, 0.20, 0.20)[k],  # blocks of 4 and 8 fill a tile
    "dear in the middle": lambda k: (0.10, 0.14, 0.18, 0.22, 0.26, 0.30, 0.16, 0.16)[k],  # another kernel from 6 on
}


@dataclass
class Run:
    """What a schedule made of a text."""

    seconds: float = 0.0
    tokens: int = 0
    widths: Counter[int] = field(default_factory=Counter)  # drafts -> cycles

    def speedup(self, cost: Callable[[int], float]) -> float:
        return self.tokens * cost(0) / self.seconds

    @property
    def plain(self) -> float:
        return self.widths[0] / self.widths.total()


def simulate(
    schedule: BlockSchedule,
    tokens: int,
    rate: float,
    seed: int = 0,
    cost: Callable[[int], float] = COSTS["flat"],
    fading: float = 1.0,
) -> Run:
    """Scripted costs, with a tenth of noise; the i-th draft is right with probability rate * fading^i."""
    rng, run = random.Random(seed), Run()
    while run.tokens < tokens:
        drafts, accepted = schedule.limit(), 0
        luck = [rng.random() < rate * fading**i for i in range(7)]
        while accepted < drafts and luck[accepted]:
            accepted += 1
        seconds = cost(drafts) * rng.uniform(0.95, 1.05)
        where = 100 + run.tokens
        schedule.record(drafted=drafts, accepted=accepted, emitted=accepted + 1, seconds=seconds, position=where)
        run.tokens, run.seconds = run.tokens + accepted + 1, run.seconds + seconds
        run.widths[drafts] += 1
    return run


@pytest.mark.parametrize("seed", range(5))
def test_where_drafts_do_not_pay_little_is_lost(seed: int) -> None:
    """Never much slower than plain decoding."""
    fixed = simulate(FixedBlock(4), 400, 0.13, seed).speedup(COSTS["flat"])
    adaptive = simulate(AdaptiveBlock(4, Costs()), 400, 0.13, seed).speedup(COSTS["flat"])
    assert fixed < 0.85 and adaptive > 0.93


@pytest.mark.parametrize("seed", range(5))
def test_where_drafts_pay_it_keeps_speculating(seed: int) -> None:
    fixed = simulate(FixedBlock(4), 400, 0.75, seed).speedup(COSTS["flat"])
    adaptive = simulate(AdaptiveBlock(4, Costs()), 400, 0.75, seed).speedup(COSTS["flat"])
    assert adaptive > 0.95 * fixed > 1.4


@pytest.mark.parametrize("seed", range(5))
def test_it_leaves_and_returns_with_the_text(seed: int) -> None:
    """Prose, then code, then prose."""
    schedule = AdaptiveBlock(4, Costs())
    shares = [simulate(schedule, n, rate, seed).plain for rate, n in ((0.1, 300), (0.85, 600), (0.1, 300))]
    assert shares[0] > 0.6 and shares[1] < 0.5 and shares[2] > 0.6


@pytest.mark.parametrize("rate, fading", [(0.9, 1.0), (0.85, 0.85), (0.6, 1.0), (0.5, 0.7)])
@pytest.mark.parametrize("shape", COSTS)
def test_it_comes_near_the_best_width_whatever_cycles_cost(shape: str, rate: float, fading: float) -> None:
    """Over three times six requests of 300 tokens, learning included; the best width is found by trying all of them."""
    cost, known = COSTS[shape], [(Costs(), lasting_acceptance(8)) for _ in range(3)]

    def speedup(new: Callable[[int], BlockSchedule]) -> float:
        runs = [simulate(new(seed), 300, rate, seed, cost, fading) for seed in range(18)]
        return sum(run.tokens for run in runs) * cost(0) / sum(run.seconds for run in runs)

    best = max(speedup(lambda _, block=block: FixedBlock(block)) for block in range(1, 9))  # type: ignore[misc]
    assert speedup(lambda seed: AdaptiveBlock(8, *known[seed // 6])) > 0.94 * best


def test_one_width_for_everything_would_lose() -> None:
    """What the width is adapted for: a block of 8 of the draft above is slower than plain decoding on one machine, and
    one of 2 is far from what it gives on another."""
    steep, flat = COSTS["steep"], COSTS["flat"]
    assert simulate(FixedBlock(8), 900, 0.6, cost=steep).speedup(steep) < 0.9
    runs = [simulate(AdaptiveBlock(8, Costs()), 900, 0.6, seed, steep) for seed in range(8)]
    assert fmean(run.speedup(steep) for run in runs) > 1.05
    widths = sum((run.widths for run in runs), Counter[int]())
    assert sum(widths[width] for width in (1, 2, 3)) > 10 * sum(widths[width] for width in (4, 5, 6, 7))
    narrow = simulate(FixedBlock(2), 900, 0.9, cost=flat).speedup(flat)
    assert simulate(AdaptiveBlock(8, Costs()), 900, 0.9, cost=flat).speedup(flat) > 2 * narrow


def test_the_next_request_starts_knowing_what_pays() -> None:
    costs, lasting = Costs(), lasting_acceptance(8)
    first = AdaptiveBlock(8, costs, lasting)
    assert first.limit() == 3, "nothing is known, and four rows are dear nowhere"
    simulate(first, 600, 0.5, cost=COSTS["steep"])
    second = AdaptiveBlock(8, costs, lasting, position=100)
    assert second.limit() in (1, 2)
    steps = 0
    while second.limit() and steps < 40:
        width = second.limit()
        second.record(drafted=width, accepted=0, emitted=1, seconds=COSTS["steep"](width), position=100 + steps)
        steps += 1
    assert 3 <= steps < 20, "nothing accepted: it rests without having measured plain steps again"


def test_a_first_short_answer_is_not_kept_waiting() -> None:
    """A command that answers one question: whether a draft pays that is nearly always right can be measured later."""
    costs, lasting = Costs(), lasting_acceptance(16)
    schedule, widths = AdaptiveBlock(16, costs, lasting), list[int]()
    for position in range(0, 480, 16):
        width = schedule.limit()
        widths.append(width)
        schedule.record(drafted=width, accepted=width, emitted=width + 1, seconds=0.15, position=position)
    assert 15 in widths[:9], "wider blocks are tried at once"
    assert 0 not in widths[:16] and widths.count(0) == 4, "measured in time, and only once"
    short = AdaptiveBlock(16, Costs(), lasting_acceptance(16))
    for position in range(4):
        short.record(drafted=short.limit(), accepted=0, emitted=1, seconds=0.15, position=position)
    assert short.limit() == 0, "one that is wrong is measured at once"


def test_a_short_answer_teaches_the_next_one() -> None:
    """Before plain steps were ever measured."""
    costs, lasting = Costs(), lasting_acceptance(16)
    first = AdaptiveBlock(16, costs, lasting)
    for position in range(0, 144, 16):
        width = first.limit()
        first.record(drafted=width, accepted=width, emitted=width + 1, seconds=0.15, position=position)
    assert costs.get(0, 100) is None and AdaptiveBlock(16, costs, lasting, 100).limit() == 15


def test_costs_of_another_context_length_say_nothing() -> None:
    costs = Costs()
    for _ in range(2):
        costs.update(3, 0.1, 500)
    assert costs.get(3, 10) == costs.get(3, 2000) == 0.1
    assert costs.get(3, 2048) == 0.1 and costs.get(3, 2049) is None and costs.get(0, 500) is None
    costs = Costs()
    know(costs, {0: 0.1, 1: 0.1, 2: 9.0, 3: 9.0})
    assert AdaptiveBlock(4, costs, position=500).limit() == 1
    assert AdaptiveBlock(4, costs, position=9000).limit() == 3, "as if nothing were known"
    costs.update(1, 0.4, 9000)
    assert costs.get(1, 9000) is None, "no timing of the other length counts"


def test_a_pause_of_the_caller_is_no_cost() -> None:
    costs = Costs()
    for _ in range(20):
        costs.update(3, 0.1, 100)
    for _ in range(3):
        costs.update(3, 60.0, 100)
        assert costs.get(3, 100) == 0.1
    costs.update(3, 60.0, 100)
    assert costs.get(3, 100) == 60.0, "four of the last seven are what it costs now"


def test_a_first_cycle_that_compiles_is_no_cost() -> None:
    costs = Costs()
    costs.update(3, 5.0, 100)
    assert costs.get(3, 100) is None, "not believed before a second one"
    costs.update(3, 0.1, 100)
    assert costs.get(3, 100) == 0.1
    costs.update(3, 0.2, 100)
    assert costs.get(3, 100) == 0.2


def test_one_slow_plain_step_does_not_make_drafts_pay() -> None:
    """What plain decoding costs is measured in rests only, so what the last step of one says is believed for long."""
    costs, schedule = Costs(), AdaptiveBlock(4, Costs())
    know(costs, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4})
    schedule, steps = AdaptiveBlock(4, costs), [0, 0]
    for position in range(400):
        width = schedule.limit()
        slow = 1.0 if not width and position % 8 == 0 else 0.0
        schedule.record(drafted=width, accepted=0, emitted=1, seconds=0.1 + 0.1 * width + slow, position=position)
        steps[bool(width)] += 1
    assert costs.get(0, 400) == 0.1 and steps[1] < 24


def test_a_clock_that_stands_still_ends_nothing() -> None:
    costs = Costs()
    for known in ({}, {0: 0.0}, {0: 0.0, 3: 0.1}):
        know(costs, known)
        schedule = AdaptiveBlock(8, costs)
        for position in range(50):
            width = schedule.limit()
            schedule.record(drafted=width, accepted=0, emitted=1, seconds=0.0, position=position)


@pytest.mark.parametrize("right", [0, 1], ids=["after a rest", "after another width"])
def test_the_cycle_after_a_change_is_no_cost(right: int) -> None:
    """The draft reads what plain steps left for it, and one is in flight when drafts come back; a draft that was
    made ahead for another width is made again."""
    costs, schedule_costs = Costs(), {0: 0.1, 1: 0.12, 2: 0.18, 3: 0.2}
    know(costs, schedule_costs)
    schedule, changes, before = AdaptiveBlock(4, costs), 0, 3
    for position in range(120):
        width = schedule.limit()
        if width and not before:
            schedule.record(drafted=0, accepted=0, emitted=1, seconds=0.1, position=position)
        changed = width not in (0, before)
        changes += changed
        accepted = width if position < 12 and right else min(right, width)
        seconds = 0.7 if changed else schedule_costs[width]
        schedule.record(drafted=width, accepted=accepted, emitted=accepted + 1, seconds=seconds, position=position)
        assert all(0.7 not in timings.latest for timings in costs.measured.values())
        before = width
    assert changes and (before == 1 if right else changes > 1)


def test_costs_that_nobody_renewed_are_measured_again() -> None:
    """A machine that was busy then may be idle now."""
    costs = Costs()
    for _ in range(2):
        costs.update(5, 0.9, 100)
    for count in range(513):
        assert (costs.get(5, 100) is None) == (count > 512)
        costs.update(3, 0.1, 100)
    assert costs.get(5, 100) is None and costs.get(3, 100) is not None
    costs.update(5, 0.2, 100)
    costs.update(5, 0.2, 100)
    assert costs.get(5, 100) == 0.2, "nothing of the old timing is left"


def test_what_a_width_costs_is_guessed_from_its_neighbours() -> None:
    """A width below all that are known could cost anything, and so could one above."""
    costs, widths = Costs(), (1, 3, 4, 5, 9, 15)
    assert costs.estimate(widths, 100) == costs.estimate(widths, 100, hopefully=True) == {}
    know(costs, {0: 0.1, 4: 0.18, 7: 0.3})
    assert costs.estimate(widths, 100) == pytest.approx({1: 0.12, 3: 0.16, 4: 0.18, 5: 0.22})
    alone = Costs()
    know(alone, {7: 0.3})
    assert alone.estimate(widths, 100) == {} and alone.estimate((3, 7), 100, hopefully=True) == {7: 0.3}


def test_a_wider_block_is_hoped_to_be_cheap_but_not_a_far_wider_one() -> None:
    """Else a cliff between two widths, or a kernel that starts at many rows, would never be found; and a draft that is
    bad on a slow machine would begin with a block of 16."""
    costs = Costs()
    know(costs, {0: 0.1, 2: 0.15, 4: 0.3, 15: 0.9})
    hopes = costs.estimate((1, 2, 3, 4, 5, 9, 10, 15, 31, 32), 100, hopefully=True)
    assert hopes.pop(1) == pytest.approx(0.125) and hopes.pop(10) == pytest.approx(0.3 + 6 / 11 * 0.6)
    assert hopes == {2: 0.15, 3: 0.15, 4: 0.3, 5: 0.15, 9: 0.15, 15: 0.9, 31: 0.15}


def test_acceptance_is_counted_by_position_and_fades() -> None:
    """Against the sums written out."""
    rng, drafts, fading = random.Random(3), 5, 0.93
    cycles = [(width, rng.randrange(width + 1)) for width in (rng.randrange(1, drafts + 1) for _ in range(60))]
    others = lasting_acceptance(6)
    here = Acceptance(drafts, fading, others)
    for cycle in cycles:
        here.record(*cycle)
    beliefs = others.rates()
    assert beliefs == [0.5] * 5, "before anything is known"
    for position, rate in enumerate(here.rates()):
        weights = [fading**age for age in range(len(cycles))][::-1]
        reached = sum(w for w, (k, a) in zip(weights, cycles, strict=True) if position < k and a >= position)
        right = sum(w for w, (k, a) in zip(weights, cycles, strict=True) if a > position)
        assert rate == pytest.approx((right + 5 * beliefs[position]) / (reached + 5))
    a, b, c = here.rates()[:3]
    assert here.expected()[:4] == pytest.approx([1, 1 + a, 1 + a + a * b, 1 + a + a * b + a * b * c])
    assert len(here.expected()) == 6


def test_what_was_not_tried_is_believed_as_before() -> None:
    """Of the text at hand: as of all texts. Of all texts: about as it was, and a position never reached like the one
    before it."""
    lasting = lasting_acceptance(4)
    for _ in range(200):
        lasting.record(3, 3)
    deep = lasting.rates()
    here = Acceptance(3, 0.9, lasting)
    for _ in range(200):
        here.record(1, 0)
        lasting.record(1, 0)
    assert lasting.rates()[0] < 0.2 < 0.85 < lasting.rates()[1], "a little like the one before it"
    assert here.rates()[0] < 0.2 and here.rates()[1:] == pytest.approx(lasting.rates()[1:]) and deep[1] > 0.95
    new = lasting_acceptance(4)
    for _ in range(200):
        new.record(1, 1)
    assert new.rates()[0] > 0.9 and new.rates()[1] == new.rates()[2] == new.rates()[0]
    here.forget()
    assert here.rates() == pytest.approx(lasting.rates())


@pytest.mark.parametrize(
    "accepted, emitted, reached",
    [
        (2, 3, [1, 1, 1, 0]),  # the third was wrong
        (2, 2, [1, 1, 0, 0]),  # a stop token or the budget ended it at the second: nobody judged the third
        (4, 5, [1, 1, 1, 1]),
        (0, 1, [1, 0, 0, 0]),
        (None, 2, [1, 1, 0, 0]),  # a near-tie gave two tokens: as much as one accepted draft
    ],
)
def test_what_was_not_judged_is_not_counted(accepted: int | None, emitted: int, reached: list[int]) -> None:
    lasting, seen = lasting_acceptance(5), lasting_acceptance(5)
    AdaptiveBlock(5, Costs(), lasting).record(drafted=4, accepted=accepted, emitted=emitted, seconds=0.1, position=10)
    right = emitted - 1 if accepted is None else accepted
    seen.record(sum(reached), right)
    assert lasting.rates() == seen.rates()
    expected, belief = list[float](), 0.5
    for position in range(4):
        belief = (5 * belief + (position < right)) / (5 + 1) if position < sum(reached) else belief
        expected.append(belief)
    assert lasting.rates() == pytest.approx(expected)


def test_the_widths_that_are_tried_fill_tiles() -> None:
    """Blocks of powers of two and of one and a half of them, for which kernels are made, and the whole one."""
    tried = [[width + 1 for width in AdaptiveBlock(block, Costs())._widths] for block in (2, 3, 7, 16, 17)]
    assert tried == [[2], [2, 3], [2, 3, 4, 6, 7], [2, 3, 4, 6, 8, 12, 16], [2, 3, 4, 6, 8, 12, 16, 17]]


@pytest.mark.parametrize("block", [2, 3, 4, 5, 6, 8, 10, 16, 31, 32])
def test_a_schedule_never_asks_for_more_than_the_block(block: int) -> None:
    rng, schedule = random.Random(block), AdaptiveBlock(block, Costs())
    widths = set()
    for position in range(400):
        width = schedule.limit()
        widths.add(width)
        accepted = rng.randrange(width + 1)
        schedule.record(
            drafted=width, accepted=accepted, emitted=accepted + 1, seconds=rng.uniform(0.1, 0.2), position=position
        )
    assert widths <= set(range(block)) and block - 1 in widths


def test_cycles_that_were_cut_short_are_known_by_what_they_drafted() -> None:
    """Near the end of the budget there are fewer drafts than were asked for."""
    costs = Costs()
    schedule = AdaptiveBlock(6, costs)
    for position in range(3):
        schedule.record(drafted=2, accepted=0, emitted=1, seconds=0.1, position=position)
    assert costs.get(2, 0) == 0.1 and costs.get(5, 0) is None


def test_a_near_tie_decided_again_is_no_plain_step() -> None:
    """It waited for the block that it takes the place of, and nothing was submitted before it."""
    costs = Costs()
    know(costs, {0: 0.1, 5: 0.2})
    schedule = AdaptiveBlock(6, costs)
    for position in range(12):
        schedule.record(drafted=5, accepted=5, emitted=6, seconds=0.1, position=position)
        schedule.record(drafted=0, accepted=None, emitted=1, seconds=0.3, position=position)
    assert schedule.limit() == 5 and costs.get(0, 0) == 0.1 and costs.get(5, 0) == 0.1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_moe", "qwen3_5"])
def test_any_schedule_gives_the_same_text_and_cache(name: str, seed: int) -> None:
    """Plain steps submitted ahead, blocks and rests in any order."""

    class Random(FixedBlock):
        rng, left, width = random.Random(seed), 0, 7

        def limit(self) -> int:
            return self.width

        def record(self, **_: object) -> None:
            self.left -= 1
            if self.left <= 0:
                self.left, self.width = self.rng.randrange(1, 5), self.rng.choice([0, 0, 1, 3, 7])

    prompt = prompt_of(21)
    truth = reference(name, prompt, 60)
    session = greedy_session(name, ScriptedProposer(truth, SCRIPTS["wide"], (0, 2)), 8)
    session.schedule = Random(8)
    commits = list(decode(session, prompt, max_tokens=60))
    assert tokens_of(commits) == truth
    assert session.position == session.cache.length + 1
    assert sum(r.shape[1] for r in session.proposer.observed) == session.cache.length
    attention = [entry for entry in session.cache.entries if not isinstance(entry, ArraysCache)]
    assert all(entry.offset == session.cache.length for entry in attention)
    assert session.stats.host_syncs == session.stats.cycles


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_stop_with_a_step_in_flight_takes_the_step_back(name: str) -> None:
    """Plain decoding submits a step before it reads the one before; a stop token undoes it, in rings too."""
    prompt = prompt_of(21)
    truth = reference(name, prompt, 60)
    for index in (1, 2, 17, 40):
        if truth[index] in truth[:index]:
            continue
        session = greedy_session(name)
        assert tokens_of(decode(session, prompt, max_tokens=60, stop={truth[index]})) == truth[: index + 1]
        assert session.cache.length == len(prompt) + index and not session.cache.is_open
        anchor = session.tokens.pop()
        rest = tokens_of(decode(session, [anchor], max_tokens=60 - index - 1))
        assert truth[: index + 1] + rest == truth


def test_a_caller_who_stops_with_a_step_in_flight_leaves_nothing_open() -> None:
    prompt = prompt_of(21)
    truth = reference("llama-sliding", prompt, 60)
    session = greedy_session("llama-sliding")
    commits = decode(session, prompt, max_tokens=60)
    got = [next(commits).tokens[0] for _ in range(7)]
    commits.close()
    assert got == truth[:7] and not session.cache.is_open
    assert session.cache.length == len(prompt) + 6
    assert all(entry.offset == session.cache.length for entry in session.cache.entries)
