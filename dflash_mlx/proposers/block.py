"""The DFlash proposer: one draft forward denoises a block of masks into K tokens.

Logits come from the mask rows (row k predicts its own position, nothing is shifted) through the target's raw head, or
the draft's own. Tokens are the best ones, drawn from q, or chosen along the path of DFlash 2's selector.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.draft.context import DraftContext
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.selector import Candidates
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.kernels.modules.linear import linear
from dflash_mlx.proposal import Proposal
from dflash_mlx.proposers.head import best_of_head
from dflash_mlx.sampling import Draws, Position, SamplingPolicy, log_probs
from dflash_mlx.targets import Target


class BlockProposer:
    """Runs a draft over its context.

    policy, draws: given for rejection sampling, where drafts are sampled from q and q is handed over; None for
        the draft's best guess per position.
    kernels: what runs the draft's operations.
    rows: masks to denoise even where fewer drafts are asked for, so that the first ones are those of a longer block.
    last: [K] int32, the tokens of the last proposal before `Proposal.within`: -1 in a row that was not finite. None if
        nothing was proposed. A proposal that was drafted ahead is the last one from `settle` on.
    """

    def __init__(
        self,
        draft: DraftModel,
        target: Target,
        context: DraftContext,
        policy: SamplingPolicy | None = None,
        draws: Draws | None = None,
        kernels: Kernels = STOCK,
        rows: int = 0,
    ) -> None:
        self.draft, self.target, self.context = draft, target, context
        self.policy, self.draws, self.kernels = policy, draws, kernels
        self.rows = draft.config.block_size - 1 if draft.config.whole_block else rows
        self.taps = draft.config.target_layer_ids
        self.last: mx.array | None = None
        self._coming: mx.array | None = None  # `last` after `settle`
        self._nothing = Proposal(mx.array([], dtype=mx.int32))
        self._waiting: list[mx.array] = []  # features that the context does not hold yet

    def propose(self, anchor: int, limit: int, position: int) -> Proposal:
        self.last = None
        if limit < 1:
            return self._nothing
        self._extend()
        proposal = self._draft(mx.array([anchor], mx.int32), limit, position)
        self.last = proposal.tokens
        return proposal

    def propose_after(
        self, features: mx.array | None, count: mx.array, anchor: mx.array, limit: int, position: int
    ) -> Proposal:
        self._extend()
        assert features is not None  # a draft has taps
        self.draft.extend(self.context, features, count, self.kernels)
        proposal = self._draft(anchor, limit, position + count)
        self._coming = proposal.tokens
        return proposal

    def settle(self, kept: int) -> None:
        self.context.settle(kept)
        if kept and self._coming is not None:
            self.last = self._coming
        self._coming = None

    def _draft(self, anchor: mx.array, limit: int, position: Position) -> Proposal:
        """K = `limit` tokens after the anchor [1], the first of them at `position`."""
        hidden = self._denoise(anchor, limit)  # [K, H]
        finite = mx.isfinite(hidden).all(axis=-1)  # [K]
        hidden = mx.where(finite[:, None], hidden, 0)  # NaN has no order, by which candidates are found
        tokens, probs = self._choose(hidden, anchor, position)
        # In a row that was not finite no token was drawn: a q of NaN has it rejected, and the target chooses by p.
        probs = None if probs is None else mx.where(finite[:, None], probs, mx.nan)
        return Proposal(mx.where(finite, tokens, -1), probs)

    def _denoise(self, anchor: mx.array, limit: int) -> mx.array:
        """[K, H] after the draft's final norm."""
        config = self.draft.config
        rows = max(limit, self.rows)
        masks = mx.full((rows,), config.mask_token_id, mx.int32)
        ids = mx.concatenate([anchor, masks])[None]  # [1, rows + 1]
        embed = self.draft.embed if config.own_embedding else self.target.block_rows
        return self.draft.denoise(embed(ids), self.context, self.kernels)[0, :limit]

    def _choose(self, hidden: mx.array, anchor: mx.array, position: Position) -> tuple[mx.array, mx.array | None]:
        """[K, H] -> tokens [K] int32, and q [K, V] if they are sampled."""
        draft, vocab_size = self.draft, self.target.spec.vocab_size
        if draft.config.selector is not None:
            known = best_of_head(hidden, draft, self.target, self.kernels)
            if known is None:
                logits = draft.over_target_ids(self._logits(hidden), vocab_size)[:, : draft.known_tokens]
            return self._walk(hidden, logits if known is None else known, anchor, position)
        if self.policy is None or self.draws is None:
            best = best_of_head(hidden, draft, self.target, self.kernels)
            return draft.target_ids(best.ids[:, 0] if best else mx.argmax(self._logits(hidden), axis=-1)), None
        logits = self._logits(hidden)  # [K, rows of the head]
        logits = draft.over_target_ids(logits, vocab_size)
        weights = self.policy.log_weights(log_probs(logits))
        return self.draws.categorical(weights, "draft", position), _softmax(weights)

    def _logits(self, hidden: mx.array) -> mx.array:
        """[K, H] -> [K, rows of the head], with the draft's own scaling."""
        head = self.draft.head
        if self.draft.config.draft_vocab_size is None:  # the target's head, whole or not, is given the target's type
            hidden = hidden.astype(self.target.spec.dtype)
        logits = self.target.head(hidden[None])[0] if head is None else linear(head, hidden, self.kernels)
        return self.draft.transform_logits(logits)

    def _walk(
        self, hidden: mx.array, logits: mx.array | Candidates, anchor: mx.array, position: Position
    ) -> tuple[mx.array, mx.array | None]:
        """As `_choose`, along the selector's path. It takes the policy's temperature and none of its filters."""
        selector, draws = self.draft.candidate_selector, self.draws
        if self.policy is None or draws is None:
            return selector.walk(hidden, logits, anchor, lambda scores, row: mx.argmax(scores, axis=-1)).tokens, None
        tempered = SamplingPolicy(self.policy.temperature)

        def draw(scores: mx.array, row: int) -> mx.array:
            return draws.categorical(tempered.log_weights(scores), "draft", position + row)

        path = selector.walk(hidden, logits, anchor, draw)
        q = mx.zeros((len(hidden), self.target.spec.vocab_size))
        return path.tokens, mx.put_along_axis(q, path.candidates, _softmax(tempered.log_weights(path.scores)), axis=1)

    def observe(self, features: mx.array | None) -> None:
        """Projected when a draft wants them: many plain steps make one wide projection."""
        if features is not None:
            self._waiting.append(features)

    def _extend(self) -> None:
        if self._waiting:
            features = self._waiting[0] if len(self._waiting) == 1 else mx.concatenate(self._waiting, axis=1)
            self._waiting = []
            self.draft.extend(self.context, features, kernels=self.kernels)

    def trim_to(self, length: int) -> None:
        self._extend()
        if length < self.context.length:
            self.context.drop(self.context.length - length)

    def flush(self) -> None:
        self._extend()
        mx.async_eval(self.context.arrays)

    def evaluate(self) -> None:
        self._extend()
        self.context.evaluate()


def _softmax(weights: mx.array) -> mx.array:
    return mx.softmax(weights, axis=-1, precise=True)
