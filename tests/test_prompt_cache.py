"""Reuse of a conversation by longest common prefix: warm equals cold, and nothing stale survives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx import make_prompt_cache, stream_generate
from dflash_mlx.prompt_cache import Reuse
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import prompt_of, reference, tiny

DRAFT, TOKENIZER = tiny_draft(), byte_tokenizer()


def ask(cache, name: str, ids: list[int], count: int = 12) -> tuple[int, list[int]]:
    reused = cache.reuse(ids)
    responses = stream_generate(
        tiny(name), TOKENIZER, ids[reused:], count, DRAFT, prompt_cache=cache, mode="dflash", block_size=6
    )
    return reused, [r.token for r in responses]


@pytest.mark.parametrize("shared", [0, 1, 5, 20, 25, 40])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_prefix_is_kept_and_warm_equals_cold(name: str, shared: int) -> None:
    """A wrapped window or a recurrent state cannot be cut back: back to the end of its prompt, or to the start."""
    cache = make_prompt_cache(tiny(name), DRAFT)
    _, answer = ask(cache, name, prompt_of(21))
    held = prompt_of(21) + answer
    turn = held[:shared] + prompt_of(9, seed=3)
    reused, got = ask(cache, name, turn)
    assert got == reference(name, turn, 12)
    overlap = min(shared, len(held) - 1)
    end_of_prompt = 20 if overlap >= 20 else 0
    assert reused == (overlap if name == "llama" or overlap == len(held) - 1 else end_of_prompt)
    assert cache.last_reuse == Reuse(reused, overlap - reused)
    assert cache.context.length == cache.cache.length


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    prompt = prompt_of(21)
    _, first = ask(cache, "llama", prompt)
    reused, again = ask(cache, "llama", prompt)
    assert reused == 20 and again == first
    with pytest.raises(ValueError, match="at least one token"):
        cache.reuse([])


def test_a_damaged_cache_is_replaced_on_reuse() -> None:
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    ask(cache, "llama", prompt_of(21))
    cache.cache.closed = "broken"
    reused, got = ask(cache, "llama", prompt_of(21))
    assert reused == 0 and got == reference("llama", prompt_of(21), 12)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4))
def test_any_conversation_equals_cold_runs(turns: list[tuple[int, int, int]]) -> None:
    """keep a prefix of what was said, add new tokens, answer for a while."""
    cache, said = make_prompt_cache(tiny("qwen3"), DRAFT), list[int]()
    for index, (keep, new, count) in enumerate(turns):
        ids = said[:keep] + prompt_of(new, seed=100 + index)
        _, got = ask(cache, "qwen3", ids, count)
        assert got == reference("qwen3", ids, count)
        said = ids + got
        assert cache.tokens == said
