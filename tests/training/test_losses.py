"""Losses and weights against brute force in float64: token by token, from the formulas."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.training.blocks import Draw, Sample, assemble
from dflash_mlx.training.losses import Goals, cross_entropy, selector_loss, weights
from dflash_mlx.training.recipe import Recipe
from tests.conftest import DFLASH2, special_draft

VOCAB, TOP, BLOCK = 40, 5, 5
RANDOM = np.random.default_rng(2)


def blocks_of(anchors: list[int], *, seed: int = 0):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCAB, 16).astype(np.int32)
    ids = np.stack([random.permutation(VOCAB)[:TOP] for _ in range(12)]).astype(np.int32)
    logprobs = np.log(random.dirichlet(np.ones(TOP), 12)).astype(np.float32)
    logprobs[3, 2:] = -np.inf
    sample = Sample(tokens, 4, np.zeros((15, 2), np.float32), ids, logprobs)
    draws = [Draw(0, np.array(anchors)), Draw(0, np.array(anchors[:1]))]  # the second row lacks anchors
    return assemble(draws, lambda _: sample, Recipe(block_size=BLOCK)), sample


def columns_without(*excluded: int) -> np.ndarray:
    columns = np.full(VOCAB, -1, np.int32)
    kept = [token for token in range(VOCAB) if token not in excluded]
    columns[kept] = np.arange(len(kept))
    return columns


@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_goals_are_the_mixture_of_token_and_distribution(soft: float, sharpness: float) -> None:
    """A row that is off by one learns the distribution of another position; an excluded token shifts no other."""
    blocks, sample = blocks_of([4, 9, 14])
    excluded = int(sample.tokens[6]), int(sample.soft_ids[5, 0])
    columns = columns_without(*excluded)
    goals = Goals.of(blocks, columns, Recipe(block_size=BLOCK, soft=soft, sharpness=sharpness))
    dense = np.zeros((len(goals.labels), VOCAB - len(set(excluded))))
    np.add.at(dense, (np.arange(len(dense))[:, None], np.array(goals.columns)), np.array(goals.shares))
    row = 0
    for anchors in ([4, 9, 14], [4, None, None]):
        for anchor in anchors:
            for k in range(1, BLOCK):
                expected = np.zeros_like(dense[0])
                place = None if anchor is None else anchor + k
                token = -1 if place is None or place >= 16 else columns[sample.tokens[place]]
                if token >= 0:
                    distribution = np.zeros(VOCAB)
                    distribution[sample.soft_ids[place - 4]] = np.exp(sample.soft_logprobs[place - 4]) ** sharpness
                    distribution = distribution[columns >= 0]
                    expected = soft * distribution / distribution.sum()
                    expected[token] += 1 - soft
                np.testing.assert_allclose(dense[row], expected, atol=1e-5)
                assert np.array(goals.counts)[row] == (token >= 0)
                entropy = -(expected[expected > 0] * np.log(expected[expected > 0])).sum()
                assert np.array(goals.entropy)[row] == pytest.approx(entropy, abs=1e-5)
                row += 1
    assert row == len(dense)


def test_without_distributions_the_token_is_all_that_is_learned() -> None:
    _blocks, sample = blocks_of([4])
    bare = assemble(
        [Draw(0, np.array([4]))],
        lambda _: Sample(sample.tokens, 4, sample.features),
        Recipe(block_size=BLOCK),
    )
    goals = Goals.of(bare, np.arange(VOCAB, dtype=np.int32), Recipe(block_size=BLOCK, soft=0.7))
    assert goals.columns.shape == (BLOCK - 1, 1)
    assert np.array(goals.shares).tolist() == [[1.0]] * (BLOCK - 1)
    assert np.array(goals.labels).tolist() == sample.tokens[5:9].tolist()


def test_cross_entropy_and_its_gradient_are_those_of_the_formula() -> None:
    """Its gradient is our own: against MLX's of the same formula, with large logits, rows of no goal, equal columns."""
    mx.random.seed(0)
    logits = mx.random.normal((6, VOCAB)) * 20
    columns = mx.array(RANDOM.integers(0, VOCAB, (6, 4)))
    shares = mx.array(RANDOM.dirichlet(np.ones(4), 6).astype(np.float32)) * mx.array([1, 1, 0, 1, 0.5, 1])[:, None]
    columns[1, 2] = columns[1, 0]
    scale = mx.random.normal((6,))

    def plain(x: mx.array) -> mx.array:
        logprobs = x - mx.logsumexp(x, axis=1, keepdims=True)
        return -(shares * mx.take_along_axis(logprobs, columns, axis=1)).sum(axis=1)

    np.testing.assert_allclose(cross_entropy(logits, columns, shares), plain(logits), rtol=1e-5, atol=1e-5)
    ours = mx.grad(lambda x: (cross_entropy(x, columns, shares) * scale).sum())(logits)
    np.testing.assert_allclose(ours, mx.grad(lambda x: (plain(x) * scale).sum())(logits), atol=1e-5)


def test_the_decay_is_that_of_the_paper() -> None:
    counts = np.array([[1, 1, 1, 1], [1, 0, 1, 1]], np.float32)
    found = weights(mx.zeros((2, 4)), mx.array(counts), Recipe(block_size=5, gamma=2.0))
    np.testing.assert_allclose(found, np.exp(-np.arange(4) / 2) * counts, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_pace_weights_are_sums_of_products(alpha: float) -> None:
    hard = RANDOM.exponential(1.0, (3, 4))
    counts = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]], np.float32)
    expected = np.zeros((3, 4))
    for block in range(3):
        for k in range(4):
            for j in range(k, 4):
                product = 1.0
                for i in range(j + 1):
                    product *= (1 - alpha) * np.exp(-hard[block, i]) + alpha if counts[block, i] else 1.0
                expected[block, k] += product * counts[block, j]
    found = weights(mx.array(hard), mx.array(counts), Recipe(block_size=5, weighting="pace", alpha=alpha))
    np.testing.assert_allclose(found, expected * counts, rtol=1e-5)


def test_no_gradient_goes_through_pace_weights() -> None:
    """The draft would else learn to be unsure, so that little is asked of it."""
    recipe = Recipe(block_size=4, weighting="pace")
    slope = mx.grad(lambda x: weights(x, mx.ones((2, 3)), recipe).sum())(mx.ones((2, 3)))
    assert not np.array(slope).any()


def test_tokens_that_the_codebooks_do_not_have_are_no_candidates() -> None:
    """A target that a draft is adapted to may have more: rows past the end of the codebooks would be read."""
    draft = special_draft(DFLASH2, vocab_size=250)
    mx.random.seed(1)
    hidden, logits = mx.random.normal((3, draft.config.hidden_size)), 3 * mx.random.normal((3, 257))
    logits[:, 250:] = 50.0  # the best ones
    before, labels = mx.array([251, 3, 256]), mx.array([5, 253, 7])
    found = selector_loss(draft, hidden, logits, before, labels)
    known = selector_loss(draft, hidden, logits[:, :250], mx.array([249, 3, 249]), mx.array([5, 0, 7]))
    assert found[1] == 0 and np.array_equal(np.array(found)[[0, 2]], np.array(known)[[0, 2]])


def test_the_selector_learns_its_candidates_given_the_true_token_before() -> None:
    draft = special_draft(DFLASH2)
    shape = draft.config.selector
    mx.random.seed(1)
    rows = 7
    hidden, logits = mx.random.normal((rows, draft.config.hidden_size)), 3 * mx.random.normal((rows, 257))
    before, labels = RANDOM.integers(0, 257, rows), RANDOM.integers(0, 257, rows)
    labels[:3] = np.argsort(-np.array(logits), axis=1)[[0, 1, 2], [0, shape.top_k - 1, shape.top_k]]
    found = np.array(selector_loss(draft, hidden, logits, mx.array(before), mx.array(labels)))
    a, b = (
        np.array(draft.candidate_selector.predecessor_codebook),
        np.array(draft.candidate_selector.successor_codebook),
    )
    projected = np.array(draft.candidate_selector.hidden_projection(hidden))
    for row in range(rows):
        unary = np.array(logits)[row]
        candidates = list(np.argsort(-unary)[: shape.top_k])
        if labels[row] not in candidates:
            candidates[-1] = labels[row]
        scores = [unary[c] + (a[before[row]] * projected[row]) @ b[c] for c in candidates]
        expected = np.log(np.exp(scores).sum()) - scores[candidates.index(labels[row])]
        assert found[row] == pytest.approx(expected, abs=1e-3)
