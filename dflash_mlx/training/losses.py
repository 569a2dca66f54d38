"""What a draft is trained to: the target's own tokens and its distribution, position by position.

A position k of a block (1..K) counts by how likely it is to be reached: by a fixed decay, exp(-(k - 1) / gamma) (DFlash
paper, arXiv 2602.06036, section 3.3), or by what the draft itself finds (D-PACE: speculators' rule, restated below).

What is learned at a position is a sparse distribution over the training vocabulary: (1 - soft) on the token that was
chosen, `soft` on the target's likeliest tokens. Its cross-entropy needs the logits at a few places and their logsumexp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.training.blocks import Blocks
from dflash_mlx.training.recipe import PACE, Recipe

_MATTERS = -6.0  # log of the share of a token in a distribution, 0.25 %


@dataclass(frozen=True)
class Goals:
    """What the rows of a micro-batch learn; R = N * A * K rows, columns of the training vocabulary.

    labels:  [R] int32, column of the token; 0 where there is none.
    counts:  [R] float32, 1 where the row has a token that can be proposed, else 0.
    columns: [R, C] int32 and shares [R, C] float32: the distribution, which sums to 1 where `counts` is 1.
    entropy: [R] float32, of the distribution: its cross-entropy cannot be less.
    """

    labels: mx.array
    counts: mx.array
    columns: mx.array
    shares: mx.array
    entropy: mx.array

    @classmethod
    def of(cls, blocks: Blocks, columns: np.ndarray, recipe: Recipe) -> Goals:
        """columns: [V], which column a token of the target is, -1 for none."""
        tokens = blocks.tokens[..., 1:].reshape(-1)
        found = np.where(tokens >= 0, columns[tokens], -1)
        there = (found >= 0) & np.repeat((blocks.anchor_segments >= 0).reshape(-1), blocks.tokens.shape[2] - 1)
        labels = np.where(there, found, 0).astype(np.int32)
        places, shares = labels[:, None], there.astype(np.float32)[:, None]
        if blocks.soft_ids is not None and blocks.soft_logprobs is not None and recipe.soft:
            top = blocks.soft_ids.shape[-1]
            ids = columns[blocks.soft_ids.reshape(-1, top)]
            weights = _sharpened(blocks.soft_logprobs.reshape(-1, top), recipe.sharpness) * (ids >= 0)
            whole = weights.sum(axis=1, keepdims=True)
            known = (whole[:, 0] > 0) & there
            soft = np.where(known, recipe.soft, 0.0)[:, None]
            places = np.concatenate([places, np.maximum(ids, 0)], axis=1)
            shares = np.concatenate([shares * (1 - soft), soft * weights / np.maximum(whole, 1e-30)], axis=1)
        shares = shares.astype(np.float32)
        return cls(
            mx.array(labels),
            mx.array(there.astype(np.float32)),
            mx.array(places.astype(np.int32)),
            mx.array(shares),
            mx.array(_entropy(places, shares)),
        )


def named(blocks: Blocks) -> np.ndarray:
    """Target ids that the rows of a micro-batch learn, ascending; of distributions those with a share that matters."""
    found = [blocks.tokens[..., 1:].reshape(-1)]
    if blocks.soft_ids is not None and blocks.soft_logprobs is not None:
        found.append(blocks.soft_ids[blocks.soft_logprobs > _MATTERS])
    ids = np.unique(np.concatenate(found))
    return ids[ids >= 0]


def _sharpened(logprobs: np.ndarray, power: float) -> np.ndarray:
    """[R, T] -> probabilities to a power, the likeliest being 1."""
    best = logprobs.max(axis=1, keepdims=True)
    return np.exp(power * (logprobs - np.where(np.isfinite(best), best, 0)).astype(np.float64))


def _entropy(places: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """[R]; the first column may name a place that another names again."""
    again = (places[:, 1:] == places[:, :1]) & (shares[:, 1:] > 0)
    merged = shares.astype(np.float64)
    merged[:, 0] += (merged[:, 1:] * again).sum(axis=1)
    merged[:, 1:] *= ~again
    return -(merged * np.log(np.maximum(merged, 1e-30))).sum(axis=1).astype(np.float32)


@mx.custom_function
def cross_entropy(logits: mx.array, columns: mx.array, shares: mx.array) -> mx.array:
    """[R, V] float32, [R, C], [R, C] -> [R]: sum of shares * (logsumexp - logit). Only the logits have a gradient.

    A custom gradient saves half of the exponentials, which are what a CPU spends its time with.
    """
    chosen = mx.take_along_axis(logits, columns, axis=1)
    return shares.sum(axis=1) * mx.logsumexp(logits, axis=1) - (shares * chosen).sum(axis=1)


@cross_entropy.vjp
def _gradient(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    logits, columns, shares = primals
    whole = shares.sum(axis=1)
    chosen = mx.take_along_axis(logits, columns, axis=1)
    # The output holds the logsumexp: no second pass over the logits.
    safe = mx.where(whole > 0, whole, 1.0)
    peak = mx.where(whole > 0, (output + (shares * chosen).sum(axis=1)) / safe, 0.0)
    slope = mx.exp(logits - peak[:, None]) * (whole * cotangent)[:, None]
    slope = mx.where((whole > 0)[:, None], slope, 0.0)
    rows = mx.arange(len(logits))[:, None]
    slope = slope.at[rows, columns].add(-shares * cotangent[:, None])
    return slope, mx.zeros_like(columns), mx.zeros_like(shares)


def weights(hard: mx.array, counts: mx.array, recipe: Recipe) -> mx.array:
    """How much each position counts.

    D-PACE: with c = exp(-cross-entropy), s = (1 - alpha) c + alpha (1 where there is no token), the weight of
    position k is the sum over j >= k of s_1 * .. * s_j.

    Args:
        hard: [blocks, K] cross-entropy against the tokens; no gradient goes through it. counts: [blocks, K].
    Returns:
        [blocks, K] float32, 0 where `counts` is.
    """
    positions = hard.shape[1]
    if recipe.weighting == PACE:
        share = (1 - recipe.alpha) * mx.exp(-mx.stop_gradient(hard)) + recipe.alpha
        reached = mx.cumprod(mx.where(counts > 0, share, 1.0), axis=1) * counts
        return mx.cumsum(reached, axis=1, reverse=True) * counts
    return mx.exp(-mx.arange(positions) / recipe.gamma_used) * counts


def selector_loss(
    draft: DraftModel, hidden: mx.array, logits: mx.array, before: mx.array, labels: mx.array
) -> mx.array:
    """Cross-entropy of DFlash 2's selector over its candidates, each given the true token before it.

    The label takes the place of the last candidate where it is none of them. As where it runs, only tokens that the
    codebooks have are candidates: a target that a draft is adapted to may have more.

    Args:
        hidden: [R, H] after the final norm. logits: [R, V] after the draft's transform. before: [R] int32, the true
            token before. labels: [R] int32.
    Returns:
        [R] float32, 0 where the label cannot be a candidate.
    """
    selector = draft.candidate_selector
    shape = draft.config.selector
    assert shape is not None  # of DFlash 2
    rows = len(selector.predecessor_codebook)
    logits, before = logits[:, :rows], mx.minimum(before, rows - 1)
    known, labels = labels < rows, mx.minimum(labels, rows - 1)
    count = min(shape.top_k, logits.shape[1])
    best = mx.argsort(-mx.stop_gradient(logits), axis=1)[:, :count].astype(mx.int32)
    found = best == labels[:, None]
    last = mx.arange(count) == count - 1
    missing = ~found.any(axis=1, keepdims=True)
    candidates = mx.where(missing & last, labels[:, None], best)
    after = selector.successor_codebook[candidates].astype(mx.float32)  # [R, C, r]
    start = selector.predecessor_codebook[before].astype(mx.float32) * selector.hidden_projection(hidden).astype(
        mx.float32
    )
    scores = mx.take_along_axis(logits, candidates, axis=1) + (after @ start[:, :, None])[..., 0]
    right = mx.where(candidates == labels[:, None], scores, 0.0).sum(axis=1)
    return mx.where(known, mx.logsumexp(scores, axis=1) - right, 0.0)
