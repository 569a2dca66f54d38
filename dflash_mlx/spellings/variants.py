"""Checkpoints that are no plain DFlash or DFlash 2 draft: what each is, from its config or from its tensors' names.

Run as a plain draft most of them would load, write correct text and accept almost nothing, so they are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings.keys import Keys, shown
from dflash_mlx.spellings.unread import is_one_of

V1, V2, SPECULATORS = "DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator"

_MIMO = "a MiMo-style draft (a mask embedding of its own, attention sinks, scaled values)"
_LAGUNA = "a Laguna draft (normed features, fused and gated attention)"
_MUSE = "a Muse Glimmer assistant (an encoder for the features)"
_MARKOV = "a DFlash hybrid with a Markov head"
_DSPARK = "a DSpark draft (it predicts from the anchor's row and judges its confidence)"
_DOMINO = "a Domino draft (a recurrent head over DFlash)"
_EAGLE = "an EAGLE head (it drafts one token after the other)"
_MTP = "a multi-token-prediction head (MTP)"
_MEDUSA = "a Medusa head"
_EXTENDED = "a DFlash draft with additional parts"
_EXPERTS = "a DFlash draft with a mixture of experts"
PACKED = "a checkpoint quantised for another runtime (FP8, NVFP4, AWQ, GPTQ or compressed-tensors)"
_LORA = "a LoRA adapter"

# In names of architectures and model types.
_NAMES = (
    (r"dspark", _DSPARK),
    (r"domino|causal_v5", _DOMINO),
    (r"dflare|dfly", _EXTENDED),
    (r"laguna", _LAGUNA),
    (r"(glimmer|onyx).*assistant", _MUSE),
    (r"mimo", _MIMO),
    (r"medusa|hydra", _MEDUSA),
    (r"eagle", _EAGLE),
    (r"mtp|nextn", _MTP),
)
# Keys that mark a variant when they are set, to something else than what changes nothing.
KEYS = {
    "markov_rank": _MARKOV,
    "sample_from_anchor": _DSPARK,
    "enable_confidence_head": _DSPARK,
    "attention_sink_bias": _MIMO,
    "attention_value_scale": _MIMO,
    "mask_embedding": _MIMO,
    "gru_hidden_dim": _DOMINO,
    "shift_label": _DOMINO,
    "eagle_config": _EAGLE,
    "medusa_num_heads": _MEDUSA,
    "hc_mult": "a DeepSeek-V4 draft (hyper-connections)",
    "dflash_context_residual": _EXTENDED,
    "dflash_verifier_final_residual": _EXTENDED,
    "dflash_block_position_embedding": _EXTENDED,
    "dflash_gated_layer_fusion": _EXTENDED,
    "dflash_dfly_layer_residual": _EXTENDED,
    "dflash_heterogeneous_kv_projections": _EXTENDED,
    "enable_hidden_correction": _EXTENDED,
}
_NEUTRAL = {"attention_value_scale": (1,)}
# Of which a DFlash draft without `architectures` has one at least.
_CLAIMS = ("dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids", "transformer_layer_config")
# In names of tensors that the plain draft does not have.
_TENSORS = (
    (r"markov", _MARKOV),
    (r"confidence_head", _DSPARK),
    (r"(^|\.)mask_embedding|attention_sink|(^|\.)sinks$", _MIMO),
    (r"aux_hidden_norms|qkv_proj|(^|\.)g_proj\.", _LAGUNA),
    (r"^encoder\.", _MUSE),
    (r"domino|gru", _DOMINO),
    (r"lora_[AaBb]", _LORA),
    (r"weight_packed|weight_scale|weight_shape|input_scale|qweight|qzeros|\.absmax", PACKED),
    (r"medusa", _MEDUSA),
    (r"(^|\.)mtp\.|nextn|eh_proj|(^|\.)[eh]norm\.", _MTP),
    (r"layers\.\d+\.hidden_norm", _EAGLE),
    (r"\.experts\.|switch_mlp", _EXPERTS),
    (r"fusion|context_hidden|verifier_final|block_position|(input|output)_proj\.", _EXTENDED),
    (r"candidate_selector|_conv\.", "a DFlash 2 draft under a config.json that says DFlash v1"),
)


def refuse(config: Mapping[str, Any]) -> None:
    """Refuse a config that describes something else.

    Raises:
        CheckpointError: it does; says what it is, from which key.
    """
    keys = Keys(("at the top level", config), ("in `dflash_config`", Keys(("", config)).table("dflash_config")))
    names = keys.texts("architectures")
    for key, value in (
        ("architectures", " ".join(names)),
        ("speculators_model_type", keys.find("speculators_model_type")),
        ("model_type", keys.find("model_type")),
        ("projector_type", keys.find("projector_type")),
    ):
        what = _first(_NAMES, value.lower()) if isinstance(value, str) else None
        if what:
            raise refused(what, f"`{key}` is {value!r}")
    for key, what in KEYS.items():
        if (value := keys.find(key)) and not is_one_of(value, _NEUTRAL.get(key, ())):
            raise refused(what, f"`{key}` is {shown(value)}")
    if keys.find("draft_ffn_type") not in (None, "dense"):
        raise refused(_EXPERTS, f"`draft_ffn_type` is {shown(keys.find('draft_ffn_type'))}")
    packing = keys.table("quantization_config").get("quant_method")
    if packing is not None:
        raise refused(PACKED, f"its `quant_method` is {shown(packing)}")
    claims = {V1, V2, SPECULATORS} & set(names) if names else any(config.get(key) for key in _CLAIMS)
    if not claims:
        raise CheckpointError(
            f"`architectures` is {shown(list(names))}, and a DFlash draft says ['{V1}'] or ['{V2}']. It seems to be an "
            "ordinary language model: its layers have nothing to read the target's features with. Choose a DFlash "
            "draft, or use this one with mlx_lm's own speculative decoding."
        )


def of_tensors(unknown: Iterable[str]) -> CheckpointError | None:
    """What a checkpoint is that has these tensors beside or instead of a plain draft's, if it is known."""
    for pattern, what in _TENSORS:
        for name in unknown:
            if re.search(pattern, name):
                return refused(what, f"it has a tensor `{name}`")
    return None


def refused(what: str, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"This is {what}: {evidence}. This version runs plain DFlash and DFlash 2 drafts, in floats or in MLX's "
        "quantisation, and would run it wrongly. Choose such a draft of the same target."
    )


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((what for pattern, what in table if re.search(pattern, text)), None)
