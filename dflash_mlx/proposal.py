"""What a proposer hands the verifier, and what acceptance decides. Plain data, no loop.

Sources: Leviathan et al. 2023 (p = target, q = draft); the block layout is the DFlash paper's (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for the positions after the anchor.

    tokens: [K] int32, may be lazy; excludes the anchor; K may be 0.
    probs:  [K, V] float32, the distribution q each token was sampled from; None = point mass (greedy, lookup).
    """

    tokens: mx.array
    probs: mx.array | None = None

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def arrays(self) -> list[mx.array]:
        """All that may be left to compute."""
        return [self.tokens] if self.probs is None else [self.tokens, self.probs]

    def within(self, vocab_size: int) -> Proposal:
        """The same proposal with ids that can be embedded: one outside 0..vocab_size-1 becomes id 0.

        Exact without `probs`, where any guess is kept only if the target chose the same id. A token sampled
        from `probs` [K, V] is in range by construction; where none could be, `probs` is NaN, which rejects any.
        """
        if not len(self):
            return self
        outside = (self.tokens < 0) | (self.tokens >= vocab_size)
        return Proposal(mx.where(outside, 0, self.tokens), self.probs)


@dataclass(frozen=True)
class Verdict:
    """What acceptance decided; host values only.

    accepted: draft tokens kept, 0..K.
    tokens:   the accepted prefix and one correction or bonus token.
    log_probs: [V] per token, lazy: what the target thought of each position.
    uncertain: the next position was too close to call, and a forward over one token has to decide it. Only then
        `tokens` may be empty, with all of them accepted drafts.
    """

    accepted: int
    tokens: tuple[int, ...]
    log_probs: mx.array | Sequence[mx.array] = field(default=(), compare=False, repr=False)
    uncertain: bool = False

    def truncate(self, budget: int, stop: Collection[int]) -> Verdict:
        """Cut to at most `budget` tokens and after the first stop token (which is kept)."""
        tokens = self.tokens[:budget]
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        return Verdict(min(self.accepted, end), tokens[:end], self.log_probs, self.uncertain)
