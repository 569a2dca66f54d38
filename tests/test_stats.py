"""Counts and clocks keep their identities, and unknown is None."""

from __future__ import annotations

import pytest

from dflash_mlx.stats import Stats, Timings


def test_published_definitions() -> None:
    stats = Stats(emitted=1)
    for accepted in (3, 0, 2):
        stats.record(drafted=3, accepted=accepted, emitted=accepted + 1)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert stats.draft_acceptance_rate == pytest.approx(5 / 9)
    assert stats.emitted == 1 + stats.accepted + stats.cycles
    assert stats.histogram == {3: 1, 0: 1, 2: 1} and stats.blocks == {4: 3}
    stats.record(drafted=0, accepted=0, emitted=1)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3), "a plain step says nothing of the draft"
    assert stats.cycles == 4 and stats.plain_steps == 1 and stats.histogram[0] == 1 and stats.blocks == {4: 3}


def test_nothing_known_is_none() -> None:
    stats, timings = Stats(), Timings()
    assert stats.mean_acceptance_length is None and stats.draft_acceptance_rate is None
    for name in ("prefill_s", "ttft_s", "decode_s", "total_s", "prompt_tps", "decode_tps", "request_tps"):
        assert getattr(timings, name) is None


def test_retracted_tokens_are_not_counted() -> None:
    stats = Stats(emitted=1)
    stats.record(drafted=7, accepted=5, emitted=6)
    stats.retract(drafted=7, accepted=5, emitted=6, delivered=2)
    assert (stats.cycles, stats.drafted, stats.accepted, stats.emitted, dict(stats.histogram)) == (1, 7, 2, 3, {2: 1})
    assert stats.blocks == {8: 1}
    stats.retract(drafted=7, accepted=2, emitted=2, delivered=0)
    assert (stats.cycles, stats.drafted, stats.accepted, stats.emitted, dict(stats.histogram)) == (0, 0, 0, 1, {})
    assert not stats.blocks


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


def test_all_work_of_the_draft_is_decoding() -> None:
    """Its part of prefill moves from one clock to the other; the whole stays."""
    timings = Timings(prompt_tokens=100, clock=fake_clock([0.0, 2.0, 2.0, 3.0]))
    timings.draft_prefill_s = 0.5
    timings.mark_prefilled()
    timings.mark_burst()
    timings.mark_burst()
    timings.emitted = 11
    assert (timings.prefill_s, timings.decode_s, timings.ttft_s, timings.total_s) == (1.5, 1.5, 2.0, 3.0)
    assert timings.decode_tps == pytest.approx(10 / 1.5) and timings.prompt_tps == pytest.approx(100 / 1.5)
