"""What speculation has to reach to pay, by a model of its cost: calculated from sizes, never measured.

Time per token is L = (T_draft + T_verify) / tau, with tau tokens per cycle (arXiv 2602.06036), so a cycle that costs c
plain steps pays if tau > c. Times are bytes that have to be read: decoding one text on a GPU waits for memory. That
gives two bounds of c. Low: a block reads the weights once. High: as often as MLX 0.32's kernels for quantised weights
read them for a few rows, at most five rows at a time from M3 on and one before; weights that are not quantised are
read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.chips import AppleChip
from dflash_mlx.fit import DraftNeed, Settings
from dflash_mlx.layer_sizes import TextSizes

_ROWS_PER_READ, _SINCE_GENERATION = 5, 15
ASSUMPTIONS = (
    "decoding waits for memory: times are bytes read, of weights, keys, values and states",
    "low: a block of drafts reads the weights once; high: as often as MLX's quantised kernels do for so many rows",
    "arithmetic, launches and the host are not counted, and a long prompt's keys are read once per block",
    "how many tokens per cycle a draft reaches on your text is not calculated: a benchmark measures it",
)


@dataclass(frozen=True)
class Regime:
    """Bytes read by a plain step, by a draft, and by the target's forward over a block; c, low and high.

    plain_tps: more tokens per second than that memory does not give plain decoding; None where it is not known.
    """

    block: int
    step_bytes: int
    draft_bytes: int
    verify_bytes: int
    low: float
    high: float
    plain_tps: float | None

    @property
    def best(self) -> float:
        """Times plain decoding if every draft were accepted, and the low bound held."""
        return self.block / self.low


def regime(
    sizes: TextSizes,
    weights: int,
    config: Mapping[str, Any],
    draft: DraftNeed,
    settings: Settings,
    chip: AppleChip | None,
    *,
    draft_packed: bool = False,
) -> Regime:
    """For a target on a GPU.

    Args:
        weights: bytes of the target's. config: its config.json, which says how many bits a weight has.
        draft_packed: its weights are quantised.
        chip: None if it is not known; then the present kernels are assumed.
    """
    rows = settings.block or draft.block
    per_weight, packed = bytes_per_weight(config, settings.size)
    head = round(sizes.vocabulary * sizes.hidden * per_weight)
    beside = settings.kept(sizes, settings.context, 1) + 2 * 4 * sizes.states
    one, block = (_read(sizes, weights, head, per_weight, tokens) for tokens in (1, rows))
    shared = 0 if draft.config.draft_vocab_size else round(head * (draft.listed or sizes.vocabulary) / sizes.vocabulary)
    drafted = draft.weights + draft.context(settings.context, settings.size)
    step = one + beside
    often, draft_often = reads(rows, packed, chip), reads(rows, draft_packed, chip)
    low = (drafted + shared + block + beside) / step
    high = (drafted + (draft_often - 1) * draft.weights + often * (shared + block) + beside) / step
    return Regime(
        block=rows,
        step_bytes=step,
        draft_bytes=drafted + shared,
        verify_bytes=block + beside,
        low=low,
        high=high,
        plain_tps=None if chip is None else chip.bandwidth * 1e9 / step,
    )


def reads(rows: int, packed: bool, chip: AppleChip | None) -> int:
    """How often weights are read for a block of so many rows."""
    if not packed:
        return 1
    if chip is not None and chip.generation < _SINCE_GENERATION:
        return rows
    return -(-rows // _ROWS_PER_READ)


def bytes_per_weight(config: Mapping[str, Any], size: int) -> tuple[float, bool]:
    """Of most of the weights, with what a group of quantised ones shares; and whether they are quantised."""
    packing = config.get("quantization")
    if not isinstance(packing, Mapping) or not packing.get("bits"):
        return float(size), False
    return int(packing["bits"]) / 8 + 2 * 2 / int(packing.get("group_size") or 64), True


def _read(sizes: TextSizes, weights: int, head: int, per_weight: float, rows: int) -> int:
    """Bytes of weights that so many rows at once need: of experts those that they are routed to, if each chooses
    anew."""
    embedding = 0 if sizes.tied else head  # of which a row per token is read
    mlp = sizes.mlp
    experts = round(mlp.layers * mlp.held * 3 * sizes.hidden * mlp.expert * per_weight)
    experts = min(experts, weights - embedding)
    idle = (1 - mlp.experts / mlp.held) ** rows if mlp.held else 0.0
    return round(weights - embedding - experts * idle)
