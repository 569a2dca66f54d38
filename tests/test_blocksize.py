"""The adaptive schedule leaves speculation where it loses, comes back where it pays, and never changes the text."""

from __future__ import annotations

import random

import pytest
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.blocksize import AdaptiveBlock, Costs, FixedBlock
from dflash_mlx.decode import decode
from tests.conftest import greedy_session, tokens_of
from tests.families import SCRIPTS, ScriptedProposer, prompt_of, reference

PLAIN_S, CYCLE_S = 0.10, 0.15  # break-even at 1.5 tokens per cycle


def simulate(schedule, tokens: int, gain, seed: int = 0, plain_s: float = PLAIN_S) -> dict[str, float]:
    """Run a schedule over scripted costs; `gain(position)` is the mean number of tokens of a cycle there."""
    rng, position, seconds, plain_steps, cycles = random.Random(seed), 0, 0.0, 0, 0
    while position < tokens:
        drafts = schedule.limit()
        emitted = 1 if not drafts else 1 + sum(rng.random() < (gain(position) - 1) / drafts for _ in range(drafts))
        cost = (CYCLE_S if drafts else plain_s) * rng.uniform(0.9, 1.1)
        schedule.record(drafted=drafts, accepted=emitted - 1, emitted=emitted, seconds=cost, position=position)
        position, seconds = position + emitted, seconds + cost
        plain_steps, cycles = plain_steps + (not drafts), cycles + bool(drafts)
    return {"speedup": position * plain_s / seconds, "plain": plain_steps, "cycles": cycles}


@pytest.mark.parametrize("seed", range(5))
def test_where_drafts_do_not_pay_little_is_lost(seed: int) -> None:
    """Never much slower than plain decoding."""
    fixed = simulate(FixedBlock(4), 400, lambda p: 1.15, seed)
    adaptive = simulate(AdaptiveBlock(4, Costs()), 400, lambda p: 1.15, seed)
    assert fixed["speedup"] < 0.85 and adaptive["speedup"] > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_where_drafts_pay_it_keeps_speculating(seed: int) -> None:
    fixed = simulate(FixedBlock(4), 400, lambda p: 2.4, seed)
    adaptive = simulate(AdaptiveBlock(4, Costs()), 400, lambda p: 2.4, seed)
    assert adaptive["speedup"] > 0.95 * fixed["speedup"] > 1.4


@pytest.mark.parametrize("seed", range(5))
def test_it_leaves_and_returns_with_the_text(seed: int) -> None:
    """Prose, then code, then prose."""
    schedule = AdaptiveBlock(4, Costs())
    text = [(1.1, 300), (2.6, 600), (1.1, 300)]
    shares = []
    for gain, length in text:
        run = simulate(schedule, length, lambda p, gain=gain: gain, seed)
        shares.append(run["plain"] / (run["plain"] + run["cycles"]))
    assert shares[0] > 0.8 and shares[1] < 0.6 and shares[2] > 0.6


def test_the_next_request_starts_knowing_what_cycles_cost() -> None:
    costs = Costs()
    simulate(AdaptiveBlock(4, costs), 200, lambda p: 1.15)
    second = AdaptiveBlock(4, costs)
    steps = 0
    while second.limit():
        second.record(drafted=3, accepted=0, emitted=1, seconds=CYCLE_S, position=steps)
        steps += 1
    assert steps == 4, "decided at the first look"


def test_costs_of_another_context_length_say_nothing() -> None:
    costs = Costs()
    costs.update(3, 0.1, 500)
    assert costs.get(3, 10) == costs.get(3, 2000) == 0.1
    assert costs.get(3, 9000) is None and costs.get(0, 500) is None


def test_a_pause_of_the_caller_is_no_cost() -> None:
    costs = Costs()
    for _ in range(20):
        costs.update(3, 0.1, 100)
    costs.update(3, 60.0, 100)
    assert costs.get(3, 100) < 0.16


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
