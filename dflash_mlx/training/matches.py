"""Which tokens of known answers a draft would propose: many blocks of many answers in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.training.blocks import Blocks, Draw, assemble
from dflash_mlx.training.forward import Sight, denoise_blocks
from dflash_mlx.training.frozen import Frozen
from dflash_mlx.training.held_out import HeldOut
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.scales import FeatureScales

_SCORES = 1 << 24  # attention scores of a forward, of which some copies are there at a time: 64 MB each
_LOGITS = 1 << 24  # that are there at a time
_PADDED = 32  # what `assemble` pads the context to


@dataclass(frozen=True)
class _Piece:
    """Blocks of one answer that fit into a forward; first: which of the wanted anchors `anchors` begins with."""

    answer: int
    first: int
    anchors: np.ndarray

    def scores(self, per_row: int, block: int) -> int:
        """Of each of its blocks."""
        return per_row * block * (int(self.anchors[-1]) + _PADDED + block)


class Matches:
    """A draft in training, held against answers that are known.

    Args:
        draft: in training, for features that are divided by `scales`; None: for features as they are.
    """

    def __init__(self, draft: DraftModel, frozen: Frozen, scales: FeatureScales | None = None) -> None:
        self.draft, self._frozen, self._scales = draft, frozen, scales

    def of(self, answers: Sequence[HeldOut], anchors: Sequence[np.ndarray], block_size: int) -> list[np.ndarray]:
        """Whether each proposal is the target's token, for blocks at these positions of each answer.

        Args:
            anchors: ascending positions, for each answer.
            block_size: anchor and proposals of each block.
        Returns:
            [anchors, K] bool for each answer; False past its end.
        """
        found = [np.zeros((len(each), block_size - 1), bool) for each in anchors]
        config = self.draft.config
        whole = max(block_size, config.block_size) if config.whole_block else block_size
        for batch in self._batches(anchors, whole):
            draws = [Draw(index, piece.anchors) for index, piece in enumerate(batch)]
            samples = [answers[piece.answer].sample() for piece in batch]
            blocks = assemble(draws, samples.__getitem__, Recipe(block_size=whole, longest=1 << 20))
            right = (self._guesses(blocks) == blocks.tokens[..., 1:])[..., : block_size - 1]
            for row, piece in zip(right, batch, strict=True):
                count = len(piece.anchors)
                found[piece.answer][piece.first : piece.first + count] = row[:count]
        return found

    def _batches(self, anchors: Sequence[np.ndarray], block: int) -> list[list[_Piece]]:
        """Pieces of like size, with all that is padded within bounds."""
        heads = self.draft.config.num_heads
        pieces = []
        for answer, wanted in enumerate(anchors):
            start = 0
            while start < len(wanted):
                whole = _Piece(answer, start, wanted[start:])
                room = max(1, _SCORES // whole.scores(heads, block))
                pieces.append(_Piece(answer, start, wanted[start : start + room]))
                start += room
        pieces.sort(key=lambda piece: (len(piece.anchors), int(piece.anchors[-1]), piece.answer))
        batches: list[list[_Piece]] = []
        for piece in pieces:  # the largest of a batch is its last
            joined = [*batches[-1], piece] if batches else []
            widest = max((each.scores(heads, block) for each in joined), default=0)
            if joined and len(joined) * len(piece.anchors) * widest <= _SCORES:
                batches[-1].append(piece)
            else:
                batches.append([piece])
        return batches

    def _guesses(self, blocks: Blocks) -> np.ndarray:
        """[N, A, K] int32 target ids as the decode loop proposes them, -2 in a row that is not finite."""
        anchors = mx.array(np.maximum(blocks.tokens[..., 0], 0))
        rows = self._frozen.rows(anchors, blocks.tokens.shape[-1])
        given = blocks.features if self._scales is None else self._scales.divided(blocks.features)
        features = mx.array(given.astype(np.float32))
        hidden = denoise_blocks(self.draft, rows, features, Sight.of(blocks)).astype(mx.float32)  # [N, A, K, H]
        shape, width = hidden.shape[:-1], hidden.shape[-1]
        finite = mx.isfinite(hidden).all(axis=-1)
        hidden = mx.where(finite[..., None], hidden, 0)
        mx.eval(hidden, finite)
        per = max(1, _LOGITS // (self._frozen.size * shape[2]))  # blocks
        flat, first = hidden.reshape(-1, shape[2], width), anchors.reshape(-1)
        parts = [self._choose(flat[at : at + per], first[at : at + per]) for at in range(0, len(flat), per)]
        return np.where(np.array(finite), np.concatenate(parts).reshape(shape), -2).astype(np.int32)

    def _choose(self, hidden: mx.array, anchors: mx.array) -> np.ndarray:
        """[M, K, H], [M] -> [M, K] target ids."""
        blocks, positions, width = hidden.shape
        logits = self._frozen.logits(hidden.reshape(-1, width))
        if self.draft.config.selector is None:
            return self._frozen.target_ids(np.array(mx.argmax(logits, axis=-1))).reshape(blocks, positions)
        # The selector scores the whole vocabulary: columns are target ids.
        logits = logits.reshape(blocks, positions, -1)[..., : self.draft.known_tokens]

        def walk(rows: mx.array, scores: mx.array, anchor: mx.array) -> mx.array:
            selector = self.draft.candidate_selector
            return selector.walk(rows, scores, anchor, lambda found, row: mx.argmax(found, axis=-1)).tokens

        return np.array(mx.vmap(walk)(hidden, logits, anchors[:, None]))
