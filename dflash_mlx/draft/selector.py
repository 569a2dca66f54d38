"""DFlash 2's candidate path selector: a walk over the best few tokens of every row, each chosen given the one before.

The score of candidate b in row t is U_t[b] + <A[a] * (P h_t), B[b]>: U are the row's logits, h its hidden state, a the
token chosen in the row before (the anchor in the first), A and B the codebooks, P the projection. One path is walked
from left to right, so a token's distribution depends on drafted tokens only. Source: z-lab `dflash` 0.1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.config import Selector

Choose = Callable[[mx.array, int], mx.array]


class Candidates(NamedTuple):
    """The best few tokens of K rows: ids [K, C] int32, which ascend, so that ties go to the lowest; logits float32."""

    ids: mx.array
    logits: mx.array

    @classmethod
    def sorted(cls, ids: mx.array, logits: mx.array) -> Candidates:
        """From any order."""
        order = mx.argsort(ids, axis=1)
        return cls(*(mx.take_along_axis(array, order, axis=1) for array in (ids, logits)))


@dataclass(frozen=True)
class Path:
    """What a walk chose; K rows, lazy.

    tokens:     [K] int32.
    candidates: [K, C] int32, ascending in each row.
    scores:     [K, C] float32, of the candidates given the path before them.
    """

    tokens: mx.array
    candidates: mx.array
    scores: mx.array


class CandidateSelector(nn.Module):
    """A fresh one changes nothing: its predecessor codebook is 0.

    predecessor_codebook, successor_codebook: [V, r]. hidden_projection: H -> r.
    """

    def __init__(self, hidden_size: int, vocab_size: int, shape: Selector) -> None:
        super().__init__()
        self._top_k = shape.top_k
        self.predecessor_codebook = mx.zeros((vocab_size, shape.rank))
        self.successor_codebook = mx.random.normal((vocab_size, shape.rank), scale=shape.rank**-0.5)
        self.hidden_projection = nn.Linear(hidden_size, shape.rank, bias=False)

    def walk(self, hidden: mx.array, logits: mx.array | Candidates, anchor: mx.array, choose: Choose) -> Path:
        """Choose a path, left to right, without reading anything.

        Args:
            hidden: [K, H] after the final norm.
            logits: [K, V] after the draft's transform; only columns that the codebooks have are candidates. Or the
                candidates, if they are known.
            anchor: [1] int32, the token before row 0.
            choose: (scores [1, C] float32, row) -> [1] int32, the index of the chosen candidate.
        """
        rows = self.predecessor_codebook.shape[0]
        candidates, unary = logits if isinstance(logits, Candidates) else self._candidates(logits[:, :rows])
        # Which candidate precedes is known only on the walk, but not many can: all pairs come from one product.
        hidden = self.hidden_projection(hidden).astype(mx.float32)  # [K, r]
        after = self.successor_codebook[candidates].astype(mx.float32) * hidden[:, None]  # [K, C, r]
        before = self.predecessor_codebook[candidates[:-1]].astype(mx.float32)  # [K-1, C, r]
        start = self.predecessor_codebook[mx.minimum(anchor, rows - 1)][0].astype(mx.float32)  # [r]
        pairs = before @ after[1:].swapaxes(1, 2)  # [K-1, C before, C after]
        scores = [unary[:1] + (after[0] @ start)[None]]  # [1, C] each
        chosen = [choose(scores[0], 0)]
        for row in range(1, len(unary)):
            scores.append(unary[row : row + 1] + pairs[row - 1][chosen[-1]])
            chosen.append(choose(scores[-1], row))
        picked = mx.concatenate(chosen)[:, None]
        tokens = mx.take_along_axis(candidates, picked, axis=1)[:, 0]
        return Path(tokens, candidates, mx.concatenate(scores))

    def _candidates(self, logits: mx.array) -> Candidates:
        """The best of [K, V]."""
        first = logits.shape[1] - min(self._top_k, logits.shape[1])
        ids = mx.argpartition(logits, kth=first, axis=1)[:, first:]
        ids = mx.sort(ids, axis=1).astype(mx.int32)
        return Candidates(ids, mx.take_along_axis(logits, ids, axis=1).astype(mx.float32))
