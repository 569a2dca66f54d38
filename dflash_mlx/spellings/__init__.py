"""The spellings of a draft's config.json, each read into one `DraftConfig`.

`zlab` and `speculators` are the two formats; `keys` looks values up and checks them, `rope` reads the rotary embedding,
`variants` knows what else a checkpoint may be, `unread` what else a config may say. A config's `auto_map` names code,
which is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings import speculators, variants, zlab


def read(config: Mapping[str, Any]) -> DraftConfig:
    """What a config.json describes.

    Raises:
        CheckpointError: a needed key is missing, two places disagree, a value is impossible, or the file describes
            something else than a plain DFlash draft; the message names it.
    """
    variants.refuse(config)
    return speculators.read(config) if speculators.is_one(config) else zlab.read(config)


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a config.json claims to be a DFlash draft's, of whatever kind."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("DFlash" in str(name) for name in names)
    return named or "dflash_config" in config or speculators.is_one(config)


def packed_elsewhere(evidence: str) -> CheckpointError:
    """The error for weights that another runtime's quantiser has packed."""
    return variants.refused(variants.PACKED, evidence)
