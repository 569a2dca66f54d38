"""A draft that does not work is noticed within a few cycles, with the reason, and never changes the answer."""

from __future__ import annotations

import sys
import threading
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import make_prompt_cache
from dflash_mlx.cache import TargetCache
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import DraftFault
from dflash_mlx.health import Patient, diagnose
from dflash_mlx.proposers import NullProposer
from dflash_mlx.sampling import make_sampler
from dflash_mlx.stats import Track
from dflash_mlx.targets import target_for
from dflash_mlx.targets.dense import DenseTarget
from tests.conftest import byte_tokenizer, draft_config, tiny_draft
from tests.families import prompt_of, reference, tiny
from tests.generating import paying as paying
from tests.generating import stream

PROMPT, COUNT = prompt_of(21), 70
TEXT = [*PROMPT, *reference("llama", PROMPT, 120)]


def poisoned(**changes) -> DraftModel:
    draft = tiny_draft(**changes)
    draft.layers[1].mlp.down_proj.weight = draft.layers[1].mlp.down_proj.weight * mx.nan
    return draft


class Knowing(DraftModel):
    """Predicts a known text, if it is fed with the layers that it was made for; `late` by one position, if asked."""

    def __init__(self, claims: list[int], made_for: list[int], *, late: int = 0) -> None:
        super().__init__(draft_config(dflash_config={"target_layer_ids": claims}), "knowing")
        mx.eval(self.parameters())
        self._target, self._late, self._fits = target_for(tiny("llama")), late, True
        cache = TargetCache(self._target.make_entries(), 0)
        cache.begin(len(TEXT))
        self._expected = self._target.forward(mx.array([TEXT]), cache, made_for).features

    def extend(self, context, features: mx.array, **rest: Any) -> None:
        at = context.length
        expected = self._expected[:, at : at + features.shape[1]]
        self._fits = (self._fits or at == 0) and mx.allclose(features, expected, atol=1e-4).item()
        super().extend(context, features, **rest)

    def denoise(self, embeddings: mx.array, context, *kernels) -> mx.array:
        start = context.length + 1 + self._late
        tokens = TEXT[start : start + embeddings.shape[1] - 1]
        tokens += [0] * (embeddings.shape[1] - 1 - len(tokens))
        rows = self._target.model.lm_head.weight[mx.array(tokens if self._fits else [0] * len(tokens))]
        return rows[None]


@pytest.fixture
def truth() -> list[int]:
    return reference("llama", PROMPT, COUNT)


def run(tokenizer, draft: DraftModel, **kwargs) -> list:
    return list(stream("llama", tokenizer, PROMPT, max_tokens=COUNT, draft_model=draft, **kwargs))


@pytest.mark.parametrize("mode", ["auto", "dflash"])
def test_a_draft_that_returns_nan_is_dropped_at_once_and_the_answer_stays(mode, paying, tokenizer, truth) -> None:
    """On an M1 a draft in float16 accepts nothing, silently; here the response says what happened and what to do."""
    responses = run(tokenizer, poisoned(), mode=mode)
    assert [r.token for r in responses] == truth
    last = responses[-1]
    assert (responses[0].mode, last.mode) == ("dflash", "plain")
    assert last.stats.cycles - last.stats.plain_steps == 1
    note = next(note for note in last.notes if "NaN" in note)
    assert note.startswith("plain decoding from here on: the draft") and "draft_dtype='float32'" in note
    assert responses[0].notes == last.notes[1:], "the reason comes first"


def test_features_that_overflow_are_told_from_a_broken_draft(tokenizer, truth) -> None:
    """The remedy is another one: the target has to be loaded otherwise."""
    draft = tiny_draft()
    draft.fc.weight = draft.fc.weight * mx.inf
    last = run(tokenizer, draft)[-1]
    assert "target's features, which overflow. Load the target in bfloat16" in last.notes[0]


def test_nan_in_sampled_mode_leaves_the_targets_own_distribution(tokenizer) -> None:
    sampler = make_sampler(temp=0.8, seed=5)
    plain = run(tokenizer, None, sampler=sampler)
    matched = run(tokenizer, poisoned(), sampler=sampler, rule="match")
    assert [r.token for r in matched] == [r.token for r in plain]
    rejected = run(tokenizer, poisoned(), sampler=sampler)
    assert rejected[-1].mode == "plain" and len(rejected) == COUNT


def test_strict_raises_instead_of_falling_back(paying, tokenizer) -> None:
    draft = poisoned()
    for _ in range(2):  # it is remembered, and raised again
        with pytest.raises(DraftFault, match=r"returned NaN or infinity.* Without `strict` decoding would go on"):
            run(tokenizer, draft, strict=True, mode="auto")
    assert run(tokenizer, draft, strict=True, mode="plain")[0].mode == "plain"
    with pytest.raises(DraftFault, match=r"0 of 48 drafts were accepted in 16 cycles"):
        run(tokenizer, tiny_draft(), strict=True, block_size=4)


def test_strict_without_a_draft_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match="there is no `draft_model`"):
        run(tokenizer, None, strict=True)


def test_a_draft_that_was_found_broken_is_not_tried_again_by_auto(paying, tokenizer, truth) -> None:
    """The next request says why from its first token on, and asking for drafts still tries them."""
    draft = poisoned()
    run(tokenizer, draft)
    responses = run(tokenizer, draft, mode="auto")
    assert [r.token for r in responses] == truth and responses[0].mode == "plain"
    assert responses[0].notes[0].startswith("plain decoding: in an earlier request the draft")
    assert "NaN" in responses[0].notes[0]
    assert run(tokenizer, draft, mode="dflash")[0].mode == "dflash"


def test_acceptance_that_stays_at_zero_ends_in_plain_decoding(paying, tokenizer, truth) -> None:
    draft = tiny_draft()
    responses = run(tokenizer, draft, mode="auto", block_size=4)
    last = responses[-1]
    assert [r.token for r in responses] == truth and last.mode == "plain"
    assert last.stats.cycles - last.stats.plain_steps == 16
    assert last.notes[0].startswith("plain decoding from here on: the draft")
    assert "0 of 48 drafts were accepted in 16 cycles. Of " in last.notes[0]
    assert "Likely causes: It was made for another target" in last.notes[0]
    again = run(tokenizer, draft, mode="auto", block_size=4)[-1]
    assert again.stats.cycles - again.stats.plain_steps == 16, "another text may suit it, so it gets another chance"


@pytest.mark.parametrize("draft", [poisoned, tiny_draft])
def test_plain_decoding_goes_on_for_long_after_a_draft_was_dropped(draft, paying, tokenizer) -> None:
    """The schedule that rests and comes back has nothing to come back to."""
    made = stream("llama", tokenizer, PROMPT, max_tokens=420, draft_model=draft(), mode="auto")
    tokens = [response.token for response in made]
    assert len(tokens) == 420
    assert tokens == [r.token for r in stream("llama", tokenizer, PROMPT, max_tokens=420, mode="plain")]


def test_who_insists_on_drafts_keeps_them_and_is_told(tokenizer, truth) -> None:
    """A benchmark of `dflash` must not turn into one of plain decoding halfway."""
    last = run(tokenizer, tiny_draft(), mode="dflash", block_size=4)[-1]
    assert last.mode == "dflash" and last.stats.plain_steps <= 1
    told = [note for note in last.notes if "drafts were accepted in" in note]
    assert len(told) == 1 and "plain decoding" not in told[0]


def test_a_draft_that_works_raises_no_alarm(paying, tokenizer, truth) -> None:
    draft = Knowing([0, 2], [0, 2])
    responses = run(tokenizer, draft, mode="auto", block_size=4, kernels="off")  # whose notes a Mac would show
    assert [r.token for r in responses] == truth
    assert responses[-1].stats.draft_acceptance_rate > 0.9 and responses[-1].notes == () and draft.fault is None


@pytest.mark.parametrize(
    ("claims", "made_for", "late", "cause"),
    [
        ([0, 2], [1, 3], 0, "the layers one above: `target_layer_ids` is one too low"),
        ([1, 3], [0, 2], 0, "the layers one below: `target_layer_ids` is one too high"),
        ([0, 2], [0, 2], 1, "it was made to predict from the anchor row"),
    ],
)
def test_the_reason_is_found_where_the_text_can_tell(claims, made_for, late, cause, paying, tokenizer, truth) -> None:
    """Layers off by one, or rows off by one, give fluent text and no speed; the two are the commonest mistakes."""
    draft = Knowing(claims, made_for, late=late)
    responses = run(tokenizer, draft, mode="auto", block_size=4)
    assert [r.token for r in responses] == truth and responses[-1].mode == "plain"
    assert cause in responses[-1].notes[0]
    assert run(tokenizer, draft, mode="auto")[0].mode == "plain", "a known cause does not go away"


def test_short_answers_are_no_sign_of_a_bad_draft(paying, tokenizer) -> None:
    """A draft that foresees the stop token is right: "yes", then the end, twenty times over."""
    draft, stops = Knowing([0, 2], [0, 2]), byte_tokenizer([TEXT[23]])
    for _ in range(20):
        last = run(stops, draft, mode="auto", block_size=4, strict=True)[-1]
        assert (last.mode, last.finish_reason, last.generation_tokens) == ("dflash", "stop", 3)
        assert last.stats.accepted == 2
    assert draft.track.accepted == 2 * draft.track.cycles == 40


def test_near_ties_that_exact_decides_again_are_no_sign_of_a_bad_draft(paying, tokenizer, truth) -> None:
    draft = Knowing([0, 2], [0, 2])
    responses = run(tokenizer, draft, mode="auto", block_size=4, exact=50.0, strict=True)
    assert [r.token for r in responses] == truth and responses[-1].stats.rechecked > 16
    assert draft.track.cycles < 3, "only blocks that were judged to their end count"


def test_a_draft_that_stops_working_is_noticed_however_long_it_worked(paying, tokenizer, truth) -> None:
    draft = tiny_draft()
    draft.track.latest.extend([(3, 3)] * 1000)
    last = run(tokenizer, draft, mode="auto", block_size=4)[-1]
    assert last.mode == "plain" and last.stats.cycles - last.stats.plain_steps == 64, "the latest 64 cycles count"


def test_nan_in_later_rows_of_a_block_is_noticed_too(tokenizer, truth) -> None:
    """The first row may be right and accepted; the rest of every block is lost."""

    class Half(Knowing):
        def denoise(self, embeddings: mx.array, context, *kernels) -> mx.array:
            rows = super().denoise(embeddings, context, *kernels)
            return mx.concatenate([rows[:, :1], rows[:, 1:] * mx.nan], axis=1)

    responses = run(tokenizer, Half([0, 2], [0, 2]), mode="dflash", block_size=4)
    assert [r.token for r in responses] == truth
    assert 0 < responses[-1].stats.accepted < 3 and "NaN" in responses[-1].notes[0]


def test_a_seed_repeats_the_text_whatever_was_found_before(paying, tokenizer) -> None:
    """A remembered fault would make the second request plain, with another, equally likely text."""
    draft = poisoned()
    sampler = make_sampler(temp=0.9, seed=4)
    first, second = (run(tokenizer, draft, mode="auto", sampler=sampler) for _ in range(2))
    assert [r.token for r in first] == [r.token for r in second] and second[0].mode == "dflash"


def test_insisting_leaves_no_judgement_behind(tokenizer) -> None:
    draft = Knowing([0, 2], [1, 3])
    assert "`target_layer_ids` is one too low" in run(tokenizer, draft, mode="dflash", block_size=4)[-1].notes[0]
    assert draft.fault is None


def test_a_draft_is_examined_once_and_on_the_last_tokens_only(paying, tokenizer, monkeypatch) -> None:
    """It costs a forward of the target: not one over a long conversation, and not one per answer."""
    read, forward = [], DenseTarget.forward

    def counting(self, ids, cache, taps=()):
        if len(taps) > 2:
            read.append(ids.shape[1])
        return forward(self, ids, cache, taps)

    monkeypatch.setattr(DenseTarget, "forward", counting)
    draft = tiny_draft()
    cache = make_prompt_cache(tiny("llama"), draft)
    for prompt in (prompt_of(150), prompt_of(9)):
        last = list(stream("llama", tokenizer, prompt, max_tokens=60, draft_model=draft, mode="auto", block_size=4,
                           prompt_cache=cache))[-1]  # fmt: skip
        assert last.mode == "plain"
    assert read == [96]


def test_a_draft_that_predicts_the_text_is_not_blamed_for_what_was_not_accepted() -> None:
    """Whatever kept its drafts from being accepted, it is no draft of another target."""
    target = target_for(tiny("llama"))
    assert Patient(target, Knowing([0, 2], [0, 2]), NullProposer(), TEXT[:90]).why_nothing_is_accepted() is None
    assert "does not work here" in Patient(target, tiny_draft(), NullProposer(), TEXT[:90]).why_nothing_is_accepted()


def test_what_a_draft_gave_is_counted_while_other_threads_add_to_it() -> None:
    """Threads may share a draft; a count that fails would end somebody's answer."""
    track, failed = Track(), []

    def work() -> None:
        try:
            for _ in range(20_000):
                track.latest.append((3, 1))
                assert track.accepted <= 64 and track.drafted <= 192
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed


def test_a_diagnosis_counts_what_each_way_of_reading_predicts() -> None:
    found = diagnose(target_for(tiny("llama")), Knowing([0, 2], [0, 2]), TEXT[:90])
    right, total = found.agreement["as configured"]
    assert right == total and found.cause is None
    assert diagnose(target_for(tiny("llama")), tiny_draft(), TEXT[:11]).agreement == {}
