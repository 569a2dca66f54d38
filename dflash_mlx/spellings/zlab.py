"""z-lab's config.json: keys in `dflash_config` or at the top level, which have to agree.

Sources: z-lab `dflash` 0.1.0, the configs of its published drafts, and the keys that vLLM and SGLang read of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mlx.config import FULL, SLIDING, Convolution, DraftConfig, Selector
from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings import rope, unread
from dflash_mlx.spellings.keys import Keys, bad, positive, shown
from dflash_mlx.spellings.variants import KEYS, V1, V2

LAYERS = 1000  # more than any draft has; keeps a damaged number from filling the memory
_PARTS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_PROJECTORS = (None, "dflash", "dflash2")


def read(config: Mapping[str, Any]) -> DraftConfig:
    """A z-lab config.

    Raises:
        CheckpointError: a needed key is missing, two places disagree, or a value is impossible.
    """
    top = Keys(("at the top level", config))
    nested = top.table("dflash_config")
    keys = Keys(("in `dflash_config`", nested), ("at the top level", config))
    if keys.find("projector_type") not in _PROJECTORS:
        raise CheckpointError(
            f"This draft has a {shown(keys.find('projector_type'))} projector, which this version does not know and "
            "would run wrongly. Choose a plain DFlash or DFlash 2 draft."
        )
    theta, scaling = rope.read(config)
    layers = keys.integer("num_hidden_layers", high=LAYERS)
    ids = keys.integers("target_layer_ids")
    slides = keys.flag("use_swa", default=False)
    older = keys.flag("causal", default=False if slides else None)
    causal = keys.flag("is_causal", default=older)
    return DraftConfig(
        **body(keys, layers),
        **layer_kinds(keys, layers, slides),
        **parts(keys, V2 in top.texts("architectures")),
        rope_theta=theta,
        rope_scaling=scaling,
        causal=causal,
        block_size=keys.integer("block_size", default=16, low=2),
        runtime_block_size=keys.integer("runtime_block_size", default=None),
        whole_block=keys.flag("whole_block", default=False),
        context_window=keys.integer("draft_window_size", default=None),
        mask_token_id=keys.integer("mask_token_id", low=0),
        target_layer_ids=ids,
        num_target_layers=keys.integer("num_target_layers", default=max(ids) + 1),
        unread=unread.names(nested, keys.asked | KEYS.keys()),  # last: by now all has been looked up
    )


def body(keys: Keys, layers: int) -> dict[str, Any]:
    """The sizes and scales that both formats spell alike.

    Raises:
        CheckpointError: one is missing or impossible, or there is a scale that this version does not know.
    """
    heads, hidden, vocab = (keys.integer(key) for key in ("num_attention_heads", "hidden_size", "vocab_size"))
    activation = keys.find("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise bad(f"`hidden_act` has to be 'silu', as in every DFlash draft, got {shown(activation)}")
    reduced = keys.integer("draft_vocab_size", default=vocab, high=vocab)
    cap = keys.find("final_logit_softcapping")
    head_dim, bias = keys.integer("head_dim", default=hidden // heads), keys.flag("attention_bias", default=False)
    unread.refuse(keys, head_dim=head_dim, attention_bias=bias)
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": keys.integer("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": reduced if reduced < vocab else None,
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope_traditional": not keys.flag("rope_is_neox_style", "is_neox_style", default=True),
        "max_position_embeddings": keys.integer("max_position_embeddings", default=0, low=0),
        "attention_bias": bias,
        "input_embedding_scale": keys.number("input_embedding_scale", default=1.0),
        "output_multiplier": keys.number("output_multiplier", default=1.0),
        # 0 means that there is none
        "final_logit_softcapping": positive("final_logit_softcapping", cap) if cap not in (None, 0) else None,
        "quantization": keys.table("quantization") or keys.table("quantization_config") or None,
    }


def layer_kinds(keys: Keys, layers: int, slides: bool) -> dict[str, Any]:
    """`layer_types` and `sliding_window`. Not read is `use_sliding_window`: drafts say false beside sliding layers.

    slides: `use_swa`, by which every layer slides.
    """
    kinds = keys.texts("layer_types") or (FULL,) * layers
    if slides:
        if SLIDING in kinds and FULL in kinds:
            raise bad("`use_swa` says that every layer slides, and `layer_types` names full ones beside sliding ones")
        kinds = (SLIDING,) * len(kinds)
    names = ("swa_window_size", "sliding_window") if slides else ("sliding_window",)
    return {
        "layer_types": kinds,
        "sliding_window": keys.integer(*names, default=None, low=2) if SLIDING in kinds else None,
    }


def parts(keys: Keys, is_second: bool) -> dict[str, Any]:
    """DFlash 2's convolution and selector.

    Raises:
        CheckpointError: they are there in part, or do not fit the architecture that the config names.
    """
    there = [key for key in _PARTS if keys.find(key)]
    if not is_second:
        if there:
            raise CheckpointError(
                f"`{there[0]}` belongs to DFlash 2, and `architectures` does not say ['{V2}']. As ['{V1}'] the draft "
                "would run without its convolutions and its selector and accept little. Fetch the config.json again "
                "from the draft's own repository."
            )
        return {}
    missing = [key for key in _PARTS if key not in there]
    if missing:
        raise CheckpointError(
            f"This is a DFlash 2 draft without `{'`, `'.join(missing)}`. It cannot be run as DFlash v1: without its "
            "convolutions and its selector it would accept almost nothing. Get the config.json from the draft's own "
            "repository."
        )
    kernel, group, rank, top_k = (keys.integer(key) for key in _PARTS)
    codes = keys.integer("selector_vocab_size", default=None)
    if codes not in (None, keys.integer("vocab_size")):
        raise bad(
            f"`selector_vocab_size` is {codes} and `vocab_size` {keys.integer('vocab_size')}; they have to be equal"
        )
    return {"convolution": Convolution(kernel, group), "selector": Selector(rank, top_k)}
