"""How much memory a training needs, before it begins.

What is there all the time is counted: weights, moments, the target. What a step needs beside it is a formula over the
largest micro-batch of an epoch, fitted to what MLX's counter says (`tests/training/test_memory.py` holds it to 25 %).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.training.blocks import ROUND, Draw, rows_of
from dflash_mlx.training.checkpoint import by_name
from dflash_mlx.training.host_llama import HostLlama
from dflash_mlx.training.prepare import Prepared
from dflash_mlx.training.recipe import BFLOAT16
from dflash_mlx.training.step import LOGITS

_CGROUP = Path("/sys/fs/cgroup/memory.max")


class TooLarge(DFlashError):
    """A training needs more memory than there is."""


@dataclass(frozen=True)
class Need:
    """Bytes at the peak.

    target: its weights. draft: weights and moments. gradients: and what an update needs beside them.
    activations: of a micro-batch, kept for its backward pass. logits: of one piece of it.
    reading: of the target, while it computes features that are not stored. held_out: features that are kept for the
    evaluations, since they are not stored.
    """

    target: int
    draft: int
    gradients: int
    activations: int
    logits: int
    reading: int = 0
    held_out: int = 0

    @property
    def peak(self) -> int:
        """Target, draft and held-out features are there all the time; a pass, an update and reading come one after the
        other."""
        kept = self.target + self.draft + self.held_out
        return kept + max(self.activations + self.logits, self.gradients, self.reading)

    def line(self) -> str:
        """For the user."""
        shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in vars(self).items())
        return f"Memory: about {self.peak / 1e9:.2f} GB at the peak ({shown})"

    def refuse_more_than(self, there: int) -> None:
        """Raises TooLarge if there are fewer bytes; says what to lower."""
        if self.peak <= there:
            return
        micro = max(self.activations + self.logits, self.reading)
        if self.peak - self.held_out <= there:
            cure = "lower `evaluate_prompts` or `evaluate_tokens`, or store the features (`--features cached`)"
        elif self.target + self.draft + self.gradients > there:
            cure = "train fewer `layers`, or a smaller target or one in fewer bits"
        elif self.logits > self.activations:
            cure = "set a `vocabulary` (8192, say), or lower `sequences` or `anchors`"
        else:
            cure = "lower `sequences` (and raise `accumulate` by as much), `anchors`, `longest` or `pack`"
        raise TooLarge(
            f"This training needs about {self.peak / 1e9:.2f} GB of memory, {micro / 1e9:.2f} of them for a "
            f"micro-batch, and {there / 1e9:.2f} GB are there. The system would end it, or it would crawl. To fit, "
            f"{cure}."
        )


def memory_here() -> int:
    """Bytes that this process may use: of the GPU, or of the machine or the container it is in."""
    info = mx.device_info()
    limit = info.get("max_recommended_working_set_size") if mx.default_device() == mx.Device(mx.gpu) else None
    if limit:
        return int(limit)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(there, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # none, or "max"
        return there


def estimate(prepared: Prepared, held_out: int = 0) -> Need:
    """What this training needs. held_out: positions of answers that it is measured on."""
    config, recipe, frozen = prepared.draft.config, prepared.recipe, prepared.frozen
    weights = _bytes(prepared.draft)
    shape = _largest(prepared)
    blocks, context = shape.rows * shape.anchors, shape.rows * shape.length
    proposals = blocks * (config.block_size - 1)
    columns = min(frozen.size, recipe.columns or frozen.size)
    together = min(proposals, max(1, LOGITS // columns))  # rows whose logits are there at a time
    logits = round(_LOGITS * 4 * together * columns)
    if config.selector is not None:
        logits += _PAIRS * 4 * together * config.selector.top_k * config.selector.rank
    width = len(config.target_layer_ids) * config.hidden_size
    features = context * width
    half = recipe.precision == BFLOAT16
    kept = (2 if half else 4) * features + 6 * features + (weights // 2 if half else 0)
    sums = weights if recipe.accumulate == 1 else 2 * weights  # gradients, and those of the micro-batches before
    target = _bytes(prepared.task.target.model)
    if isinstance(prepared.decoder, HostLlama):
        target *= 2  # it has a copy
    if frozen.vocabulary is not None:
        target += 4 * frozen.size * config.hidden_size
    return Need(
        target=target,
        draft=3 * weights,
        gradients=sums + 3 * weights,
        activations=_of_layers(config, shape, half) + kept + sums,
        logits=logits,
        reading=0 if prepared.decoder is None else _reading(prepared, context),
        held_out=0 if prepared.decoder is None else 2 * held_out * width,
    )


def _reading(prepared: Prepared, positions: int) -> int:
    """Keys and values of all of the target's layers, and the rows of one. Its sizes are the draft's, but for layers."""
    config, spec = prepared.draft.config, prepared.task.target.spec
    kept = 2 * spec.n_layers * config.num_kv_heads * config.head_dim + len(config.target_layer_ids) * spec.hidden_size
    return positions * spec.dtype.size * (kept + 4 * (spec.hidden_size + config.intermediate_size))


# Fitted by least squares to the peaks of 16 trainings of tiny drafts (mlx 0.32.4 on a CPU), within 6 %: arrays of one
# size that are alive at the peak. Of each layer, its scores, rows of hidden size and heads, and rows of the MLP; of the
# layer whose backward pass runs, its scores and rows; logits; and what the selector scores.
_KEPT = (1.2, 5.8, 5.4)
_KEPT_HALF = (1.5, 2.9, 3.4)
_RUNNING, _RUNNING_HALF = (6.2, 1.1), (4.8, 1.6)
_LOGITS, _PAIRS = 3.75, 4


def _of_layers(config: DraftConfig, shape: _Shape, half: bool) -> int:
    """Bytes of activations."""
    rows = shape.rows * shape.anchors * config.block_size
    scores = 4 * rows * config.num_heads * (shape.length + config.block_size)
    heads = 4 * rows * (config.hidden_size + (config.num_heads + config.num_kv_heads) * config.head_dim)
    mlp = 4 * rows * config.intermediate_size
    kept, running = (_KEPT_HALF, _RUNNING_HALF) if half else (_KEPT, _RUNNING)
    each = kept[0] * scores + kept[1] * heads + kept[2] * mlp
    return round(config.num_layers * each + running[0] * scores + running[1] * (heads + mlp))


def disk_for_features(prepared: Prepared) -> int:
    """Bytes that the features of all answers take on the disk, as float16."""
    config = prepared.draft.config
    return 2 * prepared.answers.positions * len(config.target_layer_ids) * config.hidden_size


@dataclass(frozen=True)
class _Shape:
    """Of a micro-batch: rows of `length` positions with so many anchors."""

    rows: int
    length: int
    anchors: int


def _largest(prepared: Prepared) -> _Shape:
    """The micro-batch of the first epoch that has most rows times positions times anchors."""
    plan = prepared.plan
    shapes = (_shape(plan.draws(number), prepared.recipe.pack) for number in range(plan.micro_batches))
    return max(shapes, key=lambda shape: shape.rows * shape.length * shape.anchors)


def _shape(draws: list[Draw], pack: int) -> _Shape:
    context = [int(draw.anchors[-1]) for draw in draws]
    rows = rows_of(context, pack)
    length = max(sum(context[index] for index in row) for row in rows)
    length = -(-length // ROUND) * ROUND
    return _Shape(len(rows), length, max(sum(len(draws[index].anchors) for index in row) for row in rows))


def _bytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in by_name(model.parameters()).values())
