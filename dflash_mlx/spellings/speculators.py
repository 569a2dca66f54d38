"""speculators' config.json: the decoder in `transformer_layer_config`, layer ids that count from 1.

An id is an index of Hugging Face's `hidden_states`, where 0 is the embedding, so layer = id - 1.
Source: speculators 0.9, `DFlashSpeculatorConfig` and `DFlash2SpeculatorConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mlx.config import FIX, DraftConfig
from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings import rope, zlab
from dflash_mlx.spellings.keys import Keys, shown
from dflash_mlx.spellings.variants import V2

_MARKS = ("speculators_model_type", "transformer_layer_config", "speculators_config")


def is_one(config: Mapping[str, Any]) -> bool:
    """Whether a config is written in this format."""
    return any(config.get(key) for key in _MARKS)


def read(config: Mapping[str, Any]) -> DraftConfig:
    """A config of speculators' `dflash` or `dflash2`.

    Raises:
        CheckpointError: it is of another kind, a needed key is missing, two places disagree, or a value is impossible.
    """
    top = Keys(("at the top level", config))
    decoder, made_by = top.table("transformer_layer_config"), top.table("speculators_config")
    keys = Keys(("in `transformer_layer_config`", decoder), ("at the top level", config))
    kind = top.find("speculators_model_type") or made_by.get("algorithm")
    if kind not in ("dflash", "dflash2"):
        raise CheckpointError(
            f"This is a speculators checkpoint of the kind {shown(kind)}; this version runs 'dflash' and 'dflash2'. "
            "Run as one of them it would accept almost nothing. Choose a DFlash draft."
        )
    if (V2 in top.texts("architectures")) != (kind == "dflash2"):
        raise CheckpointError(
            f"`speculators_model_type` is {kind!r} and `architectures` {shown(top.find('architectures'))}, which "
            f"contradict each other. Run as the wrong one it would accept little. {FIX}"
        )
    place = decoder if any(decoder.get(key) for key in rope.KEYS) else config
    theta, scaling = rope.read(place, one_for_all=True)
    layers = keys.integer("num_hidden_layers", high=zlab.LAYERS)
    body = zlab.body(keys, layers)
    _check_features(top, body["hidden_size"])
    ids = _layer_ids(top)
    free = top.flag("sliding_window_non_causal", default=kind == "dflash2")
    return DraftConfig(
        **body,
        **zlab.layer_kinds(keys, layers, slides=False),
        **zlab.parts(keys, kind == "dflash2"),
        rope_theta=theta,
        rope_scaling=scaling,
        causal=False if free else None,
        block_size=top.integer("block_size", default=8, low=2),
        mask_token_id=top.integer("mask_token_id", low=0),
        target_layer_ids=ids,
        num_target_layers=keys.integer("num_target_layers", default=max(ids) + 1),
        verifier=_verifier(made_by),
    )


def _layer_ids(keys: Keys) -> tuple[int, ...]:
    ids = keys.integers("aux_hidden_state_layer_ids")
    if 0 in ids:
        raise CheckpointError(
            f"Draft config: `aux_hidden_state_layer_ids` {list(ids)} holds 0, which in this format is the embedding "
            "and no layer: its ids count from 1. Drafts read layers only, and if the ids were meant to count from 0, "
            f"each would be read one layer too early. {FIX}"
        )
    return tuple(each - 1 for each in ids)


def _check_features(keys: Keys, hidden: int) -> None:
    width = keys.integer("target_hidden_size", default=hidden)
    if width != hidden:
        raise CheckpointError(
            f"Draft config: `target_hidden_size` is {width} and the draft's `hidden_size` {hidden}. A draft that "
            "shares the target's embedding and head needs them equal, and this version has no projection between them. "
            "Choose a draft of the target's own width."
        )


def _verifier(made_by: Mapping[str, Any]) -> str | None:
    verifier = made_by.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None
