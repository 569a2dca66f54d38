"""How the weights of a draft change: AdamW with a warm-up and a cosine, on gradients that micro-batches add up to.

Weights, moments and updates are float32, whatever the passes are computed in. A step whose loss or gradient is not
finite changes nothing; several of them in a row end the training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW, MultiOptimizer, clip_grad_norm
from mlx.utils import tree_map, tree_unflatten

from dflash_mlx.errors import DFlashError
from dflash_mlx.training.checkpoint import by_name
from dflash_mlx.training.recipe import Recipe

PATIENCE = 5  # steps in a row that may come to nothing
# Kernels begin at 1 and codebooks and embeddings are looked up: to pull them to 0 would not make them simpler.
_UNDECAYED = ("base_kernel", "codebook", "embed_tokens")


class Diverged(DFlashError):
    """Step after step, loss or gradient were not finite."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate: up in a line to `peak` over `warm_up` steps, then half a cosine down to `floor`."""

    peak: float
    floor: float
    warm_up: int
    steps: int

    @classmethod
    def of(cls, recipe: Recipe, steps: int) -> Schedule:
        return cls(recipe.rate, recipe.rate * recipe.floor, math.ceil(recipe.warm_up * steps), steps)

    def at(self, step: int) -> float:
        """Of the step with this number, from 0."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        share = min(1.0, (step - self.warm_up + 1) / max(1, self.steps - self.warm_up))
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * share)) / 2


class Sum:
    """Gradients, losses and weights of a step's micro-batches, added up; divided once, at the end.

    So a step of several micro-batches is one of all their blocks, however the weights are spread over them.
    """

    def __init__(self) -> None:
        self.gradients: Any = None
        self.totals: dict[str, mx.array] = {}

    def add(self, gradients: Any, totals: dict[str, mx.array]) -> None:
        """gradients: of a sum of weighted losses. totals: sums, of losses and of weights among others."""
        if self.gradients is None:
            self.gradients, self.totals = gradients, dict(totals)
        else:
            self.gradients = tree_map(mx.add, self.gradients, gradients)
            self.totals = {name: value + totals[name] for name, value in self.totals.items()}
        mx.eval(self.gradients, self.totals)  # now, so that no micro-batch's activations outlive it

    def mean(self, weight: mx.array) -> Any:
        """The gradient of the mean loss."""
        return tree_map(lambda gradient: gradient / weight, self.gradients)


@dataclass(frozen=True)
class Update:
    """norm: of the gradient before it is clipped. taken: False if it was not finite and nothing was changed."""

    norm: float
    rate: float
    taken: bool


class Optimiser:
    """AdamW. Only matrices of linear layers decay.

    Args:
        draft: whose trainable parameters it changes; float32.
        steps: of the whole training.
    Raises:
        ValueError: a parameter is not float32.
    """

    def __init__(self, draft: nn.Module, recipe: Recipe, steps: int) -> None:
        self._draft, self._clip = draft, recipe.clip
        self.schedule = Schedule.of(recipe, steps)
        kinds = [
            AdamW(self.schedule.at(0), list(recipe.betas), weight_decay=decay, bias_correction=True)
            for decay in (recipe.decay, 0.0)
        ]
        self._rule = MultiOptimizer(kinds, [lambda name, value: decays(name, value)])
        for name, value in by_name(draft.trainable_parameters()).items():
            if value.dtype != mx.float32:
                raise ValueError(f"`draft` has to be float32 to be trained, and its {name} is {value.dtype}.")
        self._rule.init(draft.trainable_parameters())

    def update(self, gradients: Any, loss: mx.array, step: int) -> Update:
        """Change the draft by a mean gradient, or leave it as it is if that or the loss is not finite."""
        rate = self.schedule.at(step)
        clipped, norm = clip_grad_norm(gradients, self._clip)
        if not (mx.isfinite(norm) & mx.isfinite(loss)).item():
            return Update(float("nan"), rate, taken=False)
        self._rule.learning_rate = rate
        self._rule.update(self._draft, clipped)
        mx.eval(self._draft.parameters(), self._rule.state)
        return Update(float(norm.item()), rate, taken=True)

    @property
    def state(self) -> dict[str, mx.array]:
        """Moments and the count of updates, by name."""
        return by_name(self._rule.state)

    def restore(self, state: dict[str, mx.array]) -> None:
        """Go on from `state` of one for a draft of the same shape."""
        self._rule.state = tree_unflatten(list(state.items()))


def decays(name: str, value: mx.array) -> bool:
    """Whether weight decay applies to a parameter: to matrices that are multiplied with."""
    return value.ndim == 2 and not any(part in name for part in _UNDECAYED)


def check_progress(skipped: int, recipe: Recipe) -> None:
    """Raises Diverged if so many steps in a row came to nothing that more would not help."""
    if skipped >= PATIENCE:
        lower = f"lower `rate` (now {recipe.rate:g})"
        cure = lower if recipe.precision == "float32" else f'{lower}, or train with `precision` "float32"'
        raise Diverged(
            f"Loss or gradient were not finite in {skipped} steps in a row, so the draft does not learn any more. "
            f"To go on would end the same way. Start again in another folder: {cure}."
        )
