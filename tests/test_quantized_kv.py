"""Quantised keys and values: the tokens of plain decoding with the same `kv_bits`, whatever the blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

from dflash_mlx import make_prompt_cache, stream_generate
from tests.families import BY_NAME, Family, build
from tests.generating import DRAFT, PROMPT, scripted

__all__ = ["scripted"]  # fixture
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}  # a group of 64 has to fit
COUNT = 60


@lru_cache
def wide(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A tiny target whose heads are wide enough to be quantised."""
    family: Family = BY_NAME[name]
    config = dict(family.config)
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **HEADS}
    return build(replace(family, config={**config, **HEADS}), dtype)


def plain(model: nn.Module, **kwargs) -> list[int]:
    steps = generate_step(mx.array(PROMPT), model, max_tokens=COUNT, prefill_step_size=8, **kwargs)
    tokens = [token for token, _ in steps]
    assert len(set(tokens)) >= 15
    return tokens


def run(model: nn.Module, tokenizer, prompt=PROMPT, count=COUNT, **kwargs):
    kwargs = dict(mode="dflash", block_size=8, prefill_step_size=8) | kwargs
    return list(stream_generate(model, tokenizer, prompt, count, DRAFT, **kwargs))


@pytest.mark.parametrize("start", [0, 8, 10, 20, 21, 22, 27, 40, 200])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5"])
def test_tokens_equal_mlx_lms_with_the_same_bits(name, bits, start, tokenizer, scripted) -> None:
    """Wherever the border falls: in the prompt, at its end, between blocks, inside one, never."""
    kv = dict(kv_bits=bits, kv_group_size=64, quantized_kv_start=start)
    truth = plain(wide(name), **kv)
    for script in ("wide", "all"):
        scripted(truth, script)
        responses = run(wide(name), tokenizer, **kv)
        assert [r.token for r in responses] == truth, script
        assert responses[-1].stats.accepted > 10


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_bfloat16_too(name, tokenizer, scripted) -> None:
    kv = dict(kv_bits=4, quantized_kv_start=25)
    truth = plain(wide(name, mx.bfloat16), **kv)
    scripted(truth, "mixed")
    assert [r.token for r in run(wide(name, mx.bfloat16), tokenizer, **kv)] == truth


def test_four_bits_change_the_text_and_the_cache_really_is_quantised(tokenizer, scripted) -> None:
    """Otherwise the parity tests above would prove nothing."""
    truth = plain(wide("qwen3"))
    assert plain(wide("qwen3"), kv_bits=4, quantized_kv_start=0) != truth
    scripted(truth, "mixed")
    entries = mlx_lm_cache(wide("qwen3"))
    run(wide("qwen3"), tokenizer, prompt_cache=entries, kv_bits=4, quantized_kv_start=30)
    assert all(type(entry) is QuantizedKVCache and entry.bits == 4 for entry in entries)


def test_a_list_that_just_reached_the_border_is_quantised_as_mlx_lm_leaves_it(tokenizer, scripted) -> None:
    """mlx_lm may go on with it and gives what it would have given alone."""
    kv = dict(kv_bits=4, quantized_kv_start=len(PROMPT) + 10, prefill_step_size=8)
    model = wide("qwen3")
    caches = [mlx_lm_cache(model), mlx_lm_cache(model)]
    theirs = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, 10, prompt_cache=caches[0], **kv)]
    scripted(theirs, "mixed")
    ours = run(model, tokenizer, count=10, prompt_cache=caches[1], **kv)
    assert [r.token for r in ours] == theirs
    assert [type(e) for e in caches[0]] == [type(e) for e in caches[1]] == [QuantizedKVCache] * 4
    rests = [
        [r.token for r in mlx_lm.stream_generate(model, tokenizer, [3, 4], 20, prompt_cache=cache, **kv)]
        for cache in caches
    ]
    assert rests[0] == rests[1]


def test_windows_stay_as_they_are_with_a_note(tokenizer, scripted) -> None:
    """Where mlx_lm stops with NotImplementedError; the tokens are those of plain decoding here."""
    model, kv = wide("gemma3_text"), dict(kv_bits=8, quantized_kv_start=0)
    baseline = run(model, tokenizer, mode="plain", **kv)
    truth = [r.token for r in baseline]
    scripted(truth, "wide")
    entries = mlx_lm_cache(model)
    block = run(model, tokenizer, prompt_cache=entries, **kv)
    assert [r.token for r in block] == truth
    assert {type(e) for e in entries} == {QuantizedKVCache, RotatingKVCache}
    for responses in (baseline, block):
        assert "`kv_bits`: 2 of 4 layers keep windows or states, and stay as they are" in responses[-1].notes


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4_text"])
def test_attention_that_takes_no_quantised_keys_is_refused_by_name(name, tokenizer) -> None:
    """Before the first token, not at the border a thousand tokens later."""
    with pytest.raises(ValueError, match=rf"`kv_bits` 8 in groups of 64 is not honoured for this {name} target"):
        stream_generate(wide(name), tokenizer, PROMPT, 5, kv_bits=8)


def test_a_group_that_does_not_fit_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match=r"groups of 128 is not honoured.*divisible"):
        run(wide("qwen3"), tokenizer, kv_bits=8, kv_group_size=128)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_prompt_cache_goes_on_in_the_same_bits(name, tokenizer, scripted) -> None:
    """Two turns speculating equal two turns of plain decoding over a cache with the same history."""
    kv = dict(kv_bits=8, quantized_kv_start=25)
    caches = [make_prompt_cache(wide(name), DRAFT) for _ in range(2)]
    said: list[int] = []
    for new in (PROMPT, [5, 6, 7], [9]):
        baseline = [r.token for r in run(wide(name), tokenizer, new, 25, mode="plain", prompt_cache=caches[0], **kv)]
        scripted(baseline, "wide")
        assert [r.token for r in run(wide(name), tokenizer, new, 25, prompt_cache=caches[1], **kv)] == baseline
        said += new + baseline
        assert caches[0].tokens == caches[1].tokens == said
    assert any(type(e) is QuantizedKVCache for e in caches[1].cache.entries)


def test_bits_do_not_stick_to_a_prompt_cache(tokenizer) -> None:
    """A later request without `kv_bits` is not quantised because an earlier one, short of its border, asked for it."""
    model = wide("qwen3")
    cache, said = make_prompt_cache(model, DRAFT), list[int]()
    said += PROMPT + [
        r.token for r in run(model, tokenizer, count=5, prompt_cache=cache, kv_bits=2, quantized_kv_start=40)
    ]
    later = run(model, tokenizer, [1, 2], 30, prompt_cache=cache)
    assert all(type(e) is KVCache for e in cache.cache.entries)
    theirs = generate_step(mx.array(said + [1, 2]), model, max_tokens=30)
    assert [r.token for r in later] == [token for token, _ in theirs]


@pytest.mark.parametrize("start", [0, 10, 40])
def test_a_full_precision_list_goes_on_in_bits_as_in_mlx_lm(start: int, tokenizer, scripted) -> None:
    """mlx_lm quantises after a forward, so the first one of the request still sees what was held."""
    model, kv = wide("qwen3"), dict(kv_bits=2, quantized_kv_start=start, prefill_step_size=8)
    caches = [mlx_lm_cache(model), mlx_lm_cache(model)]
    for cache in caches:
        list(mlx_lm.stream_generate(model, tokenizer, PROMPT, 10, prompt_cache=cache))
    new = [5, 6, 7, 8]
    theirs = [r.token for r in mlx_lm.stream_generate(model, tokenizer, new, 30, prompt_cache=caches[0], **kv)]
    scripted(theirs, "mixed")
    assert [r.token for r in run(model, tokenizer, new, 30, prompt_cache=caches[1], **kv)] == theirs


def test_a_border_of_the_next_turn_does_not_change_what_is_quantised(tokenizer) -> None:
    model, kv = wide("qwen3"), dict(kv_bits=2, quantized_kv_start=10, prefill_step_size=2048)
    texts = []
    for stable in (None, 15):
        cache = make_prompt_cache(model, DRAFT)
        cache.reuse(PROMPT, stable)
        texts.append([r.token for r in run(model, tokenizer, count=20, prompt_cache=cache, **kv)])
    assert texts[0] == texts[1]


def test_bits_over_a_ring_are_noted(tokenizer) -> None:
    """Where mlx_lm stops with NotImplementedError."""
    for kwargs in (dict(max_kv_size=16), dict(prompt_cache=mlx_lm_cache(wide("qwen3"), 16))):
        responses = stream_generate(wide("qwen3"), tokenizer, PROMPT, 5, kv_bits=4, quantized_kv_start=0, **kwargs)
        assert any("`kv_bits` changes nothing here" in note for note in list(responses)[-1].notes)


def test_other_bits_than_the_cache_holds_are_refused(tokenizer, scripted) -> None:
    cache = make_prompt_cache(wide("qwen3"), DRAFT)
    run(wide("qwen3"), tokenizer, count=5, prompt_cache=cache, kv_bits=8, quantized_kv_start=0)
    with pytest.raises(ValueError, match="`kv_bits` is 4 in groups of 64, and `prompt_cache` holds 8 bits"):
        run(wide("qwen3"), tokenizer, [1], count=5, prompt_cache=cache, kv_bits=4)
    later = run(wide("qwen3"), tokenizer, [1], count=5, prompt_cache=cache)
    assert "the prompt cache holds keys and values in 8 bits" in later[-1].notes
    cache.reset()
    assert all(type(e) is KVCache for e in cache.cache.entries)


def test_leaving_before_the_border_does_not_quantise_early(tokenizer, scripted) -> None:
    """The border belongs to positions that were kept, not to drafts that were taken back."""
    truth = plain(wide("qwen3"))
    scripted(truth, "all")
    cache = make_prompt_cache(wide("qwen3"), DRAFT)
    responses = stream_generate(
        wide("qwen3"),
        tokenizer,
        PROMPT,
        COUNT,
        DRAFT,
        mode="dflash",
        block_size=8,
        prompt_cache=cache,
        kv_bits=4,
        quantized_kv_start=len(PROMPT) + 7,
    )
    for _ in range(4):
        next(responses)
    responses.close()
    assert cache.cache.length == len(PROMPT) + 3
    assert all(type(e) is KVCache for e in cache.cache.entries)
