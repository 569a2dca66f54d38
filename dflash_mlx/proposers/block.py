"""The DFlash proposer: one draft forward denoises a block of masks into K tokens.

Logits come from the mask rows (row k predicts its own position, nothing is shifted) through the target's raw head.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.draft.context import DraftContext
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Draws, SamplingPolicy, log_probs
from dflash_mlx.targets import Target


class BlockProposer:
    """Runs a draft over its context.

    policy, draws: given for rejection sampling, where drafts are sampled from q and q is handed over; None for
        the draft's best guess per position.
    """

    def __init__(
        self,
        draft: DraftModel,
        target: Target,
        context: DraftContext,
        policy: SamplingPolicy | None = None,
        draws: Draws | None = None,
    ) -> None:
        self.draft, self.target, self.context = draft, target, context
        self.policy, self.draws = policy, draws
        self.taps = draft.config.target_layer_ids
        self._nothing = Proposal(mx.array([], dtype=mx.int32))
        self._waiting: list[mx.array] = []  # features that the context does not hold yet

    def propose(self, anchor: int, limit: int, position: int) -> Proposal:
        if limit < 1:
            return self._nothing
        self._extend()
        ids = mx.array([[anchor] + [self.draft.config.mask_token_id] * limit])  # [1, K+1]
        hidden = self.draft.denoise(self.target.embed(ids), self.context)  # [1, K, H]
        logits = self.target.head(hidden.astype(self.target.spec.dtype))[0]  # [K, V]
        logits = self.draft.transform_logits(logits)
        if self.policy is None or self.draws is None:
            return Proposal(mx.argmax(logits, axis=-1).astype(mx.int32))
        weights = self.policy.log_weights(log_probs(logits))
        tokens = self.draws.categorical(weights, "draft", position)
        return Proposal(tokens, mx.softmax(weights, axis=-1, precise=True))

    def observe(self, features: mx.array | None) -> None:
        """Projected when a draft wants them: many plain steps make one wide projection."""
        if features is not None:
            self._waiting.append(features)

    def _extend(self) -> None:
        if self._waiting:
            features = self._waiting[0] if len(self._waiting) == 1 else mx.concatenate(self._waiting, axis=1)
            self._waiting = []
            self.draft.extend(self.context, features)

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
