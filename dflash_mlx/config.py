"""What a draft is: one frozen `DraftConfig`, whatever spelling its config.json uses (`dflash_mlx.spellings`).

What cannot be guessed without silently losing acceptance (layer ids, mask id, rope base) is an error when missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"
FIX = "Correct the config.json, or fetch it again from the draft's own repository."


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
    whole_block: it was trained with blocks of `block_size` and no others, so all rows are denoised however few are
        wanted: with fewer masks it finds less (bench/LOG.md).
    context_window: context rows that every layer keeps at most by default; None keeps all that it sees.
    verifier: the target that the checkpoint names, if it does.
    unread: keys of `dflash_config` that nothing here reads and that are not known to be harmless.
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
    whole_block: bool = False
    context_window: int | None = None
    verifier: str | None = None
    unread: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for check in (self._sizes, self._attention, self._vocabulary, self._taps, self._second):
            if problem := check():
                raise CheckpointError(f"Draft config: {problem}. {FIX}")

    def _sizes(self) -> str | None:
        names = (
            "hidden_size num_layers intermediate_size num_heads num_kv_heads head_dim vocab_size rms_norm_eps"
            " rope_theta input_embedding_scale output_multiplier final_logit_softcapping context_window"
        )
        for name in names.split():
            value = vars(self)[name]
            if value is not None and not value > 0:
                return f"`{name}` has to be positive, got {value}"
        if self.block_size < 2:
            return f"`block_size` has to be 2 or more, got {self.block_size}"
        if self.runtime_block_size is not None and not 2 <= self.runtime_block_size <= self.block_size:
            return (
                f"`runtime_block_size` has to be in 2..{self.block_size} (the draft was trained with `block_size` "
                f"{self.block_size}), got {self.runtime_block_size}"
            )
        return None

    def _attention(self) -> str | None:
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads"
        if self.head_dim % 2:
            return f"`head_dim` has to be even to be rotated, got {self.head_dim}"
        if len(self.layer_types) != self.num_layers:
            return f"`layer_types` names {len(self.layer_types)} layers, `num_hidden_layers` is {self.num_layers}"
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            return f"unknown layer type {unknown[0]!r}; known are {FULL} and {SLIDING}"
        if SLIDING in self.layer_types and not (self.sliding_window and self.sliding_window > 1):
            return f"sliding layers need `sliding_window` of 2 or more, got {self.sliding_window}"
        return None

    def _vocabulary(self) -> str | None:
        if self.mask_token_id < 0:
            return f"`mask_token_id` has to be 0 or more, got {self.mask_token_id}"
        if self.own_embedding and self.mask_token_id >= self.vocab_size:
            return f"`mask_token_id` {self.mask_token_id} has no row in the draft's embedding of {self.vocab_size}"
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            return f"`draft_vocab_size` has to be in 1..{self.vocab_size} (`vocab_size`), got {self.draft_vocab_size}"
        return None

    def _taps(self) -> str | None:
        ids, layers = self.target_layer_ids, self.num_target_layers
        if not ids or any(not 0 <= i < layers for i in ids):
            why = f" (ids count from 0, so {layers} is no layer)" if layers in ids else ""
            return f"`target_layer_ids` {list(ids)} have to be in 0..{layers - 1}{why}"
        return None

    def _second(self) -> str | None:
        """DFlash 2."""
        if self.convolution is None or self.selector is None:
            return None if self.convolution is self.selector else "DFlash 2 needs a convolution and a selector, got one"
        group = self.convolution.group_size
        if self.hidden_size % group:
            return f"`conv_group_size` {group} has to divide `hidden_size` {self.hidden_size}"
        if self.selector.top_k > self.vocab_size:
            return f"`selector_top_k` {self.selector.top_k} is more than the {self.vocab_size} tokens of `vocab_size`"
        if self.draft_vocab_size not in (None, self.vocab_size):
            return (
                f"DFlash 2 needs the full vocabulary, because its selector scores every token; `draft_vocab_size` is "
                f"{self.draft_vocab_size} and `vocab_size` {self.vocab_size}"
            )
        return None

    def is_causal(self, layer: int) -> bool:
        """Whether rows of a block see only rows before them in this layer."""
        return self.causal if self.causal is not None else self.layer_types[layer] == SLIDING

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Read a config.json in any of the published spellings.

        Raises:
            CheckpointError: a needed key is missing, two places disagree, a value is impossible, or the file
                describes another architecture; the message names it.
        """
        from dflash_mlx import spellings  # it needs this class

        return spellings.read(config)
