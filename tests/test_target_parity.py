"""Our layer loop is the model's own forward, bit for bit. The alarm for a change in mlx_lm."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from dflash_mlx.cache import TargetCache
from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.targets import target_for
from tests.families import BY_NAME, EVERY, build, prompt_of, tiny


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_forward_equals_the_model_bit_for_bit(name: str, dtype: mx.Dtype) -> None:
    """A user would get other tokens than from mlx_lm. Prefill below and above the window, then blocks on top."""
    model = tiny(name, dtype)
    target = target_for(model)
    cache, theirs = TargetCache(target.make_entries(), 0), make_prompt_cache(model)
    for width in (21, 1, 5, 16, 1):
        ids = mx.array(prompt_of(width, seed=width))
        cache.begin(width)
        ours = target.logits(target.forward(ids[None], cache).hidden)
        cache.commit(width)
        expected = model(ids[None], cache=theirs)
        assert ours.dtype == expected.dtype
        assert mx.array_equal(ours, expected), f"{name} {width}: {mx.abs(ours - expected).max().item()}"


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5"])
def test_features_are_the_residual_stream_after_the_tapped_layers(name: str) -> None:
    """Off by one would leave the text right and the acceptance poor."""
    model = build(BY_NAME[name])
    target = target_for(model)
    outputs = []
    h = model.model.embed_tokens(mx.array([prompt_of(7)]))
    for layer, entry in zip(model.model.layers, make_prompt_cache(model), strict=True):
        h = layer(h, None if isinstance(entry, ArraysCache) else "causal", entry)
        outputs.append(h)
    for taps in [(0,), (3,), (1, 2), (2, 0)]:
        cache = TargetCache(target.make_entries(), 0)
        cache.begin(7)
        features = target.forward(mx.array([prompt_of(7)]), cache, taps).features
        assert mx.array_equal(features, mx.concatenate([outputs[tap] for tap in taps], axis=-1))


def test_the_last_tap_is_before_the_final_norm() -> None:
    target = target_for(tiny("llama"))
    cache = TargetCache(target.make_entries(), 0)
    cache.begin(3)
    forward = target.forward(mx.array([[1, 2, 3]]), cache, (3,))
    assert mx.array_equal(forward.features, forward.hidden)


def test_nothing_is_stored_on_the_model() -> None:
    """Two drafts with other taps share a target."""
    model = build(BY_NAME["qwen3"])
    before = (set(vars(model)), set(model), [type(layer) for layer in model.layers])
    target = target_for(model)
    cache = TargetCache(target.make_entries(), 0)
    cache.begin(2)
    target.forward(mx.array([[1, 2]]), cache, (1,))
    assert (set(vars(model)), set(model), [type(layer) for layer in model.layers]) == before


def test_an_unknown_model_is_refused_with_what_is_supported() -> None:
    from mlx_lm.models import gemma

    args = gemma.ModelArgs("gemma", 8, 1, 8, 1, 8, 1e-5, 11, 1)
    with pytest.raises(UnsupportedTarget, match=r"gemma\.Model has no adapter.*llama, qwen2, qwen3, .*targets"):
        target_for(gemma.Model(args))


def test_a_split_model_is_refused() -> None:
    model = build(BY_NAME["qwen2"])
    model.model.pipeline_size = 2
    with pytest.raises(UnsupportedTarget, match="split over 2 machines"):
        target_for(model)
