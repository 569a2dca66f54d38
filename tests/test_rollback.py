"""Whatever was drafted, rejected, cut back or interrupted: the cache is that of a run which only saw what was kept.

The oracle is mlx_lm alone: its model over its own cache, fed with the kept rows of each block as one forward.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from dflash_mlx.cache import TargetCache
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.targets import target_for
from tests.conftest import KERNELS
from tests.families import BY_NAME, EVERY, FAMILIES, QUANTISED, VOCAB, cases, tiny
from tests.plain import REORDERED, visible

# Families of which a view has other modules: attention, layers that leave tapes, quantised layers.
SWAPPED = [f for f in FAMILIES if f.module in ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5")]
SWAPPED += [BY_NAME["qwen3_5_moe"], *QUANTISED]
WALKS = [pytest.param(*case.values, "stock", id=case.id) for case in EVERY]
WALKS += [pytest.param(*case.values, "references", id=f"{case.id}-references") for case in cases(SWAPPED)]
ONCE = [(name, "stock") for name in BY_NAME] + [(family.name, "references") for family in SWAPPED]


class Interrupted(Exception):
    pass


@dataclass
class Walk:
    """A cache under test and the oracle's, side by side."""

    name: str
    dtype: mx.Dtype
    dice: random.Random
    kernels: Kernels = STOCK
    kept: int = 0
    ways: Iterator[str] = field(default_factory=lambda: itertools.cycle(("never", "middle", "whole")))

    def __post_init__(self) -> None:
        self.model = tiny(self.name, self.dtype)
        self.target = target_for(self.model, self.kernels)
        self.cache = TargetCache(self.target.make_entries(), 0)
        self.oracle = make_prompt_cache(self.model)

    @property
    def tolerance(self) -> float:
        """Zero until a ring has wrapped."""
        window = BY_NAME[self.name].window
        return REORDERED[self.dtype] if window and self.kept > window else 0.0

    def ids(self, width: int) -> list[int]:
        return [self.dice.randrange(VOCAB) for _ in range(width)]

    def block(self, ids: Sequence[int], *keeps: int) -> None:
        """Write `ids`, commit the first of `keeps`, shrink to the others, and compare."""
        self.cache.begin(len(ids))
        logits = self.target.logits(self.target.forward(mx.array([ids]), self.cache).hidden)
        self.cache.commit(keeps[0])
        for keep in keeps[1:]:
            self.cache.shrink(keep)
        keep = keeps[-1]
        self.kept += keep
        expected = self.model(mx.array([ids[:keep]]), cache=self.oracle)
        assert self.cache.length == self.kept
        self.close(logits[:, :keep], expected, self.tolerance, "logits")
        self.compare()

    def compare(self) -> None:
        """Every layer; bit for bit up to and including the first ring, whose rows no other ring has touched."""
        tolerance = 0.0
        for index, (ours, theirs) in enumerate(zip(self.cache.entries, self.oracle, strict=True)):
            assert isinstance(ours, ArraysCache) or ours.offset == theirs.offset == self.kept
            for a, b in zip(visible(ours), visible(theirs), strict=True):
                self.close(a, b, tolerance, f"entry {index}")
            if isinstance(ours, RotatingKVCache):
                tolerance = self.tolerance

    def close(self, ours: mx.array, expected: mx.array, tolerance: float, what: str) -> None:
        assert ours.shape == expected.shape and ours.dtype == expected.dtype, what
        scale = max(1.0, mx.abs(expected).max().item())
        difference = mx.abs(ours.astype(mx.float32) - expected.astype(mx.float32)).max().item()
        assert difference <= tolerance * scale, f"{what} after {self.kept} positions: {difference}"

    def abort(self, width: int, how: str) -> None:
        """A forward that is thrown away: never run, broken off in the middle, or whole."""
        self.cache.begin(width)
        ids = mx.array([self.ids(width)])
        if how == "whole":
            mx.eval(self.target.forward(ids, self.cache).hidden)
        elif how == "middle":
            attention = [e for e in self.cache.entries if not isinstance(e, ArraysCache)]
            broken = attention[len(attention) // 2]
            broken.update_and_fetch = interrupt
            try:
                with pytest.raises(Interrupted):
                    self.target.forward(ids, self.cache)
            finally:
                del broken.update_and_fetch
        self.cache.abort()

    def step(self) -> None:
        """One random thing that decoding may do."""
        width = self.dice.choice([1, 2, 3, 5, 8, 16])
        if self.dice.random() < 0.3:
            for how in itertools.islice(self.ways, 2):
                self.abort(width, how)
            return
        keeps = [self.dice.randint(1, width)]
        while self.dice.random() < 0.4:
            keeps.append(self.dice.randint(1, keeps[-1]))
        self.block(self.ids(width), *keeps)


def interrupt(*args: object) -> None:
    raise Interrupted


@pytest.mark.parametrize(("name", "dtype", "how"), WALKS)
def test_a_random_walk_leaves_what_a_run_of_only_the_kept_tokens_leaves(name: str, dtype: mx.Dtype, how: str) -> None:
    """Rejected rows would be attended to later, or a state would remember them. Prompts below, at and above windows.

    Recurrent layers roll back by running again, or, where blocks leave a tape, from it.
    """
    for seed, prompt in enumerate((3, 15, 17, 40) if BY_NAME[name].window else (1, 9)):
        walk = Walk(name, dtype, random.Random(seed), KERNELS[how])
        walk.block(walk.ids(prompt), prompt)
        while walk.kept < prompt + 40:
            walk.step()
        walk.block(walk.ids(1), 1)


@pytest.mark.parametrize(("name", "how"), ONCE)
def test_every_way_to_keep_part_of_a_block_is_exact(name: str, how: str) -> None:
    """All of commit(keep) and shrink(less) for a block of five, each from the same prompt, and the row after it."""
    for keep in range(1, 6):
        for less in range(1, keep + 1):
            walk = Walk(name, mx.float32, random.Random(keep), KERNELS[how])
            walk.block(walk.ids(18), 18)
            walk.block(walk.ids(5), keep, less)
            if how == "references":
                walk.block(walk.ids(4), min(less, 3))  # from the tape, where the block left one
            walk.block(walk.ids(1), 1)
