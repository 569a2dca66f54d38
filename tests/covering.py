"""A small sample of a large product in which every pair of values that can occur together does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Choice = dict[str, Any]
Pair = tuple[str, Any, str, Any]


@dataclass(frozen=True)
class Rule:
    """Which combinations of these factors' values there are; other factors combine freely with them."""

    factors: tuple[str, ...]
    combinations: Collection[tuple]
    _known: dict[tuple, bool] = field(default_factory=dict)

    def allows(self, partial: Mapping[str, Any]) -> bool:
        """Whether a partial choice can be completed."""
        wanted = tuple(partial.get(factor) for factor in self.factors)
        if wanted not in self._known:
            self._known[wanted] = any(
                all(w is None or w == v for w, v in zip(wanted, values, strict=True)) for values in self.combinations
            )
        return self._known[wanted]


def pairs_of(choice: Mapping[str, Any]) -> set[Pair]:
    return {(f, choice[f], g, choice[g]) for f, g in itertools.combinations(sorted(choice), 2)}


@dataclass(frozen=True)
class Product:
    """Values of each factor, none of them None, and rules that share no factor."""

    factors: Mapping[str, Sequence]
    rules: Sequence[Rule]

    def allows(self, partial: Mapping[str, Any]) -> bool:
        return all(rule.allows(partial) for rule in self.rules)

    def pairs(self) -> set[Pair]:
        """Every pair of values that some choice has."""
        return {
            (f, a, g, b)
            for f, g in itertools.combinations(sorted(self.factors), 2)
            for a, b in itertools.product(self.factors[f], self.factors[g])
            if self.allows({f: a, g: b})
        }

    def sample(self, seed: int = 0, tries: int = 4) -> list[Choice]:
        """Choices that have every pair: greedily, each grown around one that is still missing."""
        dice = random.Random(seed)
        missing = dict.fromkeys(sorted(self.pairs(), key=repr))  # in a fixed order
        chosen: list[Choice] = []
        while missing:
            f, a, g, b = next(iter(missing))
            grown = [self._grow({f: a, g: b}, missing, dice) for _ in range(tries)]
            chosen.append(max(grown, key=lambda choice: len(pairs_of(choice) & missing.keys())))
            for pair in pairs_of(chosen[-1]):
                missing.pop(pair, None)
        return chosen

    def _grow(self, choice: Choice, missing: Mapping[Pair, None], dice: random.Random) -> Choice:
        """Complete a choice in random order, each time with the value that adds most of the missing pairs."""
        rest = [factor for factor in self.factors if factor not in choice]
        dice.shuffle(rest)
        for factor in rest:
            longer = [{**choice, factor: v} for v in self.factors[factor]]
            longer = [c for c in longer if self.allows(c)]
            dice.shuffle(longer)
            choice = max(longer, key=lambda c: _added(c, factor, missing))
        return choice


def _added(choice: Choice, factor: str, missing: Mapping[Pair, None]) -> int:
    """Missing pairs that the value of `factor` brings."""
    others = (sorted((factor, other)) for other in choice if other != factor)
    return sum((f, choice[f], g, choice[g]) in missing for f, g in others)
