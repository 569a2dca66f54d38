"""A pair in numbers, for `dflash_mlx.plan`: what was asked, its sizes, its need of memory by settings."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.chips import AppleChip
from dflash_mlx.errors import DFlashError
from dflash_mlx.fit import CONTEXT, DraftNeed, Fit, Parts, Settings, parts_of
from dflash_mlx.layer_sizes import STEP, TextSizes, sizes_of
from dflash_mlx.machine import Machine
from dflash_mlx.needs import StoredDraft, demo_sizes, stored_draft, target_weights
from dflash_mlx.options import KV_GROUP_SIZES
from dflash_mlx.pairing import registry
from dflash_mlx.pairing.inspection import Pair

_LONGEST = 2**20  # where a config does not say how long a context may be


@dataclass(frozen=True)
class Asked:
    """What is planned. draft: "auto", None, or a folder or repository. block_size: the draft's own if None."""

    target: str
    machine: Machine
    chip: AppleChip | None = None
    revision: str | None = None
    draft: str | None = "auto"
    draft_revision: str | None = None
    context: int = CONTEXT
    kv_bits: int | None = None
    kv_group_size: int = 64
    draft_bits: int | None = None
    block_size: int | None = None


@dataclass(frozen=True)
class Sized:
    """A pair in numbers. draft: None where there is none or nothing is known of it (`unread`)."""

    asked: Asked
    sizes: TextSizes
    config: Mapping[str, Any]
    weights: int
    draft: StoredDraft | None
    unread: bool
    settings: Settings

    def need_in(self, bits: int | None) -> DraftNeed | None:
        """The draft's part of the memory in so many bits."""
        return self.draft.need(self.settings.size, self.asked.machine, bits) if self.draft else None

    @property
    def need(self) -> DraftNeed | None:
        return self.need_in(self.asked.draft_bits)

    def parts(self, context: int | None = None, need: DraftNeed | None = None) -> Parts:
        settings = self.settings if context is None else replace(self.settings, context=context)
        return parts_of(self.sizes, self.weights, need or self.need, settings, self.asked.machine, self.unread)

    @property
    def fit(self) -> Fit:
        return Fit.of(self.parts(), self.asked.machine)

    def longest_context(self) -> int:
        """That fits, 0 if none does; never longer than the model was made for."""
        usable, limit = self.asked.machine.usable, self.sizes.positions or _LONGEST

        def fits(context: int) -> bool:
            return self.parts(context).total <= usable

        if fits(limit):
            return limit
        low, high = 0, -(-limit // STEP)  # in steps: `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * STEP) else (low, middle)
        return low * STEP


def sized(asked: Asked, pair: Pair) -> Sized | None:
    """In numbers, where config and files say enough.

    Raises:
        ValueError: a block that the draft cannot run, or keys and values in groups that the target's heads do not have.
    """
    config = pair.config
    if pair.target.name == registry.DEMO:  # whose packed weights are unpacked when it is loaded
        config = demo_sizes()
    sizes = None if pair.is_draft else sizes_of(config)
    try:
        weights, size = target_weights(pair.target, config, asked.machine)
    except DFlashError:
        return None
    if sizes is None or weights is None:
        return None
    draft = None
    if pair.draft is not None:
        with contextlib.suppress(DFlashError):
            draft = stored_draft(pair.draft)
    if pair.refused is None:
        _check_groups(asked, sizes)
    unread = draft is None and pair.resolution.draft is not None
    settings = Settings(asked.context, size, asked.kv_bits, asked.kv_group_size, block=_block(asked, draft))
    return Sized(asked, sizes, config, weights, draft, unread, settings)


def _check_groups(asked: Asked, sizes: TextSizes) -> None:
    """As `quantized_kv.check` does: of layers that keep all positions, whose keys and values are what is quantised."""
    widths = sorted({layer.width for layer in sizes.layers if layer.row and layer.window is None})
    if asked.kv_bits is None or all(width % asked.kv_group_size == 0 for width in widths):
        return
    fitting = [str(group) for group in KV_GROUP_SIZES if all(width % group == 0 for width in widths)]
    none = f"No group of {', '.join(map(str, KV_GROUP_SIZES))} does: leave `kv_bits` out."
    cure = f"Choose {' or '.join(fitting)}, or leave `kv_bits` out." if fitting else none
    raise ValueError(
        f"`kv_group_size` has to divide the width of the target's heads, {' and '.join(map(str, widths))}, got "
        f"{asked.kv_group_size}: generation would refuse to quantise keys and values so. {cure}"
    )


def _block(asked: Asked, draft: StoredDraft | None) -> int | None:
    trained = None if draft is None else draft.config.block_size
    if asked.block_size is None or trained is None:
        return None
    if not 2 <= asked.block_size <= trained:
        raise ValueError(
            f"`block_size` has to be in 2..{trained} (the draft was trained with {trained}), got {asked.block_size}."
        )
    return asked.block_size
