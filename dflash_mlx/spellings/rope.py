"""The spellings of rotary embeddings: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling`.

Not read: `partial_rotary_factor` (drafts rotate the whole head), the sections of multimodal ropes (positions of a text
are one number), `mscale` and `mscale_all_dim` (`dflash_mlx.draft.rope` says why).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mlx.config import FIX
from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings.keys import Keys, bad, positive, shown

# What each scaling needs. Those that change with the length (dynamic, longrope) would change keys already stored.
_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_NUMBERS = (*_NEEDS["llama3"], "beta_fast", "beta_slow", "attention_factor")
KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_LAYER_KINDS = ("sliding_attention", "full_attention")


def read(config: Mapping[str, Any], *, one_for_all: bool = False) -> tuple[float, Mapping[str, Any] | None]:
    """(base, scaling or None). The scaling has `rope_type` and the numbers that it needs.

    Args:
        one_for_all: where the file has a rope for each kind of layer, the one of the sliding layers serves all.
    Raises:
        CheckpointError: no base, two that differ, or a scaling that is unknown or incomplete.
    """
    top = Keys(("at the top level", config))
    new, old = _of_all_layers(top.table("rope_parameters"), one_for_all), top.table("rope_scaling")
    keys = Keys(("in `rope_parameters`", new), ("in `rope_scaling`", old), ("at the top level", config))
    base = keys.number("rope_theta")
    if base <= 1:
        raise bad(f"`rope_theta` has to be above 1, got {base}")
    scalings = [scaling for scaling in (_scaling(new), _scaling(old)) if scaling is not None]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise CheckpointError(
            f"Draft config: `rope_parameters` scales by {shown(scalings[0])} and `rope_scaling` by "
            f"{shown(scalings[1])}. One of them is wrong, and a wrong one silently costs acceptance. {FIX}"
        )
    return base, scalings[0] if scalings else None


def _of_all_layers(parameters: Mapping[str, Any], one_for_all: bool) -> Mapping[str, Any]:
    """The parameters, or where each kind of layer has its own, those that every layer shares."""
    kinds = [parameters[kind] for kind in _LAYER_KINDS if parameters.get(kind) is not None]
    if not kinds:
        return parameters
    if not all(isinstance(kind, Mapping) for kind in kinds):
        raise bad(f"`rope_parameters` has to hold an object for each kind of layer, got {shown(parameters)}")
    if not one_for_all and kinds[0] != kinds[-1]:
        raise CheckpointError(
            "Draft config: `rope_parameters` rotates sliding and full layers differently, and this version gives "
            "every layer of a draft the same rope. Run wrongly it would accept little. Choose another draft."
        )
    return kinds[0]


def _scaling(table: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Normalised, or None if positions are not scaled."""
    given = [table[name] for name in ("rope_type", "type") if table.get(name) is not None]
    kinds = {kind if isinstance(kind, str) else shown(kind) for kind in given}
    if "mrope" in kinds:  # with one position per token it is the plain one
        kinds = kinds - {"mrope"} | {"default"}
    if kinds <= {"default"}:
        return None
    kind = kinds.pop()
    if kinds or kind not in _NEEDS:
        raise _unusable(table, f"its type is {' and '.join(sorted({kind, *kinds}))}, known are {', '.join(_NEEDS)}")
    missing = [name for name in _NEEDS[kind] if table.get(name) is None]
    if missing:
        raise _unusable(table, f"`{missing[0]}` is missing")
    scaling = {name: positive(name, table[name]) for name in _NUMBERS if table.get(name) is not None}
    truncate = Keys(("in the rope scaling", table)).flag("truncate")
    return scaling | {"rope_type": kind} | ({} if truncate is None else {"truncate": truncate})


def _unusable(table: Mapping[str, Any], why: str) -> CheckpointError:
    return CheckpointError(f"Draft config: the rope scaling {shown(dict(table))} is not usable: {why}. {FIX}")
