"""The target's part in training a draft: embedding and head, which the draft shares and which do not change."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.vocabulary import head_rows
from dflash_mlx.targets import Target
from dflash_mlx.training.recipe import RecipeError


def by_frequency(counts: np.ndarray) -> np.ndarray:
    """[V] counts -> [V] int32, the tokens with the largest first; among equals the lowest ids, merged first by BPE."""
    return np.argsort(-counts, kind="stable").astype(np.int32)


class Frozen:
    """Embedding and head of a target, for a draft.

    Args:
        vocabulary: target ids that are the head's columns in training, ascending; None: all.
        order: target ids, the most frequent ones first, for `among`.
    Raises:
        RecipeError: one of both is given, and no rows can be picked of such a head.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModel,
        vocabulary: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        self._target, self._draft, self.vocabulary, self._order = target, draft, vocabulary, order
        rows = target.spec.vocab_size
        self.columns = np.full(rows, -1, np.int32)
        ids = np.arange(rows, dtype=np.int32) if vocabulary is None else vocabulary
        self.columns[ids] = np.arange(len(ids), dtype=np.int32)
        self.size = len(ids)
        self._weight: mx.array | None = None
        self._bias: mx.array | None = None
        if vocabulary is not None:
            self._weight, self._bias = _picked(target.head_module, vocabulary)
        elif order is not None:
            _picked(target.head_module, order[:1])  # refused now, not at the first step

    def among(self, named: np.ndarray, size: int) -> Frozen:
        """With fewer columns: those of these target ids, filled up to `size` with the most frequent ones.

        Tokens that no row of a micro-batch is to learn differ in how much they can be taken for those that it is to
        learn; the frequent ones stand for all.
        """
        assert self._order is not None
        wanted = np.zeros(len(self.columns), bool)
        wanted[named] = True
        wanted &= self.columns >= 0
        order = self._order[(self.columns[self._order] >= 0) & ~wanted[self._order]]
        wanted[order[: max(0, size - int(wanted.sum()))]] = True
        return Frozen(self._target, self._draft, np.flatnonzero(wanted).astype(np.int32))

    def rows(self, anchors: mx.array, block_size: int) -> mx.array:
        """[N, A] tokens -> [N, A, B, H]: embeddings of [anchor, mask x K]."""
        masks = mx.full((*anchors.shape, block_size - 1), self._draft.config.mask_token_id, mx.int32)
        ids = mx.concatenate([anchors[..., None], masks], axis=-1).reshape(anchors.shape[0], -1)
        embed = self._draft.embed if self._draft.config.own_embedding else self._target.block_rows
        return mx.stop_gradient(embed(ids)).reshape(*anchors.shape, block_size, -1)

    def logits(self, hidden: mx.array) -> mx.array:
        """[R, H] after the draft's final norm -> [R, columns] float32, after the draft's transform."""
        if self._weight is None:
            found = self._target.head(hidden[None].astype(self._target.spec.dtype))[0]
        else:
            found = hidden.astype(mx.float32) @ self._weight.T
            found = found if self._bias is None else found + self._bias
        return self._draft.transform_logits(found.astype(mx.float32))

    def target_ids(self, columns: np.ndarray) -> np.ndarray:
        """Columns -> target ids."""
        return columns if self.vocabulary is None else self.vocabulary[columns]


def _picked(head: nn.Module, ids: np.ndarray) -> tuple[mx.array, mx.array | None]:
    """Weight [ids, H] and bias [ids] of a head, as float32. Raises RecipeError for a head of an unknown kind."""
    rows = head_rows(head, mx.array(ids))
    if rows is None:
        raise RecipeError(
            f"The target's head is a {type(head).__name__}, of which no rows can be picked, and the recipe learns "
            "against some of its tokens only (`vocabulary`, `columns`). Set both to 0, or fuse the adapter into the "
            "target (`mlx_lm.fuse`)."
        )
    weight, bias = rows.weight, rows.get("bias")
    if isinstance(rows, nn.QuantizedLinear):
        weight = mx.dequantize(weight, rows.scales, rows.get("biases"), rows.group_size, rows.bits, rows.mode)
    weight = weight.astype(mx.float32)
    mx.eval(weight)
    return weight, None if bias is None else bias.astype(mx.float32)
