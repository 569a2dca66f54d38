"""A run whose numbers contradict each other ends. Each test spoils one thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.bench.checks import check, demand, demand_same
from dflash_mlx.bench.form import BenchError
from dflash_mlx.bench.measured import Measured, Reported
from dflash_mlx.bench.record import Compared, Limits
from tests.bench.scripted import FakeClock, Scripted, dflash, prompt


def ran(arm: Scripted) -> Measured:
    return arm.run(prompt("one"), Limits(max_tokens=9))


def reported(measured: Measured, **changes: Any) -> Measured:
    return replace(measured, reported=replace(measured.reported, **changes))


@pytest.mark.parametrize("arm", [Scripted(FakeClock()), dflash(FakeClock())], ids=["plain", "drafts"])
def test_true_numbers_pass(arm: Scripted) -> None:
    """Else every run would end, and the tests below would show nothing."""
    assert check(ran(arm)) == []


def test_an_answer_that_ends_inside_a_block_passes() -> None:
    """The budget often cuts the last block behind an accepted draft, and then there is no correction."""
    whole = ran(dflash(FakeClock()))
    assert whole.cycles is not None and whole.cycles.emitted is not None
    cut = replace(
        whole,
        generated=8,
        tokens=whole.tokens[:8],
        cycles=replace(whole.cycles, emitted=(*whole.cycles.emitted[:-1], 2)),
        reported=replace(whole.reported, generated=8, decode_tps=7 / whole.decode_s, request_tps=8 / whole.end_s),
    )
    assert check(cut) == []


def test_an_answer_of_one_token_passes() -> None:
    """It has no cycles and no rates."""
    arm = Scripted(FakeClock(), script=())
    arm.report = lambda seen: Reported(1, 0, 0, 0, 0, {}, seen.first_s, 0.0, seen.end_s)  # type: ignore[method-assign]
    measured = ran(arm)
    assert measured.decode_tps is None and measured.request_tps is None and measured.mlx_lm_tps is None
    assert check(measured) == []


@pytest.mark.parametrize(
    "change, identity",
    [
        (dict(accepted=6), "tokens = accepted + cycles + first - cut (6 + 3 + 1 - 0): 9 and 10"),
        (dict(cycles=4), "tokens = accepted + cycles + first - cut (5 + 4 + 1 - 0): 9 and 10"),
        (dict(cycles=4), "cycle time * cycles = last token - first, in s: 2 and 1.5"),
        (dict(drafted=12), "drafted seen = reported: 9 and 12"),
        (dict(plain_steps=1), "plain_steps seen = reported: 0 and 1"),
        (dict(histogram={0: 1, 2: 2}), "tokens = sum of (k + 1) * histogram + plain steps + first - cut: 9 and 8"),
        (dict(accepted=6), "sum of k * histogram = accepted: 5 and 6"),
        (dict(accepted=6), "sum over positions = accepted: 5 and 6"),
        (dict(drafted=12), "sum over positions = drafted: 9 and 12"),
        (dict(generated=10), "tokens given = tokens reported: 9 and 10"),
        (dict(decode_tps=4.5), "tokens per cycle / cycle time = rate of generation, per s: 4 and 4.5"),
        (dict(request_tps=3.0), "tokens / time = rate with prefill, per s: 2.25 and 3"),
        (dict(generation_tps=8.0), "mlx_lm's rate, per s: 6 and 8"),
        (dict(total_s=3.0), "the request took, seen = reported, in s: 4 and 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_counter_or_rate_that_the_answer_contradicts_is_named_with_both_sides(
    change: dict[str, Any], identity: str
) -> None:
    """Else acceptance and speed would be printed from counts that nobody held against the tokens."""
    assert identity in check(reported(ran(dflash(FakeClock())), **change))


@pytest.mark.parametrize("seconds", [2.0, 1.5])
def test_a_prefill_that_is_counted_as_decoding_is_caught(seconds: float) -> None:
    """The engine says that its first token came at once, so that the prompt's two seconds slow down decoding."""
    spoilt = ran(dflash(FakeClock()))
    said = spoilt.reported
    assert said.ttft_s is not None and said.decode_s is not None
    moved = reported(spoilt, ttft_s=said.ttft_s - seconds, decode_s=said.decode_s + seconds)
    found = check(moved)
    assert any(each.startswith("first token after, seen = reported, in s: 2.5 and") for each in found)
    assert any(each.startswith("generation only took, seen = reported, in s: 2 and") for each in found)


def test_a_decoding_without_the_draft_s_prefill_is_caught() -> None:
    """Half a second of the draft's work on the prompt would be in no number."""
    spoilt = ran(dflash(FakeClock()))
    assert "generation only took, seen = reported, in s: 2 and 1.5" in check(reported(spoilt, decode_s=1.5))


@pytest.mark.parametrize(
    "column, value, identity",
    [
        ("accepted", (3, 1, 2), "tokens = accepted + 1 in cycle 2: 1 = 1 + 1"),
        ("drafted", (3, 3, 1), "0 <= accepted <= drafted in cycle 3: accepted 2, drafted 1"),
        ("drafted", (5, 3, 3), "drafted <= block - 1 in cycle 1: drafted 5, block 4"),
        ("emitted", (4, 1, 2), "tokens outside of cycles are 0 or 1: 9 tokens, 7 in cycles"),
    ],
)
def test_a_cycle_that_gives_other_tokens_than_it_says_is_caught(
    column: str, value: tuple[int, ...], identity: str
) -> None:
    """Histogram and acceptance by position are made of these columns."""
    measured = ran(dflash(FakeClock()))
    assert measured.cycles is not None
    found = check(replace(measured, cycles=replace(measured.cycles, **{column: value})))
    assert identity in found


def test_time_that_runs_backwards_is_caught() -> None:
    """A burst seen before the first token would make a negative cycle time."""
    measured = ran(dflash(FakeClock()))
    assert measured.cycles is not None
    found = check(replace(measured, cycles=replace(measured.cycles, at_s=(2.0, 3.5, 4.0))))
    assert any(each.startswith("time does not run backwards") for each in found)


def test_a_draft_prefill_longer_than_the_time_to_the_first_token_is_caught() -> None:
    """Generation only would take longer than the whole request."""
    found = check(replace(ran(dflash(FakeClock())), draft_prefill_s=3.0))
    assert "0 <= the draft's prefill <= first token: 3 s, 2.5 s" in found
    assert "generation only <= with prefill: 4.5 s, 4 s" in found


def test_the_error_names_prompt_arm_identity_and_both_sides() -> None:
    """What a user sends when a run has ended."""
    spoilt = reported(ran(dflash(FakeClock())), drafted=12)
    with pytest.raises(BenchError, match=r"Prompt 'one', arm 'dflash': drafted seen = reported: 9 and 12; .*report it"):
        demand(spoilt)


def test_other_tokens_of_an_exact_arm_end_a_run_unless_rounding_explains_them() -> None:
    """A near-tie is a result, a bug is not, and an engine that promises nothing may differ."""
    row = Compared("one", "dflash", False, 3, 0.3, "bug", 3, 2.0, 0.0, "5 was expected and 6 got", 1, None, None, None)
    with pytest.raises(BenchError, match="its tokens are not the baseline's: 5 was expected and 6 got"):
        demand_same(row, exact=True)
    demand_same(row, exact=False)
    demand_same(replace(row, divergence="near-tie"), exact=True)
