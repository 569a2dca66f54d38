"""Tiny model and draft folders on disk, as users have them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import BY_NAME, tiny

DRAFT_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 257,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "num_target_layers": 4,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 256},
}


def target_folder(folder: Path, name: str = "llama") -> Path:
    """The shared tiny model, with the byte tokenizer and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BY_NAME[name].config | {"eos_token_id": [257]}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny(name).parameters())))
    byte_tokenizer()._tokenizer.save_pretrained(str(folder))
    return folder


def draft_folder(folder: Path, seed: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DRAFT_CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny_draft(seed).parameters())))
    return folder
