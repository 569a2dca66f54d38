"""Does a pair fit into this machine's memory: an estimate from metadata alone, part by part.

Weights and caches are counted; what a forward needs beside them is a formula. Against MLX's peak on a CPU (mlx
0.32.4): the demo pair in float32 with 100 to 3,000 tokens of prompt 0 to 2 % too much; tiny random targets of 6 to 11
MB in all -1 to +14 % where the prompt is read in whole pieces. Not measured on a Mac.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dflash_mlx.config import DraftConfig
from dflash_mlx.layer_sizes import STEP, TextSizes, sizes_of
from dflash_mlx.machine import Machine, this_machine

Verdict: TypeAlias = Literal["fits", "tight", "too large", "unknown"]
CONTEXT = 4096
TIGHT = 0.9  # of what may be used; above, a longer conversation or another program is too much
SNAPSHOTS = 4  # of the prompt cache, `prompt_cache.SNAPSHOTS`
_STATE_BYTES = 4  # recurrent states are float32
# Of each position of a piece of the prompt: arrays of hidden and of intermediate size that are alive at once.
_HIDDEN, _INTERMEDIATE = 8, 3


@dataclass(frozen=True)
class Parts:
    """Bytes at the peak.

    target, draft: weights, with the rows of the head that a draft copies. context: keys, values and states of the
    target; draft_context: of the draft. snapshots: states and windows that a conversation comes back to. work: of one
    forward.
    """

    target: int
    draft: int = 0
    context: int = 0
    draft_context: int = 0
    snapshots: int = 0
    work: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def gb(self) -> dict[str, float]:
        """By name for people, in units of 1e9 bytes, without those that are nothing."""
        return {name.replace("_", " "): size / 1e9 for name, size in vars(self).items() if size}


@dataclass(frozen=True)
class Fit:
    """Whether it fits: what is needed at the peak, in parts, and what there is, in units of 1e9 bytes.

    Where the sizes cannot be had the verdict is "unknown", and nothing is said to be needed.
    """

    verdict: Verdict
    needed_gb: float | None
    available_gb: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Parts, machine: Machine) -> Fit:
        share = parts.total / machine.usable
        verdict: Verdict = "fits" if share <= TIGHT else "tight" if share <= 1 else "too large"
        return cls(verdict, parts.total / 1e9, machine.usable / 1e9, parts.gb())


@dataclass(frozen=True)
class DraftNeed:
    """A draft. weights: bytes in memory. listed: tokens that it proposes from, if not all."""

    config: DraftConfig
    weights: int
    listed: int = 0

    def context(self, length: int, size: int) -> int:
        """Bytes of its keys and values."""
        draft = self.config
        row = 2 * draft.num_kv_heads * draft.head_dim * size
        longest = draft.context_window or length
        windows = [
            (draft.sliding_window or length) if kind.startswith("sliding") else length for kind in draft.layer_types
        ]
        return sum(row * min(-(-length // STEP) * STEP, window + STEP, longest + STEP) for window in windows)


def fit(
    config: Mapping[str, Any],
    weights: int | None,
    draft: DraftNeed | None = None,
    *,
    context: int = CONTEXT,
    size: int | None = None,
    machine: Machine | None = None,
    unread_draft: bool = False,
) -> Fit:
    """Whether a target, its draft and a context fit.

    Args:
        config: the target's config.json.
        weights: bytes of its weights in memory, None if unknown.
        context: positions, prompt and answer together.
        size: bytes of an activation; by the config if None.
        unread_draft: it has a draft of which nothing is known yet; the usual size is assumed.
    """
    machine = machine or this_machine()
    sizes = sizes_of(config)
    if sizes is None or weights is None:
        return Fit("unknown", None, machine.usable / 1e9)
    return Fit.of(
        parts_of(sizes, weights, draft, context, size or activation_size(config), machine, unread_draft), machine
    )


def parts_of(
    sizes: TextSizes,
    weights: int,
    draft: DraftNeed | None,
    context: int,
    size: int,
    machine: Machine,
    unread_draft: bool = False,
) -> Parts:
    """The parts, for `fit`."""
    windows = sum(layer.elements(context, machine.chunk) for layer in sizes.layers if layer.window is not None)
    return Parts(
        target=weights,
        draft=_draft_weights(sizes, draft, size, unread_draft),
        context=size * sizes.rows(context, machine.chunk) + 2 * _STATE_BYTES * sizes.states,  # before and after a block
        draft_context=draft.context(context, size) if draft is not None else 0,
        snapshots=SNAPSHOTS * (_STATE_BYTES * sizes.states + size * windows),
        work=_work(sizes, draft, context, size, machine),
    )


def _draft_weights(sizes: TextSizes, draft: DraftNeed | None, size: int, unread: bool) -> int:
    """Of an unread one: five layers as wide as the target, MLPs three times as wide, fed by five taps, in 2 bytes.

    That is 0.92 GB for a hidden size of 2560 and 2.3 GB for one of 4096.
    """
    if draft is not None:
        return draft.weights + draft.listed * sizes.hidden * size
    return 2 * 70 * sizes.hidden**2 if unread else 0


def _work(sizes: TextSizes, draft: DraftNeed | None, context: int, size: int, machine: Machine) -> int:
    """Of one piece of the prompt, or of one block. What is tapped for the draft is kept until the piece is read."""
    chunk, taps, block = min(context, machine.chunk), 0, 1
    if draft is not None:
        taps, block = len(draft.config.target_layer_ids), draft.config.runtime_block_size or draft.config.block_size
    rows = size * chunk * ((_HIDDEN + taps) * sizes.hidden + _INTERMEDIATE * sizes.intermediate)
    if not machine.metal:  # whose kernel stores no scores, and needs no mask
        rows += chunk * context * (size * sizes.heads + 1)
    return max(rows, 2 * 4 * block * sizes.vocabulary)


def activation_size(config: Mapping[str, Any]) -> int:
    """Bytes of an activation by a config.json: 4 where it says float32, else 2."""
    nested = config.get("text_config")
    places = (nested if isinstance(nested, Mapping) else {}, config)
    named = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), "")
    return 4 if str(named).endswith("float32") else 2
