"""Many blocks in one forward see what one block in a forward of its own sees, and nothing else."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.config import FULL, SLIDING, Convolution, Selector
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.training.blocks import Blocks, Draw, Sample, assemble
from dflash_mlx.training.forward import Sight, denoise_blocks
from dflash_mlx.training.recipe import Recipe
from tests.conftest import special_draft
from tests.draft_reference import reference_denoise

BLOCK = 4
LENGTHS = ((5, 13), (3, 21), (9, 12))  # prompt, whole answer
KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "sliding, causal blocks": dict(layer_types=(SLIDING, FULL), sliding_window=5),
    "sliding, blocks both ways": dict(layer_types=(SLIDING, SLIDING), sliding_window=3, causal=False),
    "causal": dict(causal=True),
    "second": dict(convolution=Convolution(2, 16), selector=Selector(8, 4), causal=False),
    "yarn": dict(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
}


def made(kind: str) -> DraftModel:
    draft = special_draft(dict(layer_types=(FULL, FULL), block_size=BLOCK) | (KINDS | KEPT)[kind])
    mx.random.seed(5)
    shaken = [(name, value + 0.1 * mx.random.normal(value.shape)) for name, value in tree_flatten(draft.parameters())]
    draft.load_weights(shaken)
    return draft


def samples(draft: DraftModel) -> list[Sample]:
    random = np.random.default_rng(1)
    width = draft.fc.weight.shape[1]
    return [
        Sample(
            random.integers(0, 250, whole).astype(np.int32), prompt, random.normal(size=(whole - 1, width)).astype("f4")
        )
        for prompt, whole in LENGTHS
    ]


DRAWS = [Draw(0, np.array([5, 8, 11])), Draw(1, np.array([3, 4, 17, 19])), Draw(2, np.array([10]))]


def run(draft: DraftModel, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of the blocks [N, A, B, H], and what the forward makes of them."""
    _count, _anchors, _size = blocks.tokens.shape
    mx.random.seed(7)
    table = mx.random.normal((300, draft.config.hidden_size))
    rows = table[mx.array(np.where(blocks.tokens >= 0, blocks.tokens, 299))]
    return np.array(rows), np.array(denoise_blocks(draft, rows, mx.array(blocks.features), Sight.of(blocks)))


# Which answer each row's segments are, by the positions that a row has room for.
ROWS = {0: ((0,), (1,), (2,)), 32: ((0, 1), (2,)), 64: ((0, 1, 2),)}


@pytest.mark.parametrize("pack", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_denoised_as_if_it_were_alone(kind: str, pack: int) -> None:
    """A mask, position or segment that is off lets blocks see each other, other answers, or what lies behind."""
    draft = made(kind)
    given = samples(draft)
    blocks = assemble(DRAWS, lambda index: given[index], Recipe(block_size=BLOCK, pack=pack, longest=24))
    rows, found = run(draft, blocks)
    assert len(found) == len(ROWS[pack])
    compared = 0
    for row, at in np.argwhere(blocks.anchor_segments >= 0):
        answer = ROWS[pack][row][blocks.anchor_segments[row, at]]
        anchor = DRAWS[answer].anchors[compared - sum(len(draw.anchors) for draw in DRAWS[:answer])]
        seen = given[answer].features[:anchor].astype(np.float64)
        np.testing.assert_allclose(found[row, at], reference_denoise(draft, seen, rows[row, at]), atol=3e-4)
        compared += 1
    assert compared == sum(len(draw.anchors) for draw in DRAWS)


KEPT: dict[str, dict[str, object]] = {
    "rows that are kept": dict(context_window=4),
    "rows that are kept, sliding": dict(layer_types=(SLIDING, FULL), sliding_window=8, context_window=5),
}


@pytest.mark.parametrize("kind", ["full", "second", "sliding, causal blocks", *KEPT])
def test_it_is_the_forward_that_serves(kind: str) -> None:
    """What is trained is what runs: `DraftModel.extend` and `denoise` give the same for every anchor."""
    draft = made(kind)
    given = samples(draft)
    blocks = assemble(DRAWS[:1], lambda index: given[index], Recipe(block_size=BLOCK))
    rows, found = run(draft, blocks)
    for at, anchor in enumerate(DRAWS[0].anchors):
        context = draft.make_context()
        draft.extend(context, mx.array(given[0].features[None, : int(anchor)]))
        served = draft.denoise(mx.array(rows[0, at][None]), context)
        np.testing.assert_allclose(found[0, at], np.array(served[0]), atol=2e-5)


def test_features_behind_the_anchor_and_of_padding_have_no_gradient() -> None:
    """Otherwise a draft would learn to read what it does not have when it runs."""
    draft = made("full")
    given = samples(draft)
    blocks = assemble(DRAWS[2:], lambda index: given[index], Recipe(block_size=BLOCK))
    rows = mx.random.normal((1, 1, BLOCK, draft.config.hidden_size))
    sight = Sight.of(blocks)
    slope = mx.grad(lambda features: (denoise_blocks(draft, rows, features, sight) ** 2).sum())(
        mx.array(blocks.features)
    )
    moved = np.abs(np.array(slope)).max(axis=-1)[0] > 0
    assert moved[:10].all() and not moved[10:].any()


def test_the_gradient_is_that_of_the_forward() -> None:
    """A wrong one trains something else: compared with differences along a random direction, parameter by parameter."""
    draft = made("second")
    given = samples(draft)
    blocks = assemble(DRAWS, lambda index: given[index], Recipe(block_size=BLOCK, pack=64, longest=24))
    sight = Sight.of(blocks)
    rows = mx.random.normal((*blocks.tokens.shape, draft.config.hidden_size))
    features = mx.array(blocks.features)

    def value(parameters: dict) -> mx.array:
        draft.update(parameters)
        return (denoise_blocks(draft, rows, features, sight) * direction).mean()

    direction = mx.random.normal(denoise_blocks(draft, rows, features, sight).shape)
    start = draft.trainable_parameters()
    slopes = dict(tree_flatten(mx.grad(value)(start)))
    draft.update(start)
    for name in (
        "fc.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.1.mlp_conv.base_kernel",
        "hidden_norm.weight",
    ):
        parameter = dict(tree_flatten(start))[name]
        along = mx.random.normal(parameter.shape)
        step = 3e-3 / float(mx.abs(along).max())
        ends = []
        for sign in (1, -1):
            draft.load_weights([(name, parameter + sign * step * along)], strict=False)
            ends.append(float((denoise_blocks(draft, rows, features, sight) * direction).mean()))
        draft.load_weights([(name, parameter)], strict=False)
        expected = (ends[0] - ends[1]) / (2 * step)
        assert float((slopes[name] * along).sum()) == pytest.approx(expected, rel=0.05, abs=2e-5), name
