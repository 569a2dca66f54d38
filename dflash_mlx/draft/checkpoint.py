"""Strict loading of a draft folder, and the check that draft and target belong together. Never runs remote code.

Every tensor has to be claimed and every parameter filled, with the right shape and finite numbers: `formats` reads the
files, `formats_shapes` compares, `formats_vocabulary` reads the tables of a reduced vocabulary. The pair check compares
what can silently cost acceptance or crash later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from dflash_mlx import spellings
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.formats import MODELOPT, explain_folder, read_tensors
from dflash_mlx.draft.formats_shapes import check_shapes as check_shapes
from dflash_mlx.draft.formats_shapes import expected_shapes as expected_shapes
from dflash_mlx.draft.formats_shapes import fitting
from dflash_mlx.draft.formats_vocabulary import take_target_ids
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions, quantize
from dflash_mlx.draft.vocabulary import PADDING, read_vocabulary
from dflash_mlx.errors import CheckpointError, IncompatiblePair
from dflash_mlx.targets import Target, TargetSpec


def read_config(folder: Path) -> DraftConfig:
    """The draft's config.

    Raises:
        CheckpointError: no config.json, not JSON, or not a DFlash draft's.
    """
    path = folder / "config.json"
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file. Give the folder that holds the draft's config.json and safetensors."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise explain_folder(folder) from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Fetch it again from the draft's repository."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, not an object. Fetch it again.")
    if not spellings.is_draft(config) and (folder / "dflash" / "config.json").is_file():
        raise explain_folder(folder)
    if (folder / MODELOPT).is_file():
        raise spellings.packed_elsewhere(f"{MODELOPT} lies beside its config.json")
    return DraftConfig.from_dict(config)


def load_draft(
    folder: Path,
    *,
    name: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    options: DraftOptions | None = None,
) -> DraftModel:
    """Build and fill a draft.

    Args:
        folder: holds config.json and one or more .safetensors.
        name: how messages call it; default the folder's name.
        dtype: of the floating parameters; default the checkpoint's, float16 becoming float32 (fused features
            overflow it).
        packed: keep quantised modules packed; False dequantises them, unless the options ask for quantisation.
        options: what the user asks for; its `dtype` comes before the other one.
    Raises:
        CheckpointError: config or weights are incomplete, unknown or damaged.
    """
    options = options or DraftOptions()
    config, tensors = read_config(folder), read_tensors(folder)
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    draft = fitting(shapes, config, name or folder.name, folder)
    if unread := config.unread:
        keys = ", ".join(f"`{key}`" for key in unread)
        draft.notes = (
            *draft.notes,
            f"the draft's config.json has keys that this version does not read: {keys}; if one changes the maths, the "
            "draft accepts less",
        )
    ids = take_target_ids(tensors, draft.config, draft.name)
    listed = read_vocabulary(folder, draft.config, draft.name)
    _check_values(draft, tensors, folder)
    draft.load_weights(list(tensors.items()), strict=True)
    if ids is not None:
        draft.map_ids(ids)
    if listed is not None and options.vocabulary == "auto":
        draft.vocabulary, draft.largest_id = listed, int(listed[-1])
    if not packed and options.bits is None:
        dequantize_model(draft)
    if options.bits is not None:
        quantize(draft, options.bits, options.group_size)
    if options.dtype is not None:
        dtype = getattr(mx, options.dtype)
    draft.set_dtype(draft.dtype if dtype is None else dtype)
    if options.window is not None:
        draft.context_window = options.window
    draft.eval()
    mx.eval(draft.parameters())
    return draft


def _check_values(draft: DraftModel, tensors: Mapping[str, mx.array], folder: Path) -> None:
    """Numbers of the right kind, and finite: one read for all tensors."""
    finite = {}
    parameters: dict[str, mx.array] = dict(tree_flatten(draft.parameters()))
    for key, parameter in parameters.items():
        value = tensors[key]
        floating = mx.issubdtype(value.dtype, mx.floating)
        if floating != mx.issubdtype(parameter.dtype, mx.floating):
            raise CheckpointError(
                f"{key} in {folder} is stored as {value.dtype}, which is another kind of number than this version "
                "computes with. The draft seems to be quantised for another runtime. Get it in bfloat16."
            )
        if floating:
            finite[key] = mx.isfinite(value).all()
    if not mx.stack(list(finite.values())).all().item():
        broken = [key for key, flag in finite.items() if not flag.item()]
        raise CheckpointError(
            f"{broken[0]} in {folder} holds numbers that are not finite ({len(broken)} of {len(tensors)} tensors do). "
            "Such a draft proposes nothing that can be accepted. Download it again."
        )


def check_pair(draft: DraftModel, target: Target, target_name: str) -> None:
    """Refuse a draft that was not made for this target.

    Raises:
        IncompatiblePair: says both values.
    """
    config, spec = draft.config, target.spec
    check_sizes(config, draft.name, spec, target_name)
    if draft.largest_id >= spec.vocab_size:
        raise IncompatiblePair(
            f"The draft {draft.name} proposes the token id {draft.largest_id} from its reduced vocabulary, and "
            f"{target_name} has {spec.vocab_size} tokens. {_choose(config)}"
        )


def check_tokens(config: DraftConfig, name: str, differing: Mapping[str, int], target_name: str) -> None:
    """Refuse a draft whose own tokenizer is another than the target's.

    Args:
        differing: tokens of the draft's whose ids are not the target's, with those ids.
    Raises:
        IncompatiblePair: there are any.
    """
    if differing:
        token, index = next(iter(differing.items()))
        raise IncompatiblePair(
            f"The draft {name} comes with another tokenizer than {target_name}: {len(differing)} tokens have "
            f"other ids there, for example {token!r} (id {index} in the draft's). {_choose(config)}"
        )


def check_sizes(config: DraftConfig, name: str, spec: TargetSpec, target_name: str) -> None:
    """Refuse a draft whose sizes are not the target's; known before any weights are.

    Raises:
        IncompatiblePair: says both values.
    """
    layers, last, mask, rows = (
        config.num_target_layers,
        max(config.target_layer_ids),
        config.mask_token_id,
        spec.vocab_size,
    )
    stated = layers != last + 1  # otherwise it may come from the ids
    facts = [
        ("hidden size", config.hidden_size, spec.hidden_size, config.hidden_size == spec.hidden_size),
        ("number of target layers", layers, spec.n_layers, not stated or layers == spec.n_layers),
        ("vocabulary size", config.vocab_size, rows, abs(config.vocab_size - rows) < PADDING),
        ("mask token id", mask, f"{rows} rows", config.own_embedding or mask < rows),
    ]
    for what, ours, theirs, fits in facts:
        if not fits:
            raise IncompatiblePair(
                f"The draft {name} was made for another target: its {what} is {ours}, that of {target_name} is "
                f"{theirs}. Its proposals would be meaningless or crash. {_choose(config)}"
            )
    if last >= spec.n_layers:
        raise IncompatiblePair(
            f"The draft {name} reads layer {last} of its target, and ids count from 0: {target_name} has the layers "
            f"0..{spec.n_layers - 1}. There is nothing to feed it with. {_choose(config)}"
        )


def _choose(config: DraftConfig) -> str:
    made_for = f" (this one says it was made for {config.verifier})" if config.verifier else ""
    return f"Choose the draft that was trained for this target{made_for}."
