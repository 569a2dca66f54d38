"""How a draft is loaded: quantised or not, in which dtype, with how much context."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import mlx.nn as nn

from dflash_mlx.draft.model import DraftModel

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("float32", "bfloat16")
VOCABULARIES = ("auto", "full")
# Fusion and what DFlash 2 adds lose more than they save; a head and an embedding of its own decide its tokens.
_WIDE = ("fc", "candidate_selector", "lm_head", "embed_tokens")
_WIDE_LEAF = "kernel_projection"


@dataclass(frozen=True)
class DraftOptions:
    """What the caller wants of a draft beside what its checkpoint says.

    bits:       quantise on load: 4 or 8; None leaves the weights as they are.
    group_size: weights that share a scale: 32, 64 or 128.
    dtype:      of the activations and of the context: "float32" or "bfloat16"; None is the loader's choice.
    window:     context rows that every layer keeps at most, 1 or more; None keeps all (or what the checkpoint says).
    vocabulary: "auto" proposes only the tokens that the draft's folder lists, if it does; "full" proposes all.

    Raises:
        ValueError: a value is out of range; the message names it as `load` does.
    """

    bits: int | None = None
    group_size: int = 64
    dtype: str | None = None
    window: int | None = None
    vocabulary: str = "auto"

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_choice("draft_bits", self.bits, BITS, "or None, which leaves the weights as they are")
        check_choice("draft_group_size", self.group_size, GROUP_SIZES)
        check_dtype("draft_dtype", self.dtype)
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(
                f"`draft_window` has to be an integer of 1 or more (context rows that each layer of the draft keeps at "
                f"most), or None, which keeps what the checkpoint says; got {self.window!r}."
            )
        if self.vocabulary not in VOCABULARIES:
            raise ValueError(
                "`draft_vocabulary` has to be 'auto' (the tokens that the draft's folder lists, if it does) or 'full' "
                f"(all), got {self.vocabulary!r}."
            )


def check_choice(argument: str, value: object, legal: Collection[int], otherwise: str = "") -> None:
    """Raises ValueError naming `argument` unless `value` is one of the legal integers; a bool is none."""
    if type(value) is not int or value not in legal:
        choices = ", ".join(map(str, legal))
        raise ValueError(f"`{argument}` has to be one of {choices}{', ' * bool(otherwise)}{otherwise}; got {value!r}.")


def check_dtype(argument: str, value: object) -> None:
    """Raises ValueError naming `argument` unless `value` is None or a dtype that a draft can run in."""
    if value is None or value in DTYPES:
        return
    why = " Fused features overflow float16, and the draft would then accept nothing." if value == "float16" else ""
    raise ValueError(f"`{argument}` has to be 'float32', 'bfloat16' or None; got {value!r}.{why}")


def quantize(draft: DraftModel, bits: int, group_size: int) -> None:
    """Pack the backbone's linear layers in place, with MLX's affine quantisation.

    Wide stay: the fusion `fc`, every `kernel_projection`, the candidate selector, norms, a head and an embedding of
    the draft's own, and rows that do not divide into groups (a note says how many). What is packed already stays as it
    is (a note says so if its bits are others). Scales get the weights' dtype: quantise before a cast to get the numbers
    that `dflash-metal convert` stores.

    Raises:
        ValueError: no matrix divides into groups of this size.
    """
    linear = {p: m for p, m in draft.named_modules() if isinstance(m, nn.Linear) and is_packable(p)}
    chosen = {path for path, module in linear.items() if module.weight.shape[-1] % group_size == 0}
    if linear and not chosen:
        raise ValueError(
            f"Groups of {group_size} weights fit no matrix of {draft.name} (hidden size {draft.config.hidden_size}), "
            "so nothing would be quantised. Choose a smaller group size, or no quantisation."
        )
    packed = [m.bits for p, m in draft.named_modules() if isinstance(m, nn.QuantizedLinear) and is_packable(p)]
    if set(packed) - {bits}:
        what, change = "the draft's weights", "changes nothing"
        if linear:
            what, change = f"{len(packed)} of the draft's matrices", "leaves them so"
        stored = " and ".join(map(str, sorted(set(packed))))
        draft.notes = (
            *draft.notes,
            f"{what} are packed already ({stored} bits), so `draft_bits` {bits} {change}; convert the "
            "original for that",
        )
    nn.quantize(draft, group_size=group_size, bits=bits, class_predicate=lambda path, module: path in chosen)
    if wide := len(linear) - len(chosen):
        draft.notes = (
            *draft.notes,
            f"{wide} of the draft's {len(linear)} matrices are not quantised: their rows do not divide into groups of "
            f"{group_size}",
        )


def is_packable(path: str) -> bool:
    """Whether the module of this name may be quantised at all."""
    parts = path.split(".")
    return parts[0] not in _WIDE and parts[-1] != _WIDE_LEAF
