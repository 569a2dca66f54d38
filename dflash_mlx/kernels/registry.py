"""All operations that have a kernel, by name."""

from __future__ import annotations

from dflash_mlx.kernels import (
    accept,
    gdn_prework,
    gdn_verify,
    lm_head_topk,
    qk_norm_rope,
    qmm_small_m,
    sdpa_rows,
)
from dflash_mlx.kernels.operation import Operation

_FILES = (accept, gdn_prework, gdn_verify, lm_head_topk, qk_norm_rope, qmm_small_m, sdpa_rows)

OPERATIONS: dict[str, Operation] = {file.OPERATION.name: file.OPERATION for file in _FILES}
