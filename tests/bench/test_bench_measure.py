"""The order of a run, what ends it, and what is left of it then. At last the real arms, on tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.bench import arms as bench_arms
from dflash_mlx.bench.arms import Models, Ours, Sequential, Stock
from dflash_mlx.bench.checks import check
from dflash_mlx.bench.compare import model_judge
from dflash_mlx.bench.form import BenchError
from dflash_mlx.bench.measure import Comparing, Step, measure
from dflash_mlx.bench.record import Limits, Measured, Prompt
from dflash_mlx.divergence import Divergence
from dflash_mlx.stats import Stats, Timings
from tests.bench.scripted import FakeClock, Scripted, dflash, prompt, record
from tests.conftest import byte_tokenizer, draft_for
from tests.families import reference, tiny


def two(clock: FakeClock | None = None, **changes: Any) -> list[Scripted]:
    clock = clock or FakeClock()
    return [Scripted(clock), dflash(clock, **changes)]


def test_arms_are_warmed_up_and_then_asked_in_turn_and_in_reverse_turn() -> None:
    """A cold first arm, or a machine that gets hot, would decide who is faster."""
    arms, log = two(), []
    for arm in arms:
        arm.log = log
    found = measure(record("stock", "dflash"), arms, [prompt("a"), prompt("b", length=200)])
    warm = [("a", "stock"), ("a", "dflash"), ("b", "stock"), ("b", "dflash")]
    turns = [(name, arm) for name in "ab" for arm in ("stock", "dflash", "dflash", "stock")]
    assert log == [*warm, *turns, ("a", "stock")]
    assert [(each.prompt, each.arm) for each in found.order] == log
    assert [each.kind for each in found.order] == ["warm-up"] * 4 + ["measured"] * 8 + ["closing"]
    assert [each.trial for each in found.of("a", "stock")] == [0, 1]
    assert found.complete and found.ended is None and len(found.measured) == 8


def test_warm_ups_are_short_and_discarded() -> None:
    """They have the shapes of the run and none of its numbers."""
    arms = two()
    found = measure(replace_run(record("stock", "dflash", max_tokens=64), warmup_tokens=5), arms, [prompt("a")])
    assert [tokens for _, tokens in arms[0].asked] == [5, 64, 64, 64]
    assert min(each.order for each in found.measured) == 2


def replace_run(made: Any, **changes: Any) -> Any:
    made.run = replace(made.run, **changes)
    return made


def test_two_pairs_are_a_b_b_a_twice() -> None:
    """More trials of the same kind, not another order."""
    found = measure(record("stock", "dflash", pairs=2), two(), [prompt("a")])
    order = [each.arm for each in found.order if each.kind == "measured"]
    assert order == ["stock", "dflash", "dflash", "stock"] * 2
    assert [each.trial for each in found.of("a", "dflash")] == [0, 1, 2, 3]


def test_an_interrupt_keeps_what_was_measured_and_says_so() -> None:
    """Hours of measuring are not lost, and do not pass for a whole run."""
    arms = two()
    arms[1].fails = {6: KeyboardInterrupt()}  # after a warm-up on two prompts and one prompt of two
    found = measure(record("stock", "dflash"), arms, [prompt("a"), prompt("b", length=200)])
    assert not found.complete and found.ended == "interrupted" and found.closing is None
    assert [(m.prompt, m.arm) for m in found.measured][4:] == [("b", "stock"), ("b", "dflash")]
    assert found.summary is not None and found.summary.prompts == 1 and found.summary.left_out == ("b",)
    assert found.summary.arms["dflash"].requests == 2
    assert "the run is not complete: interrupted" in found.summary.notes


def test_an_interrupt_before_the_first_prompt_leaves_an_empty_summary() -> None:
    """No number, rather than an error in working one out."""
    arms = two()
    arms[0].fails = {1: KeyboardInterrupt()}
    summary = measure(record("stock", "dflash"), arms, [prompt("a")]).summary
    assert summary is not None and summary.prompts == 0 and summary.arms == {} and summary.longest_prompt is None


def test_an_error_is_raised_and_the_record_kept() -> None:
    """A model that runs out of memory at the fifth prompt."""
    arms, made = two(), record("stock", "dflash")
    arms[1].fails = {3: RuntimeError("out of memory")}
    with pytest.raises(RuntimeError):
        measure(made, arms, [prompt("a")])
    assert made.ended == "RuntimeError: out of memory" and len(made.measured) == 2


def test_wrong_counters_end_the_run() -> None:
    """The engine says that it accepted one token more than it gave."""

    def spoil(measured: Measured) -> Measured:
        return replace(measured, reported=replace(measured.reported, accepted=6))

    made = record("stock", "dflash")
    with pytest.raises(BenchError, match=r"'a', arm 'dflash': tokens = accepted \+ cycles \+ first - cut .*: 9 and 10"):
        measure(made, two(spoil=spoil), [prompt("a")])
    assert not made.complete and made.ended is not None and "arm 'dflash'" in made.ended


def test_a_prefill_moved_into_decoding_ends_the_run() -> None:
    """Its time to the first token is too good, and its decoding too slow."""

    def spoil(measured: Measured) -> Measured:
        said = measured.reported
        return replace(measured, reported=replace(said, ttft_s=0.5, decode_s=(said.decode_s or 0) + 2.0))

    with pytest.raises(BenchError, match=r"first token after, seen = reported, in s: 2\.5 and 0\.5"):
        measure(record("stock", "dflash"), two(spoil=spoil), [prompt("a")])


@pytest.mark.parametrize("kind", ["bug", "near-tie"])
def test_a_changed_token_ends_the_run_unless_it_is_a_near_tie(kind: Any) -> None:
    """The judge is asked about what the two arms said, and is believed."""
    asked = []

    def judge(ids: Any, expected: Any, got: Any) -> Divergence:
        asked.append((tuple(ids), tuple(expected), tuple(got)))
        return Divergence(kind, 4, 0.25, 0.5, 104, 999, "104 was expected and 999 got")

    def spoil(measured: Measured) -> Measured:
        tokens = (*measured.tokens[:4], 999, *measured.tokens[5:])
        return replace(measured, tokens=tokens, output_sha256="changed")

    made = record("stock", "dflash")
    if kind == "bug":
        with pytest.raises(BenchError, match="arm 'dflash': its tokens are not the baseline's: 104 was expected"):
            measure(made, two(spoil=spoil), [prompt("a")], comparing=Comparing(judge))
    else:
        measure(made, two(spoil=spoil), [prompt("a")], comparing=Comparing(judge))
    truth = tuple(range(100, 109))
    assert asked == [(tuple(range(100)), truth, (100, 101, 102, 103, 999, 105, 106, 107, 108))]
    row = made.compared[1]
    assert (row.tokens_match, row.divergence, row.index, row.gap, row.rounding) == (False, kind, 4, 0.25, 0.5)
    assert (row.common_prefix, row.common_share) == (4, 4 / 9)


def test_progress_counts_every_request() -> None:
    """A run of an hour has to say where it is."""
    steps: list[Step] = []
    measure(record("stock", "dflash"), two(), [prompt("a")], progress=steps.append)
    assert [step.done for step in steps] == list(range(1, 8)) and {step.total for step in steps} == {7}
    assert steps[2].asking.kind == "measured" and steps[2].measured.generated == 9


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=[]), "`prompts` has none"),
        (dict(prompts=[prompt("a"), prompt("a")]), "`prompts` has two of one name"),
        (dict(names=("dflash", "stock")), "`arms` are .*'stock', 'dflash'.* and the record's .*'dflash', 'stock'"),
        (dict(pairs=0), "`pairs` has to be 1 or more, got 0"),
        (dict(warmup_tokens=0), "`warmup_tokens` has to be 1 or more, got 0"),
    ],
    ids=["none", "twice", "order", "pairs", "cold"],
)
def test_a_run_that_would_mix_numbers_is_refused(change: dict[str, Any], message: str) -> None:
    """Before anything is measured."""
    made = record(*change.get("names", ("stock", "dflash")), pairs=change.get("pairs", 1))
    made = replace_run(made, warmup_tokens=change.get("warmup_tokens", 32))
    with pytest.raises(ValueError, match=message):
        measure(made, two(), change.get("prompts", [prompt("a")]))


# The real arms.

PROMPTS = [Prompt("one", "code", tuple(range(40, 70))), Prompt("two", "chat", tuple(range(60, 100, 2)))]


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(tiny("llama"), byte_tokenizer())


def real_arms(models: Models) -> list[Any]:
    draft = draft_for("llama")
    return [
        Stock(models),
        Ours.plain(models),
        Ours.dflash(models, draft),
        Ours.auto(models, draft),
        Sequential(models, tiny("llama"), drafts=3),
    ]


def test_the_real_arms_give_one_text_and_numbers_that_agree(models: Models) -> None:
    """mlx_lm itself, our loop in three modes, and mlx_lm's sequential drafting, which here is the target itself."""
    arms = real_arms(models)
    made = record(*(arm.name for arm in arms), max_tokens=60)
    found = measure(made, arms, PROMPTS, comparing=Comparing(model_judge(models.model, made.run.limits)))
    assert found.complete and all(row.divergence == "identical" for row in found.compared)
    assert all(check(each) == [] for each in found.measured)
    summary = found.summary
    assert summary is not None and summary.arms["stock"].acceptance is None
    assert summary.arms["sequential"].acceptance["draft_acceptance_rate"] == 1.0  # type: ignore[index]
    assert summary.arms["sequential"].acceptance["mean_acceptance_length"] == 4.0  # type: ignore[index]
    assert list(found.of("one", "stock")[0].tokens) == reference("llama", PROMPTS[0].ids, 60)
    one = found.of("one", "dflash")[0]
    assert one.prefill_tokens == 1 and one.reported.drafted and one.peak_memory_gb


def test_the_real_arms_go_on_behind_an_end_marker_if_asked_to(models: Models) -> None:
    """Fixed lengths, for curves over context; by default an answer ends where the model ends it."""
    tokens = Stock(models).run(PROMPTS[0], Limits(max_tokens=12)).tokens
    ending = Models(models.model, byte_tokenizer([tokens[5]]))
    for arm in real_arms(ending):
        stopped = arm.run(PROMPTS[0], Limits(max_tokens=12))
        assert stopped.tokens == tokens[: tokens.index(tokens[5]) + 1] and stopped.finish_reason == "stop", arm.name
        assert check(stopped) == []
        assert arm.run(PROMPTS[0], Limits(max_tokens=12, ignore_eos=True)).tokens == tokens, arm.name
    assert tokens[5] in ending.tokenizer.eos_token_ids


def test_sampled_text_repeats_with_its_seed(models: Models) -> None:
    """A run at a temperature can be made again, in every arm."""
    limits = Limits(max_tokens=12, temperature=1.0, seed=5)
    for arm in real_arms(models):
        first, again = arm.run(PROMPTS[0], limits), arm.run(PROMPTS[0], limits)
        assert first.tokens == again.tokens and check(first) == [], arm.name
        assert first.tokens != arm.run(PROMPTS[0], replace(limits, seed=6)).tokens, arm.name
    with pytest.raises(ValueError, match="`seed` has to be given"):
        Limits(temperature=1.0)


def test_an_engine_that_counts_wrongly_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine, with a counter that drops a cycle's drafts."""
    true = Stats.record

    def forgetful(self: Stats, *, drafted: int, accepted: int, emitted: int) -> None:
        true(self, drafted=max(drafted - 1, 0), accepted=accepted, emitted=emitted)

    monkeypatch.setattr(Stats, "record", forgetful)
    found = check(Ours.dflash(models, draft_for("llama")).run(PROMPTS[0], Limits(max_tokens=12)))
    assert any(each.startswith("drafted seen = reported") for each in found)


def test_an_engine_that_changes_a_token_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine, whose third token is another one: rounding does not explain it."""
    true = bench_arms.Sighting.see

    def careless(self: Any, token: int, text: str, **more: Any) -> None:
        true(self, (token + 1) % 200 if len(self.tokens) == 3 and "drafted" in more else token, text, **more)

    arms = [Stock(models), Ours.dflash(models, draft_for("llama"))]
    made = record("stock", "dflash", max_tokens=12)
    monkeypatch.setattr(bench_arms.Sighting, "see", careless)
    with pytest.raises(BenchError, match="arm 'dflash': its tokens are not the baseline's: After 3 equal tokens"):
        measure(made, arms, PROMPTS[:1], comparing=Comparing(model_judge(models.model, made.run.limits)))
    assert made.compared[1].divergence == "bug" and made.compared[1].index == 3


def test_an_engine_that_counts_prefill_as_decoding_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine, whose clock says that the first token came a second earlier."""
    true = Timings.mark_burst

    def early(self: Timings) -> None:
        before = self.first
        true(self)
        if before is None and self.first is not None:
            self.first -= 1.0

    monkeypatch.setattr(Timings, "mark_burst", early)
    found = check(Ours.plain(models).run(PROMPTS[0], Limits(max_tokens=12)))
    assert any(each.startswith("first token after, seen = reported") for each in found)
    assert any(each.startswith("generation only took, seen = reported") for each in found)


def test_every_request_begins_with_memory_of_its_own(models: Models) -> None:
    """Else the arm that comes second shows the peak of the first."""
    ballast = mx.zeros((64, 1024, 1024))
    mx.eval(ballast)
    del ballast
    one = Stock(models).run(PROMPTS[0], Limits(max_tokens=4))
    assert one.peak_memory_gb is not None and one.peak_memory_gb < 0.2
