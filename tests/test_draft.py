"""The draft equals an independent numpy implementation, whatever way its context is fed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.draft.context import DraftContext
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.rope import make_rope
from dflash_mlx.errors import CheckpointError
from tests.conftest import draft_config, tiny_draft

HIDDEN, DIM = 64, 16
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


# --- An independent implementation of the paper's formulas, in float64. ---


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotary(config) -> tuple[np.ndarray, float]:
    """inverse frequencies [D/2] and the factor on q and k."""
    base = config.rope_theta ** (-np.arange(0, DIM, 2) / DIM)
    scaling = config.rope_scaling
    if not scaling:
        return base, 1.0
    s, original = scaling["factor"], scaling["original_max_position_embeddings"]
    corr = [DIM * np.log(original / (2 * np.pi * n)) / (2 * np.log(config.rope_theta)) for n in (32, 1)]
    if scaling.get("truncate", True):
        corr = [np.floor(corr[0]), np.ceil(corr[1])]
    low, high = max(corr[0], 0), min(corr[1], DIM - 1)
    ramp = np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    factor = scaling.get("attention_factor") or 0.1 * np.log(s) + 1
    return base * ((1 - ramp) + ramp / s), factor


def rotate(x: np.ndarray, positions: np.ndarray, config) -> np.ndarray:
    """[T, heads, D], split halves."""
    inverse, factor = rotary(config)
    angle = positions[:, None, None] * inverse
    a, b = np.split(x * factor, 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def reference_denoise(draft: DraftModel, features: np.ndarray, block: np.ndarray) -> np.ndarray:
    """features [S, F] of positions 0..S-1, block [T, H] embeddings -> [T-1, H]."""
    c = draft.config
    w = {k: np.array(v.astype(mx.float32), dtype=np.float64) for k, v in tree_flatten(draft.parameters())}
    eps, groups = c.rms_norm_eps, c.num_heads // c.num_kv_heads
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    start, rows = len(features), len(block)
    where = np.arange(start, start + rows)
    x = block.astype(np.float64)
    for i in range(c.num_layers):
        p = f"layers.{i}."
        u = rms(x, w[p + "input_layernorm.weight"], eps)

        def heads(rows_in, name, norm=None, positions=None, p=p):
            y = (rows_in @ w[f"{p}self_attn.{name}_proj.weight"].T).reshape(len(rows_in), -1, DIM)
            if norm:
                y = rotate(rms(y, w[f"{p}self_attn.{norm}.weight"], eps), positions, c)
            return y

        q = heads(u, "q", "q_norm", where)
        k = np.concatenate([heads(context, "k", "k_norm", np.arange(start)), heads(u, "k", "k_norm", where)])
        v = np.concatenate([heads(context, "v"), heads(u, "v")])
        out = np.zeros_like(q)
        for row in range(rows):
            key = np.arange(start + rows)
            seen = np.ones(start + rows, bool)
            if c.is_causal(i):
                seen &= key <= where[row]
            if c.layer_types[i] == "sliding_attention":
                seen &= where[row] - key < c.sliding_window
            for head in range(c.num_heads):
                score = k[:, head // groups] @ q[row, head] * DIM**-0.5
                score = np.where(seen, score, -np.inf)
                weight = np.exp(score - score.max())
                out[row, head] = (weight / weight.sum()) @ v[:, head // groups]
        x = x + out.reshape(rows, -1) @ w[p + "self_attn.o_proj.weight"].T
        u = rms(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = (u @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], eps)[1:]


VARIANTS = {
    "full": {},
    "sliding": dict(layer_types=["sliding_attention"] * 2, sliding_window=6),
    "mixed": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6),
    "sliding-both-ways": dict(layer_types=["sliding_attention"] * 2, sliding_window=6, is_causal=False),
    "causal-full": dict(dflash_config={"causal": True}),
    "yarn": dict(rope_scaling=YARN),
    "yarn-untruncated": dict(rope_scaling=YARN | {"truncate": False, "attention_factor": 1.25}),
}


def data(context: int, block: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(context * 100 + block)
    return (
        rng.normal(size=(context, 2 * HIDDEN)).astype(np.float32) * 3,
        rng.normal(size=(block, HIDDEN)).astype(np.float32),
    )


def run(draft: DraftModel, chunks: list[np.ndarray], block: np.ndarray) -> np.ndarray:
    context = draft.make_context()
    for chunk in chunks:
        draft.extend(context, mx.array(chunk)[None])
    return np.array(draft.denoise(mx.array(block)[None], context)[0])


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 30])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_denoise_equals_the_numpy_reference(variant: str, length: int) -> None:
    """A slip in fusion, positions or masks costs acceptance and nothing else would show it."""
    draft = tiny_draft(**VARIANTS[variant])
    features, block = data(length)
    np.testing.assert_allclose(run(draft, [features], block), reference_denoise(draft, features, block), atol=2e-4)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("cuts", [[1], [5, 6, 7], [1, 2, 3, 4, 5], [12], [4, 5, 17]])
def test_feeding_the_context_in_pieces_changes_nothing(variant: str, cuts: list[int]) -> None:
    """Prefill chunks, then accepted rows per cycle, one row among them."""
    draft = tiny_draft(**VARIANTS[variant])
    features, block = data(20)
    whole, pieces = run(draft, [features], block), run(draft, np.split(features, cuts), block)
    np.testing.assert_allclose(pieces, whole, atol=1e-5)


def test_drafting_leaves_no_trace_in_the_context() -> None:
    """Rows of a block must not be seen by the next one."""
    draft = tiny_draft(**VARIANTS["mixed"])
    features, block = data(9)
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None])
    first = draft.denoise(mx.array(block)[None], context)
    draft.denoise(mx.array(block * 7)[None], context)
    assert mx.array_equal(first, draft.denoise(mx.array(block)[None], context))
    assert context.length == 9


@pytest.mark.parametrize("drop", [0, 1, 3])
def test_dropped_positions_are_gone(drop: int) -> None:
    draft = tiny_draft()
    features, block = data(10)
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None])
    context.drop(drop)
    assert context.length == 10 - drop
    ours = draft.denoise(mx.array(block)[None], context)
    expected = run(draft, [features[: 10 - drop]], block)
    np.testing.assert_allclose(np.array(ours[0]), expected, atol=1e-5)


def test_a_sliding_layer_forgets_what_its_window_does_not_reach() -> None:
    """Row 0 of a block sees window - 1 context rows; an older feature may be anything."""
    draft = tiny_draft(**VARIANTS["sliding"])
    features, block = data(20)
    changed = features.copy()
    changed[:15] += 5
    np.testing.assert_array_equal(run(draft, [features], block), run(draft, [changed], block))
    changed[15] += 5
    assert np.abs(run(draft, [features], block) - run(draft, [changed], block)).max() > 1e-3
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None])
    assert [layer.rows for layer in context.layers] == [5, 5]


def test_the_block_is_seen_both_ways_in_full_layers_and_one_way_in_sliding_ones() -> None:
    features, block = data(4)
    changed = block.copy()
    changed[-1] += 5
    full, sliding = tiny_draft(), tiny_draft(**VARIANTS["sliding"])
    assert np.abs(run(full, [features], block) - run(full, [features], changed))[0].max() > 1e-3
    difference = np.abs(run(sliding, [features], block) - run(sliding, [features], changed))
    assert difference[:-1].max() == 0 and difference[-1].max() > 1e-3


def test_a_context_that_starts_late_uses_absolute_positions() -> None:
    """The draft joins a filled cache: its rows are rotated where they really are."""
    draft = tiny_draft()
    features, _ = data(8)
    late = DraftContext(draft.config, start=5)
    draft.extend(late, mx.array(features[5:])[None])
    moved = draft.make_context()
    draft.extend(moved, mx.array(features[5:])[None])
    assert late.length == 8
    assert mx.abs(late.layers[0].arrays[0] - moved.layers[0].arrays[0]).max().item() > 1e-2
    assert mx.array_equal(late.layers[0].arrays[1], moved.layers[0].arrays[1])


def test_yarn_agrees_with_mlx_lm_where_both_speak() -> None:
    config = draft_config(rope_scaling=YARN)
    x = mx.random.normal((1, 2, 6, DIM))
    theirs = initialize_rope(DIM, config.rope_theta, False, dict(YARN), 2048)
    assert mx.abs(make_rope(config)(x, offset=77) - theirs(x, offset=77)).max().item() < 1e-4


def test_yarn_ignores_mscale() -> None:
    """Kimi drafts carry mscale keys but were trained with the plain factor."""
    x = mx.random.normal((1, 2, 6, DIM))
    plain, with_keys = (
        make_rope(draft_config(rope_scaling=YARN | e)) for e in ({}, dict(mscale=1.0, mscale_all_dim=1.0))
    )
    assert mx.array_equal(plain(x, offset=9), with_keys(x, offset=9))


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn"}, {"rope_type": "spiral", "factor": 2.0}])
def test_an_unusable_rope_scaling_is_named(scaling: dict) -> None:
    with pytest.raises(CheckpointError, match=r"rope scaling .* is not usable"):
        make_rope(draft_config(rope_scaling=scaling))


def test_logit_transforms_are_the_drafts_own() -> None:
    logits = mx.array([[-50.0, 3.0, 200.0]])
    draft = tiny_draft(output_multiplier=0.5, final_logit_softcapping=30.0)
    expected = 30 * np.tanh(np.array([[-25.0, 1.5, 100.0]]) / 30)
    np.testing.assert_allclose(np.array(draft.transform_logits(logits)), expected, rtol=1e-5)
    assert tiny_draft().transform_logits(logits) is logits


def test_huge_features_stay_finite() -> None:
    """They would overflow float16, to which no draft is ever cast."""
    draft = tiny_draft()
    draft.set_dtype(mx.bfloat16)
    features, block = data(6)
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None] * 1e5)
    assert mx.isfinite(draft.denoise(mx.array(block)[None], context)).all().item()


def test_parameter_count_follows_the_published_formula() -> None:
    """L (2 nq D H + 2 nkv D H + 3 H I + 2 H + 2 D) + K H^2 + 2 H: the sizes of the published files."""
    from dflash_mlx.config import DraftConfig

    def count(layers, hidden, inner, heads, kv, taps, dim=128):
        config = draft_config(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=kv, head_dim=dim, num_target_layers=64,
            dflash_config={"target_layer_ids": list(range(taps))},
        )  # fmt: skip
        assert isinstance(config, DraftConfig)
        flat = tree_flatten(DraftModel(config).parameters())  # lazy: nothing is allocated
        return len(flat), sum(v.size for _, v in flat)

    assert count(5, 2560, 9728, 32, 8, 5) == (58, 537_427_200)  # Qwen3-4B-DFlash-b16
    assert count(5, 4096, 12288, 32, 8, 5) == (58, 1_048_626_432)  # Qwen3-8B-DFlash-b16
    assert count(8, 2048, 6144, 32, 4, 5) == (91, 473_995_264)  # Qwen3-Coder-30B-A3B-DFlash
    assert count(6, 4096, 12288, 32, 8, 8) == (69, 1_291_904_512)  # Qwen3.5-9B-DFlash
