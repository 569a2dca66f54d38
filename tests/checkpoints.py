"""Draft checkpoints on disk, one function per format, under the names that are published.

Tiny, for the tiny targets (hidden 64, 4 layers, 257 ids). The tensors are made from the config's sizes and not from
`DraftModel`, so that the package cannot agree with itself only.

    v1(folder)           z-lab DFlash v1          v1(folder, layer_types=[...], sliding_window=8)
    dflash2(folder)      z-lab DFlash 2           dflash2(folder, dflash_config={"selector_top_k": 8})
    speculators(folder)  speculators, shared head speculators(folder, kept=[...], dflash2=True, own_head=True)
    quantized(tensors)   packed as MLX packs it; beside it `quantization` belongs into the config
    write(folder, config, tensors, shards=2)      anything else
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.families import VOCAB

Tensors = dict[str, mx.array]

HIDDEN, TARGET_LAYERS, MASK, TAPS = 64, 4, 256, [0, 2]
_BODY = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_PARTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}


def v1_config(**changes: Any) -> dict[str, Any]:
    """z-lab's v1: keys beside `dflash_config` at the top level; `dflash_config` is merged, other keys replace."""
    config = {
        **_BODY,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": TARGET_LAYERS,
        "block_size": 16,
        "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": MASK},
    }
    return _changed(config, changes)


def dflash2_config(**changes: Any) -> dict[str, Any]:
    """z-lab's DFlash 2: sliding, bidirectional, rope and block nested."""
    config = {
        **_BODY,
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "rope_parameters": _ROPE,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 24,
        "is_causal": False,
        "dflash_config": {
            "target_layer_ids": TAPS,
            "mask_token_id": MASK,
            "block_size": 8,
            "num_target_layers": TARGET_LAYERS,
            **_PARTS,
        },
    }
    return _changed(config, changes)


def speculators_config(*, dflash2: bool = False, draft_vocab_size: int = VOCAB, **changes: Any) -> dict[str, Any]:
    """speculators' dflash or dflash2; `transformer_layer_config` is merged, other keys replace."""
    config = {
        "speculators_model_type": "dflash2" if dflash2 else "dflash",
        "speculators_version": "0.9.0",
        "architectures": ["DFlash2DraftModel" if dflash2 else "DFlashSpeculator"],
        "transformer_layer_config": {
            **_BODY,
            "model_type": "qwen3",
            "rope_parameters": _ROPE,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
        },
        "draft_vocab_size": draft_vocab_size,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "mask_token_id": MASK,
        "target_hidden_size": HIDDEN,
        "sliding_window_non_causal": dflash2,
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "tiny/llama", "architectures": ["LlamaForCausalLM"]},
        },
        **(_PARTS if dflash2 else {}),
    }
    return _changed(config, changes)


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key in ("dflash_config", "transformer_layer_config"):
        if isinstance(changes.get(key), dict) and key in config:
            changes = {**changes, key: {**config[key], **changes[key]}}
    return config | changes


def tensors_of(config: Mapping[str, Any], seed: int = 3) -> Tensors:
    """Random weights under the published names: the body, and DFlash 2's parts if the config has their sizes."""
    flat = {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}
    taps = flat.get("target_layer_ids") or flat["aux_hidden_state_layer_ids"]
    hidden, inner, dim, rows = (
        flat[key] for key in ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads")
    )
    queries, keys = rows * dim, flat["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if flat.get("conv_kernel_size"):
        taps_, groups = flat["conv_kernel_size"], hidden // flat["conv_group_size"]
        for side in ("attention_conv", "mlp_conv"):
            layer[f"{side}.base_kernel"] = (2, taps_, hidden)
            layer[f"{side}.kernel_projection.weight"] = (2 * taps_ * groups, hidden)
    for index in range(flat["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if flat.get("selector_rank"):
        rank = flat["selector_rank"]
        shapes |= {
            "candidate_selector.predecessor_codebook": (flat["vocab_size"], rank),
            "candidate_selector.successor_codebook": (flat["vocab_size"], rank),
            "candidate_selector.hidden_projection.weight": (rank, hidden),
        }
    mx.random.seed(seed)
    return {name: _random(name, shape) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...]) -> mx.array:
    if len(shape) == 1:
        return 1.0 + 0.1 * mx.random.normal(shape)  # norms
    if name.endswith("base_kernel"):
        near_identity = mx.concatenate([mx.ones((2, 1, shape[2])), mx.zeros((2, shape[1] - 1, shape[2]))], axis=1)
        return near_identity + 0.1 * mx.random.normal(shape)
    limit = 1 / math.sqrt(shape[-1])
    return mx.random.uniform(-limit, limit, shape)


def head(rows: int = VOCAB, hidden: int = HIDDEN, seed: int = 5) -> Tensors:
    """A head of the draft's own."""
    mx.random.seed(seed)
    return {"lm_head.weight": _random("", (rows, hidden))}


def embedding(rows: int = VOCAB, hidden: int = HIDDEN, seed: int = 6) -> Tensors:
    """An embedding of the draft's own."""
    mx.random.seed(seed)
    return {"embed_tokens.weight": mx.random.normal((rows, hidden))}


def vocabulary(kept: Sequence[int], total: int = VOCAB) -> Tensors:
    """speculators' tables of a reduced vocabulary: kept target ids, in the order of the draft's rows."""
    chosen = set(kept)
    return {
        "d2t": mx.array([target - row for row, target in enumerate(kept)], dtype=mx.int64),
        "t2d": mx.array([index in chosen for index in range(total)]),
    }


def _linear(module: str) -> bool:
    return module.endswith("_proj")


def quantized(
    tensors: Tensors,
    only: Callable[[str], bool] = _linear,
    *,
    group_size: int = 32,
    bits: int = 4,
    mode: str = "affine",
) -> Tensors:
    """The matrices of the modules that `only` names, packed as MLX packs them; by default those of the layers."""
    packed: Tensors = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if value.ndim == 2 and name.endswith(".weight") and only(module):
            weight, scales, *biases = mx.quantize(value, group_size=group_size, bits=bits, mode=mode)
            packed |= {f"{module}.weight": weight, f"{module}.scales": scales}
            packed |= {f"{module}.biases": each for each in biases}
        else:
            packed[name] = value
    return packed


def write(folder: Path, config: object, tensors: Mapping[str, mx.array] | None = None, *, shards: int = 1) -> Path:
    """config.json, and the tensors in so many files, beyond one with the index that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is None:
        return folder
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tensors), {"format": "pt"})
        return folder
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in where if where[name] == file})
    total = sum(value.nbytes for value in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    )
    return folder


def v1(folder: Path, seed: int = 3, **changes: Any) -> Path:
    """A z-lab DFlash v1 draft."""
    config = v1_config(**changes)
    return write(folder, config, tensors_of(config, seed))


def dflash2(folder: Path, seed: int = 3, **changes: Any) -> Path:
    """A z-lab DFlash 2 draft."""
    config = dflash2_config(**changes)
    return write(folder, config, tensors_of(config, seed))


def speculators(
    folder: Path,
    seed: int = 3,
    *,
    kept: Sequence[int] | None = None,
    own_head: bool = False,
    own_embedding: bool = False,
    **changes: Any,
) -> Path:
    """A draft as speculators saves it.

    kept: target ids of a reduced vocabulary, in the order of the head's rows; it brings its head and both tables.
    own_head, own_embedding: also with the full vocabulary.
    """
    if kept is not None:
        changes = {"draft_vocab_size": len(kept), **changes}
    config = speculators_config(**changes)
    tensors = tensors_of(config, seed)
    if kept is not None:
        tensors |= head(len(kept)) | vocabulary(kept)
    elif own_head:
        tensors |= head()
    if own_embedding:
        tensors |= embedding()
    return write(folder, config, tensors)
