"""Many rows at once: the same tokens as mlx_lm's own loop makes of each alone."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import TargetCache
from dflash_mlx.targets import target_for
from dflash_mlx.training.decoder import Decoder, MlxDecoder, decoder_for
from dflash_mlx.training.host_llama import HostLlama
from tests.families import BY_NAME, FAMILIES, build, prompt_of, reference, tiny

STEPS = 24  # past the windows of 16
TAPS = (0, 2)


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], leaving: dict[int, list[int]]) -> list[list[int]]:
    """STEPS tokens of each row; leaving: step -> rows of the first batch that stay."""
    live = list(range(len(prompts)))
    tokens: list[list[int]] = [[] for _ in prompts]
    read = decoder.start(np.array(prompts), len(prompts[0]) + STEPS)
    for step in range(STEPS):
        chosen = read.logits.argmax(axis=-1)
        for row, token in zip(live, chosen, strict=True):
            tokens[row].append(int(token))
        if step in leaving:
            kept = [live.index(row) for row in leaving[step]]
            decoder.keep(kept)
            live, chosen = leaving[step], chosen[kept]
        read = decoder.extend(chosen)
    return tokens


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_rows_of_a_batch_say_what_each_says_alone(name: str) -> None:
    """Spoiled by a cache that mixes rows, and by rows that leave with the wrong keys."""
    prompts = [prompt_of(9, seed) for seed in (1, 2, 3, 4)]
    expected = [reference(name, prompt, STEPS) for prompt in prompts]
    tokens = greedy(MlxDecoder(target_for(tiny(name))), prompts, {5: [3, 0, 2], 13: [2, 3]})
    for row, stayed in enumerate((14, 6, STEPS, STEPS)):
        assert tokens[row] == expected[row][:stayed], row


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_host_decoder_says_what_mlx_says(name: str) -> None:
    """On a CPU the data of a plain Llama comes from it alone."""
    prompts = [prompt_of(9, seed) for seed in (1, 2, 3, 4)]
    decoder = decoder_for(tiny(name))
    assert isinstance(decoder, HostLlama)
    tokens = greedy(decoder, prompts, {5: [3, 0, 2], 13: [2, 3]})
    for row, stayed in enumerate((14, 6, STEPS, STEPS)):
        assert tokens[row] == reference(name, prompts[row], STEPS)[:stayed], row


@pytest.mark.parametrize("alike", [0, 5, 9])
def test_an_opening_that_all_rows_share_is_read_like_the_rest(alike: int) -> None:
    """A template's system message is read once; the logits and features are those of every row read whole."""
    opening = prompt_of(alike, 7)
    prompts = np.array([opening + prompt_of(9 - alike, seed) for seed in (1, 2, 3)])
    read = HostLlama(tiny("llama"), TAPS).start(prompts, 20)
    target = target_for(tiny("llama"))
    for row, prompt in enumerate(prompts):
        cache = TargetCache(target.make_entries(), 0)
        cache.begin(9)
        forward = target.forward(mx.array(prompt[None]), cache, TAPS)
        assert forward.features is not None and read.features is not None
        np.testing.assert_allclose(read.features[row], np.array(forward.features[0]), rtol=2e-3, atol=2e-3)
        expected = np.array(target.logits(forward.hidden)[0, -1])
        np.testing.assert_allclose(read.logits[row], expected, rtol=1e-4, atol=1e-4)


def test_long_prompts_are_read_in_pieces_like_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred rows of two thousand ids have more scores than memory; pieces of 2 to 4 ids give the same."""
    prompts = np.array([prompt_of(9, seed) for seed in (1, 2, 3)])
    whole, pieces = HostLlama(tiny("llama"), TAPS), HostLlama(tiny("llama"), TAPS)
    started, read = whole.start(prompts, 20), whole.read(prompts)
    monkeypatch.setattr("dflash_mlx.training.host_llama.SCORES", 3 * pieces._heads * 9 * 2)
    widths: list[int] = []
    forward = pieces._forward
    monkeypatch.setattr(pieces, "_forward", lambda ids: widths.append(ids.shape[1]) or forward(ids))
    for one, other in ((started, pieces.start(prompts, 20)), (read, pieces.read(prompts))):
        assert one.features is not None and other.features is not None
        np.testing.assert_allclose(other.features, one.features, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(pieces.read(prompts).hidden, read.hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(pieces.start(prompts, 20).logits, started.logits, rtol=1e-4, atol=1e-4)
    assert max(widths) <= 4 and sum(widths) == 4 * 9


def test_features_are_the_same_from_both_decoders() -> None:
    """Otherwise a draft would be trained on other features than it is given."""
    prompts = np.array([prompt_of(9, 1), prompt_of(9, 2)])
    decoders = (HostLlama(tiny("llama"), TAPS), MlxDecoder(target_for(tiny("llama")), TAPS))
    for step in range(4):
        host, stock = (d.start(prompts, 20) if step == 0 else d.extend(prompts[:, step]) for d in decoders)
        assert host.features is not None and stock.features is not None
        assert host.features.dtype == stock.features.dtype == np.float16
        np.testing.assert_allclose(host.features, stock.features, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["llama-sliding", "qwen3", "gemma3_text"])
def test_the_host_decoder_leaves_other_architectures_alone(name: str) -> None:
    """It knows full attention without norms of queries only; anything else goes through the model's own modules."""
    assert isinstance(decoder_for(tiny(name)), MlxDecoder)


def test_the_host_decoder_leaves_other_weights_alone() -> None:
    """It computes in float32, so a model that runs in bfloat16 would be answered by another one."""
    assert not HostLlama.serves(tiny("llama", mx.bfloat16))
    scaled = BY_NAME["llama"].config | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    biased = BY_NAME["llama"].config | {"attention_bias": True}
    for config in (scaled, biased):
        assert not HostLlama.serves(build(type(BY_NAME["llama"])("changed", "llama", config)))
