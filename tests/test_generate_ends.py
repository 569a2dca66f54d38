"""How an answer ends: end tokens, stop strings, whole characters, budgets."""

from __future__ import annotations

import json
from pathlib import Path

import mlx_lm
import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper

from dflash_mlx import generate, load, make_prompt_cache
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import BY_NAME, reference, tiny
from tests.folders import target_folder
from tests.generating import DRAFT, PROMPT, TEXT, paying, scripted, speak, stream, text_ids
from tests.thinking import raw_tokenizer

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


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 20}, {"eos_token_id": [21, 22]}, {20, 21, 22}),
        ({"eos_token_id": [20, 23]}, {"eos_token_id": 21}, {20, 21, 23}),
        ({"eos_token_id": 20}, {"eos_token_id": 0}, {0, 20}),
        ({"eos_token_id": 0}, None, {0}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 20}}, {"eos_token_id": None}, {20}),
        ({"eos_token_id": [20]}, "{ not json", {20}),
        ({}, {}, set()),
    ],
)
def test_end_tokens_are_united_from_tokenizer_config_and_generation_config(
    config: dict, generation_config: dict | str | None, expected: set[int], tmp_path: Path
) -> None:
    """An end that only one file knows ends the answer; mlx_lm lets one file replace the other, and an id 0 get lost."""
    folder = target_folder(tmp_path)
    raw_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(BY_NAME["llama"].config | config))
    if generation_config is not None:
        text = generation_config if isinstance(generation_config, str) else json.dumps(generation_config)
        (folder / "generation_config.json").write_text(text)
    _, tokenizer = load(str(folder), blas="off")
    own = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_ids == expected | {own}
    _, tokenizer = load(str(folder), blas="off", model_config={"eos_token_id": 30})
    assert tokenizer.eos_token_ids == {30, own}, "what the caller says replaces what the files say, as in mlx_lm"


@pytest.mark.parametrize("end", [20, 21, 22, "<|im_end|>", "q"])
def test_each_united_end_token_ends_the_answer_at_every_block_offset(
    end: int | str, tmp_path: Path, scripted, monkeypatch
) -> None:
    """Of the tokenizer, both configs and the user's own; hidden from the text, which is that of the ids before it."""
    folder = target_folder(tmp_path)
    raw_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(BY_NAME["llama"].config | {"eos_token_id": 20}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [21, 22]}))
    _, tokenizer = load(str(folder), blas="off")
    tokenizer.add_eos_token("q")
    token = end if isinstance(end, int) else tokenizer.convert_tokens_to_ids(end)
    for offset in range(16):
        before = text_ids(tokenizer, "x" * offset + "kůň", 0)
        ids = [*before, token, *text_ids(tokenizer, "and more of it", 0)]
        speak(monkeypatch, scripted, ids, len(PROMPT), "all")
        cache = make_prompt_cache(tiny("llama"), DRAFT)
        responses = list(stream("llama", tokenizer, max_tokens=len(ids), prompt_cache=cache))
        assert [r.token for r in responses] == [*before, token]
        assert responses[-1].finish_reason == "stop"
        assert "".join(r.text for r in responses) == tokenizer.decode(before) == "x" * offset + "kůň"
        assert cache.tokens == [*PROMPT, *before, token]


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


HARD = TEXT + "e\u0301o\u0308 👩‍👩‍👧 🇨🇿 \u200bक्षि"  # combining marks, joined emoji, flags
STOP = "ů🦊"


@pytest.mark.parametrize(
    ("ending", "detokenizer"),
    [
        ("budget", NaiveStreamingDetokenizer),
        ("stop string", BPEStreamingDetokenizer),
        ("end token", BPEStreamingDetokenizer),
    ],
)
def test_characters_cut_by_blocks_come_out_whole(ending: str, detokenizer, scripted, monkeypatch) -> None:
    """Never a replacement character for one that completes later, also right before the end, at any block size."""
    tokenizer = TokenizerWrapper(raw_tokenizer(), detokenizer)
    tail = {"budget": "", "stop string": f"{STOP}{HARD}", "end token": f"<|im_end|>{HARD}"}[ending]
    for block in range(1, 17):
        text = "x" * (block % 4) + HARD
        ids = text_ids(tokenizer, text + tail, 0)
        speak(monkeypatch, scripted, ids, len(PROMPT), "wide")
        mode = "dflash" if block > 1 else "plain"
        responses = list(stream("llama", tokenizer, max_tokens=len(ids), block_size=block, mode=mode, stop=STOP))
        assert "".join(r.text for r in responses) == text
        assert not any("\ufffd" in r.text for r in responses)
        assert responses[-1].finish_reason == ("length" if ending == "budget" else "stop")


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
    whole = generate(
        tiny("llama"), tokenizer, PROMPT, max_tokens=len(ids), draft_model=DRAFT, mode="dflash", stop="beta gamma"
    )
    assert whole == "x" * offset + "alpha "


@pytest.mark.parametrize("offset", range(16))
def test_of_two_matches_in_one_block_the_first_ends_the_answer(offset: int, tokenizer, scripted, monkeypatch) -> None:
    """Nothing of the block behind it is shown, counted or kept."""
    ids = text_ids(tokenizer, "a END, an END.", offset)
    speak(monkeypatch, scripted, ids, len(PROMPT), "all")
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    responses = list(stream("llama", tokenizer, max_tokens=len(ids), stop=["END", "END."], prompt_cache=cache))
    assert "".join(r.text for r in responses) == "x" * offset + "a "
    assert len(responses) == responses[-1].generation_tokens == offset + len("a END")
    assert cache.tokens == PROMPT + ids[: offset + len("a END")]


def test_held_back_text_is_released_when_nothing_matches(tokenizer, scripted, monkeypatch) -> None:
    ids = text_ids(tokenizer, "see beta gam", 0)
    speak(monkeypatch, scripted, ids, len(PROMPT), "all")
    responses = list(stream("llama", tokenizer, max_tokens=len(ids), stop="beta gamma"))
    assert "".join(r.text for r in responses) == "see beta gam" and responses[-1].finish_reason == "length"
