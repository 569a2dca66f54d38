"""An independent implementation of DFlash and DFlash 2 in numpy's float64, straight from the formulas.

Row by row and loop by loop: nothing is shared with the package but the parameters' names.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.model import DraftModel

Weights = dict[str, np.ndarray]


def weights_of(draft: DraftModel) -> Weights:
    return {k: np.array(v.astype(mx.float32), dtype=np.float64) for k, v in tree_flatten(draft.parameters())}


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotary(config: DraftConfig) -> tuple[np.ndarray, float]:
    """inverse frequencies [D/2] and the factor on q and k."""
    dim = config.head_dim
    base = config.rope_theta ** (-np.arange(0, dim, 2) / dim)
    scaling = config.rope_scaling
    if not scaling:
        return base, 1.0
    s, original = scaling["factor"], scaling["original_max_position_embeddings"]
    corr = [dim * np.log(original / (2 * np.pi * n)) / (2 * np.log(config.rope_theta)) for n in (32, 1)]
    if scaling.get("truncate", True):
        corr = [np.floor(corr[0]), np.ceil(corr[1])]
    low, high = max(corr[0], 0), min(corr[1], dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    factor = scaling.get("attention_factor") or 0.1 * np.log(s) + 1
    return base * ((1 - ramp) + ramp / s), factor


def rotate(x: np.ndarray, positions: np.ndarray, config: DraftConfig) -> np.ndarray:
    """[T, heads, D], split halves."""
    inverse, factor = rotary(config)
    angle = positions[:, None, None] * inverse
    a, b = np.split(x * factor, 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def convolve(side: int, z: np.ndarray, u: np.ndarray, base: np.ndarray, projection: np.ndarray) -> np.ndarray:
    """z, u [T, H]; base [2, taps, H]; projection [2 * taps * groups, H], in the order side, tap, group."""
    rows, hidden = z.shape
    _, taps, _ = base.shape
    groups = len(projection) // (2 * taps)
    group_size = hidden // groups
    out = np.zeros_like(z)
    for t in range(rows):
        dynamic = projection @ u[t]
        for tap in range(taps):
            if t - tap < 0:
                continue
            for c in range(hidden):
                index = (side * taps + tap) * groups + c // group_size
                out[t, c] += (base[side, tap, c] + dynamic[index]) * z[t - tap, c]
    return out


def reference_keys(draft: DraftModel, features: np.ndarray, layer: int) -> np.ndarray:
    """features [S, F] of positions 0..S-1 -> the context's keys [S, kv heads, D], rotated."""
    c, w = draft.config, weights_of(draft)
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
    keys = (context @ w[f"layers.{layer}.self_attn.k_proj.weight"].T).reshape(len(features), -1, c.head_dim)
    keys = rms(keys, w[f"layers.{layer}.self_attn.k_norm.weight"], c.rms_norm_eps)
    return rotate(keys, np.arange(len(features)), c)


def reference_denoise(draft: DraftModel, features: np.ndarray, block: np.ndarray) -> np.ndarray:
    """features [S, F] of positions 0..S-1, block [T, H] embeddings -> [T-1, H]."""
    c, w = draft.config, weights_of(draft)
    dim, eps, groups = c.head_dim, c.rms_norm_eps, c.num_heads // c.num_kv_heads
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    start, rows = len(features), len(block)
    where = np.arange(start, start + rows)
    x = block.astype(np.float64)
    for i in range(c.num_layers):
        p = f"layers.{i}."

        def heads(rows_in, name, norm=None, positions=None, p=p):
            y = (rows_in @ w[f"{p}self_attn.{name}_proj.weight"].T).reshape(len(rows_in), -1, dim)
            if norm:
                y = rotate(rms(y, w[f"{p}self_attn.{norm}.weight"], eps), positions, c)
            return y

        def around(z, u, conv, side, p=p):
            if c.convolution is None:
                return z
            return convolve(side, z, u, w[f"{p}{conv}.base_kernel"], w[f"{p}{conv}.kernel_projection.weight"])

        u = rms(x, w[p + "input_layernorm.weight"], eps)
        y = around(u, u, "attention_conv", 0)
        q = heads(y, "q", "q_norm", where)
        k = np.concatenate([heads(context, "k", "k_norm", np.arange(start)), heads(y, "k", "k_norm", where)])
        v = np.concatenate([heads(context, "v"), heads(y, "v")])
        out = np.zeros_like(q)
        for row in range(rows):
            key = np.arange(start + rows)
            seen = np.ones(start + rows, bool)
            if c.is_causal(i):
                seen &= key <= where[row]
            if c.layer_types[i] == "sliding_attention":
                seen &= where[row] - key < c.sliding_window
            for head in range(c.num_heads):
                score = k[:, head // groups] @ q[row, head] * dim**-0.5
                score = np.where(seen, score, -np.inf)
                weight = np.exp(score - score.max())
                out[row, head] = (weight / weight.sum()) @ v[:, head // groups]
        x = x + around(out.reshape(rows, -1) @ w[p + "self_attn.o_proj.weight"].T, u, "attention_conv", 1)
        u = rms(x, w[p + "post_attention_layernorm.weight"], eps)
        y = around(u, u, "mlp_conv", 0)
        gate, up = (y @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + around((silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T, u, "mlp_conv", 1)
    return rms(x, w["norm.weight"], eps)[1:]


def reference_logits(draft: DraftModel, raw: np.ndarray) -> np.ndarray:
    """The draft's multiplier and cap on the raw head's output."""
    logits = raw * draft.config.output_multiplier
    cap = draft.config.final_logit_softcapping
    return cap * np.tanh(logits / cap) if cap else logits


def reference_own_head(draft: DraftModel, hidden: np.ndarray) -> np.ndarray:
    """[K, H] -> [K, rows of its head]"""
    return reference_logits(draft, hidden @ weights_of(draft)["lm_head.weight"].T)


def reference_walk(
    draft: DraftModel, hidden: np.ndarray, logits: np.ndarray, path: list[int], known: int | None = None
) -> list[dict[int, float]]:
    """Scores by candidate, row by row, for a walk whose rows chose path[1:]; path[0] is the anchor."""
    w = weights_of(draft)
    a, b = w["candidate_selector.predecessor_codebook"], w["candidate_selector.successor_codebook"]
    projection = w["candidate_selector.hidden_projection.weight"]
    selector = draft.config.selector
    assert selector is not None
    rows = []
    for h, u, previous in zip(hidden, logits, path, strict=False):
        ids = range(min(len(a), len(u), known or len(u)))
        best = sorted(ids, key=lambda token: -u[token])[: selector.top_k]
        before = a[min(previous, len(a) - 1)] * (projection @ h)
        rows.append({token: u[token] + before @ b[token] for token in best})
    return rows


def reference_path(draft: DraftModel, hidden: np.ndarray, logits: np.ndarray, anchor: int) -> list[int]:
    """The greedy walk: K tokens."""
    path = [anchor]
    for row in range(len(hidden)):
        scores = reference_walk(draft, hidden, logits, [*path, -1])[row]
        path.append(max(sorted(scores), key=lambda token: scores[token]))
    return path[1:]
