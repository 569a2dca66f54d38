"""Keys that this version does not read: those that would change the maths are refused, the rest is told.

A draft that runs without a scale that it was trained with writes correct text and accepts less, so silence would hide
the cause. Tensors need no such care: every one has to be claimed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings.keys import Keys, shown

# Keys of other architectures with the values by which they change nothing; `refuse` adds those that depend on sizes.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "scale_emb": (1,),
    "attn_logit_softcapping": (0, False),
    "mlp_bias": (False,),
    "attention_sink": (False,),
    "attention_sinks": (False,),
    "swa_attention_sink_enabled": (False,),
    "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,),
    "attention_mode": ("gqa", "mha"),
}
# Of training, of other runtimes, or said elsewhere in the file too.
_HARMLESS = re.compile(
    r"num_anchors|max_anchors|.*loss.*|.*_(warmup|ramp)_ratio|mask_token|selector_vocab_size|swa_window_size|"
    r"attention_dropout|attention_backend|initializer_range|(torch_)?dtype|model_type|architectures"
)


def refuse(keys: Keys, *, head_dim: int, attention_bias: bool) -> None:
    """Refuse a config with a key that changes what is computed and that nothing here reads.

    Raises:
        CheckpointError: names the key, its value and what would change nothing.
    """
    neutral = _NEUTRAL | {
        "attention_multiplier": (head_dim**-0.5,),
        "query_pre_attn_scalar": (head_dim,),
        "attention_out_bias": (attention_bias,),
    }
    for key, harmless in neutral.items():
        value = keys.find(key)
        if value is not None and not is_one_of(value, harmless):
            raise CheckpointError(
                f"Draft config: `{key}` is {shown(value)}, which changes what the draft computes, and this version "
                f"computes as if it were {shown(harmless[0])}. It would accept little. Choose a draft without this "
                "key, or a newer version of this package."
            )


def is_one_of(value: object, choices: Iterable[object]) -> bool:
    """Whether a value of the file is one of these; a number is no flag, and digits may be rounded."""
    return any(_same(value, choice) for choice in choices)


def _same(value: object, choice: object) -> bool:
    if isinstance(value, bool) != isinstance(choice, bool):
        return False
    if isinstance(value, float) and isinstance(choice, int | float):
        return math.isclose(value, choice, rel_tol=1e-6)
    return value == choice


def names(table: Mapping[str, Any], read: Iterable[str]) -> tuple[str, ...]:
    """Keys of a table that hold something, were not looked up, and are not known to be harmless."""
    known = set(read)
    return tuple(
        key for key, value in table.items() if value is not None and key not in known and not _HARMLESS.fullmatch(key)
    )
