"""The target: a frozen mlx_lm model and how to look inside it, through adapters that own the layer loop.

An adapter calls the model's own modules in the model's own order; it replaces nothing and stores nothing on them.
`forward` followed by `logits` equals `model(...)` bit for bit, which a parity test checks for every family.

To add a family: one file here with a class under `@register("<mlx_lm.models file name>")`, imported at the end of
this file, and one row in `tests/families.py`. A model of no registered family is examined by `probe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import TargetCache
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.kernels.view import view_of


@dataclass(frozen=True)
class TargetSpec:
    """Facts that a draft has to match."""

    model_type: str
    n_layers: int
    hidden_size: int
    vocab_size: int  # rows of the embedding, padding included
    dtype: mx.Dtype  # of the activations
    max_positions: int | None = None  # that the model was made for, if its config says
    note: str | None = None  # what the user should know about how it is served
    width_dependent: bool = False  # a block and single rows are computed in different forms, on any backend


@dataclass(frozen=True)
class Forward:
    """hidden: [B, T, H] before the final norm; features: [B, T, len(taps) * H], or None without taps."""

    hidden: mx.array
    features: mx.array | None

    @classmethod
    def of(cls, hidden: mx.array, outputs: Mapping[int, mx.array], taps: Sequence[int]) -> Forward:
        """From the outputs of the tapped layers, in the order of the taps."""
        return cls(hidden, mx.concatenate([outputs[tap] for tap in taps], axis=-1) if taps else None)


class Target(Protocol):
    """What the decode loop and the draft need of a model."""

    model: nn.Module
    text: nn.Module  # the language model whose modules run: the model's, or a view's
    spec: TargetSpec

    def embed(self, ids: mx.array) -> mx.array:
        """[B, T] -> [B, T, H], scaled as the model scales."""
        ...

    def block_rows(self, ids: mx.array) -> mx.array:
        """[B, T] -> [B, T, H]: what a draft's block is made of; `embed`, but for families whose drafts want it raw."""
        ...

    def head(self, normed: mx.array) -> mx.array:
        """[B, T, H] after a final norm -> [B, T, V]: the raw head, which the draft shares."""
        ...

    @property
    def head_module(self) -> nn.Module:
        """What `head` calls: a linear layer, or the embedding of a model that is tied to it."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, T, H] before the final norm -> [B, T, V]."""
        ...

    def make_entries(self, max_kv_size: int | None = None) -> list:
        """A fresh list of mlx_lm cache entries, one per layer that keeps something."""
        ...

    def forward(self, ids: mx.array, cache: TargetCache, taps: Sequence[int] = ()) -> Forward:
        """Run [B, T] ids on top of the cache and write their keys and values into it.

        taps: indices of decoder layers whose output (the residual stream after the layer) is returned.
        """
        ...


_ADAPTERS: dict[str, Callable[[nn.Module], Target]] = {}


def register(*names: str) -> Callable[[type], type]:
    """Serve the models of these `mlx_lm.models` files."""

    def add(cls: type) -> type:
        _ADAPTERS.update(dict.fromkeys(names, cls))
        return cls

    return add


def supported() -> list[str]:
    return sorted(_ADAPTERS)


def family(model: nn.Module) -> str:
    """The mlx_lm file that defines the model; unlike `model_type` it does not depend on aliases."""
    return type(model).__module__.rpartition(".")[2]


def text_part(model: nn.Module) -> nn.Module:
    """The language model inside a vision or audio shell of mlx_lm, or the model itself."""
    return model.get("language_model", model)


def adapter_of(model: nn.Module) -> Callable[[nn.Module], Target] | None:
    """The adapter registered for the mlx_lm file that defines the model."""
    return _ADAPTERS.get(family(model)) if type(model).__module__.startswith("mlx_lm.models.") else None


def target_for(model: nn.Module, kernels: Kernels = STOCK) -> Target:
    """The adapter of this model: its family's, or one that was probed, which `spec.note` says.

    It runs the model's own modules, or with `kernels` those of a view in which some call them; `target.model` is the
    model either way.

    Raises:
        UnsupportedTarget: nothing serves it; says what was found, what is supported and what to do.
    """
    adapter = adapter_of(model)
    make, note = (adapter, None) if adapter else probe.probed(model)
    target = make(view_of(model, kernels))
    target.model = model
    if note is not None:
        target.spec = replace(target.spec, note=note)
    return target


from dflash_mlx.targets import dense as dense  # noqa: E402  (registers its families)
from dflash_mlx.targets import hybrid as hybrid  # noqa: E402
from dflash_mlx.targets import probe as probe  # noqa: E402
from dflash_mlx.targets import sliding as sliding  # noqa: E402
