"""Make a model folder smaller or cleaner: a draft under z-lab's tensor names, or a target through mlx_lm.

    convert("z-lab/Qwen3-4B-DFlash-b16", "Qwen3-4B-DFlash-4bit", bits=4)

The folder appears whole or not at all. Its config.json is the source's, with `quantization` where weights were packed
and `converted`, which says from what, and by which version, it was made.
"""

from __future__ import annotations

if __name__ == "__main__":  # before MLX is imported, so that --help answers at once
    import sys

    from dflash_mlx.convert_command import convert_main

    sys.exit(convert_main())

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx import spellings
from dflash_mlx.conversion.recipe import LEGAL, SLACK, Recipe, copy_beside, write_config
from dflash_mlx.conversion.target import convert_target
from dflash_mlx.draft.checkpoint import load_draft, read_config
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions, check_dtype
from dflash_mlx.draft.vocabulary import FILE
from dflash_mlx.files import check_space, refuse_existing, save_weights, whole_folder
from dflash_mlx.hub.cache import DRAFT, TARGET
from dflash_mlx.hub.names import cached_repository
from dflash_mlx.hub.repository import Progress, Source, find, read_object
from dflash_mlx.pairing import preflight
from dflash_mlx.pairing.preflight_target import check_target
from dflash_mlx.pairing.registry import DEMO

# What belongs to a draft beside config and weights. Code is not copied: nothing here runs it.
_BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja", "generation_config.json", FILE)


def convert(
    source: str,
    output: str | Path,
    *,
    bits: int | None = None,
    group_size: int = 64,
    dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a draft or a target as an MLX folder, quantised if `bits` is given.

    mlx_lm's `convert` is another function: it takes targets only, says `q_bits`, `q_group_size` and `mlx_path`, and
    does mixed recipes and uploads, which this one does not. What is not packed although `bits` is given, and a vision
    or audio part that is left out, is said in a warning.

    Args:
        source: a folder or a Hugging Face repository; a draft of any format that `load` reads, or what mlx_lm loads.
        output: the folder to make. Missing parents are made.
        bits: 4 or 8. Of a draft only the layers' matrices are packed; of a target, what mlx_lm packs.
        group_size: packed weights that share a scale: 32, 64 or 128.
        dtype: of all other weights: "float32", "bfloat16", and for a target "float16"; default as stored
            (of a target: as its config.json says).
        revision: branch, tag or commit of a repository.
        progress: called with (what is being done, share done or None).
    Returns:
        The folder.
    Raises:
        FetchError, CheckpointError: the source cannot be had or read, or is quantised already and `bits` is given.
        FileExistsError: there is something at `output`.
        OSError: the disk is full, or `output` cannot be written; nothing is left.
        ValueError: an argument is out of range.
    """
    recipe, output = Recipe(bits, group_size, dtype), Path(os.path.expanduser(output))
    if source == DEMO:
        raise ValueError("`source` 'demo' is converted and quantised already; load('demo', draft='auto') loads it.")
    if revision is not None and os.path.exists(os.path.expanduser(source)):
        raise ValueError(f"`revision` ({revision!r}) is of a repository, and {source} is here already. Leave it out.")
    refuse_existing(output)
    _check_parent(output)
    tell = progress or (lambda message, share: None)
    tell(f"Looking for {source}", None)
    where = _checked(source, revision, recipe)
    folder = where.fetch(tell)
    if where.kind is DRAFT:
        convert_draft(folder, output, recipe, tell, made_from=_origin(folder))
    else:
        convert_target(folder, output, recipe, tell, made_from=_origin(folder))
    tell(f"Wrote {output}", 1.0)
    return output


def _checked(source: str, revision: str | None, recipe: Recipe) -> Source:
    """Where the model is, and as what; refuses before the download what can be refused then."""
    where = find(source, DRAFT, revision)
    if spellings.is_draft(where.config()):
        check_dtype("dtype", recipe.dtype)
        recipe.refuse_packed(preflight.check_draft(where).quantization, source)
    else:
        where = find(source, TARGET, revision)
        config = check_target(where)
        recipe.refuse_packed(config.get("quantization") or config.get("quantization_config"), source)
    preflight.check_disk(where)
    return where


def _check_parent(output: Path) -> None:
    """Refuse, before anything is fetched, a place where no folder can be made. Raises OSError."""
    there = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is no folder, so {output} cannot be made in it. Give another place.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{there} cannot be written by you, so {output} cannot be made in it. Give a place in a folder of yours."
        )


def convert_draft(
    folder: Path, output: Path, recipe: Recipe, tell: Progress, *, made_from: Mapping[str, Any] | None = None
) -> None:
    """Write the draft in a folder as `load_draft` with the same options has it, bit for bit.

    Args:
        made_from: goes into `converted` of its config.json; its `source` names the draft in what is said.
    Raises:
        CheckpointError, FileExistsError, OSError, ValueError: as `convert`.
    """
    check_dtype("dtype", recipe.dtype)
    name = str((made_from or {}).get("source", folder.name))
    recipe.refuse_packed(read_config(folder).quantization, name)
    tell(f"Reading {name}", None)
    draft = load_draft(folder, name=name, options=DraftOptions(recipe.bits, recipe.group_size, recipe.dtype))
    for note in draft.notes if recipe.bits is not None else ():
        warnings.warn(note, stacklevel=3)
    weights: dict[str, mx.array] = dict(tree_flatten(draft.parameters())) | _tables(draft)
    size = sum(value.nbytes for value in weights.values())
    check_space(output, size + SLACK)
    tell(f"Writing {output} ({size / 1e9:.2f} GB)", None)
    with whole_folder(output) as scratch:
        save_weights(scratch / "model.safetensors", weights)
        config = read_object(folder / "config.json")
        if recipe.bits is not None:
            config["quantization"] = {"group_size": recipe.group_size, "bits": recipe.bits}
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = str(draft.dtype).removeprefix("mlx.core.")
        write_config(scratch, config, recipe, made_from)
        copy_beside(folder, scratch, (*_BESIDE, *LEGAL))


def _tables(draft: DraftModel) -> dict[str, mx.array]:
    """speculators' tables of a reduced vocabulary: offsets per row of the head, and which target ids are kept."""
    rows, vocab = draft.config.draft_vocab_size, draft.config.vocab_size
    if rows is None:
        return {}
    index = mx.arange(rows, dtype=mx.int32)
    ids = draft.target_ids(index)
    if rows == vocab and mx.array_equal(ids, index):
        return {}
    kept = mx.zeros((vocab,), dtype=mx.bool_)
    kept[ids] = True
    return {"d2t": (ids - index).astype(mx.int64), "t2d": kept}


def _origin(folder: Path) -> dict[str, Any]:
    """A repository and its commit; of another folder only the name."""
    repository = cached_repository(str(folder))
    if repository is None:
        return {"source": folder.resolve().name}
    return {"source": repository, "revision": folder.name}
