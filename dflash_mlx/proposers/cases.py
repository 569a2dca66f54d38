"""What a pair wants raced before kernels serve it."""

from __future__ import annotations

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.kernels import accept
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.modules.linear import RowsEmbedding, cases_of
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.view import survey
from dflash_mlx.proposers.head import head_cases
from dflash_mlx.targets import Target


def cases_of_pair(target: Target, draft: DraftModel, kernels: Kernels) -> list[Case]:
    """Of what blocks go through: the modules of both, heads, and acceptance; none where no kernels are wired in.

    Args:
        target: made with these kernels.
    """
    if not kernels.wired:
        return []
    tied = target.head_module
    found = [*survey(target.text), *survey(draft), *(tied.head_cases() if type(tied) is RowsEmbedding else ())]
    if draft.head is not None and draft.config.draft_vocab_size is None:  # borrowed
        found += cases_of(draft.head, target.spec.dtype)
    return list(dict.fromkeys([*found, *head_cases(draft, target, kernels), accept.CASE]))
