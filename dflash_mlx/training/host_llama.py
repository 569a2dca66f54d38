"""The Llama architecture in numpy float32, for decoding many rows on a CPU.

MLX's CPU backend computes `exp` one number at a time: at 96 rows of SmolLM2-135M SwiGLU takes 124 ms of a step and
softmax 30 to 160, where all of a step takes 340 here, 245 of them products (one thread of a Xeon, mlx 0.32.4, numpy
2.4.6, 2026-11-30). Keys and values are written in place. Rounding differs from MLX's in the last bits, as it does
between batch sizes and BLAS libraries anyhow.

Layer order and arithmetic: mlx_lm.models.llama.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama

from dflash_mlx.training.features import narrow

if TYPE_CHECKING:
    from dflash_mlx.training.decoder import Rows, Whole


SCORES = 2**27  # of a layer's attention that are there at a time: 512 MiB


@dataclass(frozen=True)
class _Layer:
    """Matrices are [in, out]."""

    attention_norm: np.ndarray
    qkv: np.ndarray
    out: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


class HostLlama:
    """A `Decoder` for what `serves` accepts. Copies the weights: 4 bytes per parameter."""

    def __init__(self, model: nn.Module, taps: Sequence[int] = ()) -> None:
        """taps: indices of layers whose output is returned as features."""
        args, inner = model.args, model.model
        self._heads, self._kv_heads = args.num_attention_heads, args.num_key_value_heads
        self._size = inner.layers[0].self_attn.head_dim
        self._eps = args.rms_norm_eps
        self.taps = tuple(taps)
        self._embedding = _numpy(inner.embed_tokens.weight)
        self._norm = _numpy(inner.norm.weight)
        head = self._embedding if args.tie_word_embeddings else _numpy(model.lm_head.weight)
        self._head = np.ascontiguousarray(head.T)  # as the other matrices: 12 % faster than a transposed view
        self._layers = [_layer(layer) for layer in inner.layers]
        self._frequencies = args.rope_theta ** (-np.arange(0, self._size, 2, dtype=np.float64) / self._size)
        self._keys: list[np.ndarray] = []  # per layer [B, kv heads, capacity, size]
        self._values: list[np.ndarray] = []
        self._turns = np.empty(0)
        self._length = 0  # positions that are held

    @staticmethod
    def serves(model: nn.Module) -> bool:
        """Whether this is a dense float32 Llama with full attention, plain rotary positions and no biases."""
        if type(model) is not llama.Model:
            return False
        inner = model.model
        modules = [module for _, module in model.named_modules()]
        linear = [module for module in modules if isinstance(module, (nn.Linear, nn.QuantizedLinear))]
        ropes = [layer.self_attn.rope for layer in inner.layers]
        return (
            inner.swa_idx is None
            and type(inner.embed_tokens) is nn.Embedding
            and all(type(module) is nn.Linear and "bias" not in module for module in linear)
            and all(type(rope) is nn.RoPE and not rope.traditional and rope.scale == 1.0 for rope in ropes)
            and all(rope.dims == layer.self_attn.head_dim for rope, layer in zip(ropes, inner.layers, strict=True))
            and inner.embed_tokens.weight.dtype == mx.float32
        )

    def start(self, ids: np.ndarray, capacity: int) -> Rows:
        self._turn_for(capacity)
        # A template opens every prompt alike: what all rows begin with is read once.
        differ = (ids != ids[:1]).any(axis=0)
        same = min(int(differ.argmax()) if differ.any() else ids.shape[1], ids.shape[1] - 1)
        self._length = 0
        self._make_room(1, same)
        opening = self._whole(ids[:1, :same]) if same else None
        shared = (self._keys, self._values)
        self._make_room(len(ids), capacity)
        for held, once in zip((self._keys, self._values), shared, strict=True):
            for array, part in zip(held, once, strict=True):
                array[:, :, :same] = part
        rest = self._last(ids[:, same:])
        if opening is None or opening.features is None or rest.features is None:
            return rest
        repeated = np.repeat(opening.features, len(ids), axis=0)
        return replace(rest, features=np.concatenate([repeated, rest.features], axis=1))

    def _turn_for(self, capacity: int) -> None:
        angles = np.outer(np.arange(capacity), self._frequencies)
        self._turns = np.exp(1j * angles).astype(np.complex64)  # [capacity, size / 2]

    def _make_room(self, batch: int, capacity: int) -> None:
        shape = (batch, self._kv_heads, capacity, self._size)
        self._keys = [np.empty(shape, np.float32) for _ in self._layers]
        self._values = [np.empty(shape, np.float32) for _ in self._layers]

    def extend(self, ids: np.ndarray) -> Rows:
        return self._last(ids[:, None])

    def keep(self, rows: Sequence[int]) -> None:
        chosen = list(rows)
        for held in (self._keys, self._values):
            for index, array in enumerate(held):
                fewer = np.empty((len(chosen), *array.shape[1:]), np.float32)
                fewer[:, :, : self._length] = array[chosen, :, : self._length]
                held[index] = fewer

    def read(self, ids: np.ndarray) -> Whole:
        self._length = 0
        self._turn_for(ids.shape[1])
        self._make_room(*ids.shape)
        return self._whole(ids)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return _rms(hidden, self._norm, self._eps) @ self._head

    def _last(self, ids: np.ndarray) -> Rows:
        from dflash_mlx.training.decoder import Rows

        whole = self._whole(ids)
        return Rows(self.logits(whole.hidden[:, -1]), whole.features)

    def _whole(self, ids: np.ndarray) -> Whole:
        """`_forward` in pieces, of which many long prompts take more than one: all their scores would not fit."""
        from dflash_mlx.training.decoder import Whole

        rows, width = ids.shape
        narrow = max(1, SCORES // (rows * self._heads * (self._length + width)))
        parts = [self._forward(ids[:, start : start + narrow]) for start in range(0, width, narrow)]
        if len(parts) == 1:
            return parts[0]
        features = [part.features for part in parts if part.features is not None]
        hidden = np.concatenate([part.hidden for part in parts], axis=1)
        return Whole(hidden, np.concatenate(features, axis=1) if features else None)

    def _forward(self, ids: np.ndarray) -> Whole:
        from dflash_mlx.training.decoder import Whole

        batch, width = ids.shape
        h = self._embedding[ids.reshape(-1)]  # [B * T, H]
        outputs = {}
        for index, layer in enumerate(self._layers):
            normed = _rms(h, layer.attention_norm, self._eps)
            h += self._attend(index, normed @ layer.qkv, batch, width) @ layer.out
            h += _swiglu(_rms(h, layer.mlp_norm, self._eps) @ layer.gate_up) @ layer.down
            if index in self.taps:
                outputs[index] = narrow(h)
        self._length += width
        features = np.concatenate([outputs[tap] for tap in self.taps], axis=-1) if outputs else None
        shaped = None if features is None else features.reshape(batch, width, -1)
        return Whole(h.reshape(batch, width, -1), shaped)

    def _attend(self, index: int, qkv: np.ndarray, batch: int, width: int) -> np.ndarray:
        """[B * T, (heads + 2 kv heads) * size] -> [B * T, heads * size]; the new keys and values are stored."""
        heads, groups, size = self._heads, self._kv_heads, self._size
        rows = qkv.reshape(batch, width, heads + 2 * groups, size).transpose(0, 2, 1, 3)  # [B, ., T, size]
        end = self._length + width
        turned = _turn(rows[:, : heads + groups], self._turns[self._length : end])
        self._keys[index][:, :, self._length : end] = turned[:, heads:]
        self._values[index][:, :, self._length : end] = rows[:, heads + groups :]
        keys, values = self._keys[index][:, :, :end], self._values[index][:, :, :end]
        # The query heads that share keys are rows of one product.
        queries = turned[:, :heads].reshape(batch, groups, heads // groups * width, size) * size**-0.5
        scores = queries @ keys.swapaxes(-1, -2)  # [B, groups, heads / groups * T, end]
        if width > 1:
            later = np.arange(end) > np.arange(self._length, end)[:, None]  # [T, end]
            scores.reshape(batch, groups, -1, width, end)[..., later] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values
        mixed /= scores.sum(axis=-1, keepdims=True)
        return mixed.reshape(batch, heads, width, size).transpose(0, 2, 1, 3).reshape(batch * width, heads * size)


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array)


def _layer(layer: Any) -> _Layer:
    def stacked(*linear: nn.Linear) -> np.ndarray:
        return np.concatenate([_numpy(module.weight).T for module in linear], axis=1)

    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        _numpy(layer.input_layernorm.weight),
        stacked(attention.q_proj, attention.k_proj, attention.v_proj),
        stacked(attention.o_proj),
        _numpy(layer.post_attention_layernorm.weight),
        stacked(mlp.gate_proj, mlp.up_proj),
        stacked(mlp.down_proj),
    )


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    scale = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[-1])
    return x * (1 / np.sqrt(scale + np.float32(eps)))[:, None] * weight


def _swiglu(gate_up: np.ndarray) -> np.ndarray:
    """[R, 2 * I] -> [R, I]: silu(gate) * up."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    out = np.negative(gate)
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives 0, as it should
        np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out


def _turn(x: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """[B, heads, T, size] rotated by [T, size / 2]; the halves of a head are the two parts of a pair."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty(x.shape, np.float32)
    out[..., :half] = first * turns.real - second * turns.imag
    out[..., half:] = first * turns.imag + second * turns.real
    return out
