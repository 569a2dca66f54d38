"""How a draft is loaded: quantised or not, in which dtype, with how much context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftOptions:
    """What the caller wants of a draft beside what its checkpoint says.

    bits:       quantise on load: 4 or 8; None leaves the weights as they are.
    group_size: weights that share a scale.
    dtype:      of the activations and of the context: "float32" or "bfloat16"; None is the loader's choice.
    window:     context rows that full layers keep; None keeps all (or what the checkpoint says).
    """

    bits: int | None = None
    group_size: int = 64
    dtype: str | None = None
    window: int | None = None
