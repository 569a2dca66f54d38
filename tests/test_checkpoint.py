"""Draft folders: every spelling reads alike, a wrong one cannot hide, a foreign pair is refused."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.checkpoint import check_pair, load_draft, read_config
from dflash_mlx.errors import CheckpointError, IncompatiblePair
from dflash_mlx.targets import target_for
from tests.conftest import DRAFT_CONFIG, tiny_draft
from tests.families import tiny

CONFIG = DRAFT_CONFIG | {"model_type": "qwen3"}


def without(*keys: str) -> dict:
    return {k: v for k, v in CONFIG.items() if k not in keys}


def nested(**values: object) -> dict:
    return {"dflash_config": CONFIG["dflash_config"] | values}


def write(folder: Path, draft=None, config: dict | None = None, weights: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    draft = draft or tiny_draft()
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    tensors = dict(tree_flatten(draft.parameters())) if weights is None else weights
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        without("block_size") | nested(block_size=16),  # nested only
        CONFIG | nested(block_size=16),  # both, agreeing
        without("rope_theta") | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},  # transformers 5
        CONFIG | {"rope_parameters": {"rope_theta": 10000.0}},
        CONFIG | {"rope_scaling": {"rope_type": "default"}},
        without("dflash_config") | {"target_layer_ids": [0, 2], "mask_token_id": 256},  # all at the top
        CONFIG | {"layer_types": ["full_attention"] * 2, "use_sliding_window": False, "max_window_layers": 5},
        without("num_target_layers") | nested(num_target_layers=4),
        CONFIG | {"attention_dropout": 0.0, "auto_map": {"AutoModel": "x.y"}, "something_new": 3},  # extras
    ],
)
def test_every_spelling_reads_alike(config: dict) -> None:
    assert DraftConfig.from_dict(config) == DraftConfig.from_dict(CONFIG)


def test_block_size_defaults_to_the_trained_16() -> None:
    assert DraftConfig.from_dict(without("block_size")).block_size == 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without("rope_theta"), "`rope_theta` is missing, both in `rope_parameters` and at the top level"),
        (
            CONFIG | {"rope_parameters": {"rope_theta": 5e6}},
            "`rope_theta` is 5000000.0 in `rope_parameters` and 10000.0",
        ),
        (without("dflash_config") | {"mask_token_id": 256}, "`target_layer_ids` is missing"),
        (without("dflash_config") | {"target_layer_ids": [0, 2]}, "`mask_token_id` is missing"),
        (CONFIG | nested(block_size=8), "`block_size` is 8 in `dflash_config` and 16 at the top level"),
        (CONFIG | nested(target_layer_ids=[0, 4]), r"`target_layer_ids` \[0, 4\] have to be in 0\.\.3"),
        (CONFIG | nested(target_layer_ids=[-1, 2]), r"have to be in 0\.\.3"),
        (CONFIG | {"layer_types": ["full_attention"]}, "`layer_types` names 1 layers, `num_hidden_layers` is 2"),
        (CONFIG | {"layer_types": ["full_attention", "linear_attention"]}, "unknown layer type 'linear_attention'"),
        (CONFIG | {"layer_types": ["sliding_attention"] * 2}, "sliding layers need `sliding_window`"),
        (CONFIG | {"block_size": 1}, "`block_size` has to be 2 or more, got 1"),
        (CONFIG | {"hidden_size": 0}, "`hidden_size` has to be positive, got 0"),
        (CONFIG | {"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        (CONFIG | {"architectures": ["DFlash2DraftModel"]}, "This is a DFlash 2 draft"),
        (CONFIG | {"architectures": ["LlamaForCausalLM"]}, r"`architectures` is \['LlamaForCausalLM'\]"),
        (CONFIG | {"speculators_model_type": "dflash"}, "a checkpoint in the speculators format"),
        (CONFIG | nested(sample_from_anchor=True), "predicts from the anchor row"),
        (CONFIG | {"markov_rank": 64}, "a Markov head"),
    ],
)
def test_a_config_that_would_cost_acceptance_is_refused(config: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DraftConfig.from_dict(config)


def test_causality_follows_the_precedence_of_the_checkpoints() -> None:
    """`is_causal`, then `dflash_config.causal`, then the layer type."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

    def causal(config: dict) -> list[bool]:
        read = DraftConfig.from_dict(config)
        return [read.is_causal(0), read.is_causal(1)]

    assert causal(CONFIG | layers) == [True, False]
    assert causal(CONFIG | layers | nested(causal=False)) == [False, False]
    assert causal(CONFIG | layers | nested(causal=False) | {"is_causal": True}) == [True, True]


def test_a_folder_loads_with_the_weights_it_holds(tmp_path: Path) -> None:
    draft = tiny_draft(seed=9)
    loaded = load_draft(write(tmp_path / "my-draft", draft))
    assert loaded.name == "my-draft" and loaded.block_size == 16
    for (key, a), (_, b) in zip(tree_flatten(loaded.parameters()), tree_flatten(draft.parameters()), strict=True):
        assert mx.array_equal(a, b), key


def test_a_leading_model_prefix_and_several_files_are_fine(tmp_path: Path) -> None:
    weights = list(tree_flatten(tiny_draft().parameters()))
    folder = write(tmp_path, weights={f"model.{k}": v for k, v in weights[:9]})
    mx.save_safetensors(str(folder / "model-2.safetensors"), dict(weights[9:]))
    assert load_draft(folder).config.num_layers == 2


def test_float16_weights_run_in_float32(tmp_path: Path) -> None:
    """Fused features overflow float16."""
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(tiny_draft().parameters())}
    assert load_draft(write(tmp_path, weights=weights)).dtype == mx.float32


@pytest.mark.parametrize("packed", [True, False])
def test_a_draft_quantised_in_part_loads_and_computes_alike(tmp_path: Path, packed: bool) -> None:
    """Exactly the modules that carry scales are quantised."""
    draft = tiny_draft(seed=4)
    nn.quantize(
        draft, group_size=32, bits=8, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "mlp" in path
    )
    folder = write(tmp_path, draft, CONFIG | {"quantization": {"group_size": 32, "bits": 8}})
    loaded = load_draft(folder, packed=packed)
    assert isinstance(loaded.layers[0].mlp.up_proj, nn.QuantizedLinear) is packed
    assert isinstance(loaded.layers[0].self_attn.q_proj, nn.Linear)
    features, block = mx.random.normal((1, 5, 128)), mx.random.normal((1, 4, 64))
    outs = []
    for model in (draft, loaded):
        context = model.make_context()
        model.extend(context, features)
        outs.append(model.denoise(block, context))
    assert mx.abs(outs[0] - outs[1]).max().item() < 1e-4


def spoiled(change) -> dict:
    weights = dict(tree_flatten(tiny_draft().parameters()))
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (spoiled(lambda w: w.pop("layers.1.self_attn.k_norm.weight")), "1 missing: layers.1.self_attn.k_norm.weight"),
        (spoiled(lambda w: w.update({"layers.0.gate.weight": mx.zeros(3)})), "1 unknown: layers.0.gate.weight"),
        (
            spoiled(lambda w: w.update({"norm.weight": mx.zeros(65)})),
            r"norm.weight in .* has shape \[65\].* needs \[64\]",
        ),
        (spoiled(lambda w: w.update({"fc.scales": mx.zeros((64, 2))})), "config.json has no `quantization`"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, weights: dict, message: str) -> None:
    """A part left out still writes correct text and accepts little."""
    with pytest.raises(CheckpointError, match=message):
        load_draft(write(tmp_path, weights=weights))


def test_damaged_files_say_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="is damaged or incomplete"):
        load_draft(folder)
    path.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="is damaged or incomplete"):
        load_draft(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"but no \.safetensors file"):
        load_draft(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_config(folder)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=32), "its hidden size is 32, that of tiny is 64"),
        (dict(vocab_size=999), "its vocabulary size is 999, that of tiny is 257"),
        (dict(num_target_layers=36), "its number of target layers is 36, that of tiny is 4"),
        (dict(dflash_config={"mask_token_id": 257}), "its mask token id is 257, that of tiny is 257 rows"),
    ],
)
def test_a_draft_for_another_target_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(IncompatiblePair, match=message):
        check_pair(tiny_draft(**changes), target_for(tiny("llama")), "tiny")


def test_padded_vocabularies_fit() -> None:
    check_pair(tiny_draft(vocab_size=320), target_for(tiny("llama")), "tiny")


def test_another_tokenizer_is_refused_by_example() -> None:
    with pytest.raises(IncompatiblePair, match=r"2 tokens have other ids there, for example 'ab' \(id 7"):
        check_pair(tiny_draft(), target_for(tiny("llama")), "tiny", differing={"ab": 7, "c": 8})


def test_a_draft_that_does_not_state_the_layer_count_fits_a_deeper_target() -> None:
    from dflash_mlx.draft.model import DraftModel

    draft = DraftModel(DraftConfig.from_dict(without("num_target_layers")))
    check_pair(draft, target_for(tiny("llama")), "tiny")
