"""What an evaluation found: numbers for the log, and one by which drafts are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Count:
    """tokens: those that cycles made, so without the first one of each answer, which reading the prompt gives."""

    prompts: int = 0
    tokens: int = 0
    cycles: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.prompts + other.prompts, self.tokens + other.tokens, self.cycles + other.cycles)

    @property
    def tokens_per_cycle(self) -> float | None:
        """None without a cycle. 1 is what plain decoding does."""
        return self.tokens / self.cycles if self.cycles else None


@dataclass(frozen=True)
class Evaluation:
    """What was found after so many steps.

    accuracy:        [K] share of right proposals at each position, whatever was proposed before; NaN if none was seen.
    expected_length: 1 + the mean number of right proposals before the first wrong one.
    categories:      of the decode loop; empty if it was not counted.
    seconds:         that it took.
    """

    step: int
    accuracy: tuple[float, ...]
    expected_length: float
    categories: Mapping[str, Count] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def overall(self) -> Count:
        """Of all categories together."""
        return sum(self.categories.values(), Count())

    @property
    def tokens_per_cycle(self) -> float | None:
        return self.overall.tokens_per_cycle

    @property
    def score(self) -> float:
        """More is better: tokens per cycle, or the expected length where cycles were not counted."""
        return self.expected_length if self.tokens_per_cycle is None else self.tokens_per_cycle

    def record(self, *, best: bool) -> dict[str, Any]:
        """For the log. Unknown is None."""
        categories = {
            name: {**asdict(count), "tokens_per_cycle": count.tokens_per_cycle}
            for name, count in self.categories.items()
        }
        return {
            "kind": "evaluation",
            "step": self.step,
            "accuracy": [None if math.isnan(share) else share for share in self.accuracy],
            "expected_length": self.expected_length,
            "tokens_per_cycle": self.tokens_per_cycle,
            "categories": categories,
            "best": best,
            "seconds": self.seconds,
        }
