"""The mlx_lm-style API: same text and responses as mlx_lm, exact stops, caches that hold what was returned."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

import dflash_mlx
from dflash_mlx import generate, make_prompt_cache, make_sampler, stream_generate
from dflash_mlx.proposers import block as block_module
from dflash_mlx.request import Request
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import SCRIPTS, ScriptedProposer, prompt_of, reference, tiny

PROMPT = prompt_of(21)
NAMES = ["llama", "llama-sliding", "qwen3", "qwen3_5"]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch):
    """Replace the draft's proposer by a scripted one, so that drafts are accepted to scripted depths."""

    def use(truth, script="mixed"):
        def make(draft, target, context, *sampling):
            proposer = ScriptedProposer(truth, SCRIPTS[script], (0, 2))
            extend, observe, trim_to = draft.extend, proposer.observe, proposer.trim_to

            def both(features):
                observe(features)
                extend(context, features)

            def cut(length):
                trim_to(length)
                if length < context.length:
                    context.drop(context.length - length)

            proposer.observe, proposer.trim_to = both, cut
            return proposer

        monkeypatch.setattr("dflash_mlx.request.BlockProposer", make)

    return use


def stream(name, tokenizer, prompt=PROMPT, **kwargs):
    kwargs.setdefault("draft_model", DRAFT)
    if kwargs["draft_model"] is not None:
        kwargs.setdefault("mode", "dflash")
    return stream_generate(tiny(name), tokenizer, prompt, **kwargs)


DRAFT = tiny_draft()


@pytest.mark.parametrize("name", NAMES)
def test_responses_are_mlx_lms_with_more(name: str, tokenizer) -> None:
    """Any mlx_lm consumer runs unchanged: same tokens, texts, counts, log-probabilities and reasons."""
    theirs = list(mlx_lm.stream_generate(tiny(name), tokenizer, PROMPT, max_tokens=40))
    ours = list(stream(name, tokenizer, max_tokens=40))
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


@pytest.mark.parametrize("script", ["all", "mixed", "wide"])
@pytest.mark.parametrize("name", NAMES)
def test_scripted_drafts_keep_the_responses(name: str, script: str, tokenizer, scripted) -> None:
    truth = reference(name, PROMPT, 60)
    scripted(truth, script)
    responses = list(stream(name, tokenizer, max_tokens=60, block_size=8))
    assert [r.token for r in responses] == truth
    drafted = [r.from_draft for r in responses]
    assert sum(drafted) == responses[-1].stats.accepted
    for cycle, group in itertools.groupby(responses, key=lambda r: r.cycle):
        group = list(group)
        flags = [r.from_draft for r in group]
        assert flags == sorted(flags, reverse=True), "accepted drafts come first"
        assert cycle == 0 or sum(flags) == group[0].accepted <= group[0].drafted


# --- arguments -------------------------------------------------------------------------------------------------


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
        (dict(kv_bits=4), "`kv_bits` is not honoured"),
        (dict(input_embeddings=mx.zeros((2, 64))), "`input_embeddings` is not honoured"),
        (dict(max_kv_size=32), "`max_kv_size` is not honoured with `draft_model`"),
        (dict(draft_model=None, mode="dflash"), "`mode` is 'dflash', but no `draft_model` was given"),
        (dict(block_size=1, mode="dflash"), "`mode` is 'dflash', but `block_size` is 1"),
        (dict(prompt_cache=[1, 2, 3]), "`prompt_cache` has 3 entries and the model 4 layers"),
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


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where speculation may pay, so that `auto` adapts."""
    monkeypatch.setattr("dflash_mlx.request._why_not_on_cpu", lambda dtype: None)


def test_auto_rests_where_drafts_do_not_pay_and_the_text_stays(paying, tokenizer) -> None:
    """The random draft is never right, so plain steps win; the statistics say how many there were."""
    prompt = prompt_of(30, seed=8)
    draft = tiny_draft()
    draft.costs.measured = {0: (0.001, 0), 15: (0.1, 0)}
    last = list(stream("llama", tokenizer, prompt, max_tokens=90, draft_model=draft, mode="auto"))
    assert [r.token for r in last] == reference("llama", prompt, 90)
    stats = last[-1].stats
    assert last[-1].mode == "dflash" and 50 < stats.plain_steps < stats.cycles
    assert stats.host_syncs == stats.cycles


def test_a_seed_is_kept_by_a_schedule_that_follows_the_clock(paying, tokenizer) -> None:
    """Rejection sampling depends on the blocks, so with a seed the block stays fixed; other exact rules adapt."""
    costs = [{0: (9.0, 0), 15: (0.1, 0)}, {0: (0.001, 0), 15: (9.0, 0)}]

    def runs(**kwargs):
        out = []
        for measured in costs:
            draft = tiny_draft()
            draft.costs.measured = dict(measured)
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


def test_an_explicit_block_size_is_kept(paying, tokenizer) -> None:
    draft = tiny_draft()
    draft.costs.measured = {0: (0.001, 0), 3: (9.0, 0)}
    stats = list(stream("llama", tokenizer, max_tokens=40, draft_model=draft, mode="auto", block_size=4))[-1].stats
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


# --- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["all", "mixed"])
@pytest.mark.parametrize("index", [1, 4, 8, 9, 16])
def test_each_of_several_end_tokens_ends_the_answer(index: int, script: str, scripted) -> None:
    """At any offset inside a block; the end marker is not text."""
    truth = reference("llama", PROMPT, 60)
    end = next(i for i in range(index, 60) if truth[i] not in truth[:i])
    unused = next(i for i in range(256) if i not in truth)
    wrapped = byte_tokenizer([unused, truth[end]])
    scripted(truth, script)
    responses = list(stream("llama", wrapped, max_tokens=60, block_size=8))
    assert [r.token for r in responses] == truth[: end + 1]
    assert responses[-1].finish_reason == "stop" and responses[-1].generation_tokens == end + 1
    theirs = list(mlx_lm.stream_generate(tiny("llama"), wrapped, PROMPT, max_tokens=60))
    assert "".join(r.text for r in responses) == "".join(r.text for r in theirs)


def test_the_mask_id_is_an_ordinary_token(tokenizer, scripted) -> None:
    """In prompt and output."""
    truth = reference("llama", PROMPT, 60)
    draft = tiny_draft(dflash_config={"mask_token_id": truth[7]})
    prompt = [*PROMPT[:-1], truth[7]]
    expected = reference("llama", prompt, 60)
    got = stream("llama", tokenizer, prompt, max_tokens=60, draft_model=draft)
    assert [r.token for r in got] == expected
    scripted(truth, "all")
    assert [r.token for r in stream("llama", tokenizer, max_tokens=60, draft_model=draft)] == truth


TEXT = "Příliš žluťoučký kůň. 日本語のテキスト 🦊🦊 konec! "


def _text_ids(tokenizer, text: str, offset: int) -> list[int]:
    return tokenizer.encode("x" * offset + text, add_special_tokens=False)


def speak(monkeypatch: pytest.MonkeyPatch, scripted, ids: list[int], prompt_length: int, script: str) -> None:
    """Make the target say `ids`: the decider's greedy choice is looked up by absolute position."""
    from dflash_mlx import accept

    table = mx.array([0] * prompt_length + ids + [0] * 64, dtype=mx.int32)

    def choose(policy, draws, logits, position):
        return table[position : position + logits.shape[0]]

    monkeypatch.setattr(accept, "_choose", choose)
    scripted(ids, script)


@pytest.mark.parametrize("block", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_characters_cut_by_blocks_come_out_whole(offset: int, block: int, tokenizer, scripted, monkeypatch) -> None:
    """Never a replacement character for one that completes later."""
    ids = _text_ids(tokenizer, TEXT, offset)
    speak(monkeypatch, scripted, ids, len(PROMPT), "wide")
    responses = list(stream("llama", tokenizer, max_tokens=len(ids), block_size=block))
    assert "".join(r.text for r in responses) == "x" * offset + TEXT
    assert not any("\ufffd" in r.text for r in responses)


def test_an_unfinished_character_is_flushed_at_the_end(tokenizer, scripted, monkeypatch) -> None:
    ids = _text_ids(tokenizer, "ab🦊", 0)[:-1]
    speak(monkeypatch, scripted, ids, len(PROMPT), "all")
    assert "".join(r.text for r in stream("llama", tokenizer, max_tokens=len(ids))) == "ab\ufffd"


@pytest.mark.parametrize("script", ["all", "mixed"])
@pytest.mark.parametrize("offset", range(16))
def test_stop_strings_are_found_over_block_borders(offset: int, script: str, tokenizer, scripted, monkeypatch) -> None:
    """Cut exactly before the match, at every block offset; the cache holds what was returned."""
    ids = _text_ids(tokenizer, "alpha beta gamma delta beta gamma", offset)
    speak(monkeypatch, scripted, ids, len(PROMPT), script)
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    responses = list(
        stream(
            "llama", tokenizer, max_tokens=len(ids), block_size=8, stop=["nothing", "beta gamma"], prompt_cache=cache
        )
    )
    assert "".join(r.text for r in responses) == "x" * offset + "alpha "
    assert responses[-1].finish_reason == "stop"
    returned = [r.token for r in responses]
    assert returned == ids[: offset + len("alpha beta gamma")]
    assert cache.tokens == PROMPT + returned
    assert cache.cache.length == cache.context.length == len(cache.tokens) - 1
    assert responses[-1].stats.emitted == responses[-1].generation_tokens == len(returned)


def test_held_back_text_is_released_when_nothing_matches(tokenizer, scripted, monkeypatch) -> None:
    ids = _text_ids(tokenizer, "see beta gam", 0)
    speak(monkeypatch, scripted, ids, len(PROMPT), "all")
    responses = list(stream("llama", tokenizer, max_tokens=len(ids), stop="beta gamma"))
    assert "".join(r.text for r in responses) == "see beta gam" and responses[-1].finish_reason == "length"


# --- samplers and processors ------------------------------------------------------------------------------------


def test_mlx_lms_sampler_gives_mlx_lms_text_with_the_same_global_seed(tokenizer, scripted) -> None:
    """Applied left to right to the emitted positions only, so the global random state moves as in mlx_lm."""
    sampler = mlx_lm_sampler(temp=0.9, top_p=0.95)
    mx.random.seed(4)
    theirs = [r.token for r in mlx_lm.stream_generate(tiny("qwen3"), tokenizer, PROMPT, 40, sampler=sampler)]
    scripted(theirs, "mixed")
    mx.random.seed(4)
    ours = list(stream("qwen3", tokenizer, max_tokens=40, sampler=sampler, block_size=8))
    assert [r.token for r in ours] == theirs
    assert ours[-1].stats.accepted > 10


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_penalties_see_the_history_of_each_position(script: str, tokenizer, scripted) -> None:
    """Repetition, presence, frequency and bias."""
    processors = make_logits_processors({5: 2.0, 9: -4.0}, 1.3, 12, 0.5, 12, 0.3, 12)
    theirs = list(mlx_lm.stream_generate(tiny("llama"), tokenizer, PROMPT, 50, logits_processors=processors))
    scripted([r.token for r in theirs], script)
    ours = list(stream("llama", tokenizer, max_tokens=50, logits_processors=processors, block_size=8))
    assert [r.token for r in ours] == [r.token for r in theirs] != reference("llama", PROMPT, 50)
    for a, b in zip(ours, theirs, strict=True):
        assert mx.array_equal(a.logprobs, b.logprobs)


def test_a_processor_with_state_is_called_as_in_plain_decoding(tokenizer, scripted) -> None:
    def counting():
        calls = []

        def processor(tokens, logits):
            calls.append(len(tokens))
            return mx.where(mx.arange(logits.shape[-1]) % 3 == len(calls) % 3, -mx.inf, logits)

        return processor, calls

    processor, calls = counting()
    plain = list(stream("llama", tokenizer, max_tokens=40, draft_model=None, logits_processors=[processor]))
    scripted([r.token for r in plain], "wide")
    processor, ours = counting()
    block = list(stream("llama", tokenizer, max_tokens=40, logits_processors=[processor], block_size=8))
    assert [r.token for r in block] == [r.token for r in plain]
    assert ours == calls


def sampled(seed: int | None, **kwargs) -> list[int]:
    sampler = make_sampler(1.0, top_p=0.95, seed=seed)
    return [r.token for r in stream("qwen3", byte_tokenizer(), max_tokens=30, sampler=sampler, **kwargs)]


def test_a_seed_fixes_the_text_whatever_ran_before(tokenizer) -> None:
    """The key of a draw is explicit; the global random state does not matter."""
    first = sampled(7)
    mx.random.seed(123)
    sampled(8)
    assert sampled(7) == first != sampled(8)
    assert sampled(7, prefill_step_size=5) == first


def test_without_a_seed_mlxs_global_state_decides(tokenizer) -> None:
    mx.random.seed(1)
    a, b = sampled(None), sampled(None)
    mx.random.seed(1)
    assert sampled(None) == a != b


def test_the_match_rule_gives_the_text_of_plain_sampling(tokenizer) -> None:
    """A second exact rule, selectable; draft and block size cannot be seen in the text."""
    plain = sampled(7, draft_model=None)
    assert sampled(7, rule="match") == sampled(7, rule="match", block_size=3) == plain


def test_filters_that_leave_one_token_are_greedy(tokenizer) -> None:
    """Temperature and filters are honoured, and ignored where they do not matter."""
    truth = reference("qwen3", PROMPT, 30)
    for sampler in (make_sampler(1.0, top_k=1), make_sampler(0.7, top_p=1e-6), make_sampler(2.0, min_p=1.0)):
        assert [r.token for r in stream("qwen3", tokenizer, max_tokens=30, sampler=sampler)] == truth
    greedy = make_sampler(0.0, top_p=0.5, seed=99)
    assert [r.token for r in stream("qwen3", tokenizer, max_tokens=30, sampler=greedy)] == truth


def test_rejection_sampling_hands_over_the_distribution_it_drew_from(tokenizer, monkeypatch) -> None:
    """One generic check of every proposer in sampled mode: q sums to one and holds the drawn tokens."""
    seen = []
    propose = block_module.BlockProposer.propose

    def spy(self, *args):
        proposal = propose(self, *args)
        seen.append(proposal)
        return proposal

    monkeypatch.setattr(block_module.BlockProposer, "propose", spy)
    sampled(3)
    drafts = [p for p in seen if len(p)]
    assert drafts
    for proposal in drafts:
        sums = proposal.probs.sum(axis=-1)
        assert mx.abs(sums - 1).max().item() < 1e-4
        assert mx.take_along_axis(proposal.probs, proposal.tokens[:, None], axis=-1).min().item() > 0


# --- caches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["all", "mixed", "wide"])
@pytest.mark.parametrize("take", [1, 2, 5, 9, 10, 23])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_caller_who_leaves_early_keeps_exactly_what_was_returned(
    name: str, take: int, script: str, tokenizer, scripted
) -> None:
    """Then the second turn on the same cache equals a cold run."""
    truth = reference(name, PROMPT, 60)
    scripted(truth, script)
    cache = make_prompt_cache(tiny(name), DRAFT)
    responses = stream(name, tokenizer, max_tokens=60, block_size=8, prompt_cache=cache)
    got = [r.token for r in itertools.islice(responses, take)]
    responses.close()
    assert got == truth[:take]
    assert cache.tokens == PROMPT + got
    assert cache.cache.length == cache.context.length == len(cache.tokens) - 1
    turn = cache.tokens + [7, 8, 9]
    expected = reference(name, turn, 30)
    scripted(expected, script)
    reused = cache.reuse(turn)
    assert reused == len(PROMPT) + take - 1
    second = list(stream(name, tokenizer, turn[reused:], max_tokens=30, block_size=8, prompt_cache=cache))
    assert [r.token for r in second] == expected
    assert second[0].cached_tokens == reused and second[-1].timings.prompt_tokens == 4


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_cache_may_be_continued_with_new_tokens_only(name: str, tokenizer, scripted) -> None:
    """mlx_lm's way: the prompt is what comes after the cache, the last answer's end included."""
    cache, tokens = make_prompt_cache(tiny(name), DRAFT), []
    for prompt in (PROMPT, [1, 2, 3], [4]):
        truth = reference(name, tokens + prompt, 20)
        scripted(truth, "mixed")
        got = [r.token for r in stream(name, tokenizer, prompt, max_tokens=20, prompt_cache=cache, block_size=8)]
        assert got == truth
        tokens += prompt + got
        assert cache.tokens == tokens


@pytest.mark.parametrize("script", ["all", "mixed"])
@pytest.mark.parametrize("take", [None, 1, 6, 13])
@pytest.mark.parametrize("name", ["llama", "llama-sliding"])
def test_an_mlx_lm_cache_list_holds_every_returned_token(name, take, script, tokenizer, scripted) -> None:
    """As after mlx_lm itself, so a script may go on with either library."""
    model, truth = tiny(name), reference(name, PROMPT, 60)
    scripted(truth, script)
    entries = mlx_lm_cache(model)
    responses = stream(name, tokenizer, max_tokens=20, block_size=8, prompt_cache=entries)
    got = [r.token for r in (responses if take is None else itertools.islice(responses, take))]
    responses.close()
    assert [entry.offset for entry in entries] == [len(PROMPT) + len(got)] * 4
    turn = PROMPT + got + [7, 8, 9]
    theirs = [r.token for r in mlx_lm.stream_generate(model, tokenizer, [7, 8, 9], 20, prompt_cache=entries)]
    assert theirs == reference(name, turn, 20)


def test_an_mlx_lm_cache_list_can_be_joined_late_with_a_note(tokenizer) -> None:
    model, entries = tiny("llama"), mlx_lm_cache(tiny("llama"))
    first = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, 10, prompt_cache=entries)]
    responses = list(stream("llama", tokenizer, [3, 4], max_tokens=30, prompt_cache=entries))
    assert [r.token for r in responses] == reference("llama", PROMPT + first + [3, 4], 30)
    assert any("has not seen all that the prompt cache holds" in note for note in responses[-1].notes)


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_an_exception_from_the_progress_callback_stops_prefill_cleanly(chunk: int, tokenizer) -> None:
    """Cancelling during prefill keeps whole chunks; the next request equals a fresh one."""
    calls = []

    def progress(done, total):
        calls.append((done, total))
        if len(calls) == chunk + 1:
            raise KeyboardInterrupt

    cache = make_prompt_cache(tiny("llama"), DRAFT)
    with pytest.raises(KeyboardInterrupt):
        list(stream("llama", tokenizer, prefill_step_size=8, prompt_cache=cache, prompt_progress_callback=progress))
    assert calls[-1] == (min(8 * chunk, 20) if chunk < 4 else 21, 21)
    assert cache.tokens == PROMPT[: calls[-1][0]] and cache.cache.length == len(cache.tokens)
    reused = cache.reuse(PROMPT)
    got = [r.token for r in stream("llama", tokenizer, PROMPT[reused:], max_tokens=30, prompt_cache=cache)]
    assert got == reference("llama", PROMPT, 30)


@pytest.mark.parametrize("where", ["propose", "observe", "forward", "decide"])
@pytest.mark.parametrize("nth", [2, 3, 5])
@pytest.mark.parametrize("kind", ["list", "cache"])
@pytest.mark.parametrize("name", ["llama", "llama-sliding"])
def test_an_interrupt_anywhere_leaves_a_usable_cache(name, kind, nth, where, tokenizer, scripted, monkeypatch) -> None:
    """What is held is what was returned, at most with the end of it not written yet; then warm equals cold."""
    model, truth = tiny(name), reference(name, PROMPT, 60)
    scripted(truth, "mixed")
    cache = mlx_lm_cache(model) if kind == "list" else make_prompt_cache(model, DRAFT)
    left = {"calls": nth + (where in ("forward", "decide", "observe"))}

    def interrupting(function):
        def call(*args, **kwargs):
            left["calls"] -= 1
            if left["calls"] == 0 and where != "observe":
                raise KeyboardInterrupt
            result = function(*args, **kwargs)
            if left["calls"] == 0:
                raise KeyboardInterrupt
            return result

        return call

    opened = Request.open

    def spoiled(request, stop):
        session = opened(request, stop)
        owner = {"propose": session.proposer, "observe": session.proposer, "decide": session.decider}.get(
            where, session
        )
        setattr(owner, where, interrupting(getattr(owner, where)))
        return session

    monkeypatch.setattr(Request, "open", spoiled)
    got = []
    with pytest.raises(KeyboardInterrupt):
        for response in stream(name, tokenizer, max_tokens=60, block_size=8, prompt_cache=cache):
            got.append(response.token)
    monkeypatch.setattr(Request, "open", opened)
    assert got == truth[: len(got)]
    turn = PROMPT + got + [7, 8, 9]
    expected = reference(name, turn, 20)
    scripted(expected, "mixed")
    if kind == "list":
        assert len({entry.offset for entry in cache}) == 1
        rest = turn[cache[0].offset :]
        assert len(rest) in (3, 4), "all that was returned, but for a last token that could not be written any more"
    else:
        assert cache.tokens == PROMPT + got
        rest = turn[cache.reuse(turn) :]
        assert len(rest) <= 4
    assert [r.token for r in stream(name, tokenizer, rest, max_tokens=20, block_size=8, prompt_cache=cache)] == expected


@pytest.mark.parametrize("name", ["llama", "llama-sliding"])
def test_an_interrupt_while_a_prefill_chunk_is_computed_keeps_tokens_and_cache_together(name, tokenizer) -> None:
    cache = make_prompt_cache(tiny(name), DRAFT)
    calls = {"left": 2}
    evaluate = cache.cache.evaluate

    def interrupted():
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        evaluate()

    cache.cache.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(stream(name, tokenizer, prefill_step_size=8, prompt_cache=cache))
    assert cache.tokens == PROMPT[:16] and cache.cache.length == 16
    rest = PROMPT[16:]
    got = [r.token for r in stream(name, tokenizer, rest, max_tokens=20, prompt_cache=cache)]
    assert got == reference(name, PROMPT, 20)


def test_progress_is_reported_as_in_mlx_lm(tokenizer) -> None:
    ours, theirs = [], []
    list(
        stream(
            "llama", tokenizer, max_tokens=2, prefill_step_size=8, prompt_progress_callback=lambda *a: ours.append(a)
        )
    )
    list(
        mlx_lm.stream_generate(
            tiny("llama"),
            tokenizer,
            PROMPT,
            2,
            prefill_step_size=8,
            prompt_progress_callback=lambda *a: theirs.append(a),
        )
    )
    assert ours == theirs


def test_requests_do_not_leak_into_each_other(tokenizer) -> None:
    """Long, short, long on one pair: text and acceptance equal fresh ones."""
    long = prompt_of(90, seed=5)

    def run(prompt):
        responses = list(stream("llama", tokenizer, prompt, max_tokens=30))
        return [r.token for r in responses], responses[-1].stats.histogram

    first = run(long)
    run([1, 2, 3])
    assert run(long) == first


def test_auto_decodes_plainly_over_a_ring_that_keeps_its_first_tokens(paying, tokenizer) -> None:
    """A block over such a ring would change the text."""
    model = tiny("qwen3")
    theirs = [
        r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, 40, prompt_cache=mlx_lm_cache(model, 16))
    ]
    ours = list(stream("qwen3", tokenizer, max_tokens=40, mode="auto", prompt_cache=mlx_lm_cache(model, 16)))
    assert [r.token for r in ours] == theirs and ours[-1].mode == "plain"
    assert any("keeps its first tokens" in note for note in ours[-1].notes)


def test_max_kv_size_is_refused_with_a_cache_that_was_made_without_it(tokenizer) -> None:
    cache = make_prompt_cache(tiny("qwen3"))
    with pytest.raises(ValueError, match="`max_kv_size` is not honoured with a PromptCache"):
        stream("qwen3", tokenizer, draft_model=None, max_kv_size=16, prompt_cache=cache)


def test_mlx_lms_defaults_for_a_quantised_cache_are_accepted_without_one(tokenizer) -> None:
    list(stream("llama", tokenizer, max_tokens=1, kv_bits=None, kv_group_size=64, quantized_kv_start=5000))


def test_penalties_are_the_same_warm_and_cold(tokenizer) -> None:
    """A PromptCache knows its tokens, so a processor sees the whole conversation in either case."""
    processors = make_logits_processors(repetition_penalty=1.5, repetition_context_size=60)
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    first = [r.token for r in stream("llama", tokenizer, max_tokens=12, prompt_cache=cache)]
    turn = PROMPT + first + [7, 8]
    cold = [r.token for r in stream("llama", tokenizer, turn, max_tokens=30, logits_processors=processors)]
    rest = turn[cache.reuse(turn) :]
    assert len(rest) == 3
    warm = stream("llama", tokenizer, rest, max_tokens=30, logits_processors=processors, prompt_cache=cache)
    assert [r.token for r in warm] == cold


def test_processors_are_not_called_behind_an_end_token(tokenizer, scripted) -> None:
    """A grammar may have no state after the end."""
    truth = reference("llama", PROMPT, 60)
    end = next(i for i in range(5, 60) if truth[i] not in truth[:i])
    seen = []

    def processor(tokens, logits):
        seen.append(tokens.size)
        return logits

    scripted(truth, "all")
    got = list(
        stream("llama", byte_tokenizer([truth[end]]), max_tokens=60, logits_processors=[processor], block_size=16)
    )
    assert [r.token for r in got] == truth[: end + 1]
    assert seen == list(range(len(PROMPT), len(PROMPT) + end + 1))


def test_log_probabilities_can_be_read_in_another_thread(tokenizer) -> None:
    """As with mlx_lm: nothing of a response is left to compute."""
    import threading

    responses, sums = list(stream("llama", tokenizer, max_tokens=20)), []
    thread = threading.Thread(target=lambda: sums.extend(mx.exp(r.logprobs).sum().item() for r in responses))
    thread.start()
    thread.join()
    assert len(sums) == 20 and all(abs(total - 1) < 1e-3 for total in sums)


def test_a_cache_of_other_models_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match="was made for other models"):
        stream("llama", tokenizer, prompt_cache=make_prompt_cache(tiny("qwen3"), DRAFT))
    with pytest.raises(ValueError, match="was made for other models"):
        stream("llama", tokenizer, prompt_cache=make_prompt_cache(tiny("llama"), tiny_draft()))


@pytest.mark.parametrize("name", ["llama", "llama-sliding"])
def test_a_plain_request_keeps_the_drafts_context_in_step(name: str, tokenizer) -> None:
    """So that the next turn speculates as if every turn had."""
    caches = [make_prompt_cache(tiny(name), DRAFT) for _ in range(2)]
    for cache, mode in zip(caches, ("plain", "dflash"), strict=True):
        list(stream(name, tokenizer, max_tokens=70, mode=mode, prompt_cache=cache, prefill_step_size=8))
        assert cache.context.length == cache.cache.length == len(PROMPT) + 69
    plain, block = ([a for layer in c.context.layers for a in layer.arrays] for c in caches)
    tolerance = 1e-4 if name == "llama-sliding" else 0
    for a, b in zip(plain, block, strict=True):
        assert mx.abs(a[:, :, :90] - b[:, :, :90]).max().item() <= tolerance
    runs = [list(stream(name, tokenizer, [3], max_tokens=20, prompt_cache=cache)) for cache in caches]
    assert [r.token for r in runs[0]] == [r.token for r in runs[1]]
    assert runs[0][-1].stats.histogram == runs[1][-1].stats.histogram
    assert not any("has not seen" in note for note in runs[0][-1].notes)


def test_a_closed_cache_says_why() -> None:
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    cache.cache.closed = "because."
    with pytest.raises(dflash_mlx.DFlashError, match=r"because\."):
        stream("llama", byte_tokenizer(), prompt_cache=cache)
