"""A recipe: everything that decides what a training makes of a target and its answers.

Stored as TOML beside what it made. The defaults are those of the DFlash paper (arXiv 2602.06036, section 4) where it
states them: five layers, blocks of 16, learning rate 6e-4, warm-up over 4 % of the steps, six epochs.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dflash_mlx.errors import DFlashError

DECAY, PACE = "decay", "pace"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
FROM_TARGET, RANDOM = "target", "random"
BLOCK, LONGEST_BLOCK = 16, 64


class RecipeError(DFlashError):
    """A recipe cannot be read, or asks for what cannot be."""


@dataclass(frozen=True)
class Recipe:
    """How a draft is made.

    layers, block_size, taps: of the draft; no taps means five of the target's layers, evenly spread. block_size 0: 16,
        or that of the draft that it begins with.
    window: positions that sliding layers see; `full` counts the last layers that see everything all the same.
        0: all layers are full.
    second: DFlash 2, with its convolutions and selector (`rank`, `candidates`).
    vocabulary: tokens that the draft can propose: the most frequent ones of the answers; 0: all, or those of the
        draft that it begins with.
    columns: tokens that a micro-batch is learned against: those that it names and the most frequent others; 0: all.
    initial: "target" (from its own last layers), "random", or a draft to begin with (folder or repository).
    mask_token_id: None finds a token that no text has.

    epochs: passes over the answers. steps: instead, if not 0.
    sequences, anchors: answers of a micro-batch, and blocks that each gives. accumulate: micro-batches of a step.
    pack: positions of a row that holds several answers; 0 pads each to the longest.
    longest: positions of an answer with its prompt, at most; the rest is cut off.

    weighting: of the positions in a block: "decay" is exp(-(k - 1) / gamma), "pace" is D-PACE with `alpha`.
    gamma: 0 means 7, 5 or 4 for blocks of 16, 10 or 8 and between them in proportion, as in the paper.
    soft: share of the target's distribution in what is learned, the rest is its token. sharpness: power to which the
        distribution is raised first.
    selector: share of the selector's loss (DFlash 2).

    rate: learning rate at its highest. warm_up: share of the steps until there. floor: share of it at the end.
    betas, decay: of AdamW. clip: norm of the gradient at most.
    precision: of the forward and backward pass; weights are float32.
    seed: of everything that is drawn.

    evaluate_every: steps; 0: only at the end. evaluate_prompts, evaluate_tokens: per category, and per answer.
    checkpoint_every: steps.
    """

    layers: int = 5
    block_size: int = 0
    taps: tuple[int, ...] = ()
    window: int = 0
    full: int = 0
    second: bool = False
    rank: int = 256
    candidates: int = 16
    vocabulary: int = 0
    columns: int = 0
    initial: str = FROM_TARGET
    mask_token_id: int | None = None

    epochs: float = 6.0
    steps: int = 0
    sequences: int = 4
    anchors: int = 64
    accumulate: int = 1
    pack: int = 0
    longest: int = 3072

    weighting: str = DECAY
    gamma: float = 0.0
    alpha: float = 0.5
    soft: float = 0.5
    sharpness: float = 1.0
    selector: float = 1.0

    rate: float = 6e-4
    warm_up: float = 0.04
    floor: float = 0.03
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.01
    clip: float = 1.0
    precision: str = FLOAT32
    seed: int = 0

    evaluate_every: int = 500
    evaluate_prompts: int = 8
    evaluate_tokens: int = 128
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = vars(self)[name]
            if not (isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high):
                raise ValueError(f"`{name}` has to be in {low}..{high}, got {value!r}.")
        for name, known in _CHOICES.items():
            if vars(self)[name] not in known:
                raise ValueError(
                    f"`{name}` has to be {' or '.join(known)}, got {vars(self)[name]!r}.{_WHY.get(name, '')}"
                )
        if any(tap < 0 for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"`taps` have to be different layers of the target, ascending, got {list(self.taps)}.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` have to be two numbers in 0..1 (1 excluded), got {list(self.betas)}.")
        if self.full > self.layers or (self.full and not self.window):
            raise ValueError(
                f"`full` counts layers without a window, of {self.layers} with `window` {self.window}, got {self.full}."
            )
        if self.block_size == 1:
            raise ValueError(f"`block_size` has to be 0 (default) or in 2..{LONGEST_BLOCK}, got 1.")
        if self.window == 1:
            raise ValueError("`window` has to be 0 (none) or 2 and more, got 1.")
        if self.vocabulary == 1 or (self.second and self.vocabulary):
            raise ValueError(
                f"`vocabulary` has to be 0 (all) with DFlash 2, and otherwise 0 or 2 and more, got {self.vocabulary}."
            )
        if self.columns == 1 or (self.second and self.columns):
            raise ValueError(
                f"`columns` has to be 0 (all) with DFlash 2, and otherwise 0 or 2 and more, got {self.columns}."
            )
        if self.pack and self.pack < self.longest:
            raise ValueError(
                f"`pack` has to be 0, or at least `longest` ({self.longest}) so that each answer fits, got {self.pack}."
            )

    @property
    def gamma_used(self) -> float:
        """Of the decay."""
        if self.gamma:
            return self.gamma
        known, block = ((8, 4.0), (10, 5.0), (16, 7.0)), self.block_size or BLOCK
        if block <= 8:
            return max(1.0, block / 2)
        (low, first), (high, second) = known[:2] if block <= 10 else known[1:]
        return first + (second - first) * (block - low) / (high - low)

    def changed(self, **values: Any) -> Recipe:
        """With other values. Raises ValueError for a value out of range."""
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Raises RecipeError for a name that is none, or a value that cannot be."""
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(values.keys() - known.keys())
        if unknown:
            raise RecipeError(f"A recipe has no entry `{unknown[0]}`. It has: {', '.join(known)}.")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        for name, value in given.items():
            default = vars(_DEFAULT)[name]
            if isinstance(default, bool) != isinstance(value, bool) or (
                (isinstance(default, (int, str, tuple)) and not isinstance(value, type(default)))
                or (default is None and not isinstance(value, (int, type(None))))
            ):
                shown = list(value) if isinstance(value, tuple) else value
                raise RecipeError(f"`{name}` of a recipe has to be {_KINDS[type(default)]}, got {shown!r}.")
        try:
            return cls(**given)
        except (ValueError, TypeError) as error:
            raise RecipeError(f"This recipe cannot be: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """From a TOML file.

        Raises:
            RecipeError: it cannot be read, or asks for what cannot be.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecipeError(
                f"There is no recipe {path}. Give a TOML file, or leave it out for the defaults."
            ) from None
        except (OSError, ValueError) as error:
            raise RecipeError(f"The recipe {path} cannot be read ({error}). Correct the file.") from error
        return cls.from_dict(values)

    def text(self) -> str:
        """As TOML, without what is None."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.to_dict().items() if value is not None)


_RANGES: dict[str, tuple[float, float]] = {
    "layers": (1, 64),
    "block_size": (0, LONGEST_BLOCK),
    "window": (0, 2**20),
    "full": (0, 64),
    "rank": (1, 4096),
    "candidates": (2, 1024),
    "vocabulary": (0, 2**20),
    "columns": (0, 2**20),
    "epochs": (1e-6, 1e6),
    "steps": (0, 10**9),
    "sequences": (1, 4096),
    "anchors": (1, 4096),
    "accumulate": (1, 4096),
    "pack": (0, 2**20),
    "longest": (4, 2**20),
    "gamma": (0, 1000),
    "alpha": (0, 1),
    "soft": (0, 1),
    "sharpness": (0.1, 10),
    "selector": (0, 100),
    "rate": (0, 1),
    "warm_up": (0, 1),
    "floor": (0, 1),
    "decay": (0, 1),
    "clip": (1e-6, 1e6),
    "seed": (0, 2**32 - 1),
    "evaluate_every": (0, 10**9),
    "evaluate_prompts": (1, 10**6),
    "evaluate_tokens": (2, 10**6),
    "checkpoint_every": (1, 10**9),
}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a word", tuple: "a list of numbers"}
_KINDS[type(None)] = "the id of a token"
_CHOICES = {"weighting": (DECAY, PACE), "precision": (FLOAT32, BFLOAT16)}
_WHY = {"precision": " A target's features overflow float16."}


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


_DEFAULT = Recipe()
