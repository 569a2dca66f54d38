"""Every formula to the digit, on an engine whose clock is a script. The expected values were worked out by hand.

One prompt of 100 tokens. Plain: prefill 2 s, then 8 steps of 0.5 s, so 9 tokens in 6 s. With drafts: prefill 2 s and
0.5 s for the draft's, then blocks of 4 in cycles of 0.5 s that accept 3, 0 and 2 of 3, so 9 tokens in 4 s.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_mlx.bench.acceptance import Acceptance
from dflash_mlx.bench.measure import measure
from dflash_mlx.bench.measured import Cycles, Measured, percentile
from dflash_mlx.bench.record import Limits, Prompt, Record, Reported
from dflash_mlx.bench.statistics import speedup, summarise
from dflash_mlx.bench.summary import Spread
from tests.bench.scripted import FakeClock, Scripted, dflash, prompt, record


def run(prompts: list[Prompt], *arms: Scripted, pairs: int = 1) -> Record:
    return measure(record(*(arm.name for arm in arms), pairs=pairs), arms, prompts)


def test_the_clocks_of_one_plain_request() -> None:
    """A prefill of 2 s counted as decoding would make 1.5 tokens per second of the 2 that the engine decodes."""
    one = Scripted(FakeClock()).run(prompt("one"), Limits())
    assert (one.ttft_s, one.decode_s, one.end_s) == (2.0, 4.0, 6.0)
    assert one.decode_tps == 2.0  # 8 tokens behind the first, in 4 s
    assert one.mlx_lm_tps == 2.25  # 9 in 4 s
    assert one.request_tps == 1.5  # 9 in 6 s
    assert one.prompt_tps == 50.0
    assert one.cycle_s == (0.5,) * 8


def test_the_clocks_of_one_request_with_drafts() -> None:
    """The draft's half second on the prompt is decoding, though it is spent before the first token."""
    one = dflash(FakeClock()).run(prompt("one"), Limits())
    assert (one.ttft_s, one.decode_s, one.end_s) == (2.5, 2.0, 4.0)
    assert one.decode_tps == 4.0  # 8 in 1.5 s and the draft's 0.5 s
    assert one.mlx_lm_tps == 6.0  # 9 in 1.5 s: why this is not our number
    assert one.request_tps == 2.25
    assert one.prompt_tps == 50.0
    assert one.cycle_s == (0.5,) * 3


def test_an_engine_whose_first_cycle_drafts_is_not_given_that_cycle_s_tokens_for_nothing() -> None:
    """mlx_lm's own speculative decoding shows 3 tokens at once: 6 tokens took the other second, not 8."""
    cycles = Cycles((2.0, 2.5, 3.0), (3, 2, 4), (3, 3, 3), (2, 1, 3))
    one = Measured("p", "a", 10, "", 9, "", 2.0, 3.0, cycles=cycles, block_size=4)
    assert one.prefill_tokens == 0 and one.decode_tokens == 6 and one.decode_tps == 6.0
    assert one.cycle_s == (0.5, 0.5)


def test_the_four_acceptance_numbers_stand_under_their_own_names() -> None:
    """80% of one is 27% of another: 5 accepted of 9 drafted, in 3 cycles of 8 tokens."""
    found = Acceptance.of(dflash(FakeClock()).run(prompt("one"), Limits()))
    assert found is not None
    said = found.as_json()
    assert said["mean_acceptance_length"] == 1 + 5 / 3
    assert said["draft_acceptance_rate"] == 5 / 9
    assert said["accepted_share"] == 5 / 8
    assert said["cycle_efficiency"] == 8 / 12
    assert said["histogram"] == {"0": 1, "2": 1, "3": 1}
    assert said["position_unconditional"] == [2 / 3, 2 / 3, 1 / 3]
    assert said["position_conditional"] == [2 / 3, 1.0, 0.5]


def test_plain_steps_are_not_cycles_that_drafted() -> None:
    """An engine that rests half of the time would seem to accept half as much."""
    resting = dflash(FakeClock(), script=((3, 1), (0, 0), (0, 0), (3, 3)))
    found = Acceptance.of(resting.run(prompt("one"), Limits()))
    assert found is not None and found.plain_steps == 2
    assert found.mean_acceptance_length == 3.0  # 1 + 4/2
    assert found.accepted_share == 4 / 8
    assert found.cycle_efficiency == 6 / 8


def test_efficiency_is_of_what_was_verified() -> None:
    """Blocks may have several widths: two cycles, of 4 tokens and of 2, that gave 2 each."""
    found = Acceptance.of(dflash(FakeClock(), script=((3, 1), (1, 1))).run(prompt("one"), Limits()))
    assert found is not None and found.cycle_efficiency == 4 / 6


def test_acceptance_of_a_server_that_tells_totals_only() -> None:
    """Without cycles there is no histogram, and no guess at one."""
    whole = dflash(FakeClock()).run(prompt("one"), Limits())
    found = Acceptance.of(replace(whole, cycles=None, reported=replace(whole.reported, histogram=None)))
    assert found is not None
    assert (found.mean_acceptance_length, found.draft_acceptance_rate) == (1 + 5 / 3, 5 / 9)
    assert found.histogram == {} and found.positions == ()


def test_pooled_acceptance_weighs_cycles_and_not_requests() -> None:
    """A short answer of one cycle would count as much as a long one. Both means are there, by name."""
    clock = FakeClock()

    class ByPrompt(Scripted):
        def run(self, asked: Prompt, limits: Limits) -> Measured:
            self.script = ((3, 3),) if asked.name == "short" else ((3, 0), (3, 0), (3, 1))
            return super().run(asked, limits)

    arm = ByPrompt(clock, name="dflash", block_size=4, exact=False)
    summary = run([prompt("short"), prompt("long")], Scripted(clock), arm).summary
    assert summary is not None
    dflashed = summary.arms["dflash"]
    assert dflashed.acceptance is not None
    assert dflashed.acceptance["mean_acceptance_length"] == 1 + 8 / 8  # two trials of 3 + 1 accepted in 1 + 3 cycles
    assert dflashed.of_requests == pytest.approx(8 / 3, rel=1e-15)  # (4 + 4/3) / 2
    assert dflashed.acceptance["position_unconditional"] == [2 / 4, 1 / 4, 1 / 4]


def test_a_speedup_is_total_time_on_both_clocks() -> None:
    """6 s over 4 s with prefill, 4 s over 2 s without: one number would hide the other."""
    clock = FakeClock()
    summary = run([prompt("one")], Scripted(clock), dflash(clock)).summary
    assert summary is not None
    arm = summary.arms["dflash"]
    assert summary.arms["stock"].speedup is None and arm.speedup is not None
    request, decode = arm.speedup["request"], arm.speedup["decode"]
    assert request is not None and decode is not None
    assert (request.basis, request.prompts, request.ratio, request.low) == ("total time", 1, 1.5, None)
    assert decode.ratio == 2.0
    assert (arm.decode_tps, arm.request_tps, arm.mlx_lm_tps) == (4.0, 2.25, 6.0)
    assert (arm.same_tokens, arm.common_share, arm.requests, arm.generated) == (1, 1.0, 2, 18)


def test_the_interval_comes_from_drawing_prompts_in_pairs() -> None:
    """Of two prompts a quarter of the draws are twice the slow one and a quarter twice the fast one, which are the ends
    of the interval. Drawn apart, arm and baseline would give 8/1 = 8."""
    found = speedup([(1.0, 1.0), (8.0, 4.0)])
    assert found is not None
    assert found.ratio == 9 / 5
    assert (found.low, found.high) == (pytest.approx(1.0, rel=1e-12), pytest.approx(2.0, rel=1e-12))
    assert (found.worst, found.best) == (1.0, 2.0)


def test_the_interval_of_alike_prompts_is_narrow_and_the_same_every_time() -> None:
    """A report made twice from one record has to say the same."""
    rows = [(4.0 + 0.5 * (i * 0.618 % 1), 2.0) for i in range(30)]
    first, again = speedup(rows), speedup(rows)
    assert first == again and first is not None and first.low is not None and first.high is not None
    assert 2.05 < first.low < first.ratio < first.high < 2.2


def test_prompts_with_other_tokens_are_compared_per_token_and_the_basis_is_said() -> None:
    """An answer half as long takes half the time, which is no speed-up."""
    clock = FakeClock()
    shorter = dflash(clock, name="other", script=((3, 3),), draft_prefill_s=0.0, exact=False)
    summary = run([prompt("one")], Scripted(clock), shorter).summary
    assert summary is not None
    arm = summary.arms["other"]
    assert arm.speedup is not None and arm.speedup["request"] is not None and arm.speedup["decode"] is not None
    assert arm.speedup["request"].basis == "per token"
    assert arm.speedup["request"].ratio == pytest.approx((6 / 9) / (2.5 / 5))
    assert arm.speedup["decode"].ratio == pytest.approx((4 / 8) / (0.5 / 4))
    assert arm.same_tokens == 0 and arm.common_share == 5 / 9
    assert "other: the tokens of 0 of 1 prompts are the baseline's; compared per token" in summary.notes
    assert "other: its answers have 5.0 tokens on average, the baseline's 9.0" in summary.notes


def test_tokens_of_a_first_burst_are_not_given_for_nothing_where_texts_are_the_same() -> None:
    """mlx_lm's speculative decoding shows four tokens at once: its time without prefill is that of 5 tokens, the
    baseline's that of 8, and one over the other would be a speed-up of 4."""
    clock = FakeClock()
    bursts = Cycles((2.5, 3.0, 3.5), (4, 1, 4), (3, 3, 3), (3, 0, 3))
    arm = dflash(
        clock,
        name="sequential",
        draft_prefill_s=0.0,
        spoil=lambda seen: replace(seen, first_s=2.5, end_s=3.5, cycles=bursts, reported=Reported()),
    )
    summary = run([prompt("one")], Scripted(clock), arm).summary
    assert summary is not None and summary.arms["sequential"].same_tokens == 1
    speed = summary.arms["sequential"].speedup
    assert speed is not None and speed["request"] is not None and speed["decode"] is not None
    assert (speed["request"].basis, speed["request"].ratio) == ("total time", 6 / 3.5)
    assert (speed["decode"].basis, speed["decode"].ratio) == ("per token", (4 / 8) / (1 / 5))


@pytest.mark.parametrize("period, said", [(1, True), (20, True), (21, False), (40, False)])
def test_answers_that_repeat_themselves_are_noted(period: int, said: bool) -> None:
    """A loop is guessed nearly always: 70 tokens per second of "and and and" is no speed."""
    clock = FakeClock()

    def looping(seen: Measured) -> Measured:
        return replace(seen, tokens=tuple(index % period for index in range(44)), generated=44, cycles=None)

    arms = [Scripted(clock, spoil=lambda seen: replace(looping(seen), reported=Reported()))]
    summary = measure(record("stock", max_tokens=44), arms, [prompt("one")]).summary
    assert summary is not None
    assert any("stock: 1 of 1 answers repeat themselves" in note for note in summary.notes) is said


def test_where_some_prompts_match_both_bases_are_there() -> None:
    """Leaving out prompts is choosing them: what all of them give stands beside."""
    clock = FakeClock()
    arm = dflash(clock, exact=False)
    found = run([prompt("one"), prompt("two")], Scripted(clock), arm)
    found.compared = [replace(row, tokens_match=False) if row.prompt == "two" else row for row in found.compared]
    summary = summarise(found).arms["dflash"]
    assert summary.speedup is not None and summary.speedup_all is not None
    assert (summary.speedup["request"].basis, summary.speedup["request"].prompts) == ("total time", 1)  # type: ignore[union-attr]
    assert (summary.speedup_all["request"].basis, summary.speedup_all["request"].prompts) == ("per token", 2)  # type: ignore[union-attr]


def test_percentiles_interpolate_and_need_twenty_values() -> None:
    """The 95th percentile of 12 answers is the slowest one by another name."""
    assert percentile([float(i) for i in range(1, 22)], 95) == 20.0
    assert percentile([float(i) for i in range(1, 22)], 50) == 11.0
    assert percentile([0.0] * 10 + [10.0] * 10, 50) == 5.0
    assert percentile([1.0] * 19, 95) is None


def test_latency_is_over_requests_and_null_below_twenty() -> None:
    """n stands beside it either way."""
    clock = FakeClock()
    few = run([prompt("one")], Scripted(clock), dflash(clock)).summary
    many = run([prompt(str(i)) for i in range(10)], Scripted(clock), dflash(clock)).summary
    assert few is not None and many is not None
    assert few.arms["stock"].request_s == Spread(2, None, None)
    assert many.arms["stock"].request_s == Spread(20, 6.0, 6.0)
    assert many.arms["dflash"].ttft_s == Spread(20, 2.5, 2.5)
    assert many.arms["dflash"].cycle_s == Spread(60, 0.5, 0.5)


def test_the_worst_category_and_the_longest_prompt_are_named() -> None:
    """They stand beside the best ones in every table."""
    clock = FakeClock()

    class ByPrompt(Scripted):
        def run(self, asked: Prompt, limits: Limits) -> Measured:
            self.cycle_s = 2.0 if asked.category == "story" else 0.5
            return super().run(asked, limits)

    drafting = ByPrompt(clock, "dflash", ((3, 3), (3, 0), (3, 2)), block_size=4)
    prompts = [prompt("a"), prompt("b", "story", 300), prompt("c", "story")]
    summary = run(prompts, Scripted(clock), drafting).summary
    assert summary is not None
    assert summary.worst_category == {"dflash": "story"}
    speeds = {name: arms["dflash"].speedup for name, arms in summary.categories.items()}
    assert speeds["code"]["request"].ratio == 6 / 3.5  # type: ignore[index, union-attr]
    assert speeds["story"]["request"].ratio == 6 / 8  # type: ignore[index, union-attr]
    assert (summary.longest_prompt, summary.longest_prompt_tokens) == ("b", 300)
    assert summary.longest["dflash"].speedup["request"].ratio == 6 / 8  # type: ignore[index, union-attr]


def test_a_machine_that_gets_slower_or_faster_is_flagged() -> None:
    """A B B A treats the arms alike, but the times of such a run are no times of this machine."""
    clock = FakeClock()
    summary = run([prompt("one")], Scripted(clock, slower=1.25), dflash(clock)).summary
    assert summary is not None and summary.drift.flagged
    # The requests after the warm-up take 1.25, 1.25**2 and 1.25**3 times as long.
    assert summary.drift.within == pytest.approx(1 / 1.25) and summary.drift.whole == pytest.approx(1 / 1.25**2)
    assert any("later rate over its earlier one is 0.80 per prompt, 0.64 over the run" in n for n in summary.notes)
    faster = run([prompt("one")], Scripted(clock, slower=0.5), dflash(clock)).summary
    assert faster is not None and faster.drift.flagged and faster.drift.within == 2.0
    steady = run([prompt("one")], Scripted(clock), dflash(clock)).summary
    assert steady is not None and not steady.drift.flagged and steady.drift.whole == 1.0


def test_an_arm_that_gave_up_drafting_is_noted() -> None:
    """Its acceptance is that of a part of the answer, and its speed that of plain decoding for the rest."""
    clock = FakeClock()
    arm = dflash(clock, spoil=lambda measured: replace(measured, mode="plain"))
    summary = run([prompt("one")], Scripted(clock), arm).summary
    assert summary is not None
    assert summary.notes == ("dflash: 2 of its requests gave up drafting, whose notes say why",)


def test_conditions_of_a_mac_that_spoil_numbers_are_noted() -> None:
    """Battery, low-power mode and heat."""
    clock = FakeClock()
    found = run([prompt("one")], Scripted(clock), dflash(clock))
    warm = {"power_source": "Battery Power", "low_power_mode": True, "thermal_pressure": "CPU_Speed_Limit 60%"}
    good = {"power_source": "AC Power", "low_power_mode": False, "thermal_pressure": "nominal"}
    found.run = replace(found.run, conditions={"before": good, "after": warm})
    assert summarise(found).notes == (
        "after the run the machine ran on Battery Power",
        "after the run low-power mode was on",
        "after the run the system reported thermal pressure: CPU_Speed_Limit 60%",
    )


def test_lengths_say_how_many_answers_the_budget_ended() -> None:
    """Answers cut at the same length look alike, whatever the model would have said."""
    clock = FakeClock()
    arms = [Scripted(clock), dflash(clock)]
    found = measure(record("stock", "dflash", max_tokens=9), arms, [prompt("one"), prompt("two")]).summary
    assert found is not None and found.arms["stock"].lengths.at_limit == 2
    found = measure(record("stock", "dflash", max_tokens=10), arms, [prompt("one"), prompt("two")]).summary
    assert found is not None and found.arms["stock"].lengths.at_limit == 0
    lengths = found.arms["dflash"].lengths
    assert (lengths.shortest, lengths.median, lengths.mean, lengths.longest) == (9, 9.0, 9.0, 9)
