"""Our layer loop is the model's own forward, bit for bit. The alarm for a change in mlx_lm."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import decode
from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.targets import target_for
from tests.conftest import greedy_session, tokens_of
from tests.families import BY_NAME, EVERY, FAMILIES, SCRIPTS, ScriptedProposer, build, prompt_of, reference, tiny


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


@pytest.mark.parametrize("name", BY_NAME)
def test_features_are_the_residual_stream_after_the_tapped_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by one would leave the text right and the acceptance poor. The model's own forward is overheard."""
    model, ids = build(BY_NAME[name]), mx.array([prompt_of(7)])
    outputs: dict[int, mx.array] = {}
    with monkeypatch.context() as patch:
        for kind in {type(layer) for layer in model.layers}:
            overhear(patch, kind, outputs)
        model(ids, cache=make_prompt_cache(model))
    target = target_for(model)
    heard = [outputs[id(layer)] for layer in model.layers]
    assert len(heard) == target.spec.n_layers
    last = len(heard) - 1
    for taps in [(0,), (last,), (1, 2), (2, 0), tuple(range(len(heard)))]:
        cache = TargetCache(target.make_entries(), 0)
        cache.begin(7)
        features = target.forward(ids, cache, taps).features
        assert mx.array_equal(features, mx.concatenate([heard[tap] for tap in taps], axis=-1)), taps


def overhear(patch: pytest.MonkeyPatch, kind: type, outputs: dict[int, mx.array]) -> None:
    """Note what layers of this class return, by layer; Gemma 4's also return keys and values."""
    call = kind.__call__

    def note(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        outputs[id(self)] = result[0] if isinstance(result, tuple) else result
        return result

    patch.setattr(kind, "__call__", note)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_last_tap_is_before_the_final_norm(name: str) -> None:
    target = target_for(tiny(name))
    cache = TargetCache(target.make_entries(), 0)
    cache.begin(3)
    forward = target.forward(mx.array([[1, 2, 3]]), cache, (target.spec.n_layers - 1,))
    assert mx.array_equal(forward.features, forward.hidden)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_the_draft_shares_the_raw_head_and_the_models_embedding(name: str) -> None:
    """A head with the target's soft-cap or multiplier in it would change what the draft was trained for."""
    model = tiny(name)
    target, text = target_for(model), model.get("language_model", model)
    inner = text.get("model", text.get("backbone"))
    table = inner.get("embed_tokens", inner.get("embeddings"))
    head = text.get("lm_head", text.get("output", table))
    rows = mx.random.normal((1, 2, 64))
    assert mx.array_equal(target.head(rows), rows @ head.weight.T)
    assert target.spec.vocab_size == table.weight.shape[0] and target.spec.hidden_size == 64
    entries = target.make_entries()
    heard: list[mx.array] = []
    first = type(model.layers[0])
    with pytest.MonkeyPatch.context() as patch:
        call = first.__call__
        patch.setattr(first, "__call__", lambda self, h, *args, **kw: heard.append(h) or call(self, h, *args, **kw))
        model(mx.array([[5, 7]]), cache=entries)
    assert mx.array_equal(target.embed(mx.array([[5, 7]])), heard[0])


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_a_block_gives_the_bits_of_single_rows_unless_the_family_says_how_far_they_are(
    name: str, dtype: mx.Dtype
) -> None:
    """What the token tests rest on; a family that declares a rounding has to need it."""
    model, width = tiny(name, dtype), 8
    block, single = make_prompt_cache(model), make_prompt_cache(model)
    for cache in (block, single):
        model(mx.array([prompt_of(7)]), cache=cache)
    ids = mx.array([prompt_of(width, seed=5)])
    together = model(ids, cache=block)
    apart = mx.concatenate([model(ids[:, i : i + 1], cache=single) for i in range(width)], axis=1)
    difference = mx.abs(together - apart).max().item()
    allowed = BY_NAME[name].rounding.get(dtype, 0.0)
    assert (difference > 0) == (allowed > 0) and difference <= allowed


@pytest.mark.parametrize(("name", "dtype"), [case for case in EVERY if BY_NAME[case.values[0]].rounding])
@pytest.mark.parametrize("script", ["all", "wide"])
def test_where_widths_round_apart_every_token_is_a_choice_within_the_rounding(
    name: str, dtype: mx.Dtype, script: str
) -> None:
    """The text may leave plain decoding's at a near-tie, and only there."""
    prompt, model = prompt_of(21, seed=5), tiny(name, dtype)
    truth = reference(name, prompt, 60, dtype)
    session = greedy_session(name, ScriptedProposer(truth, SCRIPTS[script]), 8, dtype)
    tokens = tokens_of(decode(session, prompt, max_tokens=60))
    assert session.stats.accepted > 20
    plain = make_prompt_cache(model)
    model(mx.array([prompt[:-1]]), cache=plain)
    for token, before in zip(tokens, [prompt[-1], *tokens[:-1]], strict=True):
        logits = model(mx.array([[before]]), cache=plain)[0, -1]
        assert (logits.max() - logits[token]).item() <= BY_NAME[name].rounding[dtype]


def test_nothing_is_stored_on_the_model() -> None:
    """Two drafts with other taps share a target."""
    model = build(BY_NAME["qwen3"])
    before = (set(vars(model)), set(model), [type(layer) for layer in model.layers])
    target = target_for(model)
    cache = TargetCache(target.make_entries(), 0)
    cache.begin(2)
    target.forward(mx.array([[1, 2]]), cache, (1,))
    assert (set(vars(model)), set(model), [type(layer) for layer in model.layers]) == before


@pytest.mark.parametrize("name", ["llama4_text", "qwen2", "qwen3_5-shell"])
def test_a_split_model_is_refused(name: str) -> None:
    """Another machine has the other layers."""
    model = build(BY_NAME[name])
    model.get("language_model", model).model.pipeline_size = 2
    with pytest.raises(UnsupportedTarget, match="split over 2 machines"):
        target_for(model)


def test_a_model_with_a_part_of_the_vocabulary_is_refused() -> None:
    """Its head gives one machine's share of the logits; shared with nobody it is whole."""

    class Group:
        def __init__(self, machines: int) -> None:
            self.size = lambda: machines

    model = build(BY_NAME["qwen3_5"])
    model.language_model.sharding_group = Group(1)
    target_for(model)
    model.language_model.sharding_group = Group(4)
    with pytest.raises(UnsupportedTarget, match="split over 4 machines"):
        target_for(model)
