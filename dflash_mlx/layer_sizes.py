"""What the layers of a target keep of a context, by its config.json alone, as mlx_lm's model files make their caches.

`tests/test_fit.py` holds it to the caches of every family there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

STEP = 256  # rows by which mlx_lm's KVCache grows
_FULL, _SLIDING, _STATE = "full_attention", "sliding_attention", "linear_attention"
_LETTERS = {"*": _FULL, "M": _STATE}  # of nemotron_h; the others keep nothing
_NAMES = {"attention": _FULL, "mamba": _STATE, "conv": _STATE, "chunked_attention": _FULL}
# What mlx_lm takes where a config says nothing: local layers, then one global one.
_PATTERNS = {"gemma3": 6, "gemma3_text": 6, "gemma4": 5, "gemma4_text": 5, "muse_glimmer": 4, "gpt_oss": 2}


@dataclass(frozen=True)
class Layer:
    """What one layer keeps, and what shapes its forward.

    row: elements per position. window: positions that it keeps, None for all. state: elements however long the context.
    heads, width: query heads and their width. channels: of the convolution before a state; carried: the recurrent part
    of the state. square: heads whose forward builds matrices of positions by positions (Mamba-2).
    """

    row: int = 0
    window: int | None = None
    state: int = 0
    heads: int = 0
    width: int = 0
    channels: int = 0
    carried: int = 0
    square: int = 0

    @property
    def attends(self) -> bool:
        return self.heads > 0

    @property
    def keeps(self) -> bool:
        return bool(self.row or self.state)

    def elements(self, context: int, chunk: int) -> int:
        """Of a context that was read in pieces of `chunk`; the last piece is added to a window before it is cut."""
        if self.window is not None:
            return self.row * min(context, self.window - 1 + min(chunk, context))
        return self.row * -(-context // STEP) * STEP

    def snapshot(self, context: int) -> int:
        """Elements that are copied to come back to a place; a layer that can be cut back needs none."""
        return self.state if self.window is None else self.row * min(context, self.window)


@dataclass(frozen=True)
class Mlp:
    """What a position goes through after attention, in elements. dense: rows of a layer without experts, or of those
    that are shared. experts: of one position; expert: rows of one. held: experts that a layer has, 0 for none."""

    dense: int
    experts: int = 0
    expert: int = 0
    held: int = 0
    layers: int = 0


@dataclass(frozen=True)
class TextSizes:
    """Sizes of a target's text part, in elements. layers: all of them. tied: the head is the embedding.

    positions: that the model was made for, if its config says. kind: `model_type` of the text part.
    """

    hidden: int
    mlp: Mlp
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool = False
    positions: int | None = None
    kind: str = ""

    def rows(self, context: int, chunk: int) -> int:
        """Elements of all keys and values."""
        return sum(layer.elements(context, chunk) for layer in self.layers)

    @property
    def states(self) -> int:
        """Elements of all states."""
        return sum(layer.state for layer in self.layers)


def sizes_of(config: Mapping[str, Any]) -> TextSizes | None:
    """The sizes that a config.json gives; None where it lacks one."""
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
    try:
        return _sizes(text)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError):
        return None


def _sizes(text: Mapping[str, Any]) -> TextSizes:
    hidden, heads = int(text["hidden_size"]), int(text.get("num_attention_heads") or 1)
    kinds = _kinds(text)
    shared = int(text.get("num_kv_shared_layers") or 0)
    layers = [_layer(text, kind, hidden, heads) for kind in kinds]
    for index in range(len(kinds) - shared, len(kinds)):
        layers[index] = replace(layers[index], row=0)  # it reads what an earlier layer keeps
    positions = text.get("max_position_embeddings")
    return TextSizes(
        hidden=hidden,
        mlp=_mlp(text, hidden, len(kinds)),
        vocabulary=int(text["vocab_size"]),
        layers=tuple(layers),
        tied=bool(text.get("tie_word_embeddings", True)),
        positions=int(positions) if positions else None,
        kind=str(text.get("model_type") or ""),
    )


def _mlp(text: Mapping[str, Any], hidden: int, depth: int) -> Mlp:
    def size(*names: str) -> int:
        return next((int(text[name]) for name in names if text.get(name)), 0)

    used = size("num_experts_per_tok", "top_k_experts")
    held = size("num_experts", "num_local_experts", "n_routed_experts")
    if not used or not held:
        return Mlp(size("intermediate_size", "block_ff_dim") or 4 * hidden)
    shared = size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    letters = text.get("hybrid_override_pattern")
    dense = len(text.get("mlp_only_layers") or ()) + size("first_k_dense_replace", "num_dense_layers")
    layers = depth - dense if letters is None else list(letters).count("E")
    return Mlp(shared, used, size("moe_intermediate_size", "intermediate_size"), held, layers)


def _kinds(text: Mapping[str, Any]) -> Sequence[str | None]:
    """What each decoder layer is: one of the three, or None for one that keeps nothing."""
    kind = text.get("model_type")
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str | list):
        return [_LETTERS.get(letter) for letter in letters]
    count = int(text.get("num_hidden_layers") or text["num_layers"])
    if (full := text.get("full_attn_idxs")) is not None:
        return [_FULL if index in full else _STATE for index in range(count)]
    if text.get("layer_types") or text.get("layers_block_type"):
        named = text.get("layer_types") or text["layers_block_type"]
        known = (_FULL, _SLIDING, _STATE)
        return [name if name in known else _NAMES.get(name) for name in named]
    if interval := text.get("full_attention_interval"):
        return [_STATE if (index + 1) % int(interval) else _FULL for index in range(count)]
    if "linear_num_value_heads" in text:  # qwen3_next and its kin: mlx_lm's default
        return [_STATE if (index + 1) % 4 else _FULL for index in range(count)]
    if kind == "gpt_oss":
        return [_SLIDING if index % 2 == 0 else _FULL for index in range(count)]
    pattern = text.get("sliding_window_pattern") or _PATTERNS.get(str(kind))
    if pattern and text.get("sliding_window"):
        return [_SLIDING if (index + 1) % int(pattern) else _FULL for index in range(count)]
    return [_FULL] * count


def _layer(text: Mapping[str, Any], kind: str | None, hidden: int, heads: int) -> Layer:
    if kind is None:
        return Layer()
    if kind == _STATE:
        return _recurrent(text, hidden)
    if text.get("kv_lora_rank"):  # the deepseek family: a latent, and the rotated part of the keys
        latent = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
        return Layer(latent, heads=heads, width=latent)
    groups = int(text.get("num_key_value_heads") or heads)
    width = int(text.get("head_dim") or hidden // heads)
    if kind == _SLIDING:
        return Layer(2 * groups * width, int(text["sliding_window"]), heads=heads, width=width)
    if text.get("global_head_dim"):  # gemma4: full layers have heads of their own
        width = int(text["global_head_dim"])
        if text.get("attention_k_eq_v"):
            groups = int(text.get("num_global_key_value_heads") or groups)
    return Layer(2 * groups * width, heads=heads, width=width)


def _recurrent(text: Mapping[str, Any], hidden: int) -> Layer:
    """A recurrent state, and the rows that its convolution still needs."""
    if "linear_num_value_heads" in text:
        keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
        values = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
        carried, channels = values * int(text["linear_key_head_dim"]), 2 * keys + values
        rows = int(text.get("linear_conv_kernel_dim") or 4) - 1
        return Layer(state=carried + rows * channels, channels=channels, carried=carried)
    if "mamba_num_heads" in text:
        heads, size = int(text["mamba_num_heads"]), int(text["ssm_state_size"])
        inner = heads * int(text["mamba_head_dim"])
        channels, rows = inner + 2 * int(text["n_groups"]) * size, int(text["conv_kernel"]) - 1
        return Layer(state=inner * size + rows * channels, channels=channels, carried=inner * size, square=heads)
    return Layer(state=(int(text["conv_L_cache"]) - 1) * hidden, channels=3 * hidden)  # lfm2: three products of it
