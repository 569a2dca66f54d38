"""Draft folders: what a checkpoint holds is loaded exactly, anything missing, unknown or damaged is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.checkpoint import check_pair, check_shapes, check_tokens, expected_shapes, load_draft, read_config
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions
from dflash_mlx.errors import CheckpointError, IncompatiblePair
from dflash_mlx.targets import target_for
from tests import checkpoints
from tests.checkpoints import Tensors, head, quantized, speculators_config, tensors_of, v1_config, vocabulary, write
from tests.conftest import tiny_draft
from tests.families import VOCAB, tiny

KEPT = [5, 3, 256, *range(100, 161)]  # 64 target ids, not in order


def changed(tensors: Tensors, change: Callable[[Tensors], object]) -> Tensors:
    tensors = dict(tensors)
    change(tensors)
    return tensors


def proposals(draft: DraftModel) -> mx.array:
    """[1, 3, H] of one block over five rows of context: depends on every tensor of the body."""
    mx.random.seed(0)
    context = draft.make_context()
    draft.extend(context, mx.random.normal((1, 5, 128)))
    return draft.denoise(mx.random.normal((1, 4, 64)), context)


# Names and files


@pytest.mark.parametrize("make", [checkpoints.v1, checkpoints.dflash2, checkpoints.speculators])
def test_a_folder_loads_with_the_weights_it_holds(tmp_path: Path, make: Callable[..., Path]) -> None:
    """Every published name is a parameter and every parameter has a published name."""
    loaded = load_draft(make(tmp_path / "my-draft", seed=9))
    assert loaded.name == "my-draft"
    config = json.loads((tmp_path / "my-draft" / "config.json").read_text())
    stored, parameters = tensors_of(config, seed=9), dict(tree_flatten(loaded.parameters()))
    assert stored.keys() == parameters.keys()
    for key, value in stored.items():
        assert mx.array_equal(value, parameters[key]), key


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"model.{name}",
        lambda name: name.replace("layers.0.", "midlayer."),
        lambda name: f"{name}.weight" if name.endswith("codebook") else name,
        lambda name: f"model.{name}.weight" if name.endswith("codebook") else f"model.{name}",
    ],
    ids=["model.", "midlayer.", "codebook.weight", "all"],
)
def test_published_prefixes_and_suffixes_are_understood(tmp_path: Path, rename: Callable[[str], str]) -> None:
    config = checkpoints.dflash2_config()
    tensors = tensors_of(config)
    loaded = load_draft(write(tmp_path, config, {rename(name): value for name, value in tensors.items()}))
    for key, value in tree_flatten(loaded.parameters()):
        assert mx.array_equal(value, tensors[key]), key


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    """The later one would win, whichever that is."""
    tensors = changed(tensors_of(v1_config()), lambda t: t.update({"model.norm.weight": mx.zeros(64)}))
    with pytest.raises(
        CheckpointError, match=r"two tensors for norm\.weight: .*`model\.norm\.weight`.*Download it again"
    ):
        load_draft(write(tmp_path, v1_config(), tensors))


def test_several_files_are_read_with_or_without_their_index(tmp_path: Path) -> None:
    folder = write(tmp_path, v1_config(), tensors_of(v1_config()), shards=3)
    mx.save_safetensors(str(folder / "training-state.safetensors"), {"adam": mx.zeros(3)})  # not in the index
    expected = proposals(load_draft(folder))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "training-state.safetensors").unlink()
    assert mx.array_equal(proposals(load_draft(folder)), expected)


def test_a_file_that_the_index_names_and_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, v1_config(), tensors_of(v1_config()), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of the 3 files .*model-00002-of-00003\.safetensors.*Download the"
    ):
        load_draft(folder)
    for content in ("{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../outside.safetensors"}}'):
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"cannot be read|lacks 1 of the 1 files"):
            load_draft(folder)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.v1(tmp_path)
    mx.save_safetensors(str(folder / "older.safetensors"), {"norm.weight": mx.zeros(64)})
    with pytest.raises(CheckpointError, match=r"holds `norm\.weight` in two files, one of them older\.safetensors"):
        load_draft(folder)


def test_damaged_files_say_so(tmp_path: Path) -> None:
    folder = checkpoints.v1(tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="is damaged or incomplete"):
        load_draft(folder)
    path.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="is damaged or incomplete"):
        load_draft(folder)
    for content, message in (("{", "cannot be read"), ("[]", "holds a list"), ("[" * 100_000, "cannot be read")):
        (folder / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            read_config(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(folder)


def test_numbers_that_mlx_cannot_read_are_named(tmp_path: Path) -> None:
    """A download of the same file again would end in the same."""
    folder = write(tmp_path, v1_config())
    weights = {name: np.array(value, np.float64) for name, value in tensors_of(v1_config()).items()}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"stores numbers as F64, which MLX cannot read.*Get the draft in bfloat16"
    ):
        load_draft(folder)


FILES = {
    "nothing": ([], r"has no config\.json, .*Give the folder"),
    "no weights": (["config.json"], r"but no \.safetensors file. Download the draft's weights"),
    "GGUF": (["draft-Q4_K_M.gguf"], r"holds GGUF files .*Download the draft's safetensors"),
    "GGUF and config": (["config.json", "draft.gguf"], r"holds GGUF files .*Download the draft's safetensors"),
    "pickle": (
        ["config.json", "pytorch_model.bin"],
        r"pickled weights \(\.bin\).* runs code .*Get the draft's safetensors",
    ),
    "pickles": (["config.json", "a.pt", "b.pth"], r"pickled weights \(\.pt, \.pth\)"),
    "adapter": (
        ["adapter_config.json", "adapter_model.safetensors"],
        r"is a LoRA adapter, .*Give the draft's own folder",
    ),
    "mlx adapter": (["adapters.safetensors"], r"is a LoRA adapter"),
    "subfolder": (
        ["dflash/config.json", "model.safetensors"],
        r"its subfolder dflash/ may be one. Give .*dflash instead",
    ),
}


@pytest.mark.parametrize(("files", "message"), FILES.values(), ids=FILES.keys())
def test_a_folder_of_another_kind_is_told_what_it_is(tmp_path: Path, files: list[str], message: str) -> None:
    """No pickle is opened: these ones are no pickles, and reading one would fail otherwise."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(v1_config()))
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path)


def test_a_target_with_its_draft_in_a_subfolder_names_the_subfolder(tmp_path: Path) -> None:
    write(tmp_path, {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2"}, {})
    checkpoints.v1(tmp_path / "dflash")
    with pytest.raises(CheckpointError, match=r"subfolder dflash/ may be one. Give .*dflash instead"):
        load_draft(tmp_path)
    assert load_draft(tmp_path / "dflash").config.num_layers == 2


def test_a_file_in_place_of_a_folder_says_what_to_give(tmp_path: Path) -> None:
    folder = checkpoints.v1(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a file. Give the folder"):
        load_draft(folder / "model.safetensors")


def test_metadata_of_another_quantiser_beside_the_config_is_noticed(tmp_path: Path) -> None:
    folder = checkpoints.v1(tmp_path)
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"quantised for another runtime .*hf_quant_config\.json"):
        load_draft(folder)


def test_keys_of_the_config_that_nothing_reads_are_told_with_every_answer(tmp_path: Path) -> None:
    assert load_draft(checkpoints.v1(tmp_path / "known", dflash_config={"num_anchors": 512})).notes == ()
    draft = load_draft(checkpoints.v1(tmp_path / "new", dflash_config={"anything_new": 8, "tilt": [1]}))
    assert draft.notes == (
        "the draft's config.json has keys that this version does not read: `anything_new`, `tilt`; if one changes the "
        "maths, the draft accepts less",
    )


# Strictness


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def add(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: mx.zeros(shape)})


V1, V2 = v1_config(), checkpoints.dflash2_config()
SPOILED = {
    "missing": (V1, drop("layers.1.self_attn.k_norm.weight"), r"1 missing: layers\.1\.self_attn\.k_norm\.weight"),
    "unknown": (V1, add("layers.0.gate.weight", 3), r"1 unknown: layers\.0\.gate\.weight"),
    "shape": (V1, add("norm.weight", 65), r"norm\.weight in .* has shape \[65\].* needs \[64\].*download both again"),
    "scales": (V1, add("fc.scales", 64, 2), r"has no `quantization`.*Add the entry"),
    "scales of a norm": (
        v1_config(quantization={"group_size": 32, "bits": 4}),
        add("norm.scales", 1),
        r"1 unknown: norm\.scales",
    ),
    "codebook": (
        V2,
        drop("candidate_selector.successor_codebook"),
        r"1 missing: candidate_selector\.successor_codebook",
    ),
    "bias": (v1_config(attention_bias=True), lambda t: None, r"8 missing: layers\.0\.self_attn\.k_proj\.bias"),
    "layers": (
        v1_config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        lambda t: drop_layer(t),
        "11 missing",
    ),
    "head": (v1_config(draft_vocab_size=64), lambda t: None, r"`lm_head\.weight` is missing.*Download the draft again"),
    "head rows": (
        V1,
        add("lm_head.weight", 300, 64),
        r"lm_head\.weight in .* has shape \[300, 64\].* needs \[257, 64\]",
    ),
    "embedding": (V1, add("embed_tokens.weight", 200, 64), r"embed_tokens\.weight .* \[200, 64\].* needs \[257, 64\]"),
    "integers": (
        V1,
        lambda t: t.update({"norm.weight": mx.zeros(64, mx.uint8)}),
        r"norm\.weight .* stored as .*uint8.*Get it in",
    ),
    "MiMo mask": (V1, add("mask_embedding", 64), "a MiMo-style draft .*`mask_embedding`"),
    "MiMo sinks": (V1, add("layers.0.self_attn.attention_sink_bias", 4), "a MiMo-style draft"),
    "Laguna norms": (V1, add("aux_hidden_norms.0.weight", 64), "a Laguna draft"),
    "Laguna gate": (V1, add("layers.0.self_attn.g_proj.weight", 4, 64), "a Laguna draft"),
    "Muse": (V1, lambda t: t.update({"encoder.fc.weight": t.pop("fc.weight")}), "a Muse Glimmer assistant"),
    "Markov": (V1, add("markov_head.weight", 4, 64), "a DFlash hybrid with a Markov head"),
    "DSpark": (V1, add("confidence_head.weight", 1, 64), "a DSpark draft"),
    "EAGLE-3": (V1, add("midlayer.hidden_norm.weight", 64), "an EAGLE head"),
    "MTP": (V1, add("mtp.layers.0.enorm.weight", 64), "a multi-token-prediction head"),
    "Medusa": (V1, add("medusa_head.0.weight", 64), "a Medusa head"),
    "FP8": (V1, add("fc.weight_scale", 64), "quantised for another runtime"),
    "NVFP4": (V1, lambda t: t.update({"fc.weight_packed": t.pop("fc.weight")}), "quantised for another runtime"),
    "LoRA": (V1, add("layers.0.self_attn.q_proj.lora_A.weight", 4, 64), "a LoRA adapter"),
    "experts": (V1, add("layers.0.mlp.experts.0.up_proj.weight", 4, 64), "a mixture of experts"),
    "fusion": (V1, add("layer_fusion_gate", 1), "a DFlash draft with additional parts"),
    "DFlash 2 as v1": (
        V1,
        add("layers.0.mlp_conv.base_kernel", 2, 2, 64),
        "a DFlash 2 draft under a config.json that says",
    ),
}


def drop_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.2.")]:
        tensors.pop(name)


@pytest.mark.parametrize(("config", "change", "message"), SPOILED.values(), ids=SPOILED.keys())
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, config: dict, change: Callable[[Tensors], object], message: str
) -> None:
    """A part left out still writes correct text and accepts little. Metadata alone is refused with the same words."""
    base = V1 if config.get("attention_bias") or config.get("draft_vocab_size") else config
    tensors = changed(tensors_of(base), change)
    with pytest.raises(CheckpointError, match=message) as loaded:
        load_draft(write(tmp_path / "draft", config, tensors))
    if "stored as" in str(loaded.value):
        return  # metadata has no numbers
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    with pytest.raises(CheckpointError) as checked:
        check_shapes(DraftConfig.from_dict(config), shapes, str(tmp_path / "draft"))
    assert str(checked.value) == str(loaded.value)


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_number_that_is_not_finite_is_named_by_its_tensor(tmp_path: Path, value: float, dtype: mx.Dtype) -> None:
    """One NaN makes every proposal NaN, and the text stays correct."""
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors_of(V1).items()}
    tensors["layers.1.mlp.up_proj.weight"][3, 4] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight in .* not finite \(1 of 25 tensors"):
        load_draft(write(tmp_path, V1, tensors))


# What only the weights can tell


def test_a_head_and_an_embedding_of_its_own_are_kept(tmp_path: Path) -> None:
    """Replaced by the target's they would still propose, and almost nothing would be accepted."""
    draft = load_draft(checkpoints.speculators(tmp_path / "a", own_head=True, own_embedding=True))
    assert (draft.config.draft_vocab_size, draft.config.own_embedding) == (VOCAB, True)
    assert mx.array_equal(draft.lm_head.weight, head()["lm_head.weight"])
    assert mx.array_equal(draft.embed_tokens.weight, checkpoints.embedding()["embed_tokens.weight"])
    draft = load_draft(checkpoints.speculators(tmp_path / "b"))
    assert (draft.config.draft_vocab_size, draft.config.own_embedding) == (None, False)


def test_rows_of_a_reduced_vocabulary_are_the_target_ids_that_its_table_says(tmp_path: Path) -> None:
    draft = load_draft(checkpoints.speculators(tmp_path / "a", kept=KEPT))
    assert draft.config.draft_vocab_size == 64
    assert draft.target_ids(mx.arange(64)).tolist() == KEPT
    for key, rows in (("d2t", sorted(KEPT)), ("t2d", KEPT)):
        tensors = tensors_of(V1) | head(64) | vocabulary(sorted(KEPT))
        tensors.pop(key)
        alone = load_draft(write(tmp_path / key, speculators_config(draft_vocab_size=64), tensors))
        assert alone.target_ids(mx.arange(64)).tolist() == sorted(rows), f"without {key}"


def test_the_head_says_how_many_rows_it_has_where_the_config_does_not(tmp_path: Path) -> None:
    tensors = tensors_of(V1) | head(64) | vocabulary(KEPT)
    draft = load_draft(write(tmp_path, v1_config(), tensors))
    assert (draft.config.draft_vocab_size, draft.target_ids(mx.array([2])).item()) == (64, 256)


def test_copies_of_the_targets_parts_are_left_out(tmp_path: Path) -> None:
    tensors = tensors_of(V1) | {"verifier_norm.weight": mx.zeros(64), "verifier_lm_head.weight": mx.zeros((VOCAB, 64))}
    assert not hasattr(load_draft(write(tmp_path, speculators_config(), tensors)), "verifier_norm")


TABLES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "none": (
        lambda t: (t.pop("d2t"), t.pop("t2d")),
        r"a head of 64 tokens and no table \(`d2t`\).*Download the draft again",
    ),
    "absolute": (
        lambda t: t.update(d2t=mx.array(KEPT)),
        r"Its entries look like target ids; this format stores offsets",
    ),
    "contradiction": (
        lambda t: t.update(t2d=mx.arange(VOCAB) < 64),
        r"contradicts itself: `d2t` names 64 .* `t2d` marks 64",
    ),
    "short": (lambda t: t.update(d2t=t["d2t"][:60]), r"has 60 entries, and its head 64 rows"),
    "range": (lambda t: t.update(d2t=t["d2t"] + 500), r"names the target id 505, and ids have to be in 0\.\.256"),
    "negative": (lambda t: t.update(d2t=t["d2t"] - 500), r"names the target id -495"),
    "twice": (lambda t: t.update(d2t=5 - mx.arange(64)), r"names a target id twice \(63 of 64"),
    "floats": (lambda t: t.update(d2t=t["d2t"].astype(mx.float32)), r"`d2t` of .* one row of integers, got .*float32"),
    "matrix": (lambda t: t.update(d2t=t["d2t"][None]), r"one row of integers, got .*int64 of shape \[1, 64\]"),
    "no head": (lambda t: t.pop("lm_head.weight"), r"`lm_head\.weight` is missing"),
    "rows": (lambda t: t.update(head(32)), r"lm_head\.weight in .* has shape \[32, 64\].* needs \[64, 64\]"),
}


@pytest.mark.parametrize(("change", "message"), TABLES.values(), ids=TABLES.keys())
def test_a_vocabulary_table_that_cannot_be_right_is_refused(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    """With a wrong table every proposal is another token than meant: correct text, nothing accepted."""
    tensors = changed(tensors_of(V1) | head(64) | vocabulary(KEPT), change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(write(tmp_path, speculators_config(draft_vocab_size=64), tensors))


def test_a_table_for_the_targets_own_head_is_refused_unless_it_changes_nothing(tmp_path: Path) -> None:
    tensors = tensors_of(V1) | vocabulary(range(VOCAB))
    load_draft(write(tmp_path / "identity", speculators_config(), tensors))
    tensors |= vocabulary([1, 0, *range(2, VOCAB)])
    with pytest.raises(CheckpointError, match="reorders tokens and no head of its own"):
        load_draft(write(tmp_path / "other", speculators_config(), tensors))


# Quantised checkpoints

WIDTHS = {
    "all alike": ({"group_size": 32, "bits": 4}, lambda module: module.endswith("_proj"), {}),
    "MLPs only": ({"group_size": 32, "bits": 8}, lambda module: "mlp" in module, {}),
    "as mlx_lm writes it": (
        {"group_size": 32, "bits": 4, "mode": "affine", "fc": False, "model.layers.0.self_attn.o_proj": False},
        lambda module: module.endswith("_proj") and module != "layers.0.self_attn.o_proj",
        {},
    ),
    "one of its own": (
        {"group_size": 32, "bits": 4, "model.layers.1.mlp.up_proj": {"group_size": 64, "bits": 8}},
        lambda module: module.endswith("down_proj"),
        {"layers.1.mlp.up_proj": dict(group_size=64, bits=8)},
    ),
    "mxfp4": ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, lambda module: module.endswith("_proj"), {}),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("entry", "only", "own"), WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_exactly_the_modules_with_scales_are_packed_and_compute_what_was_stored(
    tmp_path: Path, key: str, entry: dict, only: Callable[[str], bool], own: dict, packed: bool
) -> None:
    """A module read with other settings than it was packed with computes noise."""
    settings = {name: entry[name] for name in ("group_size", "bits", "mode") if name in entry}
    wide = tensors_of(V1)
    tensors = quantized(wide, only, **settings)
    for module, its in own.items():
        tensors = quantized(tensors, lambda name, module=module: name == module, **its)
    config = v1_config(**{key: entry})
    draft = load_draft(write(tmp_path, config, tensors), packed=packed)
    check_shapes(DraftConfig.from_dict(config), {name: value.shape for name, value in tensors.items()}, "it")
    kinds = {
        path: isinstance(module, nn.QuantizedLinear) for path, module in draft.named_modules() if "weight" in module
    }
    with_scales = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    assert with_scales and {path for path, is_packed in kinds.items() if is_packed} == (
        with_scales if packed else set()
    )
    for module in with_scales:
        parts = [tensors.get(f"{module}.{part}") for part in ("weight", "scales", "biases")]
        width = own.get(module, settings)
        wide[f"{module}.weight"] = mx.dequantize(*parts, **({"mode": "affine"} | width))
    expected = proposals(load_draft(write(tmp_path / "wide", V1, wide), dtype=mx.float32))
    assert mx.abs(proposals(draft) - expected).max().item() < 1e-4


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"group_size": 64, "bits": 4}, r"\.scales in .* has shape \[64, 2\].* needs \[64, 1\]"),
        ({"group_size": 32, "bits": 8}, r"\.weight in .* has shape \[64, 8\].* needs \[64, 16\]"),
        ({"group_size": 48, "bits": 4}, r"MLX cannot pack the weights .*Correct `quantization`"),
        ({"group_size": 32, "bits": 4, "mode": "spiral"}, r"MLX cannot pack the weights"),
        ({"group_size": 32, "bits": 4, "mode": 3}, r"MLX cannot pack the weights"),
        ({"group_size": "32", "bits": 4}, r"`group_size` has to be an integer"),
        (
            {"group_size": 32, "bits": 4, "layers.0.self_attn.q_proj": False},
            r"is packed, and `quantization` .* says that it is not",
        ),
    ],
)
def test_packed_weights_whose_config_says_otherwise_are_refused(tmp_path: Path, entry: dict, message: str) -> None:
    config = v1_config(quantization=entry)
    with pytest.raises(CheckpointError, match=message):
        load_draft(write(tmp_path, config, quantized(tensors_of(V1), lambda module: module.endswith("q_proj"))))


# How the user wants it


def test_float16_weights_run_in_float32(tmp_path: Path) -> None:
    """Fused features overflow float16."""
    tensors = {name: value.astype(mx.float16) for name, value in tensors_of(V1).items()}
    draft = load_draft(write(tmp_path, V1, tensors))
    assert {value.dtype for _, value in tree_flatten(draft.parameters())} == {mx.float32}


def test_options_decide_width_dtype_and_window(tmp_path: Path) -> None:
    folder = checkpoints.v1(tmp_path, draft_window_size=100)
    plain = load_draft(folder, dtype=mx.bfloat16)
    assert (plain.dtype, plain.context_window) == (mx.bfloat16, 100)
    draft = load_draft(folder, dtype=mx.bfloat16, packed=False, options=DraftOptions(8, 32, "float32", 50))
    assert (draft.dtype, draft.context_window) == (mx.float32, 50)
    assert isinstance(draft.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert draft.layers[0].mlp.up_proj.scales.dtype == mx.float32
    assert mx.abs(proposals(draft) - proposals(load_draft(folder))).max().item() < 0.1


def test_expected_shapes_are_those_of_a_loaded_draft(tmp_path: Path) -> None:
    draft = load_draft(checkpoints.dflash2(tmp_path))
    expected = {key: tuple(value.shape) for key, value in tree_flatten(draft.parameters())}
    assert expected_shapes(draft.config) == expected


# The pair


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=32), "its hidden size is 32, that of tiny is 64"),
        (dict(vocab_size=999), "its vocabulary size is 999, that of tiny is 257"),
        (dict(num_target_layers=36), "its number of target layers is 36, that of tiny is 4"),
        (dict(dflash_config={"mask_token_id": 257}), "its mask token id is 257, that of tiny is 257 rows"),
        (
            dict(num_target_layers=5, dflash_config={"target_layer_ids": [0, 4]}),
            r"reads layer 4 .* count from 0: tiny has the layers 0\.\.3",
        ),
    ],
)
def test_a_draft_for_another_target_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(IncompatiblePair, match=f"{message}.*Choose the draft that was trained for this target"):
        check_pair(tiny_draft(**changes), target_for(tiny("llama")), "tiny")


def test_padded_vocabularies_fit() -> None:
    check_pair(tiny_draft(vocab_size=320), target_for(tiny("llama")), "tiny")


def test_a_reduced_vocabulary_that_names_ids_beyond_the_targets_is_refused(tmp_path: Path) -> None:
    """Padding of the draft's table would be proposed, and has no row in the target's."""
    decoder = {"vocab_size": 320}
    folder = checkpoints.speculators(tmp_path, kept=[1, 2, 300], transformer_layer_config=decoder)
    tensors = tensors_of(speculators_config(transformer_layer_config=decoder)) | head(3) | vocabulary([1, 2, 300], 320)
    write(folder, speculators_config(transformer_layer_config=decoder, draft_vocab_size=3), tensors)
    draft = load_draft(folder)
    with pytest.raises(IncompatiblePair, match=r"proposes the token id 300 .*tiny has 257 tokens.*made for tiny/llama"):
        check_pair(draft, target_for(tiny("llama")), "tiny")


def test_a_full_vocabulary_may_have_rows_beyond_the_targets() -> None:
    """They are padding, and cut off."""
    draft = DraftModel(replace(DraftConfig.from_dict(v1_config(vocab_size=320)), draft_vocab_size=320))
    draft.map_ids(mx.arange(319, -1, -1))
    check_pair(draft, target_for(tiny("llama")), "tiny")


def test_a_mask_beyond_the_targets_rows_is_fine_in_an_embedding_of_its_own(tmp_path: Path) -> None:
    config = v1_config(vocab_size=320, dflash_config={"mask_token_id": 300})
    folder = write(tmp_path, config, tensors_of(config) | checkpoints.embedding(320))
    check_pair(load_draft(folder), target_for(tiny("llama")), "tiny")


def test_another_tokenizer_is_refused_by_example() -> None:
    with pytest.raises(IncompatiblePair, match=r"2 tokens have other ids there, for example 'ab' \(id 7"):
        check_tokens(tiny_draft().config, "tiny-draft", {"ab": 7, "c": 8}, "tiny")


def test_a_draft_that_does_not_state_the_layer_count_fits_a_deeper_target() -> None:
    config = DraftConfig.from_dict({key: value for key, value in V1.items() if key != "num_target_layers"})
    check_pair(DraftModel(config), target_for(tiny("llama")), "tiny")
