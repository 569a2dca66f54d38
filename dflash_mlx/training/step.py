"""Loss and gradients of one micro-batch.

Weights are float32. With `precision` "bfloat16" the passes run on a rounded copy of them, as a draft in bfloat16 is
served; MLX sums norms in float32, and scores, logits and losses are float32 either way. Features are divided by their
scales in float32 first, since the larger ones of some targets overflow float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.training.blocks import Blocks
from dflash_mlx.training.forward import Sight, denoise_blocks
from dflash_mlx.training.frozen import Frozen
from dflash_mlx.training.initialise import FeatureScales
from dflash_mlx.training.losses import Goals, cross_entropy, named, selector_loss, weights
from dflash_mlx.training.recipe import BFLOAT16, Recipe

LOGITS = 1 << 26  # logits that are kept for the backward pass; of more, pieces of this size are computed twice
Totals = dict[str, mx.array]


class Step:
    """One draft's, with its target's frozen parts.

    Args:
        draft: float32, for features that are divided by `scales`.
    """

    def __init__(self, draft: DraftModel, frozen: Frozen, recipe: Recipe, scales: FeatureScales) -> None:
        self._draft, self._frozen, self._recipe = draft, frozen, recipe
        self._scales = scales

    def __call__(self, blocks: Blocks) -> tuple[Any, Totals]:
        """The gradient of the sum of weighted losses, and sums.

        Returns:
            Gradients of the trainable parameters, float32, and: loss, kl [] and weight []: of these, the sum of the
            weights; right [K], the proposals that are the target's token, of count [K]; blocks [].
        """
        recipe = self._recipe
        frozen = self._frozen.among(named(blocks), recipe.columns) if recipe.columns else self._frozen
        goals = Goals.of(blocks, frozen.columns, recipe)
        sight = Sight.of(blocks)
        anchors = mx.array(np.maximum(blocks.tokens[..., 0], 0))
        rows = self._frozen.rows(anchors, blocks.tokens.shape[-1])
        features = mx.array(self._scales.divided(blocks.features))
        before = mx.array(np.maximum(blocks.tokens[..., :-1], 0).reshape(-1).astype(np.int32))
        master = self._draft.trainable_parameters()

        def run(parameters: Any) -> tuple[mx.array, Totals]:
            self._draft.update(self._rounded(parameters))
            hidden = denoise_blocks(self._draft, rows, features, sight)
            return self._totals(hidden.astype(mx.float32), frozen, goals, before)

        try:
            (_, totals), gradients = mx.value_and_grad(run)(master)
        finally:
            self._draft.update(master)
        totals["blocks"] = mx.array(int((blocks.anchor_segments >= 0).sum()))
        return gradients, totals

    def _rounded(self, parameters: Any) -> Any:
        if self._recipe.precision != BFLOAT16:
            return parameters
        return tree_map(lambda value: value.astype(mx.bfloat16), parameters)

    def _totals(self, hidden: mx.array, frozen: Frozen, goals: Goals, before: mx.array) -> tuple[mx.array, Totals]:
        """[N, A, K, H] -> the sum of weighted losses, and all sums."""
        positions, width = hidden.shape[2:]
        found = self._in_pieces(hidden.reshape(-1, width), frozen, goals, before)
        joined = [mx.concatenate(list(parts)).reshape(-1, positions) for parts in zip(*found, strict=True)]
        soft, hard, right, selected = joined
        counts = goals.counts.reshape(-1, positions)
        weight = weights(mx.stop_gradient(hard), counts, self._recipe)
        loss = (weight * soft).sum()
        if self._draft.config.selector is not None:
            loss = loss + self._recipe.selector * (weight * selected).sum()
        kl = (weight * (soft - goals.entropy.reshape(-1, positions))).sum()
        totals = {"loss": loss, "kl": kl, "weight": weight.sum(), "right": (right * counts).sum(axis=0)}
        return loss, totals | {"count": counts.sum(axis=0)}

    def _in_pieces(
        self, hidden: mx.array, frozen: Frozen, goals: Goals, before: mx.array
    ) -> list[tuple[mx.array, ...]]:
        """What each row loses, in pieces of rows, so that not all logits are there at once."""
        second = self._draft.config.selector is not None
        # What is recomputed has a gradient for its arguments only.
        selector = self._draft.candidate_selector.trainable_parameters() if second else {}
        rows = max(1, LOGITS // frozen.size)
        pieces = []
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            lose = partial(
                self._lose, frozen, [each[part] for each in (goals.labels, goals.columns, goals.shares, before)]
            )
            pieces.append((lose if len(hidden) <= rows else mx.checkpoint(lose))(selector, hidden[part]))
        return pieces

    def _lose(self, frozen: Frozen, given: Sequence[mx.array], selector: Any, hidden: mx.array) -> tuple[mx.array, ...]:
        """What rows lose.

        Args:
            given: their labels, columns, shares and the tokens before them. selector: its parameters. hidden: [R, H].
        Returns:
            [R] each: cross-entropy to the distribution and to the token, whether that is found, the selector's loss.
        """
        labels, columns, shares, before = given
        logits = frozen.logits(hidden)
        soft: mx.array = cross_entropy(logits, columns, shares)  # type: ignore[assignment]
        still = mx.stop_gradient(logits)
        # As the distribution's: what it says about the logsumexp costs no second one.
        chosen = mx.take_along_axis(still, columns, axis=1)
        share = mx.maximum(shares.sum(axis=1), 1e-30)
        total = (mx.stop_gradient(soft) + (shares * chosen).sum(axis=1)) / share
        hard = total - mx.take_along_axis(still, labels[:, None], axis=1)[:, 0]
        right = (mx.argmax(still, axis=1) == labels).astype(mx.float32)
        if not selector:
            return soft, hard, right, mx.zeros_like(soft)
        self._draft.candidate_selector.update(selector)
        return soft, hard, right, selector_loss(self._draft, hidden, logits, before, labels)
