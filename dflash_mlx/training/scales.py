"""How large a target's features are, folded into and out of a draft's fusion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.training.twin import twin

FUSION = "fc.weight"
_MARK = "feature_scales"


@dataclass(frozen=True, eq=False)
class FeatureScales:
    """How large the features of each tap are. A draft is trained on features divided by it: they differ by a factor of
    ten and more from layer to layer, which an optimiser takes badly.

    A draft in training has them in its fusion, `fc` times `std`, and takes features that are divided (`divided`).
    Everything that is saved, or runs in the decode loop, is without (`out_of`). `measure` rounds to powers of two:
    folding is then exact, and nothing is gained by more digits.

    std: [n_taps] float32.

    Raises:
        ValueError: a scale is not a positive, finite number.
    """

    std: np.ndarray

    def __post_init__(self) -> None:
        std = np.asarray(self.std, np.float32)
        if std.ndim != 1 or not len(std) or not (np.isfinite(std) & (std > 0)).all():
            raise ValueError(f"`std` has to be a positive, finite number for each tap, got {self.std!r}.")
        object.__setattr__(self, "std", std)

    @classmethod
    def measure(cls, sequences: Iterable[np.ndarray], taps: int) -> FeatureScales:
        """The standard deviation over positions and channels, per tap, summed in float64.

        Position 0 is left out: it is an attention sink, hundreds of times larger than the rest.

        Args:
            sequences: [T, taps * H] each, from position 0 on.
        Raises:
            ValueError: nothing to measure, no features, or features that are not finite or do not vary.
        """
        count, total, squares = 0, np.zeros(taps), np.zeros(taps)
        for rows in sequences:
            later = rows[1:].reshape(-1, taps, rows.shape[1] // taps).astype(np.float64)
            count += later.shape[0] * later.shape[2]
            total += later.sum(axis=(0, 2))
            squares += np.square(later).sum(axis=(0, 2))
        if not count:
            raise ValueError("`sequences` have no position after their first one, so no scale can be measured.")
        variance = squares / count - np.square(total / count)
        if not np.isfinite(variance).all() or not (variance > 0).all():
            worst = int(np.argmin(np.where(np.isfinite(variance), variance, -np.inf)))
            raise ValueError(
                f"The features of tap {worst} (counted from 0) have the variance {variance[worst]}, so a draft could "
                "not learn from them: this layer's outputs are too large for float16, or constant. Choose other `taps`."
            )
        return cls(np.exp2(np.round(np.log2(variance) / 2)))

    def divided(self, features: np.ndarray) -> np.ndarray:
        """[.., n_taps * H] -> the same in float32, as a draft in training takes it."""
        taps = features.reshape(*features.shape[:-1], len(self.std), -1)
        return (taps.astype(np.float32) / self.std[:, None]).reshape(features.shape)

    def into(self, draft: DraftModel) -> DraftModel:
        """A draft for divided features that does what this one does for plain ones.

        It shares all arrays but one with the draft that was given, which stays as it is.

        Raises:
            ValueError: it is for divided features already, or has another number of taps.
        """
        if scales_of(draft) is not None:
            raise ValueError(f"`draft` ({draft.name}) has feature scales folded in already. Give it without.")
        return _copy(draft, self.times(draft.fc.weight), self)

    def out_of(self, draft: DraftModel) -> DraftModel:
        """The draft for plain features that does what this one does for divided ones: what is saved and served.

        It shares all arrays but one with the draft that was given, which stays as it is.

        Raises:
            ValueError: these scales are not folded into it.
        """
        folded = scales_of(draft)
        if folded is None or not np.array_equal(folded.std, self.std):
            has = "no feature scales" if folded is None else f"the scales {folded.to_json()}"
            raise ValueError(f"`draft` ({draft.name}) has {has} folded in, so {self.to_json()} cannot be taken out.")
        return _copy(draft, FeatureScales(1 / self.std).times(draft.fc.weight), None)

    def to_json(self) -> list[float]:
        return [float(value) for value in self.std]

    @classmethod
    def from_json(cls, values: list[float]) -> FeatureScales:
        """Raises ValueError: they are not positive numbers."""
        return cls(np.array(values, np.float32))

    def times(self, weight: mx.array) -> mx.array:
        """[H, n_taps * H], the columns of each tap times its scale. Raises ValueError for other taps."""
        hidden, taps = weight.shape[0], len(self.std)
        if weight.shape[1] != taps * hidden:
            raise ValueError(
                f"`draft` reads {weight.shape[1] // hidden} taps, and these are the scales of {taps}. They belong to "
                "another draft."
            )
        return (weight.reshape(hidden, taps, hidden) * mx.array(self.std)[:, None]).reshape(weight.shape)


def scales_of(draft: DraftModel) -> FeatureScales | None:
    return vars(draft).get(_MARK)


def mark(draft: DraftModel, scales: FeatureScales | None) -> None:
    """Note which scales are in a draft's fusion."""
    vars(draft)[_MARK] = scales


def _copy(draft: DraftModel, fusion: mx.array, scales: FeatureScales | None) -> DraftModel:
    """The same draft with another fusion."""
    made = twin(draft, {FUSION: fusion})
    mark(made, scales)
    if draft.config.own_embedding:
        made.embed_tokens.freeze()
    return made
