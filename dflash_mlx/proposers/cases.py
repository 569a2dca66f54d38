"""What a pair wants raced before kernels serve it."""

from __future__ import annotations

import mlx.nn as nn

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.kernels import accept
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.view import survey, view_of
from dflash_mlx.proposers.head import head_cases
from dflash_mlx.targets import target_for


def cases_of_pair(model: nn.Module, draft: DraftModel, kernels: Kernels) -> list[Case]:
    """Of the modules of both, of the draft's head and of acceptance; none where no kernels are wired in.

    Raises:
        UnsupportedTarget: nothing serves the model.
    """
    if not kernels.wired:
        return []
    head = head_cases(draft, target_for(model, kernels), kernels)
    return [*survey(view_of(model, kernels), draft), *head, accept.CASE]
