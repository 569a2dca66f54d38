"""Prompt caches on disk: one safetensors file in mlx_lm's format, written aside and moved into place.

A reader sees the old file or the new one, never half of one: after an interrupt, a crash or a full disk what was there
before is still there. The file holds cache entries (the target's, the draft's context, then those of each snapshot) and
a JSON header that says for which tokens and weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from safetensors import SafetensorError, safe_open

from dflash_mlx.cache import Snapshot, TargetCache
from dflash_mlx.draft.context import ContextSnapshot, Rows
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CacheStateError
from dflash_mlx.files import check_written, whole_file
from dflash_mlx.prompt_cache import Place, PromptCache, make_prompt_cache
from dflash_mlx.targets import text_part

FORMAT = 1
_SAMPLE = 16  # values of each parameter that the fingerprint looks at, from its start and from its end


def save_prompt_cache(path: str | os.PathLike[str], cache: PromptCache) -> None:
    """Write a prompt cache to one file, whole or not at all; `load_prompt_cache` reads it.

    The file holds the conversation, so a new one can be read by its owner only. As in mlx_lm its name ends in
    .safetensors, which is added where it is missing.

    Raises:
        CacheStateError: the cache is closed, or a request runs on it.
        OSError: the file cannot be written. What was there before is kept.
        ValueError: `cache` is no PromptCache.
    """
    if not isinstance(cache, PromptCache):
        raise ValueError(
            f"`cache` has to be a PromptCache, got {type(cache).__name__}. For a list of mlx_lm's cache objects take "
            "mlx_lm.models.cache.save_prompt_cache."
        )
    with cache.exclusive():
        if cache.cache.closed is not None:
            raise CacheStateError(cache.cache.closed)
        entries, header = _contents(cache)
        _write(cache_file(path), entries, header | {"digest": _digest(entries)})


def _contents(cache: PromptCache) -> tuple[list[Any], dict[str, Any]]:
    """Entries in the order in which `_fill` takes them, and the header."""
    context = cache.context_in_step()
    entries = [_trimmed(entry) for entry in cache.cache.entries]
    entries += [_entry(layer.held) for layer in context.layers] if context else []
    places = []
    for place in cache.places:
        entries += [layer for layer in place.target.layers if layer is not None]
        entries += [_entry(rows) for rows in place.context.layers] if place.context else []
        kept = [place.context.length, place.context.start] if place.context else None
        places.append({"length": place.target.length, "context": kept})
    return entries, {
        "format": FORMAT,
        "target": fingerprint(cache.target.model),
        "draft": fingerprint(cache.draft) if cache.draft else None,
        "tokens": cache.tokens,
        "length": cache.cache.length,
        "context_layers": len(context.layers) if context else 0,
        "context": [context.length, context.start] if context else None,
        "window": context.window if context else None,
        "places": places,
    }


def load_prompt_cache(
    path: str | os.PathLike[str], model: nn.Module | None = None, draft_model: DraftModel | None = None
) -> PromptCache:
    """Read a prompt cache that was saved for this target, in any thread.

    A file that was saved for another draft or draft window, or for none, serves too: the draft then joins late and
    accepts less.

    Raises:
        OSError: there is no such file, or it cannot be read.
        CacheStateError: it is damaged, not a file of ours, or was saved for other weights or another config.
        ValueError: `model` is missing.
    """
    if model is None:
        raise ValueError(
            "`model` is missing: a cache belongs to a target, and is checked against it. For a file of mlx_lm's take "
            "mlx_lm.models.cache.load_prompt_cache."
        )
    where = cache_file(path)
    entries, header = _read(where)
    if header.get("target") != fingerprint(model):
        raise _unusable(where, "it was saved for a target with other weights or another config")
    loaded = make_prompt_cache(model, draft_model)
    try:
        _fill(loaded, iter(entries), header)
    except (KeyError, TypeError, ValueError, StopIteration, AttributeError) as error:
        raise _unusable(where, "its header does not fit its contents") from error
    return loaded


def _fill(cache: PromptCache, entries: Iterator[Any], header: dict[str, Any]) -> None:
    """Put what was read in its places, in the order in which it was written."""
    target = TargetCache([next(entries) for _ in cache.cache.entries], header["length"])
    rows = [_rows(next(entries)) for _ in range(header["context_layers"])]
    context = None
    window = cache.context.window if cache.context else None
    same = header.get("window") == window  # files of before there were windows have none
    if cache.draft is not None and header["draft"] == fingerprint(cache.draft) and header["context"] and same:
        length, context_start = header["context"]
        context = cache.draft.make_context(context_start)
        for layer, held in zip(context.layers, rows, strict=True):
            layer.hold(held)
        context.length = length
        context.evaluate()
    for saved in header["places"]:
        layers = tuple(next(entries) if state.needs_snapshot else None for state in target.states)
        snapshot = None
        if saved["context"]:
            rows = [_rows(next(entries)) for _ in range(header["context_layers"])]
            length, context_start = saved["context"]
            snapshot = ContextSnapshot(length, context_start, tuple(rows))
        cache.places.append(Place(Snapshot(saved["length"], layers), snapshot if context else None))
    cache.cache, cache.context = target, context
    cache.tokens.extend(header["tokens"])


def fingerprint(model: nn.Module) -> str:
    """Hex digest of a model's config and of the names, shapes, types and ends of all its parameters.

    Another checkpoint, another quantisation or another rope gives another one. Of each parameter 32 values are looked
    at, so an edit inside a tensor by hand may go unnoticed.
    """
    parameters: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    flat = [array.reshape(-1) for _, array in parameters if array.size]
    ends = [mx.concatenate([a[:_SAMPLE], a[-_SAMPLE:]]).view(mx.uint8) for a in flat]
    digest = hashlib.blake2b(digest_size=16)
    for owner in (model, text_part(model)):
        digest.update(repr(vars(owner).get("args", vars(owner).get("config"))).encode())
    for name, array in parameters:
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
    digest.update(np.array(mx.concatenate(ends)).tobytes())
    return digest.hexdigest()


def _digest(entries: Sequence[Any]) -> str:
    """Of everything the entries hold, so that a damaged byte does not become wrong text."""
    digest = hashlib.blake2b(digest_size=16)
    held: Any = tree_flatten([entry.state for entry in entries])
    for name, value in held:
        digest.update(f"{name} ".encode())
        if isinstance(value, mx.array):
            digest.update(np.array(value.reshape(-1).view(mx.uint8)).tobytes() if value.size else b"")
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def _trimmed(entry: Any) -> Any:
    """Without the spare rows of a cache that grows in steps."""
    if not isinstance(entry, KVCache | QuantizedKVCache) or entry.empty():
        return entry
    return type(entry).from_state((*entry.keys_and_values(), *entry.state[2:]))


def _entry(rows: Rows | None) -> KVCache:
    """Rows of the draft's context as a cache entry; None is an empty one."""
    return KVCache.from_state((*rows, rows[0].shape[2])) if rows else KVCache()


def _rows(entry: KVCache) -> Rows | None:
    return None if entry.empty() else entry.keys_and_values()


def cache_file(path: str | os.PathLike[str]) -> Path:
    """The file itself, behind a link too; MLX tells the format by the suffix."""
    where = Path(path).expanduser()
    if where.suffix != ".safetensors":
        where = where.with_name(f"{where.name}.safetensors")
    return where.resolve()


def _write(path: Path, entries: Sequence[Any], header: dict[str, Any]) -> None:
    with whole_file(path) as aside:
        try:
            mlx_lm_cache.save_prompt_cache(str(aside), list(entries), {"dflash": json.dumps(header)})
        except RuntimeError as error:
            raise OSError(f"Saving {path} failed ({error}). What was there before is kept.") from error
        try:
            check_written(aside)
        except OSError as error:
            raise OSError(f"Saving {path}: it {error.strerror} What was there before is kept.") from error


def _read(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """The entries, evaluated, and the header."""
    with path.open("rb"):
        pass  # a missing or unreadable file is an OSError with its name
    why = "it was not written by dflash_mlx"
    try:
        with safe_open(path, "numpy"):
            pass
        entries, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
        header = json.loads(metadata["dflash"])
        if header["format"] != FORMAT:
            why = f"its format is {header['format']}, and this version reads {FORMAT}"
            raise ValueError(why)
        mx.eval([entry.state for entry in entries])
        if header["digest"] != _digest(entries):
            why = "its contents have changed since they were written"
            raise ValueError(why)
    except SafetensorError as error:
        raise _unusable(path, f"it is damaged or was cut short: {error}") from error
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _unusable(path, why) from error
    return entries, header


def _unusable(path: Path, why: str) -> CacheStateError:
    return CacheStateError(f"{path} cannot be used as a prompt cache ({why}). Start with a fresh one.")
