"""Does a pair fit into this machine's memory: an estimate from metadata alone, part by part.

Weights and caches are counted; what a forward needs beside them is a formula (`dflash_mlx.piece`). Against MLX's peak
on a CPU (mlx 0.32.4): the demo pair in float32 with prompts of 100 to 2,000 tokens within 0.2 %; random targets of 2 to
25 MB in all within 7 % (`tests/test_fit.py`), but for Mamba-2 in bfloat16, within 16 %. Not measured on a Mac.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dflash_mlx.config import DraftConfig
from dflash_mlx.layer_sizes import STEP, Layer, TextSizes, sizes_of
from dflash_mlx.machine import Machine, this_machine
from dflash_mlx.piece import piece_bytes

Verdict: TypeAlias = Literal["fits", "tight", "too large", "unknown"]
CONTEXT = 4096
TIGHT = 0.9  # of what may be used; above, a longer conversation or another program is too much
SNAPSHOTS = 4  # of the prompt cache, `prompt_cache.SNAPSHOTS`
KV_START = 5000  # positions from which on `kv_bits` are honoured, in mlx_lm and here
_STATE_BYTES = 4  # recurrent states are float32


@dataclass(frozen=True)
class Parts:
    """Bytes at the peak.

    target, draft: weights, with the rows of the head that a draft copies. context: keys and values of the target;
    draft_context: of the draft. states: recurrent ones, before and after a block. snapshots: states and windows that a
    conversation comes back to. work: activations of one piece of the prompt. block: what a block of drafts needs beyond
    that; the two come one after the other.
    """

    target: int
    draft: int = 0
    context: int = 0
    draft_context: int = 0
    states: int = 0
    snapshots: int = 0
    work: int = 0
    block: int = 0

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
class Settings:
    """What changes the need of a pair.

    context: positions, prompt and answer together. size: bytes of an activation. kv_bits, kv_group_size: of the
    target's keys and values once it holds `kv_start` positions. block: anchor and drafts; the draft's own if None.
    snapshots: places that a conversation comes back to.
    """

    context: int = CONTEXT
    size: int = 2
    kv_bits: int | None = None
    kv_group_size: int = 64
    kv_start: int = KV_START
    block: int | None = None
    snapshots: int = SNAPSHOTS

    @property
    def quantized(self) -> bool:
        """Whether keys and values ever are."""
        return self.kv_bits is not None and self.context > self.kv_start

    def kept(self, sizes: TextSizes, context: int, chunk: int) -> int:
        """Bytes of the target's keys and values; when they are quantised, those not quantised yet may be more."""
        if not self.quantized or self.kv_bits is None:
            return self.size * sizes.rows(context, chunk)
        full = sum(layer.elements(context, chunk) for layer in sizes.layers if layer.window is None)
        start = sum(
            layer.elements(min(context, self.kv_start), chunk) for layer in sizes.layers if layer.window is None
        )
        windows = sizes.rows(context, chunk) - full
        each = self.kv_bits / 8 + 2 * self.size / self.kv_group_size  # with a scale and a bias for every group
        return self.size * windows + max(round(each * full), round(self.size * start))


@dataclass(frozen=True)
class DraftNeed:
    """A draft. weights: bytes in memory. listed: tokens that it proposes from, if not all."""

    config: DraftConfig
    weights: int
    listed: int = 0

    @property
    def block(self) -> int:
        """Anchor and drafts that are run by default."""
        return self.config.runtime_block_size or self.config.block_size

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
    settings = Settings(context, size or activation_size(config))
    return Fit.of(parts_of(sizes, weights, draft, settings, machine, unread_draft), machine)


def parts_of(
    sizes: TextSizes,
    weights: int,
    draft: DraftNeed | None,
    settings: Settings,
    machine: Machine,
    unread_draft: bool = False,
) -> Parts:
    """The parts, for `fit`."""
    context, size = settings.context, settings.size
    copied = sum(
        _STATE_BYTES * layer.state or size * layer.snapshot(context) for layer in sizes.layers if _snaps(layer)
    )
    work = _work(sizes, draft, settings, machine)
    return Parts(
        target=weights,
        draft=_draft_weights(sizes, draft, size, unread_draft),
        context=settings.kept(sizes, context, machine.chunk),
        draft_context=draft.context(context, size) if draft is not None else 0,
        states=2 * _STATE_BYTES * sizes.states,
        snapshots=settings.snapshots * copied,
        work=work,
        block=max(0, block_bytes(sizes, draft, settings) - work),
    )


def _work(sizes: TextSizes, draft: DraftNeed | None, settings: Settings, machine: Machine) -> int:
    """The most by which a piece of the prompt exceeds what is held at the end: the last whole one, or what remains.

    The draft's context takes a piece in when the target is through with it.
    """
    context, size = settings.context, settings.size
    taps = draft.config.target_layer_ids if draft is not None else ()
    whole = context // machine.chunk * machine.chunk
    pieces = [(whole, machine.chunk)] * (whole > 0) + [(context, context - whole)] * (whole < context)

    def held(end: int, start: int) -> int:
        drafts = draft.context(start, size) if draft is not None else 0
        return settings.kept(sizes, end, machine.chunk) + drafts

    def exceeds(end: int, chunk: int) -> int:
        there = piece_bytes(sizes, end, chunk, size, metal=machine.metal, quantized=settings.quantized, taps=taps)
        return there - (held(context, context) - held(end, end - chunk))

    return max(0, *(exceeds(*piece) for piece in pieces))


def _snaps(layer: Layer) -> bool:
    return layer.state > 0 or layer.window is not None


def block_bytes(sizes: TextSizes, draft: DraftNeed | None, settings: Settings) -> int:
    """Of one block beside caches: logits of target and draft, in float32 where they are compared."""
    rows = 1 if draft is None else settings.block or draft.block
    return 2 * 4 * rows * sizes.vocabulary


def _draft_weights(sizes: TextSizes, draft: DraftNeed | None, size: int, unread: bool) -> int:
    """Of an unread one: five layers as wide as the target, MLPs three times as wide, fed by five taps, in 2 bytes.

    That is 0.92 GB for a hidden size of 2560 and 2.3 GB for one of 4096.
    """
    if draft is not None:
        return draft.weights + draft.listed * sizes.hidden * size
    return 2 * 70 * sizes.hidden**2 if unread else 0


def activation_size(config: Mapping[str, Any]) -> int:
    """Bytes of an activation by a config.json: 4 where it says float32, else 2."""
    nested = config.get("text_config")
    places = (nested if isinstance(nested, Mapping) else {}, config)
    named = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), "")
    return 4 if str(named).endswith("float32") else 2
