"""The draft equals an independent numpy implementation, whatever way its context is fed."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx import make_prompt_cache, stream_generate
from dflash_mlx.cache import TargetCache
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.context import DraftContext
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.rope import make_rope
from dflash_mlx.errors import CheckpointError
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.sampling import make_sampler
from dflash_mlx.targets import target_for
from dflash_mlx.threads import leave_cleanly
from dflash_mlx.training.architecture import config_json
from tests.conftest import DFLASH2, OWN_PARTS, draft_config, special_draft, tiny_draft
from tests.draft_reference import reference_denoise, reference_keys
from tests.families import BY_NAME, prompt_of, tiny

HIDDEN, DIM = 64, 16
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}

VARIANTS = {
    "full": {},
    "sliding": dict(layer_types=["sliding_attention"] * 2, sliding_window=6),
    "mixed": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6),
    "sliding-both-ways": dict(layer_types=["sliding_attention"] * 2, sliding_window=6, is_causal=False),
    "causal-full": dict(dflash_config={"causal": True}),
    "yarn": dict(rope_scaling=YARN),
    "yarn-untruncated": dict(rope_scaling=YARN | {"truncate": False, "attention_factor": 1.25}),
}


def data(context: int, block: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(context * 100 + block)
    return (
        rng.normal(size=(context, 2 * HIDDEN)).astype(np.float32) * 3,
        rng.normal(size=(block, HIDDEN)).astype(np.float32),
    )


def run(draft: DraftModel, chunks: list[np.ndarray], block: np.ndarray) -> np.ndarray:
    context = draft.make_context()
    for chunk in chunks:
        draft.extend(context, mx.array(chunk)[None])
    return np.array(draft.denoise(mx.array(block)[None], context)[0])


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 30])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_denoise_equals_the_numpy_reference(variant: str, length: int) -> None:
    """A slip in fusion, positions or masks costs acceptance and nothing else would show it."""
    draft = tiny_draft(**VARIANTS[variant])
    features, block = data(length)
    np.testing.assert_allclose(run(draft, [features], block), reference_denoise(draft, features, block), atol=2e-4)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("cuts", [[1], [5, 6, 7], [1, 2, 3, 4, 5], [12], [4, 5, 17]])
def test_feeding_the_context_in_pieces_changes_nothing(variant: str, cuts: list[int]) -> None:
    """Prefill chunks, then accepted rows per cycle, one row among them."""
    draft = tiny_draft(**VARIANTS[variant])
    features, block = data(20)
    whole, pieces = run(draft, [features], block), run(draft, np.split(features, cuts), block)
    np.testing.assert_allclose(pieces, whole, atol=1e-5)


def test_drafting_leaves_no_trace_in_the_context() -> None:
    """Rows of a block must not be seen by the next one."""
    draft = tiny_draft(**VARIANTS["mixed"])
    features, block = data(9)
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None])
    first = draft.denoise(mx.array(block)[None], context)
    draft.denoise(mx.array(block * 7)[None], context)
    assert mx.array_equal(first, draft.denoise(mx.array(block)[None], context))
    assert context.length == 9


@pytest.mark.parametrize("drop", [0, 1, 3])
def test_dropped_positions_are_gone(drop: int) -> None:
    draft = tiny_draft()
    features, block = data(10)
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None])
    context.drop(drop)
    assert context.length == 10 - drop
    ours = draft.denoise(mx.array(block)[None], context)
    expected = run(draft, [features[: 10 - drop]], block)
    np.testing.assert_allclose(np.array(ours[0]), expected, atol=1e-5)


def test_a_sliding_layer_forgets_what_its_window_does_not_reach() -> None:
    """Row 0 of a block sees window - 1 context rows; an older feature may be anything."""
    draft = tiny_draft(**VARIANTS["sliding"])
    features, block = data(20)
    changed = features.copy()
    changed[:15] += 5
    np.testing.assert_array_equal(run(draft, [features], block), run(draft, [changed], block))
    changed[15] += 5
    assert np.abs(run(draft, [features], block) - run(draft, [changed], block)).max() > 1e-3
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None])
    assert [layer.rows for layer in context.layers] == [5, 5]


def test_the_block_is_seen_both_ways_in_full_layers_and_one_way_in_sliding_ones() -> None:
    features, block = data(4)
    changed = block.copy()
    changed[-1] += 5
    full, sliding = tiny_draft(), tiny_draft(**VARIANTS["sliding"])
    assert np.abs(run(full, [features], block) - run(full, [features], changed))[0].max() > 1e-3
    difference = np.abs(run(sliding, [features], block) - run(sliding, [features], changed))
    assert difference[:-1].max() == 0 and difference[-1].max() > 1e-3


def test_a_context_that_starts_late_uses_absolute_positions() -> None:
    """The draft joins a filled cache: its rows are rotated where they really are."""
    draft = tiny_draft()
    features, _ = data(8)
    late = DraftContext(draft.config, start=5)
    draft.extend(late, mx.array(features[5:])[None])
    moved = draft.make_context()
    draft.extend(moved, mx.array(features[5:])[None])
    assert late.length == 8
    assert mx.abs(late.layers[0].arrays[0] - moved.layers[0].arrays[0]).max().item() > 1e-2
    assert mx.array_equal(late.layers[0].arrays[1], moved.layers[0].arrays[1])


def test_yarn_agrees_with_mlx_lm_where_both_speak() -> None:
    config = draft_config(rope_scaling=YARN)
    x = mx.random.normal((1, 2, 6, DIM))
    theirs = initialize_rope(DIM, config.rope_theta, False, dict(YARN), 2048)
    assert mx.abs(make_rope(config)(x, offset=77) - theirs(x, offset=77)).max().item() < 1e-4


def test_yarn_ignores_mscale() -> None:
    """Kimi drafts carry mscale keys but were trained with the plain factor."""
    x = mx.random.normal((1, 2, 6, DIM))
    plain, with_keys = (
        make_rope(draft_config(rope_scaling=YARN | e)) for e in ({}, dict(mscale=1.0, mscale_all_dim=1.0))
    )
    assert mx.array_equal(plain(x, offset=9), with_keys(x, offset=9))


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3])
def test_another_thread_can_be_the_first_to_draft(scaling: dict) -> None:
    """A chat loads in one thread and answers in another, which can compute nothing that the first left lazy."""
    draft = special_draft(OWN_PARTS, rope_scaling=scaling)
    features, block = data(6)
    found: list[mx.array | Exception] = []

    def work() -> None:
        leave_cleanly()
        try:
            ids = draft.target_ids(mx.argmax(draft.lm_head(mx.array(run(draft, [features], block))), axis=-1))
            mx.eval(ids)
            found.append(ids)
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], mx.array), found


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn"}, {"rope_type": "spiral", "factor": 2.0}])
def test_an_unusable_rope_scaling_is_named(scaling: dict) -> None:
    with pytest.raises(CheckpointError, match=r"rope scaling .* is not usable"):
        make_rope(draft_config(rope_scaling=scaling))


def test_logit_transforms_are_the_drafts_own() -> None:
    logits = mx.array([[-50.0, 3.0, 200.0]])
    draft = tiny_draft(output_multiplier=0.5, final_logit_softcapping=30.0)
    expected = 30 * np.tanh(np.array([[-25.0, 1.5, 100.0]]) / 30)
    np.testing.assert_allclose(np.array(draft.transform_logits(logits)), expected, rtol=1e-5)
    assert tiny_draft().transform_logits(logits) is logits


STORED = [mx.float32, mx.bfloat16, mx.float16]


@pytest.mark.parametrize("given", STORED, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("parts", [{}, DFLASH2], ids=["v1", "dflash2"])
def test_huge_features_stay_finite(parts: dict, stored: mx.Dtype, given: mx.Dtype) -> None:
    """They would overflow float16 on fusion; a draft that is stored in it computes in float32."""
    draft = special_draft(parts)
    draft.set_dtype(stored)
    features, block = data(6)
    huge = mx.clip(mx.array(features) * 1e5, -6e4, 6e4) if given == mx.float16 else mx.array(features) * 1e5
    context = draft.make_context()
    draft.extend(context, huge.astype(given)[None])
    hidden = draft.denoise(mx.array(block).astype(given)[None], context)
    assert mx.isfinite(hidden).all().item() and mx.abs(hidden).max().item() > 0.1
    expected = mx.float32 if stored == mx.float16 else stored
    assert {array.dtype for array in [hidden, *context.arrays]} == {expected} == {draft.dtype}


@pytest.mark.parametrize("parts", [{}, DFLASH2, OWN_PARTS], ids=["v1", "dflash2", "own parts"])
@pytest.mark.parametrize("ours", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("theirs", STORED, ids=str)
def test_target_and_draft_keep_their_dtypes(tokenizer, theirs: mx.Dtype, ours: mx.Dtype, parts: dict) -> None:
    """A target's cache that the draft widened would take twice the memory, and give another text."""
    model, draft = tiny("llama", theirs), special_draft(parts)
    draft.set_dtype(ours)
    for options in ({}, {"sampler": make_sampler(temp=0.8, seed=1)}):
        held, plain = make_prompt_cache(model, draft), make_prompt_cache(model, None)
        prompt = prompt_of(21)
        texts = [
            [r.token for r in stream_generate(model, tokenizer, prompt, 12, prompt_cache=cache, **options, **more)]
            for cache, more in ((held, dict(draft_model=draft, mode="dflash", block_size=4)), (plain, {}))
        ]
        if not options:
            assert texts[0] == texts[1]
        assert {(e.keys.dtype, e.values.dtype) for e in held.cache.entries} == {(theirs, theirs)}
        assert held.context is not None and {array.dtype for array in held.context.arrays} == {ours}


def counting() -> llama.Model:
    """Its layer i adds 2^i to every channel, and nothing else, so that a feature says which layers it is the sum of."""
    config = dict(BY_NAME["llama"].config, mlp_bias=True)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map(mx.zeros_like, model.parameters()))
    for index, layer in enumerate(model.layers):
        layer.mlp.down_proj.bias = mx.full((HIDDEN,), 2.0**index)
    return model


def test_every_draft_gets_the_outputs_of_its_own_layers(tokenizer) -> None:
    """One layer off, or those of the draft before it: correct text and poor acceptance. Drafts A, B and A again."""
    model = counting()
    before = [type(layer) for layer in model.layers], set(vars(model)), set(model)

    class Hearing(DraftModel):
        def extend(self, context: DraftContext, features: mx.array, **rest: Any) -> None:
            heard.append(features)
            super().extend(context, features, **rest)

    a, b = (Hearing(draft_config(dflash_config={"target_layer_ids": taps})) for taps in ([2, 0], [0, 1, 3]))
    for draft, layers in ((a, [2, 0]), (b, [0, 1, 3]), (a, [2, 0])):
        heard: list[mx.array] = []
        options = dict(draft_model=draft, mode="dflash", block_size=4)
        assert len(list(stream_generate(model, tokenizer, prompt_of(9), 6, **options))) == 6
        features = mx.concatenate(heard, axis=1)[0].reshape(-1, len(layers), HIDDEN)
        assert len(features) >= 9
        for place, layer in enumerate(layers):
            assert np.unique(np.array(features[:, place])).tolist() == [2.0 ** (layer + 1) - 1]
    assert ([type(layer) for layer in model.layers], set(vars(model)), set(model)) == before


@pytest.mark.parametrize("name", ["qwen3_5", "glm4"])
def test_the_targets_partial_rotary_is_not_the_drafts(tokenizer, name: str) -> None:
    """These targets rotate half of a head. A draft that did so, too, would accept next to nothing."""
    model = tiny(name)
    draft = tiny_draft(rope_theta=5000.0)
    held = make_prompt_cache(model, draft)
    for _ in stream_generate(model, tokenizer, prompt_of(21), 8, draft, prompt_cache=held, mode="dflash", block_size=4):
        pass
    target = target_for(model)
    cache = TargetCache(target.make_entries(), 0)
    cache.begin(held.cache.length)
    ids = mx.array([held.tokens[: held.cache.length]])
    features = target.forward(ids, cache, draft.config.target_layer_ids).features
    assert features is not None and held.context is not None
    for index, layer in enumerate(held.context.layers):
        assert layer.held is not None
        expected = reference_keys(draft, np.array(features[0]), index)
        np.testing.assert_allclose(np.array(layer.held[0][0]), expected.swapaxes(0, 1), atol=1e-3)


def test_parameter_count_follows_the_published_formula() -> None:
    """L (2 nq D H + 2 nkv D H + 3 H I + 2 H + 2 D) + K H^2 + 2 H: the sizes of the published files."""
    from dflash_mlx.config import DraftConfig

    def count(layers, hidden, inner, heads, kv, taps, dim=128):
        config = draft_config(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=kv, head_dim=dim, num_target_layers=64,
            dflash_config={"target_layer_ids": list(range(taps))},
        )  # fmt: skip
        assert isinstance(config, DraftConfig)
        flat = tree_flatten(DraftModel(config).parameters())  # lazy: nothing is allocated
        return len(flat), sum(v.size for _, v in flat)

    assert count(5, 2560, 9728, 32, 8, 5) == (58, 537_427_200)  # Qwen3-4B-DFlash-b16
    assert count(5, 4096, 12288, 32, 8, 5) == (58, 1_048_626_432)  # Qwen3-8B-DFlash-b16
    assert count(8, 2048, 6144, 32, 4, 5) == (91, 473_995_264)  # Qwen3-Coder-30B-A3B-DFlash
    assert count(6, 4096, 12288, 32, 8, 8) == (69, 1_291_904_512)  # Qwen3.5-9B-DFlash


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_draft_of_whole_blocks_proposes_the_first_of_a_whole_block(name: str) -> None:
    """One that learned from blocks of one size finds less with fewer masks, and is not given fewer.

    Nor is any draft while `auto` verifies less than a block.
    """
    target = target_for(tiny(name))
    found: dict[tuple[bool, int], list[int]] = {}
    adapted: dict[int, list[int]] = {}
    for whole in (True, False):
        draft = special_draft(dict(block_size=6, whole_block=whole, num_target_layers=target.spec.n_layers))
        draft.update(tree_map(lambda value: value * 4 if value.ndim == 2 else value, draft.parameters()))
        assert DraftConfig.from_dict(config_json(draft.config)).whole_block is whole
        for limit in (5, 3, 1):
            proposer = BlockProposer(draft, target, draft.make_context())
            proposer.observe(mx.array(data(9)[0])[None])
            found[whole, limit] = proposer.propose(7, limit, 10).tokens.tolist()
            proposer = BlockProposer(draft, target, draft.make_context(), rows=4)
            proposer.observe(mx.array(data(9)[0])[None])
            adapted[limit] = proposer.propose(7, limit, 10).tokens.tolist()
    assert found[True, 5] == found[False, 5]
    assert found[True, 3] == found[True, 5][:3] and found[True, 1] == found[True, 5][:1]
    assert found[False, 3] != found[False, 5][:3]
    assert adapted[5] == found[False, 5] and len(adapted[3]) == 3, "of the draft without whole blocks"
    assert adapted[1] == adapted[3][:1] != found[False, 1]
