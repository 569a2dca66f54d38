"""A draft's first weights from its target: the target's last layers, where they have what a draft's layers have.

Copied is whole attention, whole MLP, and single norms. What has no counterpart in a draft (experts, recurrent layers,
gates, fused projections, norms behind sublayers) is left out, and said. Norms become plain ones, also of families whose
weight counts from 1 (Gemma 3, Muse). Nothing that is returned shares memory with the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.config import DraftConfig
from dflash_mlx.targets import Target

# What draft and target call a part, in the order in which they are looked for.
_ATTENTION = ("self_attn", "attention", "mixer")
_PROJECTIONS = {
    "q_proj": ("q_proj",),
    "k_proj": ("k_proj",),
    "v_proj": ("v_proj",),
    "o_proj": ("o_proj", "out_proj", "wo"),
}
_HEAD_NORMS = {"q_norm": ("q_norm", "q_layernorm"), "k_norm": ("k_norm", "k_layernorm")}
_MLP = ("mlp", "feed_forward", "mixer")
_MATRICES = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}
_BEFORE = ("input_layernorm", "operator_norm", "attention_norm", "norm")
_BETWEEN = ("pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm")
_FINAL = "norm.weight"

Tensors = dict[str, mx.array]


@dataclass
class Copied:
    """tensors: by the draft's names, float32. missing: part and what is to be said of it -> layers of the draft."""

    tensors: Tensors = field(default_factory=dict)
    missing: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def lacks(self, part: str, why: str, layer: int) -> None:
        self.say(part, f"begins at random: {why}", layer)

    def say(self, part: str, what: str, layer: int) -> None:
        self.missing.setdefault((part, what), []).append(layer)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{part} of draft layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} {why}"
            for (part, why), layers in self.missing.items()
        )


def mlp_width(target: Target) -> int | None:
    """Rows between the matrices of the last layer's MLP; None if it is no plain gated one."""
    found = _parts(_named(_layers(target)[-1], _MLP), _MATRICES)
    gate = None if found is None else _base(found["gate_proj"])
    return gate.weight.shape[0] if gate is not None and gate.weight.ndim == 2 else None


def final_norm(target: Target, config: DraftConfig) -> Tensors:
    """The draft's last norm, as the target's; empty if that is no RMS norm."""
    weight = plain_norm(getattr(target, "final_norm", None))
    return {} if weight is None or weight.shape != (config.hidden_size,) else {_FINAL: weight}


def copy_layers(target: Target, config: DraftConfig) -> Copied:
    """The target's last layers, in order, as the draft's; its final norm; and what norms the features.

    The features' norm is that of the layer that reads the deepest tap in the target, so that keys and values are first
    made of what their projections know.
    """
    layers, copied = _layers(target), Copied(final_norm(target, config))
    if not copied.tensors:
        copied.lacks("the final norm", "the target's is no RMS norm", config.num_layers - 1)
    reader = max(config.target_layer_ids) + 1
    norm = _norm(layers[reader], _BEFORE) if reader < len(layers) else copied.tensors.get(_FINAL)
    if norm is not None and norm.shape == (config.hidden_size,):
        copied.tensors["hidden_norm.weight"] = mx.array(np.array(norm))
    for index in range(config.num_layers):
        source = len(layers) - config.num_layers + index
        if source < 0:
            copied.lacks("everything", f"the target has {len(layers)} layers", index)
            continue
        _attention(copied, layers[source], config, index)
        _mlp(copied, layers[source], config, index)
        _norms(copied, layers[source], config, index)
    return copied


def _attention(copied: Copied, layer: nn.Module, config: DraftConfig, index: int) -> None:
    part = "the attention"
    attention = _named(layer, _ATTENTION)
    found = _parts(attention, _PROJECTIONS)
    if attention is None or found is None:
        return copied.lacks(part, "the target's layer has none with projections of its own", index)
    queries, keys, hidden = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.hidden_size,
    )
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    if not _take(copied, found, shapes, f"layers.{index}.self_attn", part, index):
        return
    if any("bias" in _base(linear) for linear in found.values()):
        copied.say(part, "begins without the target's biases, which a draft does not have", index)
    for name, names in _HEAD_NORMS.items():
        weight = _norm(attention, names)
        if weight is None:
            continue
        if weight.shape != (config.head_dim,):
            copied.lacks(f"`{name}`", f"the target's has the shape {list(weight.shape)}", index)
            continue
        # A draft divides scores by the root of the head's size; what the target does otherwise is a matter of scale.
        ratio = getattr(attention, "scale", config.head_dim**-0.5) * math.sqrt(config.head_dim)
        scaled = weight if name != "q_norm" or math.isclose(ratio, 1.0, rel_tol=1e-6) else weight * ratio
        copied.tensors[f"layers.{index}.self_attn.{name}.weight"] = scaled


def _mlp(copied: Copied, layer: nn.Module, config: DraftConfig, index: int) -> None:
    part = "the MLP"
    found = _parts(_named(layer, _MLP), _MATRICES)
    if found is None:
        return copied.lacks(part, "the target's layer has none, or another kind (experts, fused matrices)", index)
    wide, hidden = config.intermediate_size, config.hidden_size
    shapes = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    _take(copied, found, shapes, f"layers.{index}.mlp", part, index)


def _norms(copied: Copied, layer: nn.Module, config: DraftConfig, index: int) -> None:
    """Before the attention and before the MLP; a norm behind the attention is none, so it counts only beside another
    that comes before it."""
    before = _norm(layer, _BEFORE)
    between = _norm(layer, _BETWEEN) if before is not None else None
    for name, weight in (("input_layernorm", before), ("post_attention_layernorm", between)):
        if weight is not None and weight.shape == (config.hidden_size,):
            copied.tensors[f"layers.{index}.{name}.weight"] = weight


def _take(
    copied: Copied,
    found: Mapping[str, nn.Module],
    shapes: Mapping[str, tuple[int, int]],
    path: str,
    part: str,
    index: int,
) -> bool:
    """Copy all of these matrices, or none; whether they were."""
    taken = {}
    for name, shape in shapes.items():
        weight = _matrix(found[name])
        if weight.shape != shape:
            copied.lacks(part, f"the target's `{name}` is {list(weight.shape)}, a draft's {list(shape)}", index)
            return False
        taken[f"{path}.{name}.weight"] = weight
    copied.tensors |= taken
    return True


def plain_norm(module: nn.Module | None) -> mx.array | None:
    """[D] float32: by what an RMS norm multiplies, whatever its weight counts from; None for another kind of norm."""
    weight = None if module is None else module.get("weight")
    if module is None or weight is None or weight.ndim != 1 or isinstance(module, nn.LayerNorm):
        return None
    weight = weight.astype(mx.float32)
    if type(module) is nn.RMSNorm:
        return _own(weight)
    applied = module(mx.ones(weight.shape)).astype(mx.float32)  # ones have the size 1
    for plain in (weight, 1.0 + weight):
        if mx.allclose(applied, plain, rtol=1e-2, atol=1e-2):
            return _own(plain)
    return None


def _norm(module: nn.Module, names: tuple[str, ...]) -> mx.array | None:
    return plain_norm(_named(module, names))


def _layers(target: Target) -> list[nn.Module]:
    """Every adapter has them."""
    return cast(Any, target).layers


def _named(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    return next((module[name] for name in names if isinstance(module.get(name), nn.Module)), None)


def _parts(module: nn.Module | None, names: Mapping[str, tuple[str, ...]]) -> dict[str, nn.Module] | None:
    """The linear layers of these names; None unless all are there."""
    if module is None:
        return None
    found = {}
    for ours, theirs in names.items():
        part = _named(module, theirs)
        if part is None or "weight" not in _base(part):
            return None
        found[ours] = part
    return found


def _base(module: nn.Module) -> nn.Module:
    """The layer itself, or the one that an adapter (LoRA, DoRA) is around."""
    return module.get("linear", module)


def _matrix(module: nn.Module) -> mx.array:
    """[out, in] float32 of a linear layer, packed or not, an adapter's changes included."""
    if "linear" in module:
        module = cast(Any, module).fuse(dequantize=True)
    weight = module["weight"]
    if "scales" in module:
        packed = cast(Any, module)
        weight = mx.dequantize(
            weight, module["scales"], module.get("biases"), packed.group_size, packed.bits, packed.mode
        )
    return _own(weight)


def _own(array: mx.array) -> mx.array:
    """float32 in memory of its own."""
    return mx.array(np.array(array.astype(mx.float32), copy=True))
