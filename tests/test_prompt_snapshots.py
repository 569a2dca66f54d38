"""Turns on targets that cannot be cut back: snapshots make the next turn warm, and warm equals cold."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx import make_prompt_cache, make_sampler, stable_length, stream_generate
from dflash_mlx.errors import CacheStateError
from dflash_mlx.prompt_cache import SNAPSHOTS, Reuse
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import BY_NAME, prompt_of, reference, tiny

DRAFT, TOKENIZER = tiny_draft(), byte_tokenizer()
CANNOT_TRIM = ["llama-sliding", "qwen3_5", "gemma3_text", "lfm2"]


def ask(cache, name: str, ids: list[int], count: int = 12, stable: int | None = None, **kwargs) -> list[int]:
    reused = cache.reuse(ids, stable)
    responses = stream_generate(
        tiny(name), TOKENIZER, ids[reused:], count, DRAFT, prompt_cache=cache, mode="dflash", block_size=6, **kwargs
    )
    return [r.token for r in responses]


@pytest.mark.parametrize("name", CANNOT_TRIM)
def test_a_rewritten_answer_costs_only_what_was_rewritten(name: str) -> None:
    """A template drops the reasoning of earlier turns: the user's message is not read again, only what follows it."""
    cache = make_prompt_cache(tiny(name), DRAFT)
    user, opened = prompt_of(30), [250, 251]  # the template opens the answer with two tokens
    answer = ask(cache, name, user + opened, stable=len(user))
    turn = user + answer[5:] + prompt_of(9, seed=4)  # without the opening and the first five tokens
    expected = reference(name, turn, 12)
    assert ask(cache, name, turn, stable=len(turn) - 2) == expected
    assert cache.last_reuse == Reuse(len(user), 0)
    assert cache.context.length == cache.cache.length == len(turn) + 11


@pytest.mark.parametrize("name", CANNOT_TRIM)
def test_the_same_prompt_again_computes_one_token(name: str) -> None:
    """Regenerate."""
    cache = make_prompt_cache(tiny(name), DRAFT)
    prompt = prompt_of(30)
    first = ask(cache, name, prompt)
    for _ in range(3):
        assert ask(cache, name, prompt) == first
        assert cache.last_reuse == Reuse(29, 0)


@pytest.mark.parametrize("name", CANNOT_TRIM)
def test_an_edited_message_goes_back_to_the_turn_before(name: str) -> None:
    """And the drafts after it are those of a cold run."""
    cache, said, ends = make_prompt_cache(tiny(name), DRAFT), list[int](), list[int]()
    for seed in range(3):
        said = said + prompt_of(20, seed=seed)
        ends.append(len(said) - 1)
        said = said + ask(cache, name, said)
    edited = said[: ends[1] + 1] + prompt_of(7, seed=9)
    cold = make_prompt_cache(tiny(name), DRAFT)
    runs = []
    for c in (cache, cold):
        reused = c.reuse(edited)
        runs.append(
            list(stream_generate(tiny(name), TOKENIZER, edited[reused:], 12, DRAFT, prompt_cache=c, mode="dflash"))
        )
    assert cache.last_reuse == Reuse(ends[1], 1)
    assert [r.token for r in runs[0]] == [r.token for r in runs[1]] == reference(name, edited, 12)
    same_context(cache, cold)
    assert runs[0][0].cached_tokens == ends[1] and runs[1][0].cached_tokens == 0
    assert runs[0][0].recomputed_tokens == 1 and runs[1][0].recomputed_tokens == 0


def same_context(ours, expected) -> None:
    """The draft sees what it would see had it read everything: the same rows, from the same position on."""
    assert (ours.context.length, ours.context.start) == (expected.context.length, expected.context.start)
    for a, b in zip(ours.context.layers, expected.context.layers, strict=True):
        for rows, others in zip(a.held, b.held, strict=True):
            assert rows.shape == others.shape and mx.abs(rows - others).max().item() < 1e-4


@pytest.mark.parametrize("name", CANNOT_TRIM)
def test_a_sliding_draft_context_comes_back_whole(name: str) -> None:
    """Rows that fell out of its window since the snapshot are there again."""
    draft = tiny_draft(5, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    caches = [make_prompt_cache(tiny(name), draft) for _ in range(2)]

    def read(cache, ids: list[int]) -> None:
        rest = ids[cache.reuse(ids) :]
        list(stream_generate(tiny(name), TOKENIZER, rest, 20, draft, prompt_cache=cache, mode="dflash"))

    edited = prompt_of(30) + [7, 8, 9]
    read(caches[0], prompt_of(30))
    for cache in caches:
        read(cache, edited)
    assert caches[0].last_reuse.reused == 29
    same_context(*caches)


def test_targets_that_can_be_cut_back_take_no_snapshots() -> None:
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    ask(cache, "llama", prompt_of(30), stable=10)
    assert cache.snapshots == []


def test_snapshots_are_bounded_and_their_bytes_are_counted() -> None:
    """A long chat does not collect a recurrent state per turn."""
    cache, said, sizes = make_prompt_cache(tiny("qwen3_5"), DRAFT), list[int](), list[int]()
    for seed in range(8):
        said = said + prompt_of(6, seed=seed)
        said = said + ask(cache, "qwen3_5", said, 4, stable=len(said) - 2)
        assert len(cache.snapshots) <= SNAPSHOTS
        sizes.append(cache.nbytes)
    assert cache.snapshots == sorted(cache.snapshots)
    growth = sizes[-1] - sizes[4]
    kv_of_a_token = 2 * 2 * 16 * 4 + DRAFT.config.num_layers * 2 * 2 * 16 * 4
    assert growth <= 3 * 10 * kv_of_a_token + 256 * kv_of_a_token  # caches grow in steps of 256 rows


@pytest.mark.parametrize("name", ["llama-sliding", "qwen3_5"])
def test_a_snapshot_is_not_written_through(name: str) -> None:
    """mlx writes rows of a ring in place: a snapshot that shared them would change under our feet."""
    cache = make_prompt_cache(tiny(name), DRAFT)
    ask(cache, name, prompt_of(30), 2)
    place = cache.places[-1]
    before = [mx.array(a) for layer in place.target.layers if layer for a in arrays_of(layer)]
    mx.eval(before)
    ask(cache, name, [*cache.tokens, 3], 40)
    after = [a for layer in place.target.layers if layer for a in arrays_of(layer)]
    assert len(before) >= 2 and all(mx.array_equal(a, b) for a, b in zip(before, after, strict=True))


def arrays_of(entry) -> list[mx.array]:
    from mlx.utils import tree_flatten

    return [a for _, a in tree_flatten(entry.state) if isinstance(a, mx.array)]


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(CANNOT_TRIM),
    st.lists(
        st.tuples(st.integers(0, 80), st.integers(1, 12), st.integers(1, 9), st.integers(0, 12), st.integers(3, 40)),
        min_size=1,
        max_size=5,
    ),
)
def test_any_conversation_equals_cold_runs(name: str, turns: list[tuple[int, int, int, int, int]]) -> None:
    """Keep a prefix of what was said, add new tokens, answer for a while; borders anywhere, any prefill step."""
    cache, said = make_prompt_cache(tiny(name), DRAFT), list[int]()
    for index, (keep, new, count, back, step) in enumerate(turns):
        ids = said[:keep] + prompt_of(new, seed=100 + index)
        got = ask(cache, name, ids, count, stable=max(len(ids) - back, 0), prefill_step_size=step)
        assert got == reference(name, ids, count)
        said = ids + got
        assert cache.tokens == said
        assert cache.context.length == cache.cache.length == len(said) - 1
        assert all(length <= cache.cache.length for length in cache.snapshots)


def test_a_second_request_on_a_cache_that_is_in_use_is_refused() -> None:
    """Two at once would write into each other."""
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    first = stream_generate(tiny("llama"), TOKENIZER, prompt_of(9), 20, DRAFT, prompt_cache=cache)
    second = stream_generate(tiny("llama"), TOKENIZER, prompt_of(9), 20, DRAFT, prompt_cache=cache)
    next(first)
    for attempt in (lambda: next(second), lambda: cache.reuse([1, 2])):
        with pytest.raises(CacheStateError, match="A request is still running on this prompt cache"):
            attempt()
    with pytest.raises(CacheStateError, match="A request is still running"):
        cache.begin(object())
    with pytest.raises(CacheStateError, match="A request is still running"):
        cache.reset()
    rest = [r.token for r in first]
    assert len(rest) == 19
    assert cache.reuse(prompt_of(9)) == 8


def test_a_request_that_fails_at_its_start_does_not_lock_the_cache(monkeypatch) -> None:
    """And a generator that was dropped in mid-answer gives the cache back."""
    from dflash_mlx import generate as _  # noqa: F401  (the module, not the function)
    from dflash_mlx.request import Request

    cache = make_prompt_cache(tiny("llama"), DRAFT)
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(type(tokenizer), "detokenizer", property(lambda self: 1 / 0), raising=False)
    with pytest.raises(ZeroDivisionError):
        next(stream_generate(tiny("llama"), tokenizer, prompt_of(9), 20, DRAFT, prompt_cache=cache))
    monkeypatch.undo()
    opened = Request.open

    def fail(request, stop):
        opened(request, stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(Request, "open", fail)
    with pytest.raises(KeyboardInterrupt):
        next(stream_generate(tiny("llama"), TOKENIZER, prompt_of(9), 20, DRAFT, prompt_cache=cache))
    monkeypatch.undo()
    responses = stream_generate(tiny("llama"), TOKENIZER, prompt_of(9), 20, DRAFT, prompt_cache=cache)
    next(responses)
    del responses
    assert ask(cache, "llama", prompt_of(9)) == reference("llama", prompt_of(9), 12)


def test_planning_a_request_leaves_the_running_one_alone() -> None:
    """`stream_generate` is a generator: until it is asked for a token nothing has changed."""
    cache = make_prompt_cache(tiny("qwen3_5"), DRAFT)
    ask(cache, "qwen3_5", prompt_of(30))
    running = stream_generate(tiny("qwen3_5"), TOKENIZER, [1, 2], 20, DRAFT, prompt_cache=cache, mode="plain")
    for _ in range(5):
        next(running)
    context = cache.context
    stream_generate(tiny("qwen3_5"), TOKENIZER, [3], 20, DRAFT, prompt_cache=cache)
    assert cache.context is context
    list(running)
    assert cache.context is context and context.start == 0 and context.covers(cache.cache.length)


def test_the_whole_conversation_instead_of_its_rest_is_refused() -> None:
    """Forgetting `ids[reused:]` would answer a conversation in which everything was said twice."""
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    ask(cache, "llama", prompt_of(30))
    turn = prompt_of(30) + [1, 2, 3]
    reused = cache.reuse(turn)
    with pytest.raises(ValueError, match=r"has 33 tokens, and `prompt_cache.reuse\(ids\)` kept 30.*other 3 have to"):
        stream_generate(tiny("llama"), TOKENIZER, turn, 12, DRAFT, prompt_cache=cache)
    got = stream_generate(tiny("llama"), TOKENIZER, turn[reused:], 12, DRAFT, prompt_cache=cache)
    assert [r.token for r in got] == reference("llama", turn, 12)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_chunk_ends_early_only_where_a_snapshot_is_taken(name: str, monkeypatch) -> None:
    from dflash_mlx.decode import Session

    widths, forward = [], Session.forward

    def spy(session, ids):
        widths.append(ids.size)
        return forward(session, ids)

    monkeypatch.setattr(Session, "forward", spy)
    ask(make_prompt_cache(tiny(name), DRAFT), name, prompt_of(30), 1, stable=20)
    assert widths == ([29, 1] if name == "llama" else [20, 9, 1])


def test_a_snapshot_of_a_window_holds_the_window_only() -> None:
    """A prefill chunk leaves thousands of rows in a ring until the next token."""
    cache = make_prompt_cache(tiny("llama-sliding"), DRAFT)
    prompt = prompt_of(300)
    ask(cache, "llama-sliding", prompt, 5)
    assert [layer.keys.shape[2] for layer in cache.places[-1].target.layers if layer is not None] == [16, 16]
    edited = prompt + [3, 4]
    assert ask(cache, "llama-sliding", edited) == reference("llama-sliding", edited, 12)
    assert cache.last_reuse.reused == 299


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_seed_repeats_after_regenerate(name: str) -> None:
    """Drafts depend on what a sliding context holds, and rejection sampling on the drafts."""
    draft = tiny_draft(5, layer_types=["sliding_attention", "full_attention"], sliding_window=24)
    cache, texts = make_prompt_cache(tiny(name), draft), []
    sampler = make_sampler(4.0, seed=5)
    for _ in range(3):
        rest = prompt_of(40)[cache.reuse(prompt_of(40)) :]
        responses = stream_generate(
            tiny(name), TOKENIZER, rest, 40, draft, prompt_cache=cache, mode="dflash", sampler=sampler
        )
        texts.append([r.token for r in responses])
    assert texts[0] == texts[1] == texts[2]
    assert cache.context.layers[0].rows == 23


def test_forgetting_forgets_what_would_have_been_read_again() -> None:
    cache = make_prompt_cache(tiny("qwen3_5"), DRAFT)
    ask(cache, "qwen3_5", prompt_of(30))
    cache.reuse(prompt_of(25) + [1])
    assert cache.last_reuse == Reuse(0, 25)
    cache.reset()
    responses = list(stream_generate(tiny("qwen3_5"), TOKENIZER, prompt_of(9), 3, DRAFT, prompt_cache=cache))
    assert responses[-1].recomputed_tokens == 0 and not any("read again" in note for note in responses[-1].notes)


def test_a_draft_that_joined_late_is_not_late_any_more_after_a_new_start() -> None:
    """Its context has seen everything that is held."""
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    ask(cache, "llama", prompt_of(30))
    cache.context = DRAFT.make_context(cache.cache.length)
    other = prompt_of(20, seed=7)
    rest = other[cache.reuse(other) :]
    responses = list(stream_generate(tiny("llama"), TOKENIZER, rest, 12, DRAFT, prompt_cache=cache, mode="dflash"))
    assert not any("has not seen" in note for note in responses[-1].notes)
    assert cache.context.start == 0 and cache.context.covers(cache.cache.length)


def test_a_border_outside_the_prompt_is_refused() -> None:
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    with pytest.raises(ValueError, match=r"`stable` has to be in 0\.\.3, the length of `ids`, got 4"):
        cache.reuse([1, 2, 3], 4)


THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def test_the_stable_part_of_a_prompt_ends_where_the_template_opens_the_answer() -> None:
    """A template that drops old reasoning and opens new one: only the marker of the role survives."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    stable = stable_length(tokenizer, messages, ids)
    assert tokenizer.decode(ids[:stable]) == "<user>hello\n<assistant>"
    answer = tokenizer.encode("hm</think>hi", add_special_tokens=False)
    later = [*messages, {"role": "assistant", "content": tokenizer.decode(answer)}, {"role": "user", "content": "more"}]
    turn = tokenizer.apply_chat_template(later, add_generation_prompt=True)
    assert turn[:stable] == ids[:stable] and turn[: stable + 1] != ids[: stable + 1]


def test_tools_in_the_prompt_do_not_hide_the_stable_part() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if tools %}T{{ tools|length }} {% endif %}" + THINKING
    messages, tools = [{"role": "user", "content": "hello"}], [{"type": "function"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools)
    assert stable_length(tokenizer, messages, ids, tools=tools) == len(ids) - len("<think>")


def test_a_template_that_refuses_a_further_turn_has_no_stable_part() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}x"
    messages = [{"role": "user", "content": "hello"}]
    assert stable_length(tokenizer, messages, tokenizer.apply_chat_template(messages)) == 0


def test_a_chat_whose_template_drops_old_reasoning_reuses_the_users_turns() -> None:
    """Two turns through a template, on a hybrid: at least the part before the last answer is kept, warm equals cold."""
    name, tokenizer = "qwen3_5", byte_tokenizer()
    tokenizer.chat_template = THINKING
    cache, messages, border = make_prompt_cache(tiny(name), DRAFT), [], 0
    for text in ("hello there", "and now?", "once more"):
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        stable = stable_length(tokenizer, messages, ids)
        got = ask(cache, name, ids, 15, stable=stable)
        assert got == reference(name, ids, 15)
        if len(messages) > 1:
            assert cache.last_reuse.reused >= border, "everything up to the last answer"
        border = stable
        messages.append({"role": "assistant", "content": tokenizer.decode([t % 128 for t in got]) + "</think>ok"})


def test_snapshots_exist_for_every_family_that_needs_them() -> None:
    for name, family in BY_NAME.items():
        cache = make_prompt_cache(tiny(name))
        list(stream_generate(tiny(name), TOKENIZER, prompt_of(9), 2, prompt_cache=cache))
        assert bool(cache.snapshots) == any(state.needs_snapshot for state in cache.cache.states), family.name
