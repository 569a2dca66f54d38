"""Strict loading of a draft folder: config.json and safetensors in z-lab's names. Never runs remote code.

Every tensor has to be claimed and every parameter filled, with the right shape. Modules that carry scales are
quantised, no others. The pair check compares what can silently cost acceptance or crash later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CheckpointError, IncompatiblePair
from dflash_mlx.targets import Target

_PADDING = 512  # rows by which padded embeddings of one vocabulary may differ


def read_config(folder: Path) -> DraftConfig:
    """The draft's config.

    Raises:
        CheckpointError: no config.json, not JSON, or not a DFlash v1 draft's.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a draft folder. Give the folder (or repository) that holds "
            "the draft's config.json and safetensors."
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Fetch it again from the draft's repository."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, not an object. Fetch it again.")
    return DraftConfig.from_dict(config)


def load_draft(
    folder: Path, *, name: str | None = None, dtype: mx.Dtype | None = None, packed: bool = True
) -> DraftModel:
    """Build and fill a draft.

    Args:
        folder: holds config.json and one or more .safetensors.
        name: how messages call it; default the folder's name.
        dtype: of the floating parameters; default the checkpoint's, float16 becoming float32 (fused features
            overflow it).
        packed: keep quantised modules packed; False dequantises them.
    Raises:
        CheckpointError: config or weights are incomplete, unknown or damaged.
    """
    config = read_config(folder)
    weights = _read_weights(folder)
    draft = DraftModel(config, name or folder.name)
    _quantize(draft, config, weights)
    _check_names(draft, weights, folder)
    draft.load_weights(list(weights.items()), strict=True)
    if not packed and config.quantization:
        dequantize_model(draft)
    if dtype is None:
        dtype = mx.float32 if draft.dtype == mx.float16 else draft.dtype
    draft.set_dtype(dtype)
    draft.eval()
    mx.eval(draft.parameters())
    return draft


def _read_weights(folder: Path) -> dict[str, mx.array]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has a config.json but no .safetensors file. Download the draft's weights too.")
    weights: dict[str, mx.array] = {}
    for path in files:
        try:
            loaded: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
            mx.eval(loaded)  # a truncated file fails here, not in the middle of an answer
        except (RuntimeError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged or incomplete ({error}). Delete it and download it again."
            ) from error
        weights.update({key.removeprefix("model."): value for key, value in loaded.items()})
    return weights


def _quantize(draft: DraftModel, config: DraftConfig, weights: dict[str, mx.array]) -> None:
    if not any(key.endswith(".scales") for key in weights):
        return
    if not config.quantization:
        raise CheckpointError(
            f"The weights of {draft.name} are quantised, and its config.json has no `quantization`. Add the entry "
            "with `group_size` and `bits`, or convert the draft again."
        )
    nn.quantize(
        draft,
        group_size=config.quantization["group_size"],
        bits=config.quantization["bits"],
        class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
    )


def _check_names(draft: DraftModel, weights: dict[str, mx.array], folder: Path) -> None:
    expected: dict[str, Any] = dict(tree_flatten(draft.parameters()))
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or extra:
        parts = [
            f"{len(keys)} {what}: {', '.join(keys[:5])}"
            for what, keys in (("missing", missing), ("unknown", extra))
            if keys
        ]
        raise CheckpointError(
            f"The weights in {folder} do not fit its config.json ({'; '.join(parts)}). A draft with a part left out "
            "still writes correct text and accepts little, so it is not loaded. Download it again, or check that "
            "this version supports its architecture."
        )
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            raise CheckpointError(
                f"{key} in {folder} has shape {list(value.shape)}, and its config.json needs "
                f"{list(expected[key].shape)}. Config and weights are of different drafts; download both again."
            )


def check_pair(
    draft: DraftModel, target: Target, target_name: str, *, differing: Mapping[str, int] | None = None
) -> None:
    """Refuse a draft that was not made for this target.

    Args:
        differing: tokens of the draft's own tokenizer whose ids are not the target's, with those ids.
    Raises:
        IncompatiblePair: says both values.
    """
    config, spec = draft.config, target.spec
    facts = [
        ("hidden size", config.hidden_size, spec.hidden_size, config.hidden_size == spec.hidden_size),
        (
            "number of target layers",
            config.num_target_layers,
            spec.n_layers,
            _layers_fit(config, spec.n_layers),
        ),
        (
            "vocabulary size",
            config.vocab_size,
            spec.vocab_size,
            abs(config.vocab_size - spec.vocab_size) < _PADDING,
        ),
        (
            "mask token id",
            config.mask_token_id,
            f"{spec.vocab_size} rows",
            0 <= config.mask_token_id < spec.vocab_size,
        ),
    ]
    for what, ours, theirs, fits in facts:
        if not fits:
            raise IncompatiblePair(
                f"The draft {draft.name} was made for another target: its {what} is {ours}, that of {target_name} is "
                f"{theirs}. Its proposals would be meaningless or crash. Choose the draft that was trained for this "
                "target."
            )
    if differing:
        token, index = next(iter(differing.items()))
        raise IncompatiblePair(
            f"The draft {draft.name} comes with another tokenizer than {target_name}: {len(differing)} tokens have "
            f"other ids there, for example {token!r} (id {index} in the draft's). Choose the draft that was trained "
            "for this target."
        )


def _layers_fit(config: DraftConfig, n_layers: int) -> bool:
    """Equal, or not stated and within range."""
    inferred = config.num_target_layers == max(config.target_layer_ids) + 1
    return config.num_target_layers == n_layers or (inferred and config.num_target_layers <= n_layers)
