"""Greedy decisions that do not depend on the width of the forward: near-ties are decided again by a single row.

A forward over a block and one over a single token may round differently (other kernels, other summation orders), so
where two tokens are almost equally likely the two can choose differently. `Cautious` lets a block decide only what is
clear; where the best two log-probabilities are closer than a margin, the position is decided by a forward over one
token, as plain decoding decides it.

What it cannot do: keys and values that a block wrote carry its rounding, and the single row reads them. The margin has
to be wide against that, too. Positions that are clear by more than all rounding together come out as in plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.accept import Judgement, Matching
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.sampling import log_probs

# Log-probability apart that two tokens have to be, by the dtype of the logits: several units in the last place of
# logits between 16 and 32, whose rounding is 2e-6, 0.016 and 0.125. Not measured on Apple hardware.
MARGINS = {mx.float32: 1e-3, mx.float16: 0.0625, mx.bfloat16: 0.5}


@dataclass
class Cautious(Matching):
    """Greedy matching that ends a block before its first near-tie.

    margin: log-probability apart that the best two tokens have to be for a block to decide; None is by dtype.
    """

    margin: float | None = None

    def judge(self, proposal: Proposal, logits: mx.array, position: int) -> Judgement:
        if not len(proposal):
            return super().judge(proposal, logits, position)
        margin = MARGINS.get(logits.dtype, MARGINS[mx.bfloat16]) if self.margin is None else self.margin
        plain = super().judge(proposal, logits, position)
        best = mx.topk(log_probs(logits).astype(mx.float32), 2, axis=-1)  # [K+1, 2]
        apart = mx.abs(best[:, 0] - best[:, 1])
        # A comparison with NaN is false: then nothing is clear, and the single row says what plain decoding would.
        clear = mx.cumprod((apart > margin).astype(mx.int32)).sum(keepdims=True).astype(mx.int32)  # [1]

        def unpack(read: list[int]) -> Verdict:
            count, *rest = read
            verdict = plain.unpack(rest)
            if count >= len(verdict.tokens):
                return verdict
            # All tokens before the last were accepted drafts, and at least the last is not clear.
            return Verdict(count, verdict.tokens[:count], verdict.log_probs, uncertain=True)

        return Judgement(mx.concatenate([clear, plain.packed]), plain.count, plain.anchor, unpack)
