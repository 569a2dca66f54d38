"""Checkpoints as they are published: text models inside vision and audio shells, with towers and MTP heads beside them.

What mlx_lm leaves out at loading stays out here, and the text is that of the text model alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import load, stream_generate
from tests.conftest import tiny_draft
from tests.families import BY_NAME, prompt_of, reference, tiny
from tests.folders import target_folder
from tests.generating import scripted as scripted

PROMPT = prompt_of(21)
Tensors = dict[str, mx.array]


def named(old: str, new: str) -> Callable[[Tensors], Tensors]:
    """Tensors under other names."""
    return lambda tensors: {re.sub(old, new, key): value for key, value in tensors.items()}


def convolutions(tensors: Tensors) -> Tensors:
    """[C, K, 1] in MLX is [C, 1, K] as published."""
    return {k: v.moveaxis(1, 2) if "conv1d.weight" in k else v for k, v in tensors.items()}


def centered_norms(tensors: Tensors) -> Tensors:
    """Qwen publishes the weights of these norms less one."""
    kinds = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
    endings = tuple(f"{kind}.weight" for kind in kinds)
    return {k: v - 1 if k.endswith(endings) else v for k, v in tensors.items()}


def single_experts(tensors: Tensors) -> Tensors:
    """One tensor per expert instead of a stack; Nemotron's have other names in MLX."""
    found: Tensors = {}
    for key, value in tensors.items():
        before, stacked, after = key.partition(".switch_mlp.")
        if not stacked:
            found[key] = value
            continue
        name = after.replace("fc1", "up_proj").replace("fc2", "down_proj")
        found |= {f"{before}.experts.{index}.{name}": expert for index, expert in enumerate(value)}
    return found


QWEN = [named(r"^language_model\.model\.", "model.language_model."), named(r"^language_model\.lm_head", "lm_head")]
PUBLISHED = {
    "qwen3_5-shell": [centered_norms, convolutions, *QWEN],
    "gemma4": [named(r"^language_model\.model\.", "model.language_model.")],
    "qwen3_next": [centered_norms, convolutions, single_experts],
    "nemotron_h-moe": [convolutions, single_experts],
    "muse_glimmer": [named(r"^model\.", "language_model.model."), named(r"^lm_head", "language_model.lm_head")],
    "mistral3": [],
    "qwen3_vl": QWEN,
    "lfm2-vl": [],
}
BESIDE = {
    "qwen3_5-shell": ["mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight", "model.visual.blocks.0.attn.qkv.weight"],
    "gemma4": ["model.vision_tower.patch.weight", "model.audio_tower.conv.weight", "model.embed_audio.proj.weight"],
    "qwen3_next": ["mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.fc.weight", "mtp.norm.weight"],
    "nemotron_h-moe": ["mtp.layers.0.mixer.up_proj.weight", "mtp.layers.0.norm.weight"],
    "muse_glimmer": ["vision_tower.blocks.0.weight", "vision_adapter.fc.weight", "vision_projection.weight"],
    "mistral3": ["vision_tower.layers.0.weight", "multi_modal_projector.linear_1.weight"],
    "qwen3_vl": ["model.visual.blocks.0.weight"],
    "lfm2-vl": ["vision_tower.layers.0.weight", "multi_modal_projector.linear_1.weight"],
}


def published_folder(folder: Path, name: str, beside: list[str], **config: object) -> Path:
    """The tiny model as its makers would publish it, with the tensors of other parts beside it."""
    target_folder(folder, name)
    tensors: Tensors = dict(tree_flatten(tiny(name).parameters()))
    for change in PUBLISHED[name]:
        tensors = change(tensors)
    tensors |= {key: mx.random.normal((8, 8) if "norm" not in key else (8,)) for key in beside}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("with_others", [False, True])
def test_a_published_checkpoint_decodes_as_its_text_model(
    name: str, with_others: bool, tmp_path: Path, scripted
) -> None:
    """Towers and MTP heads are ignored, and drafting changes nothing."""
    folder = published_folder(tmp_path / "model", name, BESIDE[name] if with_others else [])
    check(folder, name, scripted)


@pytest.mark.parametrize("kind", ["gemma4_unified", "gemma4"])
def test_a_folder_under_an_alias_of_mlx_lm_is_served(kind: str, tmp_path: Path, scripted) -> None:
    """mlx_lm says that `gemma4_unified` is gemma4; the adapter is found by the file that defines the class."""
    beside = ["model.vision_embedder.weight", "model.embed_vision.weight"]
    check(published_folder(tmp_path / "model", "gemma4", beside, model_type=kind), "gemma4", scripted)


def check(folder: Path, name: str, scripted) -> None:
    """Nothing but the text model was loaded; its tokens are mlx_lm's, with drafts accepted to mixed depths."""
    model, tokenizer = load(str(folder), blas="off")
    expected = dict(tree_flatten(tiny(name).parameters()))
    loaded = dict(tree_flatten(model.parameters()))
    assert loaded.keys() == expected.keys() and all(mx.array_equal(loaded[key], expected[key]) for key in expected)
    truth = reference(name, PROMPT, 60)
    scripted(truth)
    draft = tiny_draft(num_target_layers=len(model.layers))
    responses = list(stream_generate(model, tokenizer, PROMPT, max_tokens=60, draft_model=draft, mode="dflash"))
    assert [response.token for response in responses] == truth
    assert responses[-1].stats.accepted > 20


def test_the_rows_are_what_they_say() -> None:
    """Each is published under other names or with other values than MLX holds, or has something beside it."""
    for name, changes in PUBLISHED.items():
        tensors = before = dict(tree_flatten(tiny(name).parameters()))
        for change in changes:
            tensors = change(tensors)
        same = tensors.keys() == before.keys() and all(mx.array_equal(tensors[key], before[key]) for key in before)
        assert BY_NAME[name] and BESIDE[name] and same == (not changes)
