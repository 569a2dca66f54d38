"""Kernels are wired into a view of a model; the model that was loaded stays as mlx_lm made it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.cache import TargetCache
from dflash_mlx.kernels import view
from dflash_mlx.kernels.choice import STOCK, references
from dflash_mlx.kernels.view import survey, view_of
from dflash_mlx.targets import target_for
from tests.families import FAMILIES, tiny
from tests.kernels.fake_operation import CASE, Marked, mark

IDS = mx.array([[(i * 7919 + 1) % 257 for i in range(24)]])


def _tree(value: Any) -> Any:
    """Every module, container and value below, by identity and in order, so that any write shows."""
    if isinstance(value, nn.Module):
        parts = [(name, _tree(part)) for name, part in [*value.items(), *vars(value).items()]]
        return (id(value), type(value), parts)
    if isinstance(value, dict):
        return (id(value), [(name, _tree(part)) for name, part in value.items()])
    if isinstance(value, list | tuple):
        return (id(value), [_tree(part) for part in value])
    return (id(value), sorted(value)) if isinstance(value, set) else id(value)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_view_computes_the_same_and_the_model_is_not_touched(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules, shared ones, lists and settings; what is replaced is replaced in the view only."""
    monkeypatch.setattr(view, "SWAPS", (mark,))
    model = tiny(family.name)
    expected = model(IDS)
    before, parameters = _tree(model), dict(tree_flatten(model.parameters()))
    seen = view_of(model, references())
    cache = make_prompt_cache(seen)
    out = mx.concatenate([seen(IDS[:, :9], cache=cache), seen(IDS[:, 9:], cache=cache)], axis=1)
    assert mx.array_equal(seen(IDS), expected) and out.shape == expected.shape
    assert _tree(model) == before
    assert all(parameters[name] is array for name, array in tree_flatten(model.parameters()))
    originals = {id(module) for module in model.modules()}
    assert not any(id(module) in originals for module in seen.modules()), "a module of the model is in the view"
    arrays = {id(array) for array in parameters.values()}
    assert {id(array) for _, array in tree_flatten(seen.parameters())} == arrays, "the view has other arrays"


def test_what_is_replaced_is_replaced_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "SWAPS", (mark,))
    seen = view_of(tiny("llama"), references())
    assert all(type(layer.mlp) is Marked for layer in seen.layers)
    assert survey(seen) == [CASE]
    assert not any(isinstance(module, Marked) for module in tiny("llama").modules())


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_modules_that_ship_compute_the_models_own_bits(family: Any, bits: int | None) -> None:
    """With every reference in place of a kernel: a prompt, blocks and single rows, dense and quantised."""
    model = tiny(family.name)
    if bits:
        model = copy.deepcopy(model)
        nn.quantize(
            model, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
        )
    seen = view_of(model, references())
    mine, theirs, done = make_prompt_cache(model), make_prompt_cache(model), 0
    for width in (20, 2, 1, 1):
        ids = IDS[:, done : done + width]
        done += width
        assert mx.array_equal(seen(ids, cache=mine), model(ids, cache=theirs)), f"{width} rows at {done - width}"


class Shared(nn.Module):
    """One module under three names, in a list and in a tuple in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.held = [self.first, {"inside": (self.first, 3)}]
        object.__setattr__(self, "aside", self.held)

    def __call__(self, x: mx.array) -> mx.array:
        return self.again(self.first(x))


def test_what_is_shared_stays_shared() -> None:
    """Two copies of one module would be replaced twice, and tied weights would come apart."""
    model = Shared()
    seen = view_of(model, references())
    assert seen.first is seen.again is seen.held[0] is seen.held[1]["inside"][0]
    assert seen.first is not model.first and vars(seen)["aside"] is seen.held and seen.held is not model.held
    assert seen.first.weight is model.first.weight
    seen.freeze()
    assert not model.first._no_grad, "freezing the view reached the model"


def test_what_is_shared_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module decides for itself what it runs on: one that is two would decide twice."""
    monkeypatch.setattr(view, "SWAPS", (lambda module, _: Marked(module) if type(module) is nn.Linear else None,))
    seen = view_of(Shared(), references())
    assert type(seen.first) is Marked and seen.first is seen.again is seen.held[0] is seen.held[1]["inside"][0]


def test_a_model_without_wired_kernels_is_used_itself() -> None:
    """Where no kernel runs, what runs is byte for byte what ran before there were any."""
    model = tiny("llama")
    assert view_of(model, STOCK) is model and target_for(model).embedding is model.model.embed_tokens
    assert not STOCK.views


def test_a_view_is_made_once_and_again_when_the_model_was_changed() -> None:
    """An adapter loaded into the model later has to show: the text would be another model's."""
    model, kernels = copy.deepcopy(tiny("llama")), references()
    seen = view_of(model, kernels)
    assert view_of(model, kernels) is seen and view_of(model, references()) is not seen
    model.layers[1].mlp.up_proj.weight = model.layers[1].mlp.up_proj.weight * 2
    again = view_of(model, kernels)
    assert again is not seen and mx.array_equal(again(IDS), model(IDS))
    model.layers[0].mlp = nn.Linear(64, 64)
    assert mx.array_equal(view_of(model, kernels)(IDS), model(IDS))
    model.layers[0].self_attn.scale *= 2
    assert mx.array_equal(view_of(model, kernels)(IDS), model(IDS))
    assert len(kernels.views) == 1


def test_a_view_does_not_keep_a_model_alive() -> None:
    """Loading another model would otherwise need room for both."""
    model, kernels = copy.deepcopy(tiny("llama")), references()
    seen = weakref.ref(view_of(model, kernels))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and seen() is None and not kernels.views


def test_kernels_that_are_gone_leave_no_views() -> None:
    kernels = references()
    seen = weakref.ref(view_of(tiny("llama"), kernels))
    del kernels
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("name", ["llama", "qwen3_5-shell", "gemma4"])
def test_an_adapter_over_a_view_names_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt caches and their files belong to the model that was loaded, with kernels or without."""
    monkeypatch.setattr(view, "SWAPS", (mark,))
    model, kernels = tiny(name), references()
    stock, target = target_for(model), target_for(model, kernels)
    assert target.model is model and target.text is not stock.text and target.spec == stock.spec
    caches = [TargetCache(target.make_entries(), 0) for target in (stock, target)]
    outputs = []
    for adapter, cache in zip((stock, target), caches, strict=True):
        cache.begin(5)
        outputs.append(adapter.logits(adapter.forward(IDS[:, :5], cache).hidden))
        cache.commit(5)
    assert mx.array_equal(*outputs)


def test_a_probed_model_has_a_view_too() -> None:
    """Models without an adapter of their own; their note stays."""
    from mlx_lm.models import olmo2

    config = dict(
        model_type="olmo2", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
        rms_norm_eps=1e-5, vocab_size=257, num_key_value_heads=2,
    )  # fmt: skip
    model = olmo2.Model(olmo2.ModelArgs.from_dict(config))
    target = target_for(model, references())
    assert target.model is model and target.text is not model and "probe tokens" in (target.spec.note or "")
