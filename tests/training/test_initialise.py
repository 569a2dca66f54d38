"""Where a training begins: with what the target knows, with an existing draft, or with noise."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.lora import LoRALinear

from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.targets import Target, target_for
from dflash_mlx.training.architecture import draft_config
from dflash_mlx.training.initialise import FeatureScales, new_draft
from dflash_mlx.training.recipe import Recipe, RecipeError
from tests import checkpoints
from tests.families import BY_NAME, VOCAB, build, tiny

SMALL = Recipe(layers=2, block_size=4)
CONTEXT = 24
STDS = (2.0, 16.0, 0.5, 8.0, 4.0)
_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MATRICES += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def begun(name: str | Target, tokenizer: TokenizerWrapper, recipe: Recipe = SMALL) -> DraftModel:
    """A new draft for a tiny target, with the scales STDS folded in."""
    target = target_for(tiny(name)) if isinstance(name, str) else name
    config = draft_config(target, tokenizer, recipe)
    return new_draft(target, recipe, config, scales_for(len(config.target_layer_ids)))


def scales_for(taps: int) -> FeatureScales:
    return FeatureScales(np.array(STDS[:taps]))


def features_for(draft: DraftModel, rows: int = CONTEXT) -> np.ndarray:
    """[1, rows, F] plain features, each tap in its size."""
    taps, hidden = len(draft.config.target_layer_ids), draft.config.hidden_size
    noise = np.random.default_rng(7).standard_normal((1, rows, taps, hidden), np.float32)
    return (noise * np.array(STDS[:taps], np.float32)[:, None]).reshape(1, rows, -1)


def denoised(draft: DraftModel, features: np.ndarray) -> np.ndarray:
    """[K, H]: one block behind these features."""
    context = draft.make_context()
    draft.extend(context, mx.array(features))
    rows = np.random.default_rng(8).standard_normal((1, 4, draft.config.hidden_size), np.float32)
    return np.array(draft.denoise(mx.array(rows), context)[0])


def parameters(module: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-4bit", "gemma3_text"])
def test_layers_are_those_of_the_targets_end(name: str, tokenizer: TokenizerWrapper) -> None:
    """The first layers, or packed numbers taken for weights, would cost most of the head start."""
    target, draft = target_for(tiny(name)), begun(name, tokenizer)
    assert draft.notes == ()
    for index, layer in enumerate(draft.layers):
        theirs = parameters(target.model.model.layers[2 + index])
        for matrix in _MATRICES:
            expected = theirs[f"{matrix}.weight"]
            if f"{matrix}.scales" in theirs:
                expected = mx.dequantize(expected, theirs[f"{matrix}.scales"], theirs[f"{matrix}.biases"], 32, 4)
            assert mx.array_equal(parameters(layer)[f"{matrix}.weight"], expected)
    assert all(value.dtype == mx.float32 for value in parameters(draft).values())


def test_norms_that_count_from_one_become_plain(tokenizer: TokenizerWrapper) -> None:
    """A draft multiplies by the weight itself: taken as they are, Gemma's would nearly erase every row."""
    model = build(BY_NAME["gemma3_text"])
    for layer in model.model.layers:
        for name in ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm"):
            layer[name].weight = mx.random.normal((64,), key=mx.random.key(len(name))) * 0.3
        layer.self_attn.k_norm.weight = mx.full((16,), 0.25)
    draft = begun(target_for(model), tokenizer)
    last, theirs = draft.layers[-1], model.model.layers[-1]
    assert mx.array_equal(last.input_layernorm.weight, 1 + theirs.input_layernorm.weight)
    assert mx.array_equal(last.post_attention_layernorm.weight, 1 + theirs.pre_feedforward_layernorm.weight)
    assert mx.array_equal(last.self_attn.k_norm.weight, mx.full((16,), 1.25))
    assert mx.array_equal(draft.norm.weight, 1 + model.model.norm.weight)
    # Gemma divides scores by another number than a draft, which the norm of the queries makes up for.
    assert mx.allclose(last.self_attn.q_norm.weight, (1 + theirs.self_attn.q_norm.weight) * (16 / 256) ** 0.5)


def test_norms_of_qwen_are_plain_already(tokenizer: TokenizerWrapper) -> None:
    """mlx_lm adds the one when it loads; a second one would double them."""
    model = build(BY_NAME["qwen3_5"])
    inner = target_for(model).inner
    inner.layers[-1].input_layernorm.weight = mx.full((64,), 1.5)
    inner.norm.weight = mx.full((64,), 0.75)
    draft = begun(target_for(model), tokenizer)
    assert draft.layers[-1].input_layernorm.weight[0].item() == 1.5
    assert draft.norm.weight[0].item() == 0.75


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama-4bit"])
def test_a_new_draft_reads_the_deepest_tap_as_the_target_does(name: str, tokenizer: TokenizerWrapper) -> None:
    """The context's values of its layer are those that the target's own layer makes of the same features."""
    model = build(BY_NAME[name])
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.weight = mx.random.uniform(0.5, 1.5, (64,), key=mx.random.key(index))
    target = target_for(model)
    recipe = SMALL.changed(layers=1, taps=(0, 2))  # layer 3 reads what layer 2 says
    draft = begun(target, tokenizer, recipe)
    layer, output = target.model.model.layers[3], np.random.default_rng(1).standard_normal((1, 9, 64), np.float32)
    expected = layer.self_attn.v_proj(layer.input_layernorm(mx.array(output * STDS[1])))
    features = np.concatenate([np.zeros((1, 9, 64), np.float32), output], axis=-1)
    found = draft.layers[0].self_attn.v_proj(draft.hidden_norm(draft.fc(mx.array(features))))
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-3)
    shallow = np.array(draft.fc.weight[:, :64])
    assert 0 < np.abs(shallow).max() < 0.1  # and a little of the others, so that they can be learned


def test_a_draft_shares_no_memory_with_its_target(tokenizer: TokenizerWrapper) -> None:
    """An optimiser that writes in place would change the target."""
    model = build(BY_NAME["qwen3"])
    draft = begun(target_for(model), tokenizer)

    def places(module: nn.Module) -> set[int]:
        return {np.array(value, copy=False).__array_interface__["data"][0] for value in parameters(module).values()}

    assert not places(draft) & places(model)
    before = {name: np.array(value) for name, value in parameters(model).items()}
    for value in parameters(draft).values():
        value[:] = 0
    assert all(np.array_equal(before[name], value) for name, value in parameters(model).items())


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("qwen3_moe", ["the MLP of draft layers 0, 1 begins at random: the target's layer has none, or another kind"]),
        (
            "qwen3_5",
            [
                "the attention of draft layer 0 begins at random: the target's layer has none with projections",
                "the attention of draft layer 1 begins at random: the target's `q_proj` is [128, 64], a draft's",
            ],
        ),
        ("qwen2", ["the attention of draft layers 0, 1 begins without the target's biases"]),
        ("olmo2", ["`q_norm` of draft layers 0, 1 begins at random: the target's has the shape [64]", "`k_norm` of"]),
        ("phi3", ["the attention of draft layers 0, 1 begins at random", "the MLP of draft layers 0, 1"]),
    ],
)
def test_what_does_not_fit_begins_at_random_and_is_said(
    name: str, notes: list[str], tokenizer: TokenizerWrapper
) -> None:
    """A head start that is not there would be believed to be."""
    draft = begun(name, tokenizer)
    assert len(draft.notes) == len(notes)
    assert all(found.startswith(expected) for found, expected in zip(draft.notes, notes, strict=True))
    assert np.isfinite(denoised(draft, features_for(draft))).all()


def test_layers_beyond_the_targets_begin_at_random(tokenizer: TokenizerWrapper) -> None:
    draft = begun("llama", tokenizer, SMALL.changed(layers=5))
    assert draft.notes == ("everything of draft layer 0 begins at random: the target has 4 layers",)
    first = target_for(tiny("llama")).model.model.layers[0]
    assert mx.array_equal(draft.layers[1].mlp.up_proj.weight, first.mlp.up_proj.weight)


def test_a_norm_behind_a_sublayer_is_not_taken_for_one_before(tokenizer: TokenizerWrapper) -> None:
    """OLMo 2 norms outputs only, under the name that others have before their MLP."""
    model = build(BY_NAME["olmo2"])
    model.model.layers[-1].post_attention_layernorm.weight = mx.full((64,), 3.0)
    draft = begun(target_for(model), tokenizer)
    assert mx.array_equal(draft.layers[-1].post_attention_layernorm.weight, mx.ones((64,)))


def test_an_adapter_of_the_target_is_copied_too(tokenizer: TokenizerWrapper) -> None:
    """A draft for a fine-tune would begin with the model before it."""
    model = build(BY_NAME["llama"])
    attention = model.model.layers[-1].self_attn
    plain = attention.v_proj.weight
    attention.v_proj = LoRALinear.from_base(attention.v_proj, r=2, scale=1.0)
    attention.v_proj.lora_b = mx.ones_like(attention.v_proj.lora_b)
    draft = begun(target_for(model), tokenizer)
    found = draft.layers[-1].self_attn.v_proj.weight
    change = (attention.v_proj.lora_a @ attention.v_proj.lora_b).T
    assert mx.allclose(found, plain + change, atol=1e-6) and not mx.allclose(found, plain, atol=1e-3)


def test_random_drafts_have_the_targets_final_norm_and_follow_the_seed(tokenizer: TokenizerWrapper) -> None:
    """Without that norm the shared head begins far off; without the seed a run could not be repeated."""
    model = build(BY_NAME["llama"])
    model.model.norm.weight = mx.full((64,), 2.5)
    first, same, other = (
        begun(target_for(model), tokenizer, SMALL.changed(initial="random", seed=seed)) for seed in (1, 1, 2)
    )
    assert mx.array_equal(first.norm.weight, model.model.norm.weight)
    assert all(mx.array_equal(value, parameters(same)[name]) for name, value in parameters(first).items())
    assert not mx.array_equal(first.fc.weight, other.fc.weight)
    fused = scales_for(1).divided(features_for(first))
    assert 0.5 < float(mx.std(first.fc(mx.array(fused))).item()) < 2


@pytest.mark.parametrize("initial", ["target", "random"])
def test_a_new_dflash_2_draft_does_what_v1_does(initial: str, tokenizer: TokenizerWrapper) -> None:
    """Its convolutions and its selector are learned from no effect on."""
    recipe = SMALL.changed(initial=initial)
    first = begun("llama", tokenizer, recipe)
    second = begun("llama", tokenizer, recipe.changed(second=True, rank=8, candidates=6))
    features = features_for(first)
    assert np.array_equal(denoised(first, features), denoised(second, features))
    check_selector_changes_nothing(second, denoised(second, features))


def check_selector_changes_nothing(draft: DraftModel, hidden: np.ndarray) -> None:
    logits = mx.array(np.random.default_rng(3).standard_normal((len(hidden), VOCAB), np.float32))
    path = draft.candidate_selector.walk(mx.array(hidden), logits, mx.array([5]), lambda s, row: mx.argmax(s, axis=1))
    assert path.tokens.tolist() == mx.argmax(logits, axis=1).tolist()
    assert (
        np.abs(np.array(draft.candidate_selector.successor_codebook)).max() > 0.1
    )  # a zero on both sides never learns
    assert np.abs(np.array(draft.candidate_selector.hidden_projection.weight)).max() > 0.01


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_to_begin_with_does_what_it_did(
    second: bool, packed: bool, tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    """Before the first step nothing may be lost, also not by becoming DFlash 2."""
    config = checkpoints.v1_config(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    tensors = checkpoints.tensors_of(config)
    if packed:
        config["quantization"] = {"group_size": 32, "bits": 4}
        tensors = checkpoints.quantized(tensors)
    folder = checkpoints.write(tmp_path / "draft", config, tensors)
    recipe = Recipe(initial=str(folder), block_size=4, second=second, rank=8, candidates=6)
    draft = begun("llama", tokenizer, recipe)
    served = scales_for(2).out_of(draft)
    assert served.block_size == 4 and served.config.quantization is None
    old = load_draft(folder, dtype=mx.float32, packed=False)
    features = features_for(old)
    expected = denoised(old, features)
    assert np.array_equal(denoised(served, features), expected)
    assert np.array_equal(denoised(draft, scales_for(2).divided(features)), expected)
    if second:
        check_selector_changes_nothing(served, expected)
        assert draft.notes == ("it becomes DFlash 2: its convolutions and its selector begin without an effect",)


def test_a_draft_that_was_changed_meanwhile_is_refused(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    target, folder = target_for(tiny("llama")), checkpoints.v1(tmp_path / "draft")
    recipe = Recipe(initial=str(folder))
    config = draft_config(target, tokenizer, recipe)
    checkpoints.v1(folder, intermediate_size=64)
    with pytest.raises(RecipeError, match=r"mlp.*has|has `layers.0.mlp"):
        new_draft(target, recipe, config, scales_for(2))


def test_an_embedding_of_its_own_is_not_trained(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Weight decay would shrink what no gradient reaches."""
    folder = checkpoints.speculators(tmp_path / "draft", own_embedding=True)
    draft = begun("llama", tokenizer, Recipe(initial=str(folder)))
    names = {name for name, _ in tree_flatten(draft.trainable_parameters())}
    assert "embed_tokens.weight" not in names and "fc.weight" in names
    served = scales_for(2).out_of(draft)
    assert "embed_tokens.weight" in parameters(served)


def test_scales_fold_in_and_out_without_a_trace(tokenizer: TokenizerWrapper) -> None:
    """A draft is trained on divided features and served on plain ones: any difference is lost acceptance."""
    recipe = SMALL.changed(taps=(0, 1, 2), initial="random")
    draft, scales = begun("llama", tokenizer, recipe), scales_for(3)
    served = scales.out_of(draft)
    features = features_for(draft)
    assert np.array_equal(denoised(served, features), denoised(draft, scales.divided(features)))
    assert not np.array_equal(served.fc.weight, draft.fc.weight)
    again = scales.into(served)
    assert mx.array_equal(again.fc.weight, draft.fc.weight)
    assert np.array_equal(scales.divided(features), features / np.repeat(scales.std, 64))


def test_uneven_scales_fold_up_to_rounding(tokenizer: TokenizerWrapper) -> None:
    draft = scales_for(3).out_of(begun("llama", tokenizer, SMALL.changed(taps=(0, 1, 2))))
    scales = FeatureScales(np.array([2.9, 6.6, 25.0]))
    features = features_for(draft)
    folded = scales.into(draft)
    assert np.allclose(denoised(folded, scales.divided(features)), denoised(draft, features), atol=1e-4)
    assert np.allclose(scales.out_of(folded).fc.weight, draft.fc.weight, rtol=1e-6, atol=0)


def test_scales_are_not_folded_twice(tokenizer: TokenizerWrapper) -> None:
    """Twice in, or once too often out, and a draft accepts nothing, without an error."""
    draft = begun("llama", tokenizer, SMALL.changed(taps=(0, 2)))
    scales = scales_for(2)
    with pytest.raises(ValueError, match="has feature scales folded in already"):
        scales.into(draft)
    with pytest.raises(ValueError, match=r"has the scales \[2.0, 16.0\] folded in, so \[1.0, 1.0\] cannot"):
        FeatureScales(np.ones(2)).out_of(draft)
    served = scales.out_of(draft)
    with pytest.raises(ValueError, match="has no feature scales folded in"):
        scales.out_of(served)
    with pytest.raises(ValueError, match="reads 2 taps, and these are the scales of 3"):
        scales_for(3).into(served)
    with pytest.raises(ValueError, match=r"one for each tap \[2\], got \[2.0, 16.0\]"):
        target = target_for(tiny("llama"))
        new_draft(target, SMALL, draft_config(target, tokenizer, SMALL), scales)


def test_folding_leaves_the_draft_in_training_alone(tokenizer: TokenizerWrapper) -> None:
    """Evaluating in the middle of a run would change it."""
    draft, scales = begun("llama", tokenizer), scales_for(1)
    before = {name: np.array(value) for name, value in parameters(draft).items()}
    scales.out_of(draft)
    assert all(np.array_equal(before[name], value) for name, value in parameters(draft).items())


def test_scales_survive_json() -> None:
    scales = FeatureScales(np.array([0.1, 2.9, 1e3]))
    assert np.array_equal(FeatureScales.from_json(json.loads(json.dumps(scales.to_json()))).std, scales.std)


def sequences(offset: float = 0.0) -> list[np.ndarray]:
    """Two answers of two taps with the sizes 3 and 20; position 0 is a sink."""
    generator = np.random.default_rng(5)
    found = [generator.standard_normal((rows, 2, 64), np.float32) * [[3.0], [20.0]] + offset for rows in (40, 70)]
    for rows in found:
        rows[0] *= 1000
    return [rows.reshape(len(rows), -1).astype(np.float32) for rows in found]


def test_scales_are_measured_without_the_first_position() -> None:
    """The sink alone would make the scales a hundred times too large."""
    assert FeatureScales.measure(sequences(), taps=2).std.tolist() == [4.0, 16.0]  # the nearest powers of two
    assert FeatureScales.measure([rows.astype(np.float16)[:64] for rows in sequences()], taps=2).std[1] == 16.0


def test_a_large_mean_does_not_hide_what_varies() -> None:
    """Summed in float32, squares of 10000 leave no digit for a deviation of 3."""
    assert FeatureScales.measure(sequences(offset=1e4), taps=2).std.tolist() == [4.0, 16.0]


def test_features_that_cannot_be_scaled_are_refused() -> None:
    """Overflown or constant features would become NaN in the first step."""
    broken = sequences()
    broken[1][5, 70] = np.inf
    with pytest.raises(ValueError, match=r"features of tap 1 .* too large for float16"), np.errstate(invalid="ignore"):
        FeatureScales.measure(broken, taps=2)
    with pytest.raises(ValueError, match="features of tap 0"):
        FeatureScales.measure([np.ones((4, 8))], taps=2)
    with pytest.raises(ValueError, match="no position after their first"):
        FeatureScales.measure([np.ones((1, 8))], taps=2)
    with pytest.raises(ValueError, match="`std` has to be a positive, finite number"):
        FeatureScales(np.array([1.0, 0.0]))
