"""The draft's checkpoint schema: one frozen `DraftConfig`, whatever spelling the config.json uses.

Reader rules (z-lab `dflash` 0.1.0 and the transformers-5 spellings): a key is looked up in `dflash_config` first,
then at the top level; where both are present they have to agree. What cannot be guessed without silently losing
acceptance (layer ids, mask id, rope base) is an error when missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys that mark an architecture this package does not run, and what it is.
_VARIANTS = {
    "speculators_model_type": "a checkpoint in the speculators format",
    "markov_rank": "a DFlash hybrid with a Markov head",
    "sample_from_anchor": "a DSpark-style head that predicts from the anchor row",
    "attention_sink_bias": "a MiMo-style draft with attention sinks",
    "attention_value_scale": "a MiMo-style draft with scaled values",
    "use_swa": "a MiMo-style draft whose layers all slide",
}


@dataclass(frozen=True)
class Convolution:
    """DFlash 2's grouped dynamic causal convolution: taps, and channels that share a dynamic kernel."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class Selector:
    """DFlash 2's candidate path selector: rank of its codebooks, candidates per position."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class DraftConfig:
    """What a DFlash draft is. Sizes in elements; ids are 0-based decoder-layer indices of the target.

    convolution, selector: both given for DFlash 2, both None for DFlash v1.
    draft_vocab_size: rows of a head of its own; None shares the target's head.
    own_embedding: it carries an embedding; otherwise it shares the target's.
    runtime_block_size: the block to run by default, at most `block_size`.
    context_window: context rows that full layers keep by default; None keeps all.
    verifier: the target that the checkpoint names, if it does.
    format: "z-lab" or "speculators".
    """

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rope_traditional: bool
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    causal: bool | None  # inside the block; None = sliding layers are causal, full layers are not
    attention_bias: bool
    block_size: int  # anchor + drafts, as trained
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    quantization: Mapping[str, Any] | None = None
    convolution: Convolution | None = None
    selector: Selector | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    runtime_block_size: int | None = None
    context_window: int | None = None
    verifier: str | None = None
    format: str = "z-lab"

    def __post_init__(self) -> None:
        positive = (
            "hidden_size num_layers intermediate_size num_heads num_kv_heads head_dim vocab_size rms_norm_eps "
            "rope_theta"
        )
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise CheckpointError(f"Draft config: `{name}` has to be positive, got {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"Draft config: {self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads."
            )
        if self.block_size < 2:
            raise CheckpointError(f"Draft config: `block_size` has to be 2 or more, got {self.block_size}.")
        if len(self.layer_types) != self.num_layers:
            raise CheckpointError(
                f"Draft config: `layer_types` names {len(self.layer_types)} layers, `num_hidden_layers` is "
                f"{self.num_layers}."
            )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise CheckpointError(f"Draft config: unknown layer type {unknown[0]!r}; known: {FULL}, {SLIDING}.")
        if SLIDING in self.layer_types and not (self.sliding_window and self.sliding_window > 1):
            raise CheckpointError(
                f"Draft config: sliding layers need `sliding_window` of 2 or more, got {self.sliding_window}."
            )
        ids = self.target_layer_ids
        if not ids or any(not 0 <= i < self.num_target_layers for i in ids):
            raise CheckpointError(
                f"Draft config: `target_layer_ids` {list(ids)} have to be in 0..{self.num_target_layers - 1}."
            )

    def is_causal(self, layer: int) -> bool:
        """Whether rows of a block see only rows before them in this layer."""
        return self.causal if self.causal is not None else self.layer_types[layer] == SLIDING

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Read a config.json of z-lab's `DFlashDraftModel`.

        Raises:
            CheckpointError: a needed key is missing, two places disagree, a value is impossible, or the file
                describes another architecture; the message names it.
        """
        read = _Reader(config)
        read.refuse_variants()
        theta, scaling = read.rope()
        layers = read.need("num_hidden_layers")
        heads = read.need("num_attention_heads")
        ids = tuple(read.need("target_layer_ids"))
        hidden = read.need("hidden_size")
        causal = config.get("is_causal")
        return cls(
            hidden_size=hidden,
            num_layers=layers,
            intermediate_size=read.need("intermediate_size"),
            num_heads=heads,
            num_kv_heads=read.get("num_key_value_heads", heads),
            head_dim=read.get("head_dim", hidden // heads),
            vocab_size=read.need("vocab_size"),
            rms_norm_eps=read.need("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_traditional=not read.get("rope_is_neox_style", read.get("is_neox_style", True)),
            max_position_embeddings=read.get("max_position_embeddings", 0),
            layer_types=tuple(read.get("layer_types", None) or [FULL] * layers),
            sliding_window=read.get("sliding_window", None),
            causal=causal if causal is not None else read.nested.get("causal"),
            attention_bias=bool(read.get("attention_bias", False)),
            block_size=read.get("block_size", 16),
            mask_token_id=read.need("mask_token_id"),
            target_layer_ids=ids,
            num_target_layers=read.get("num_target_layers", max(ids, default=-1) + 1),
            input_embedding_scale=read.get("input_embedding_scale", 1.0),
            output_multiplier=read.get("output_multiplier", 1.0),
            final_logit_softcapping=read.get("final_logit_softcapping", None),
            quantization=read.get("quantization", None),
        )


class _Reader:
    """Looks a key up in `dflash_config`, then at the top level, and insists that the two agree."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.top = config
        self.nested: Mapping[str, Any] = config.get("dflash_config") or {}

    def get(self, key: str, default: Any) -> Any:
        nested, top = self.nested.get(key), self.top.get(key)
        if nested is not None and top is not None and nested != top:
            raise CheckpointError(
                f"Draft config: `{key}` is {nested!r} in `dflash_config` and {top!r} at the top level. One of them "
                "is wrong, and a wrong value silently costs acceptance. Correct the config.json."
            )
        value = nested if nested is not None else top
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise CheckpointError(
                f"Draft config: `{key}` is missing. It cannot be guessed without spoiling the draft; get the "
                "config.json from the draft's own repository."
            )
        return value

    def rope(self) -> tuple[float, Mapping[str, Any] | None]:
        """(base, scaling): nested `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta`."""
        nested = self.top.get("rope_parameters") or {}
        inner, top = nested.get("rope_theta"), self.top.get("rope_theta")
        if inner is not None and top is not None and inner != top:
            raise CheckpointError(
                f"Draft config: `rope_theta` is {inner} in `rope_parameters` and {top} at the top level. Correct "
                "the config.json."
            )
        theta = inner if inner is not None else top
        if theta is None:
            raise CheckpointError(
                "Draft config: `rope_theta` is missing, both in `rope_parameters` and at the top level. A guessed "
                "base spoils long contexts; get the config.json from the draft's own repository."
            )
        scaling = self.top.get("rope_scaling") or nested or None
        kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
        return float(theta), None if kind == "default" else scaling

    def refuse_variants(self) -> None:
        names = self.top.get("architectures") or []
        if "DFlash2DraftModel" in names:
            raise CheckpointError(
                "This is a DFlash 2 draft (convolutions and a candidate selector). This version runs DFlash v1 "
                "drafts; run as v1 it would load and accept almost nothing. Choose a v1 draft."
            )
        if names and "DFlashDraftModel" not in names:
            raise CheckpointError(
                f"`architectures` is {list(names)}, and a DFlash draft says ['DFlashDraftModel']. If this is an "
                "ordinary language model, use it with mlx_lm's own speculative decoding."
            )
        for key, what in _VARIANTS.items():
            if self.nested.get(key) or self.top.get(key):
                raise CheckpointError(
                    f"This is {what} (`{key}` is {self.nested.get(key) or self.top.get(key)!r}). This version runs "
                    "plain DFlash v1 drafts and would run it wrongly. Choose another draft."
                )
