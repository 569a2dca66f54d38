"""The registry is data: well formed, without doubles, and it says of every target whether it runs here."""

from __future__ import annotations

import importlib
import re

import mlx.core as mx
import pytest

from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.pairing import registry
from dflash_mlx.targets import supported, target_for

PINNED = {"z-lab/Qwen3-4B-DFlash-b16", "z-lab/Qwen3-8B-DFlash-b16"}
WRONG = {  # named in documents, and not there
    "z-lab/Qwen3-8B-DFlash",
    "z-lab/Llama-3.1-8B-Instruct-DFlash",
    "z-lab/gemma-4-12B-it-DFlash",
    "z-lab/Qwen3.5-7B-DFlash",
    "z-lab/Qwen3.5-14B-DFlash",
}


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("demo", "demo"),
        ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3-8B-4bit", "z-lab/Qwen3-8B-DFlash-b16"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit-dwq", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
        ("/models/Meta-Llama-3.1-8B-Instruct-8bit/", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("mlx-community/Qwen3-4B-MLX-4bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3.6-27B-4bit", "z-lab/Qwen3.6-27B-DFlash"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "z-lab/gpt-oss-20b-DFlash"),
        ("Qwen/Qwen3.5-27B-FP8", "z-lab/Qwen3.5-27B-DFlash"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "z-lab/Qwen3-8B-DFlash-b16"),
        ("unsloth/Qwen3-8B-bnb-4bit", "z-lab/Qwen3-8B-DFlash-b16"),
        ("lmstudio-community/Qwen3-4B-MLX-8bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3-4B-4bit-DWQ-053125", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/gemma-4-12B-it-6bit", "z-lab/gemma4-12B-it-DFlash"),
        ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
        ("~/hub/models--mlx-community--Qwen3-4B-4bit/snapshots/0123abc/", "z-lab/Qwen3-4B-DFlash-b16"),
        (r"C:\models\Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("Qwen/Qwen3-40B", None),
        ("Qwen/Qwen3-4B-Instruct-2507", None),
        ("mlx-community/Qwen3-4B-Instruct-2507-4bit-DWQ-2510", None),
        ("mlx-community/Qwen3-4B-Thinking-2507-4bit", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("Qwen/Qwen3.5-35B-A3B-Base", None),
        ("someone/My-Qwen3-4B", None),
        ("someone/demo-4bit", None),
        ("models--Qwen--Qwen3-4B/snapshots", None),
        ("", None),
    ],
)
def test_a_target_has_its_draft_at_any_quantisation_and_no_other_model_has_it(target: str, draft: str | None) -> None:
    """A wrong match costs acceptance and says nothing; a missing one costs the user the speed."""
    row = registry.draft_for(target)
    assert (row.draft if row else None) == draft


def test_every_row_is_well_formed_and_no_name_is_there_twice() -> None:
    rows = registry.rows()
    assert len(rows) > 25 and {row.format for row in rows} == {"dflash", "dflash2"}
    for row in rows:
        assert row.draft == "demo" or re.fullmatch(r"[\w-]+/[\w.-]+", row.draft)
        assert row.revision is None or re.fullmatch("[0-9a-f]{40}", row.revision)
        for name in row.targets:
            assert registry.draft_for(name) is row, f"{name} leads to another row"
    assert {row.draft for row in rows if row.revision} == PINNED
    assert {row.draft for row in rows if row.tested} == {"demo"}, "run with real weights, or not"
    assert not WRONG & {row.draft for row in rows}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([dict(draft="a/b", targets=["x"]), dict(draft="a/b", targets=["y"])], "names a/b twice"),
        ([dict(draft="a/b", targets=["x"]), dict(draft="a/c", targets=["x"])], "names x twice"),
        ([dict(draft="a/b", targets=[])], "not well formed"),
        ([dict(draft="a/b", targets=["Qwen"])], "not well formed"),
        ([dict(draft="a/b", targets=["q/x"])], "not well formed"),
        ([dict(draft="a/b", targets=["x"], format="eagle")], "not well formed"),
        ([dict(draft="a/b", targets=["x"], block=1)], "not well formed"),
    ],
)
def test_a_malformed_or_doubled_row_is_an_error(tables: list[dict], message: str) -> None:
    """Otherwise it would match nothing, or the first of two, and nobody would notice."""
    with pytest.raises(ValueError, match=message):
        registry.parse({"draft": [dict(family="llama", format="dflash") | table for table in tables]})


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(TypeError, match="lisence"):
        registry.parse({"draft": [dict(draft="a/b", targets=["x"], family="llama", format="dflash", lisence="MIT")]})


_MLA = dict(
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    v_head_dim=16,
    qk_nope_head_dim=16,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    vocab_size=257,
)
_MINIMAX = dict(
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    num_experts_per_tok=2,
    num_local_experts=4,
    shared_intermediate_size=0,
    num_hidden_layers=4,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rotary_dim=8,
    vocab_size=257,
    head_dim=16,
)
_TINY = {"kimi_k25": {"text_config": _MLA}, "minimax": _MINIMAX}


def test_what_it_says_of_targets_without_an_adapter_is_so() -> None:
    """Tried with tiny models: what is refused, what the generic adapter serves, and what mlx_lm does not know."""
    others = {row.family: row for row in registry.rows() if row.family not in supported()}
    assert others.keys() == {*_TINY, "glm5_next"}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mlx_lm.models.glm5_next")
    for family, config in _TINY.items():
        module = importlib.import_module(f"mlx_lm.models.{family}")
        mx.random.seed(0)
        model = module.Model(module.ModelArgs.from_dict({"model_type": family} | config))
        if others[family].refused:
            with pytest.raises(UnsupportedTarget):
                target_for(model)
        else:
            assert "generic" in (target_for(model).spec.note or "")
