"""The best tokens of a draft's head without its logits, where `lm_head_topk` can find them.

Logits are wanted where a token is drawn from all of them, and by a draft that multiplies them. Everyone else needs the
best one of every row, or the candidates of DFlash 2's selector.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.selector import Candidates
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.lm_head_topk import CLASSES, OPERATION, Best, Head
from dflash_mlx.kernels.modules.head import head_of
from dflash_mlx.kernels.operation import Case
from dflash_mlx.targets import Target


class _Wanted(NamedTuple):
    head: Head
    best: int
    softcap: float | None
    dtype: mx.Dtype  # of the rows that the head is given

    def of(self, hidden: mx.array) -> Best:
        return Best(hidden.astype(self.dtype), self.head, self.best, softcap=self.softcap)


def best_of_head(hidden: mx.array, draft: DraftModel, target: Target, kernels: Kernels) -> Candidates | None:
    """[K, H] after the draft's final norm -> the best row of the head, or the selector's candidates, of each row.

    None where the logits have to be computed: see above, without kernels, and for one row.
    """
    wanted = _wanted(draft, target, kernels) if len(hidden) > 1 else None
    if wanted is None:
        return None
    values, ids = kernels.run(OPERATION, wanted.of(hidden))
    return Candidates.sorted(ids, values)


def head_cases(draft: DraftModel, target: Target, kernels: Kernels) -> list[Case]:
    """What has to be raced before the kernel serves this pair."""
    wanted = _wanted(draft, target, kernels)
    if wanted is None:
        return []
    found = []
    for rows in CLASSES.most:
        best = wanted.of(mx.zeros((rows, draft.config.hidden_size), wanted.dtype))
        if OPERATION.why_not(best) is None:
            found.append(OPERATION.case(best))
    return found


def _wanted(draft: DraftModel, target: Target, kernels: Kernels) -> _Wanted | None:
    config = draft.config
    own = config.draft_vocab_size is not None
    if not kernels.wired or config.output_multiplier != 1.0 or (own and config.selector is not None):
        return None
    head = head_of(target.head_module if draft.head is None else draft.head, kernels)
    if head is None:
        return None
    dtype = draft.dtype if own else target.spec.dtype
    best = 1
    if config.selector is not None:
        known = head.vocab_size if draft.known_tokens is None else draft.known_tokens
        head = head.first(min(known, target.spec.vocab_size, config.vocab_size))
        best = min(config.selector.top_k, head.vocab_size)
    return _Wanted(head, best, config.final_logit_softcapping or None, dtype)
