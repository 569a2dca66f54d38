"""Whether a request's quantised keys and values can be honoured, found out by trying rather than by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from dflash_mlx.cache import KVQuantization, TargetCache
from dflash_mlx.targets import Target


def check(target: Target, entries: Sequence[Any], q: KVQuantization | None) -> tuple[str, ...]:
    """Notes on what is quantised and what is not.

    Args:
        entries: the cache that will be used.
    Raises:
        ValueError: the target's attention takes no quantised cache of this kind, or `entries` hold another one.
    """
    held = {(e.bits, e.group_size) for e in entries if isinstance(e, QuantizedKVCache)}
    if q is None:
        return tuple(f"the prompt cache holds keys and values in {bits} bits" for bits, _ in sorted(held))
    for bits, group_size in held - {(q.bits, q.group_size)}:
        raise ValueError(
            f"`kv_bits` is {q.bits} in groups of {q.group_size}, and `prompt_cache` holds {bits} bits in groups of "
            f"{group_size}. Pass the same, or start with a fresh cache."
        )
    kept = sum(not isinstance(entry, KVCache | QuantizedKVCache) for entry in entries)
    if kept == len(entries):
        return ("`kv_bits` changes nothing here: no layer of this cache keeps all keys and values",)
    refusal = _refusal(target, q)
    if refusal is not None:
        raise ValueError(
            f"`kv_bits` {q.bits} in groups of {q.group_size} is not honoured for this {target.spec.model_type} target: "
            f"its attention does not take such a cache ({refusal}). Leave it out"
            + (", or choose a `kv_group_size` that divides its heads." if "divisible" in refusal else ".")
        )
    return (f"`kv_bits`: {kept} of {len(entries)} layers keep windows or states, and stay as they are",) if kept else ()


def _refusal(target: Target, q: KVQuantization) -> str | None:
    """Why not: two forwards are built, the second over quantised keys. Shapes are checked then, nothing is computed."""
    cache = TargetCache(target.make_entries(), 0, replace(q, start=0))
    try:
        for _ in range(2):
            cache.begin(1)
            target.forward(mx.array([[0]]), cache)
            cache.commit(1)
    except (ValueError, TypeError, RuntimeError) as error:
        return " ".join(str(error).strip().partition("\n")[0].split())
    return None
