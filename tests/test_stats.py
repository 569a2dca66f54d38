"""Counts and clocks keep their identities, and unknown is None."""

from __future__ import annotations

import itertools

import pytest

from dflash_mlx.stats import Stats, Timings


def test_published_definitions() -> None:
    stats = Stats(emitted=1)
    for accepted in (3, 0, 2):
        stats.record(drafted=3, accepted=accepted, emitted=accepted + 1)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert stats.draft_acceptance_rate == pytest.approx(5 / 9)
    assert stats.emitted == 1 + stats.accepted + stats.cycles
    assert stats.histogram == {3: 1, 0: 1, 2: 1}


def test_nothing_known_is_none() -> None:
    stats, timings = Stats(), Timings()
    assert stats.mean_acceptance_length is None and stats.draft_acceptance_rate is None
    for name in ("prefill_s", "ttft_s", "decode_s", "total_s", "prompt_tps", "decode_tps", "request_tps"):
        assert getattr(timings, name) is None


def test_retracted_tokens_are_not_counted() -> None:
    stats = Stats(emitted=1)
    stats.record(drafted=7, accepted=5, emitted=6)
    stats.retract(accepted=5, kept=2, emitted=4)
    assert (stats.accepted, stats.emitted, dict(stats.histogram)) == (2, 3, {2: 1})


def fake_clock(times: list[float]):
    values = iter(times)
    return lambda: next(values)


def test_prefill_is_in_one_rate_and_not_in_the_other() -> None:
    """Prefill 2 s, then 10 ms per cycle of 2 tokens."""
    cycles = [2.0 + 0.01 * i for i in range(1, 51)]
    timings = Timings(prompt_tokens=400, clock=fake_clock([0.0, 2.0, 2.0, *cycles]))
    timings.mark_prefilled()
    timings.mark_burst()
    timings.emitted += 1
    assert timings.decode_tps is None and timings.request_tps is None, "no rate before two tokens"
    for _ in cycles:
        timings.mark_burst()
        timings.emitted += 2
    assert timings.prompt_tps == pytest.approx(200)
    assert timings.ttft_s == pytest.approx(2.0) and timings.total_s == pytest.approx(2.5)
    assert timings.decode_tps == pytest.approx(100 / 0.5)
    assert timings.request_tps == pytest.approx(101 / 2.5)
    assert timings.request_tps < timings.decode_tps
    assert sum(timings.cycle_s) == pytest.approx(timings.decode_s)
    assert all(gap == pytest.approx(0.01) for gap in timings.cycle_s)


def test_bursts_are_the_gaps_not_the_tokens() -> None:
    clock = itertools.count()
    timings = Timings(clock=lambda: float(next(clock)))
    timings.mark_prefilled()
    for _ in range(4):
        timings.mark_burst()
        timings.emitted += 5
    assert timings.cycle_s == [1.0, 1.0, 1.0]
