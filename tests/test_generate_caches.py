"""Caches hold what was returned, however the caller leaves; the next turn equals a cold run."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from mlx_lm.sample_utils import make_logits_processors

import dflash_mlx
from dflash_mlx import make_prompt_cache
from dflash_mlx.request import Request
from tests.conftest import KERNELS, byte_tokenizer, tiny_draft
from tests.families import prompt_of, reference, tiny
from tests.generating import DRAFT, PROMPT, paying, scripted, stream

__all__ = ["paying", "scripted"]  # fixtures


@pytest.mark.parametrize(
    ("script", "kernels"), [("all", "stock"), ("mixed", "stock"), ("wide", "stock"), ("mixed", "references")]
)
@pytest.mark.parametrize("take", [1, 2, 5, 9, 10, 23])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_caller_who_leaves_early_keeps_exactly_what_was_returned(
    name: str, take: int, script: str, kernels: str, tokenizer, scripted
) -> None:
    """Then the second turn on the same cache equals a cold run."""
    truth, how = reference(name, PROMPT, 60), dict(block_size=8, kernels=KERNELS[kernels])
    scripted(truth, script)
    cache = make_prompt_cache(tiny(name), DRAFT)
    responses = stream(name, tokenizer, max_tokens=60, prompt_cache=cache, **how)
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
    second = list(stream(name, tokenizer, turn[reused:], max_tokens=30, prompt_cache=cache, **how))
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


@pytest.mark.parametrize(("script", "kernels"), [("all", "stock"), ("mixed", "stock"), ("mixed", "references")])
@pytest.mark.parametrize("take", [None, 1, 6, 13])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_an_mlx_lm_cache_list_holds_every_returned_token(name, take, script, kernels, tokenizer, scripted) -> None:
    """As after mlx_lm itself, so a script may go on with either library."""
    model, truth = tiny(name), reference(name, PROMPT, 60)
    scripted(truth, script)
    entries = mlx_lm_cache(model)
    how = dict(block_size=8, kernels=KERNELS[kernels])
    responses = stream(name, tokenizer, max_tokens=20, prompt_cache=entries, **how)
    got = [r.token for r in (responses if take is None else itertools.islice(responses, take))]
    responses.close()
    assert {entry.offset for entry in entries if not isinstance(entry, ArraysCache)} == {len(PROMPT) + len(got)}
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


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_cancelling_the_next_turn_before_its_first_chunk_keeps_the_last_answer_whole(name, tokenizer) -> None:
    """Its last token is not in the cache yet; it must not be lost."""
    cache = make_prompt_cache(tiny(name), DRAFT)
    said = PROMPT + [r.token for r in stream(name, tokenizer, max_tokens=10, prompt_cache=cache)]

    def cancel(done, total):
        raise KeyboardInterrupt

    for wrong in (dict(prompt_progress_callback=cancel), dict(prefill_step_size=2, prompt_progress_callback=cancel)):
        with pytest.raises(KeyboardInterrupt):
            list(stream(name, tokenizer, [7, 8, 9], prompt_cache=cache, **wrong))
        assert cache.tokens == said
    again = stream(name, tokenizer, [7, 8, 9], max_tokens=20, prompt_cache=cache)
    assert [r.token for r in again] == reference(name, said + [7, 8, 9], 20)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_token_whose_text_could_not_be_made_was_not_returned(name, at, tokenizer, scripted, monkeypatch) -> None:
    """An interrupt in the detokenizer, in mid-block: what is held is what the caller got."""
    truth = reference(name, PROMPT, 60)
    scripted(truth, "all")
    cache, left = make_prompt_cache(tiny(name), DRAFT), {"calls": at}
    add = type(tokenizer.detokenizer).add_token

    def interrupted(self, token):
        left["calls"] -= 1
        if left["calls"] < 0:
            raise KeyboardInterrupt
        add(self, token)

    monkeypatch.setattr(type(tokenizer.detokenizer), "add_token", interrupted)
    got: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for response in stream(name, tokenizer, max_tokens=60, block_size=8, prompt_cache=cache):
            got.append(response.token)
    monkeypatch.undo()
    assert got == truth[:at] and cache.tokens == PROMPT + got
    turn = cache.tokens + [3]
    rest = turn[cache.reuse(turn) :]
    assert [r.token for r in stream(name, tokenizer, rest, max_tokens=20, prompt_cache=cache)] == reference(
        name, turn, 20
    )


def test_an_interrupt_while_drafting_leaves_no_masks_in_the_context(tokenizer, monkeypatch) -> None:
    """Rows of the block are written behind the context and forgotten, also then."""
    from dflash_mlx.draft import context as module

    cache = make_prompt_cache(tiny("llama"), DRAFT)
    update, left = module.KVCache.update_and_fetch, {"calls": -1}

    class Interrupted(module.KVCache):
        def update_and_fetch(self, keys, values):
            result = update(self, keys, values)
            left["calls"] -= 1
            if left["calls"] == 0:
                raise KeyboardInterrupt
            return result

    monkeypatch.setattr(module, "KVCache", Interrupted)
    cache.reset()
    responses = stream("llama", tokenizer, max_tokens=40, prompt_cache=cache)
    got = [next(responses).token for _ in range(6)]
    left["calls"] = 4
    with pytest.raises(KeyboardInterrupt):
        for response in responses:
            got.append(response.token)
    assert cache.tokens == PROMPT + got
    assert cache.context_in_step().covers(cache.cache.length) and cache.context.start in (0, cache.cache.length)


def test_a_second_interrupt_while_the_first_is_tidied_up_closes_the_cache(tokenizer, scripted, monkeypatch) -> None:
    """What was not returned could not be taken back: nothing is built on it, and `reuse` starts afresh."""
    from dflash_mlx.decode import Session

    truth = reference("llama", PROMPT, 60)
    scripted(truth, "all")
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    responses = stream("llama", tokenizer, max_tokens=60, block_size=8, prompt_cache=cache)
    got = [next(responses).token for _ in range(4)]
    monkeypatch.setattr(Session, "retract", lambda session: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        responses.close()
    monkeypatch.undo()
    with pytest.raises(dflash_mlx.DFlashError, match="left before what was not returned could be taken back"):
        next(stream("llama", tokenizer, [3], max_tokens=10, prompt_cache=cache))
    turn = PROMPT + got + [3]
    assert cache.reuse(turn) == 0
    again = stream("llama", tokenizer, turn, max_tokens=20, prompt_cache=cache)
    assert [r.token for r in again] == reference("llama", turn, 20)


def test_a_cache_with_rows_of_unknown_tokens_is_not_continued(tokenizer) -> None:
    """An interrupt in a prefill, between what the cache and what the list of tokens got."""
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    list(stream("llama", tokenizer, max_tokens=10, prompt_cache=cache))
    del cache.tokens[-5:]
    with pytest.raises(dflash_mlx.DFlashError, match="An interrupt left rows in it whose tokens are not known"):
        list(stream("llama", tokenizer, [3], max_tokens=10, prompt_cache=cache))
    turn = PROMPT + [1, 2]
    rest = turn[cache.reuse(turn) :]
    got = [r.token for r in stream("llama", tokenizer, rest, max_tokens=20, prompt_cache=cache)]
    assert got == reference("llama", turn, 20)


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


def test_a_list_of_another_model_is_refused(tokenizer) -> None:
    """Not an error of the library behind."""
    for name, other in (("llama", "qwen3_5"), ("qwen3_5", "llama")):
        with pytest.raises(ValueError, match="`prompt_cache` was made for another model: entry 0 is a"):
            stream(name, tokenizer, prompt_cache=mlx_lm_cache(tiny(other)))


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


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_the_second_turn_drafts_as_a_cold_run_does(name: str, tokenizer) -> None:
    """Reuse works with the draft on: only new tokens are read, and acceptance is that of a fresh process."""
    cache = make_prompt_cache(tiny(name), DRAFT)
    said = PROMPT + [r.token for r in stream(name, tokenizer, max_tokens=20, prompt_cache=cache)]
    turn = said + prompt_of(6, seed=8)
    reused = cache.reuse(turn)
    warm = list(stream(name, tokenizer, turn[reused:], max_tokens=40, prompt_cache=cache))
    cold = list(stream(name, tokenizer, turn, max_tokens=40))
    assert warm[-1].timings.prompt_tokens == 7
    assert [r.token for r in warm] == [r.token for r in cold] == reference(name, turn, 40)
    assert warm[-1].stats == cold[-1].stats


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_prompt_and_answer_may_outgrow_the_drafts_window(name: str, length: int, tokenizer) -> None:
    """A window of 16 in a draft of blocks of 16, crossed by the prompt or inside a block: no crash, plain's tokens."""
    draft = tiny_draft(5, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    prompt = prompt_of(length, seed=2)
    for block in (4, 16):
        responses = stream(name, tokenizer, prompt, max_tokens=40, draft_model=draft, block_size=block)
        assert [r.token for r in responses] == reference(name, prompt, 40)
