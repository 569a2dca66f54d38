"""The mlx_lm-style API: same text and responses as mlx_lm; arguments honoured or refused by name."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

from dflash_mlx import generate, make_prompt_cache, make_sampler, stream_generate
from dflash_mlx.blocksize import Acceptance, AdaptiveBlock, Costs
from dflash_mlx.proposal import Proposal
from dflash_mlx.proposers.block import BlockProposer
from tests.conftest import KERNELS, byte_tokenizer, tiny_draft
from tests.families import prompt_of, reference, tiny
from tests.generating import DRAFT, PROMPT, know, paying, scripted, stream

__all__ = ["paying", "scripted"]  # fixtures

NAMES = ["llama", "llama-sliding", "qwen3", "qwen3_5"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", [*NAMES, "llama-4bit", "qwen3_5-4bit"])
def test_responses_are_mlx_lms_with_more(name: str, kernels: str, tokenizer) -> None:
    """Any mlx_lm consumer runs unchanged: same tokens, texts, counts, log-probabilities and reasons."""
    theirs = list(mlx_lm.stream_generate(tiny(name), tokenizer, PROMPT, max_tokens=40))
    ours = list(stream(name, tokenizer, max_tokens=40, kernels=KERNELS[kernels]))
    assert [r.token for r in ours] == [r.token for r in theirs]
    assert [r.text for r in ours] == [r.text for r in theirs]
    assert [r.finish_reason for r in ours] == [r.finish_reason for r in theirs]
    assert [r.generation_tokens for r in ours] == list(range(1, 41))
    for a, b in zip(ours, theirs, strict=True):
        assert isinstance(a, type(b)) and a.prompt_tokens == b.prompt_tokens
        # A plain run's ring is rotated: the same numbers are added in another order.
        assert mx.abs(a.logprobs - b.logprobs).max().item() <= (1e-4 if name == "llama-sliding" else 0)
    last = ours[-1]
    assert last.mode == "dflash" and last.block_size == 16
    assert last.stats.emitted == 40 and last.stats.drafted > 0


def test_generate_returns_the_text_of_the_stream(tokenizer) -> None:
    expected = mlx_lm.generate(tiny("llama"), tokenizer, PROMPT, max_tokens=30)
    assert generate(tiny("llama"), tokenizer, PROMPT, max_tokens=30) == expected
    assert generate(tiny("llama"), tokenizer, PROMPT, max_tokens=30, draft_model=DRAFT, mode="dflash") == expected


def test_verbose_prints_text_and_both_clocks(tokenizer, capsys) -> None:
    text = generate(tiny("llama"), tokenizer, PROMPT, max_tokens=20, draft_model=DRAFT, mode="dflash", verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith(text)
    assert "generation only" in printed and "prefill-inclusive" in printed and "tokens per cycle" in printed


def test_text_arrays_and_lists_are_the_same_prompt(tokenizer) -> None:
    ids = tokenizer.encode("hello")
    runs = [
        [r.token for r in stream("llama", tokenizer, prompt, max_tokens=8)]
        for prompt in ("hello", ids, mx.array(ids), tuple(ids))
    ]
    assert runs[0] == runs[1] == runs[2] == runs[3]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("script", ["all", "mixed", "wide"])
@pytest.mark.parametrize("name", NAMES)
def test_scripted_drafts_keep_the_responses(name: str, script: str, kernels: str, tokenizer, scripted) -> None:
    truth = reference(name, PROMPT, 60)
    scripted(truth, script)
    responses = list(stream(name, tokenizer, max_tokens=60, block_size=8, kernels=KERNELS[kernels]))
    assert [r.token for r in responses] == truth
    drafted = [r.from_draft for r in responses]
    assert sum(drafted) == responses[-1].stats.accepted
    for cycle, group in itertools.groupby(responses, key=lambda r: r.cycle):
        group = list(group)
        flags = [r.from_draft for r in group]
        assert flags == sorted(flags, reverse=True), "accepted drafts come first"
        assert cycle == 0 or sum(flags) == group[0].accepted <= group[0].drafted


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(max_tokens=0), "`max_tokens` has to be 1 or more, or -1"),
        (dict(max_tokens=-2), "`max_tokens` .* got -2"),
        (dict(block_size=17), r"`block_size` has to be in 2\.\.16 .* got 17"),
        (dict(block_size=0), r"`block_size` has to be 1 \(plain decoding\) or more, got 0"),
        (dict(block_size=99, mode="plain"), r"`block_size` has to be in 2\.\.16 .* got 99"),
        (dict(max_tokens=4.5), "`max_tokens` has to be 1 or more"),
        (dict(num_draft_tokens=16), r"`block_size` has to be in 2\.\.16"),
        (dict(num_draft_tokens=3, block_size=4), "say the same thing"),
        (dict(mode="fast"), "`mode` has to be one of auto, dflash, plain"),
        (dict(rule="maybe"), "`rule` has to be one of rejection, match"),
        (dict(prefill_step_size=0), "`prefill_step_size` has to be 1 or more"),
        (dict(kv_bits=4), "`kv_bits` 4 in groups of 64 is not honoured for this llama target.*shape"),
        (dict(kv_bits=7), "`kv_bits` has to be one of 2, 3, 4, 5, 6, 8, got 7"),
        (dict(kv_bits=8.0), r"`kv_bits` has to be one of .*, got 8\.0"),
        (dict(kv_bits=8, kv_group_size=64.0), r"`kv_group_size` has to be one of .*, got 64\.0"),
        (dict(kv_bits=8, quantized_kv_start=None), "`quantized_kv_start` has to be 0 or more, got None"),
        (dict(prefill_step_size=7.5), r"`prefill_step_size` has to be 1 or more, got 7\.5"),
        (dict(prefill_step_size=None), "`prefill_step_size` has to be 1 or more, got None"),
        (dict(block_size=4.0), r"`block_size` has to be 1 \(plain decoding\) or more, got 4\.0"),
        (dict(num_draft_tokens=3.0), r"`num_draft_tokens` has to be an integer of 1 or more, got 3\.0"),
        (dict(max_tokens=True), "`max_tokens` has to be 1 or more, or -1 for no limit, got True"),
        (dict(max_kv_size=0, draft_model=None), "`max_kv_size` has to be 1 or more, got 0"),
        (dict(stop=[3]), "`stop` has to hold strings, got 3"),
        (dict(kv_bits=8, kv_group_size=48), "`kv_group_size` has to be one of 32, 64, 128, got 48"),
        (dict(kv_bits=8, quantized_kv_start=-1), "`quantized_kv_start` has to be 0 or more"),
        (dict(input_embeddings=mx.zeros((2, 64))), "`input_embeddings` is not honoured"),
        (dict(max_kv_size=32), "`max_kv_size` is not honoured with `draft_model`"),
        (dict(draft_model=None, mode="dflash"), "`mode` is 'dflash', but no `draft_model` was given"),
        (dict(block_size=1, mode="dflash"), "`mode` is 'dflash', but `block_size` is 1"),
        (dict(prompt_cache=[1, 2, 3]), "`prompt_cache` has 3 entries and the model 4\\."),
        (dict(prompt_cache=mlx_lm_cache(tiny("qwen3"), 16)), "is a ring that keeps its first tokens"),
        (dict(stop=""), "empty string"),
        (dict(stop=["x", ""]), "empty string"),
    ],
)
def test_bad_arguments_are_refused_by_name_before_any_work(kwargs: dict, message: str, tokenizer) -> None:
    with pytest.raises(ValueError, match=message):
        stream("llama", tokenizer, **kwargs)  # not iterated


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "`prompt` has no tokens"),
        ("", "`prompt` has no tokens"),
        ([1, 257], r"id 257, and the model's ids are 0\.\.256"),
    ],
)
def test_bad_prompts_are_refused(prompt, message: str, tokenizer) -> None:
    with pytest.raises(ValueError, match=message):
        stream("llama", tokenizer, prompt)


def test_an_ordinary_model_as_draft_is_sent_to_mlx_lm(tokenizer) -> None:
    """The two kinds of draft are told apart."""
    with pytest.raises(ValueError, match=r"`draft_model` is a Model, not a DFlash draft.*mlx_lm's own stream_generate"):
        stream("llama", tokenizer, draft_model=tiny("llama"))


def test_num_draft_tokens_is_block_size_minus_one(tokenizer) -> None:
    assert list(stream("llama", tokenizer, num_draft_tokens=3, max_tokens=5))[-1].block_size == 4


def test_a_prompt_longer_than_the_context_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match=r"makes 2049 tokens, and the model's context is 2048\. Shorten it"):
        stream("llama", tokenizer, prompt_of(2049))
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    list(stream("llama", tokenizer, max_tokens=1, prompt_cache=cache))
    with pytest.raises(ValueError, match="makes 2049 tokens"):
        stream("llama", tokenizer, prompt_of(2049 - len(PROMPT)), prompt_cache=cache)


def test_an_answer_that_may_outgrow_the_context_is_noted(tokenizer) -> None:
    note = "may outgrow the model's context of 2048"
    assert any(note in n for n in next(stream("llama", tokenizer, max_tokens=2048)).notes)
    assert any(note in n for n in next(stream("llama", tokenizer, max_tokens=-1)).notes)
    assert not any(note in n for n in next(stream("llama", tokenizer, max_tokens=2000)).notes)


def test_the_clocks_start_when_the_user_asked(tokenizer) -> None:
    import time

    last = list(stream("llama", tokenizer, max_tokens=5, requested_at=time.perf_counter() - 5))[-1]
    assert last.timings.ttft_s > 5 and last.timings.total_s > 5 and last.timings.decode_s < 5


@pytest.mark.parametrize("kwargs", [dict(mode="plain"), dict(block_size=1, mode="auto"), dict(draft_model=None)])
def test_plain_decoding_is_named_plain(kwargs: dict, tokenizer) -> None:
    """Block 1 degrades to plain decoding instead of stopping."""
    responses = list(stream("llama", tokenizer, max_tokens=40, **kwargs))
    assert [r.token for r in responses] == reference("llama", PROMPT, 40)
    last = responses[-1]
    assert (last.mode, last.block_size, last.stats.drafted, last.stats.accepted) == ("plain", 1, 0, 0)
    assert last.stats.draft_acceptance_rate is None and last.stats.mean_acceptance_length is None
    assert last.stats.plain_steps == last.stats.cycles and not last.stats.histogram


def test_auto_falls_back_where_speculation_cannot_pay_and_says_so(tokenizer) -> None:
    """On a CPU without a real BLAS every drafted token costs as much as a decoded one."""
    last = list(stream("llama", tokenizer, mode="auto", max_tokens=4))[-1]
    assert last.mode == "plain"
    assert any("reference BLAS" in note and "mode='dflash'" in note for note in last.notes)


def test_auto_rests_where_drafts_do_not_pay_and_the_text_stays(paying, tokenizer) -> None:
    """The random draft is never right, so plain steps win; the statistics say how many there were."""
    prompt = prompt_of(30, seed=8)
    draft = tiny_draft()
    know(draft.costs, {0: 0.001, 15: 0.1})
    last = list(stream("llama", tokenizer, prompt, max_tokens=90, draft_model=draft, mode="auto"))
    assert [r.token for r in last] == reference("llama", prompt, 90)
    stats = last[-1].stats
    assert last[-1].mode == "dflash" and 50 < stats.plain_steps < stats.cycles
    assert stats.host_syncs == stats.cycles


def test_a_seed_is_kept_by_a_schedule_that_follows_the_clock(paying, tokenizer) -> None:
    """Rejection sampling depends on the blocks, so with a seed the block stays fixed; other exact rules adapt."""
    costs = [{0: 9.0, 15: 0.1}, {0: 0.001, 15: 9.0}]

    def runs(**kwargs):
        out = []
        for measured in costs:
            draft = tiny_draft()
            know(draft.costs, measured)
            kwargs["draft_model"] = draft
            responses = list(stream("qwen3", tokenizer, max_tokens=40, mode="auto", **kwargs))
            out.append(([r.token for r in responses], responses[-1].stats.plain_steps))
        return out

    fast, slow = runs(sampler=make_sampler(1.0, seed=5))
    assert fast == slow
    sampler = make_sampler(1.0, seed=5)
    response = next(stream("qwen3", tokenizer, mode="auto", sampler=sampler, draft_model=tiny_draft()))
    assert any("so that the seed repeats the text" in note for note in response.notes)
    fast, slow = runs(sampler=make_sampler(1.0, seed=5), rule="match")
    assert fast[0] == slow[0] and fast[1] < slow[1]
    fast, slow = runs(sampler=make_sampler(0.0))
    assert fast[0] == slow[0] and fast[1] < slow[1]
    fast, slow = runs(sampler=make_sampler(1.0))
    assert fast[1] < slow[1]


def test_auto_drafts_whole_blocks_and_verifies_what_pays(paying, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one draft is worth what it costs here; it is the first one of a block of 16."""
    asked: list[tuple[int, int]] = []

    class Seen(BlockProposer):
        def propose(self, anchor: int, limit: int, position: int) -> Proposal:
            asked.append((limit, self.rows))
            return super().propose(anchor, limit, position)

    monkeypatch.setattr("dflash_mlx.request.BlockProposer", Seen)
    draft = tiny_draft()
    know(draft.costs, {0: 9.0, 1: 9.1, **dict.fromkeys((2, 3, 5, 7, 11, 15), 99.0)})
    last = list(stream("llama", tokenizer, max_tokens=12, draft_model=draft, mode="auto"))[-1]
    assert draft.acceptance.rates() != tiny_draft().acceptance.rates(), "the next request knows how good the draft is"
    assert last.block_size == 16 and {rows for _, rows in asked} == {15}
    assert [limit for limit, _ in asked][:4] == [1, 1, 1, 1]
    assert last.stats.blocks[2] >= 4 and sum(last.stats.blocks.values()) == last.stats.cycles - last.stats.plain_steps
    asked.clear()
    list(stream("llama", tokenizer, max_tokens=12, draft_model=draft, mode="auto", sampler=make_sampler(1.0)))
    assert {rows for _, rows in asked} == {15}, "sampled drafts too"
    asked.clear()
    list(stream("llama", tokenizer, max_tokens=12, draft_model=draft, mode="dflash"))
    assert asked[0] == (10, 0), "a block that was asked for is drafted as wide as it is verified"


def test_a_long_conversation_does_not_begin_by_what_short_ones_cost(paying, tokenizer, monkeypatch) -> None:
    """The schedule is told where the request begins: behind what its prompt cache holds."""
    begun: list[int] = []

    class Seen(AdaptiveBlock):
        def __init__(self, block_size: int, costs: Costs, lasting: Acceptance | None = None, position: int = 0) -> None:
            begun.append(position)
            super().__init__(block_size, costs, lasting, position)

    monkeypatch.setattr("dflash_mlx.request.AdaptiveBlock", Seen)
    draft = tiny_draft()
    cache = make_prompt_cache(tiny("llama"), draft)
    for _ in range(2):
        list(stream("llama", tokenizer, max_tokens=4, draft_model=draft, prompt_cache=cache, mode="auto"))
    assert begun[0] == 0 and begun[1] == len(PROMPT) + 3


def test_an_explicit_block_size_is_kept(paying, tokenizer) -> None:
    draft = tiny_draft()
    know(draft.costs, {0: 0.001, 3: 9.0})
    stats = list(stream("llama", tokenizer, max_tokens=16, draft_model=draft, mode="auto", block_size=4))[-1].stats
    assert stats.plain_steps <= 1  # the last cycle has no room for a draft


def test_bfloat16_on_a_cpu_falls_back_too(tokenizer) -> None:
    model = tiny("llama", mx.bfloat16)
    last = list(stream_generate(model, tokenizer, PROMPT, 4, DRAFT))[-1]
    assert last.mode == "plain" and any("bfloat16 on a CPU" in note for note in last.notes)


def test_max_kv_size_is_honoured_without_a_draft(tokenizer) -> None:
    theirs = [r.token for r in mlx_lm.stream_generate(tiny("qwen3"), tokenizer, PROMPT, 40, max_kv_size=16)]
    ours = [r.token for r in stream("qwen3", tokenizer, max_tokens=40, draft_model=None, max_kv_size=16)]
    assert ours == theirs != reference("qwen3", PROMPT, 40)


def test_no_limit_runs_to_the_end_token(tokenizer) -> None:
    truth = reference("llama", PROMPT, 60)
    responses = list(stream("llama", byte_tokenizer([truth[30]]), max_tokens=-1))
    assert [r.token for r in responses] == truth[: truth.index(truth[30]) + 1]


def test_a_stream_of_the_callers_is_used(tokenizer) -> None:
    own = mx.new_stream(mx.cpu)
    seen = []
    for response in stream("llama", tokenizer, max_tokens=5, stream=own):
        seen.append(mx.default_stream(mx.cpu) == own)
        assert response.token >= 0
    assert seen == [False] * 5, "the caller's own code keeps its stream"
