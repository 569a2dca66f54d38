"""Make a model folder smaller or cleaner: a draft under z-lab's tensor names, or a target through mlx_lm.

    convert("z-lab/Qwen3-4B-DFlash-b16", "Qwen3-4B-DFlash-4bit", bits=4)

The folder appears whole or not at all. Its config.json is the source's, with `quantization` where weights were packed
and `converted`, which says from what, and by which version, it was made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten

from dflash_mlx import __version__, preflight, spellings
from dflash_mlx.draft.checkpoint import load_draft, read_config
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import BITS, GROUP_SIZES, DraftOptions, check_choice, check_dtype
from dflash_mlx.errors import CheckpointError
from dflash_mlx.files import check_space, check_written, refuse_existing, save_weights, whole_folder
from dflash_mlx.hub.cache import DRAFT, TARGET
from dflash_mlx.hub.repository import Progress, Source, find, read_object
from dflash_mlx.registry import DEMO, cached_repository

TARGET_DTYPES = ("float32", "bfloat16", "float16")
CONVERTED = "converted"  # key of config.json
_SLACK = 64 << 20  # bytes for everything but the weights
# What belongs to a draft beside config and weights. Code is not copied: nothing here runs it.
_BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja", "generation_config.json")
_LEGAL = ("README*", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")


@dataclass(frozen=True)
class Recipe:
    """What becomes of the weights: `bits` per packed weight in groups of `group_size` (None: none is packed), `dtype`
    of all others (None: as stored).

    Raises:
        ValueError: a value is out of range.
    """

    bits: int | None = None
    group_size: int = 64
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_choice("bits", self.bits, BITS, "or None, which packs nothing")
        check_choice("group_size", self.group_size, GROUP_SIZES)
        if self.dtype is not None and self.dtype not in TARGET_DTYPES:
            raise ValueError(f"`dtype` has to be one of {', '.join(TARGET_DTYPES)} or None; got {self.dtype!r}.")

    def refuse_packed(self, config: Mapping[str, Any] | None, name: str) -> None:
        """Raises CheckpointError if weights that `config` says are packed were to be packed again."""
        if self.bits is not None and config:
            how = f"{config['bits']} bits" if "bits" in config else config.get("quant_method", "by its config.json")
            raise CheckpointError(
                f"{name} is quantised already ({how}). Rounding rounded weights again loses more than rounding once. "
                "Give the original, or leave `bits` out to copy this one as it is."
            )


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
        OSError: the disk is full or cannot be written; nothing is left.
        ValueError: an argument is out of range.
    """
    recipe, output = Recipe(bits, group_size, dtype), Path(output).expanduser()
    if source == DEMO:
        raise ValueError("`source` 'demo' is converted and quantised already; load('demo', draft='auto') loads it.")
    if revision is not None and Path(source).expanduser().exists():
        raise ValueError(f"`revision` ({revision!r}) is of a repository, and {source} is here already. Leave it out.")
    refuse_existing(output)
    tell = progress or (lambda message, share: None)
    tell(f"Looking for {source}", None)
    where = _checked(source, revision, recipe)
    folder = where.fetch(tell)
    if where.kind is DRAFT:
        convert_draft(folder, output, recipe, tell, made_from=_origin(folder))
    else:
        _convert_target(folder, output, recipe, tell, made_from=_origin(folder))
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
        preflight.check_weights(where)
        config = where.config()
        recipe.refuse_packed(config.get("quantization") or config.get("quantization_config"), source)
    preflight.check_disk([where])
    return where


def convert_draft(
    folder: Path, output: Path, recipe: Recipe, tell: Progress, *, made_from: Mapping[str, Any] | None = None
) -> None:
    """Write the draft in a folder as `load_draft` with the same options has it, bit for bit.

    Args:
        made_from: goes into `converted` of its config.json.
    Raises:
        CheckpointError, FileExistsError, OSError, ValueError: as `convert`.
    """
    check_dtype("dtype", recipe.dtype)
    recipe.refuse_packed(read_config(folder).quantization, folder.name)
    tell(f"Reading {folder.name}", None)
    draft = load_draft(folder, options=DraftOptions(recipe.bits, recipe.group_size, recipe.dtype))
    weights: dict[str, mx.array] = dict(tree_flatten(draft.parameters())) | _tables(draft)
    size = sum(value.nbytes for value in weights.values())
    check_space(output, size + _SLACK)
    tell(f"Writing {output} ({size / 1e9:.2f} GB)", None)
    with whole_folder(output) as scratch:
        save_weights(scratch / "model.safetensors", weights)
        config = read_object(folder / "config.json")
        if recipe.bits is not None:
            config["quantization"] = {"group_size": recipe.group_size, "bits": recipe.bits}
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = str(draft.dtype).removeprefix("mlx.core.")
        _write_config(scratch, config, recipe, made_from)
        _copy(folder, scratch, (*_BESIDE, *_LEGAL))


def _convert_target(
    folder: Path, output: Path, recipe: Recipe, tell: Progress, *, made_from: Mapping[str, Any]
) -> None:
    """Through mlx_lm, which packs embeddings and heads too; it prints what it does."""
    size = _target_size(folder, recipe)
    check_space(output, size + _SLACK)
    tell(f"Converting {made_from['source']} with mlx_lm (about {size / 1e9:.2f} GB)", None)
    with whole_folder(output) as scratch:
        scratch.rmdir()  # mlx_lm wants to make it
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
            raise CheckpointError(f"{made_from['source']} could not be converted by mlx_lm: {error}") from error
        for file in scratch.glob("*.safetensors"):
            check_written(file)
        _write_config(scratch, read_object(scratch / "config.json"), recipe, made_from)
        _copy(folder, scratch, _LEGAL)
        _name_base(scratch / "README.md", cached_repository(str(folder)), recipe)


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


def _target_size(folder: Path, recipe: Recipe) -> int:
    """Bytes of the converted weights, from the heads of the files."""
    arrays: list[mx.array] = []
    try:
        for path in folder.glob("model*.safetensors"):
            arrays += dict(mx.load(str(path))).values()  # type: ignore[arg-type]  # lazy: nothing is read
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"A file in {folder} is damaged or incomplete ({error}). Download it again.") from error
    if recipe.bits is None and recipe.dtype is None:
        return sum(array.nbytes for array in arrays)
    item = 4 if recipe.dtype == "float32" else 2
    each = item if recipe.bits is None else recipe.bits / 8 + 2 * item / recipe.group_size  # a scale and a bias a group
    return round(sum(array.size for array in arrays) * each)


def _origin(folder: Path) -> dict[str, Any]:
    """A repository and its commit; of another folder only the name."""
    repository = cached_repository(str(folder))
    if repository is None:
        return {"source": folder.resolve().name}
    return {"source": repository, "revision": folder.name}


def _write_config(folder: Path, config: dict[str, Any], recipe: Recipe, made_from: Mapping[str, Any] | None) -> None:
    packed = {} if recipe.bits is None else {"bits": recipe.bits, "group_size": recipe.group_size}
    config[CONVERTED] = {"by": f"dflash-metal {__version__}", **(made_from or {}), **packed}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _copy(folder: Path, output: Path, patterns: tuple[str, ...]) -> None:
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, output / path.name)  # what a link leads to, under the mode of a new file


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
