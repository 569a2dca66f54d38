"""How an answer ends: end tokens, stop strings, whole characters, budgets."""

from __future__ import annotations

import mlx_lm
import pytest

from dflash_mlx import make_prompt_cache
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import reference, tiny
from tests.generating import DRAFT, PROMPT, TEXT, paying, scripted, speak, stream, text_ids

__all__ = ["paying", "scripted"]  # fixtures


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


@pytest.mark.parametrize("block", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_characters_cut_by_blocks_come_out_whole(offset: int, block: int, tokenizer, scripted, monkeypatch) -> None:
    """Never a replacement character for one that completes later."""
    ids = text_ids(tokenizer, TEXT, offset)
    speak(monkeypatch, scripted, ids, len(PROMPT), "wide")
    responses = list(stream("llama", tokenizer, max_tokens=len(ids), block_size=block))
    assert "".join(r.text for r in responses) == "x" * offset + TEXT
    assert not any("\ufffd" in r.text for r in responses)


def test_an_unfinished_character_is_flushed_at_the_end(tokenizer, scripted, monkeypatch) -> None:
    ids = text_ids(tokenizer, "ab🦊", 0)[:-1]
    speak(monkeypatch, scripted, ids, len(PROMPT), "all")
    assert "".join(r.text for r in stream("llama", tokenizer, max_tokens=len(ids))) == "ab\ufffd"


@pytest.mark.parametrize("script", ["all", "mixed"])
@pytest.mark.parametrize("offset", range(16))
def test_stop_strings_are_found_over_block_borders(offset: int, script: str, tokenizer, scripted, monkeypatch) -> None:
    """Cut exactly before the match, at every block offset; the cache holds what was returned."""
    ids = text_ids(tokenizer, "alpha beta gamma delta beta gamma", offset)
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
    ids = text_ids(tokenizer, "see beta gam", 0)
    speak(monkeypatch, scripted, ids, len(PROMPT), "all")
    responses = list(stream("llama", tokenizer, max_tokens=len(ids), stop="beta gamma"))
    assert "".join(r.text for r in responses) == "see beta gam" and responses[-1].finish_reason == "length"
