"""The oracle: what mlx_lm's own loop says, and what its own cache holds after every token of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from tests.families import BY_NAME, tiny

Rows = tuple[mx.array, ...]

# Behind a ring that has wrapped the rows of two runs may lie in another order, so attention adds the same numbers in
# another order. Measured: 2e-5 in float32, 0.02 in bfloat16. A wrong row differs by about 1.
REORDERED = {mx.float32: 1e-4, mx.bfloat16: 0.05}


def visible(entry: object) -> Rows:
    """What the next token can see: keys and values in temporal order, or a recurrent layer's state."""
    if isinstance(entry, ArraysCache):
        return tuple(entry.cache)
    if isinstance(entry, RotatingKVCache):
        rows = entry.max_size - 1
        return tuple(entry._temporal_order(a)[..., -rows:, :] for a in (entry.keys, entry.values))
    if isinstance(entry, QuantizedKVCache):
        return tuple(a[..., : entry.offset, :] for part in (entry.keys, entry.values) for a in part)
    return tuple(a[..., : entry.offset, :] for a in (entry.keys, entry.values))


@dataclass
class Plain:
    """mlx_lm's greedy loop after `prompt`.

    tokens: what it said.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    _at: list[list[Rows | None]] = field(default_factory=list)  # per step and entry; None where rows only append
    _end: list[Rows] = field(default_factory=list)

    def held(self, length: int) -> list[Rows]:
        """What each entry showed when the cache held `length` positions: the prompt and some of the tokens."""
        at = self._at[length - len(self.prompt)]
        return [
            tuple(a[..., :length, :] for a in end) if rows is None else rows
            for rows, end in zip(at, self._end, strict=True)
        ]


def plain_run(name: str, prompt: Sequence[int], count: int, dtype: mx.Dtype = mx.float32) -> Plain:
    """`count` tokens of mlx_lm's own loop; a long run must not be a short loop, or parity would prove little."""
    model = tiny(name, dtype)
    entries = make_prompt_cache(model)
    run = Plain(list(prompt))
    changing = [isinstance(entry, ArraysCache | RotatingKVCache) for entry in entries]

    def sample(logprobs: mx.array) -> mx.array:  # called when the step's rows have been written
        run._at.append([visible(e) if changes else None for e, changes in zip(entries, changing, strict=True)])
        return mx.argmax(logprobs, axis=-1)

    steps = generate_step(mx.array(run.prompt), model, max_tokens=count, sampler=sample, prompt_cache=entries)
    run.tokens += [token for token, _ in steps]
    run._end += [visible(entry) for entry in entries]
    mx.eval(run._at, run._end)
    if count >= 40:
        distinct = len(set(run.tokens))
        assert distinct >= 12, f"{name}: the baseline repeats itself ({distinct} distinct of {count})"
    return run


def prefilled(name: str, ids: Sequence[int], dtype: mx.Dtype = mx.float32) -> list[Rows]:
    """What each entry shows after one forward over `ids`."""
    entries = make_prompt_cache(tiny(name, dtype))
    tiny(name, dtype)(mx.array([list(ids)]), cache=entries)
    return [visible(entry) for entry in entries]


def check_rows(entries: Sequence[object], expected: Sequence[Rows], name: str, dtype: mx.Dtype, length: int) -> None:
    """Each entry shows what is expected of it, at `length` positions.

    Bit for bit, except in families whose layers round by width, and behind a ring that has wrapped.
    """
    exact = BY_NAME[name].rounding.get(dtype, 0.0)
    tolerance = exact
    for index, (entry, theirs) in enumerate(zip(entries, expected, strict=True)):
        assert isinstance(entry, ArraysCache) or entry.offset == length, f"entry {index}"  # type: ignore[attr-defined]
        for a, b in zip(visible(entry), theirs, strict=True):
            check_close(a, b, tolerance, f"entry {index} at {length} positions")
        if isinstance(entry, RotatingKVCache):
            tolerance = loose(name, dtype, length)


def loose(name: str, dtype: mx.Dtype, length: int) -> float:
    """By how much arrays behind all layers may differ at `length` positions."""
    family = BY_NAME[name]
    wrapped = family.window is not None and length > family.window
    return max(REORDERED[dtype] if wrapped else 0.0, family.rounding.get(dtype, 0.0))


def check_close(ours: mx.array, expected: mx.array, tolerance: float, what: str) -> None:
    """Equal up to `tolerance` of the largest value, or of 1; bit for bit if it is 0."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype, what
    if mx.array_equal(ours, expected):
        return
    scale = max(1.0, mx.abs(expected).max().item())
    difference = mx.abs(ours.astype(mx.float32) - expected.astype(mx.float32)).max().item()
    assert difference <= tolerance * scale, f"{what}: they differ by {difference}"
