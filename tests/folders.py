"""Tiny model and draft folders on disk, as users have them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.conftest import DRAFT_CONFIG, byte_tokenizer, tiny_draft
from tests.families import BY_NAME, tiny


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
