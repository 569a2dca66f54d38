"""Do the tensors of a checkpoint fit its config? Decided from names and shapes alone, strictly in both directions.

The draft is built with what the checkpoint carries (a head or an embedding of its own, packed modules), but its weights
are never computed, so this is cheap enough to do before a download, from a repository's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.formats import canonical, renamed
from dflash_mlx.draft.formats_vocabulary import TABLES
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CheckpointError
from dflash_mlx.spellings import variants
from dflash_mlx.spellings.keys import Keys

Shapes = Mapping[str, Sequence[int]]


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a config describes, without packing and without vocabulary tables.

    Raises:
        CheckpointError: no model can be built of it.
    """
    return _shapes_of(_build(config, "draft"))


def check_shapes(config: DraftConfig, shapes: Shapes, where: str) -> DraftConfig:
    """Refuse the tensors that `load_draft` would refuse, from their stored names and shapes.

    Args:
        where: how messages call the checkpoint.
    Returns:
        The config with what only the tensors can tell.
    Raises:
        CheckpointError: as `load_draft`.
    """
    return fitting({new: shapes[name] for name, new in renamed(shapes, where).items()}, config, where, where).config


def fitting(shapes: Shapes, config: DraftConfig, name: str, where: object) -> DraftModel:
    """A draft without weights whose parameters have exactly these names (z-lab's) and shapes.

    Its `config` says what only the weights can tell: the rows of a head of its own, an embedding of its own. Tables of
    a reduced vocabulary are looked at elsewhere (`formats_vocabulary`).

    Raises:
        CheckpointError: tensors are missing, unknown, or of another shape.
    """
    shapes = {key: shape for key, shape in shapes.items() if key not in TABLES}
    draft = _build(_with_own_parts(config, shapes, where), name)
    _quantize(draft, shapes, where)
    expected = _shapes_of(draft)
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if other := variants.of_tensors(unknown):
        raise other
    if missing or unknown:
        parts = [
            f"{len(keys)} {what}: {', '.join(keys[:5])}"
            for what, keys in (("missing", missing), ("unknown", unknown))
            if keys
        ]
        raise CheckpointError(
            f"The weights in {where} do not fit its config.json ({'; '.join(parts)}). A draft with a part left out "
            "still writes correct text and accepts little, so it is not loaded. Download it again, or check that "
            "this version supports its architecture."
        )
    for key, shape in expected.items():
        if tuple(shapes[key]) != shape:
            raise CheckpointError(
                f"{key} in {where} has shape {list(shapes[key])}, and its config.json needs {list(shape)}. Config and "
                "weights are of different drafts; download both again."
            )
    return draft


def _build(config: DraftConfig, name: str) -> DraftModel:
    try:
        return DraftModel(config, name)
    except (ValueError, RuntimeError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"The config.json of {name} describes a model that cannot be built ({error}). Get it from the draft's own "
            "repository."
        ) from error


def _shapes_of(draft: DraftModel) -> dict[str, tuple[int, ...]]:
    parameters: dict[str, mx.array] = dict(tree_flatten(draft.parameters()))
    return {key: tuple(value.shape) for key, value in parameters.items()}


def _with_own_parts(config: DraftConfig, shapes: Shapes, where: object) -> DraftConfig:
    """The config, with the head and the embedding that are among the tensors."""
    head, rows = shapes.get("lm_head.weight"), config.draft_vocab_size
    if head is None and rows is not None:
        raise CheckpointError(
            f"The config.json in {where} has a vocabulary of {rows} tokens for the draft and {config.vocab_size} for "
            "the target, so it needs a head of its own, and `lm_head.weight` is missing. The target's head would "
            "number tokens otherwise. Download the draft again."
        )
    if head and rows is None:
        rows = head[0] if head[0] < config.vocab_size else config.vocab_size
    return replace(config, draft_vocab_size=rows, own_embedding="embed_tokens.weight" in shapes)


def _quantize(draft: DraftModel, shapes: Shapes, where: object) -> None:
    """Pack exactly the modules that carry scales, as the config says for each or for all."""
    packed = {key.removesuffix(".scales") for key in shapes if key.endswith(".scales")}
    if not packed:
        return
    if not draft.config.quantization:
        raise CheckpointError(
            f"The weights in {where} are quantised, and its config.json has no `quantization`. How they are packed "
            "cannot be told. Add the entry with `group_size` and `bits`, or convert the draft again."
        )
    try:
        nn.quantize(draft, class_predicate=_packing(draft.config.quantization, packed, where))
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"MLX cannot pack the weights in {where} as its config.json says ({error}). Correct `quantization` there, "
            "or convert the draft again."
        ) from error


def _packing(
    entries: Mapping[str, Any], packed: set[str], where: object
) -> Callable[[str, nn.Module], bool | dict[str, Any]]:
    """The predicate for `nn.quantize`: how the module of this path is packed, or False."""
    own = {_module(path): entry for path, entry in entries.items() if isinstance(entry, Mapping | bool)}

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path not in packed or not isinstance(module, nn.Linear | nn.Embedding):
            return False
        entry = own.get(path, True)
        if entry is False:
            raise CheckpointError(
                f"{path} in {where} is packed, and `quantization` of its config.json says that it is not. Config and "
                "weights are of different drafts; download both again."
            )
        keys = Keys(("in `quantization`", entry if isinstance(entry, Mapping) else entries))
        mode = keys.find("mode")
        return {
            "group_size": keys.integer("group_size", default=None),
            "bits": keys.integer("bits", default=None),
            "mode": "affine" if mode is None else mode,
        }

    return how


def _module(path: str) -> str:
    """The module that an entry of `quantization` means, under the name that it has here."""
    return (canonical(f"{path}.weight") or path).removesuffix(".weight")
