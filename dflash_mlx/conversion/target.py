"""A target as an MLX folder, written by mlx_lm: what it loses is said, and its errors are told in short."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import mlx.core as mx
import mlx_lm

from dflash_mlx.conversion.recipe import LEGAL, SLACK, Recipe, copy_beside, write_config
from dflash_mlx.errors import CheckpointError
from dflash_mlx.files import check_space, check_written, whole_folder
from dflash_mlx.hub.names import cached_repository
from dflash_mlx.hub.repository import Progress, read_object
from dflash_mlx.load_target import summary

_SHORT = 31  # of such rows no group can be made: convolutions have them
_TOWERS = {"vision": ("vision", "visual"), "audio": ("audio",)}


def convert_target(folder: Path, output: Path, recipe: Recipe, tell: Progress, *, made_from: Mapping[str, Any]) -> None:
    """Through mlx_lm, which packs embeddings and heads too; it prints what it does.

    Raises:
        CheckpointError, FileExistsError, OSError, ValueError: as `convert.convert`.
    """
    before, name = _arrays(folder), made_from["source"]
    size = _converted_size(before, recipe)
    check_space(output, size + SLACK)
    tell(f"Converting {name} with mlx_lm (about {size / 1e9:.2f} GB)", None)
    with whole_folder(output) as scratch:
        scratch.rmdir()  # mlx_lm wants to make it
        _run(folder, scratch, recipe, name, output)
        for file in scratch.glob("*.safetensors"):
            check_written(file)
        for note in _losses(before, _arrays(scratch), recipe, name):
            warnings.warn(note, stacklevel=3)
        write_config(scratch, read_object(scratch / "config.json"), recipe, made_from)
        copy_beside(folder, scratch, LEGAL)
        _name_base(scratch / "README.md", cached_repository(str(folder)), recipe)


def _run(folder: Path, scratch: Path, recipe: Recipe, name: str, output: Path) -> None:
    try:
        mlx_lm.convert(
            str(folder),
            str(scratch),
            quantize=recipe.bits is not None,
            q_group_size=recipe.group_size,
            q_bits=recipe.bits,
            dtype=recipe.dtype,
        )
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        if "write" in str(error):
            raise OSError(f"Writing {output} failed ({error}). Is the disk full? Nothing is left there.") from error
        raise CheckpointError(
            f"{name} could not be converted by mlx_lm: {summary(error)}. Its files may be incomplete or of another "
            "model than its config.json says: download it again, or update mlx_lm if a newer one reads it."
        ) from error


def _losses(before: Mapping[str, mx.array], after: Mapping[str, mx.array], recipe: Recipe, name: str) -> list[str]:
    """What the user may not expect of the converted weights.

    Raises:
        ValueError: nothing was packed that should have been.
    """
    notes = []
    for part, words in _TOWERS.items():
        had, has = (any(word in key for key in names for word in words) for names in (before, after))
        if had and not has:
            notes.append(f"the {part} part of {name} is left out: mlx_lm reads the text model only")
    if recipe.bits is None:
        return notes
    packed = sum(key.endswith(".scales") for key in after)
    rows = {key: value.shape[-1] for key, value in after.items() if key.endswith(".weight") and value.ndim > 1}
    plain = [size for key, size in rows.items() if key.removesuffix("weight") + "scales" not in after]
    wide = sum(size > _SHORT and size % recipe.group_size != 0 for size in plain)
    if wide and not packed:
        raise ValueError(
            f"Groups of {recipe.group_size} weights fit no matrix of {name}, so nothing would be quantised. Choose a "
            "smaller group size, or no quantisation."
        )
    if wide:
        notes.append(
            f"{wide} of {packed + wide} matrices of {name} are not quantised: their rows do not divide into groups of "
            f"{recipe.group_size}"
        )
    return notes


def _arrays(folder: Path) -> dict[str, mx.array]:
    """Names and shapes, from the heads of the files: the arrays are lazy and nothing is read.

    Raises:
        CheckpointError: a file is damaged.
    """
    found: dict[str, mx.array] = {}
    try:
        for path in folder.glob("model*.safetensors"):
            found |= mx.load(str(path))  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"A file in {folder} is damaged or incomplete ({error}). Download it again.") from error
    return found


def _converted_size(arrays: Mapping[str, mx.array], recipe: Recipe) -> int:
    """Bytes of the converted weights."""
    if recipe.bits is None and recipe.dtype is None:
        return sum(array.nbytes for array in arrays.values())
    item = 4 if recipe.dtype == "float32" else 2
    each = item if recipe.bits is None else recipe.bits / 8 + 2 * item / recipe.group_size  # a scale and a bias a group
    return round(sum(array.size for array in arrays.values()) * each)


def _name_base(path: Path, repository: str | None, recipe: Recipe) -> None:
    """Say in a target's model card what it was made of: `draft="auto"` finds the draft by that."""
    if repository is None:
        return
    try:
        data = hub.metadata_load(path) or {}
    except Exception:  # free text: yaml raises a dozen kinds, and a broken card stays as it is
        return
    relation = {"base_model_relation": "quantized"} if recipe.bits is not None else {}
    hub.metadata_save(path, data | {"base_model": repository, "library_name": "mlx"} | relation)
