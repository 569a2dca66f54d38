"""What can be refused of a target before its weights are read or fetched: by its config and its list of files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils

from dflash_mlx import demo, spellings
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft import checkpoint
from dflash_mlx.draft.formats import PICKLED
from dflash_mlx.errors import CheckpointError, FetchError
from dflash_mlx.hub.cache import missing_shards
from dflash_mlx.hub.repository import Source
from dflash_mlx.pairing import tokens
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.targets import TargetSpec

_ONLY = {
    "GGUF": ((".gguf",), "GGUF is packed for llama.cpp, and read here for the demo only"),
    "pickle": (PICKLED, "pickle can run code that is stored in it, so it is never opened"),
}


def check_target(target: Source, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Refuse a target that cannot be loaded, whatever its draft is; nothing large is read.

    Args:
        changes: what `load`'s `model_config` replaces in its config.
    Returns:
        Its config.json, changed.
    Raises:
        CheckpointError: it is a draft, of no model that mlx_lm has, or incomplete.
        FetchError: its config cannot be had, or there are no safetensors.
    """
    if target.name == DEMO:
        return demo_config() if target.folder is None else target.config()
    config = target.config()
    if spellings.is_draft(config):
        verifier = verifier_of(config)
        made_for = f" (its config names {verifier})" if verifier else ""
        raise CheckpointError(
            f"{target.name} is a DFlash draft, which has no embedding and no head of its own, so it cannot run alone. "
            f"Load the target that it was trained for{made_for}, and pass this as its draft (`draft=`, on the command "
            "line --draft)."
        )
    config |= changes or {}
    check_family(config, target.name)
    check_weights(target)
    if target.folder is not None:
        _check_folder(target)
    return config


def demo_config() -> dict[str, Any]:
    """The sizes of the demo's target where it was not converted yet, by the draft that was made for it."""
    draft = checkpoint.read_config(demo.draft_folder())
    return dict(
        model_type="llama",
        num_hidden_layers=draft.num_target_layers,
        hidden_size=draft.hidden_size,
        vocab_size=draft.vocab_size,
    )


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """The target that a draft's config.json names, if it does and can be read."""
    try:
        return DraftConfig.from_dict(config).verifier
    except CheckpointError:
        return None


def target_spec(config: Mapping[str, Any], draft: DraftConfig) -> TargetSpec:
    """A target's sizes by its config.json; what that leaves to mlx_lm's defaults counts as fitting the draft."""
    text = config.get("text_config") or {}

    def size(key: str, otherwise: int) -> int:
        value = text.get(key, config.get(key))
        return value if isinstance(value, int) else otherwise

    pattern = text.get("hybrid_override_pattern", config.get("hybrid_override_pattern"))  # decides in nemotron_h
    layers = len(pattern) if isinstance(pattern, str | list) else size("num_hidden_layers", draft.num_target_layers)
    return TargetSpec(
        model_type=str(text.get("model_type", config.get("model_type"))),
        n_layers=layers,
        hidden_size=size("hidden_size", draft.hidden_size),
        vocab_size=size("vocab_size", draft.vocab_size),
        dtype=mx.bfloat16,
    )


def model_files(config: Mapping[str, Any]) -> list[str]:
    """mlx_lm's model file for this config.json, and that for its text part if it has one; [] if it names none."""
    kinds = [config.get("model_type"), (config.get("text_config") or {}).get("model_type")]
    return [mlx_lm_utils.MODEL_REMAPPING.get(kind, kind) for kind in kinds if isinstance(kind, str)]


def exists(file: str) -> bool:
    """Whether mlx_lm has a model file of this name."""
    return "." not in file and find_spec(f"mlx_lm.models.{file}") is not None


def check_family(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that mlx_lm has no file for. Raises CheckpointError."""
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{name} could not be loaded by mlx_lm: its config.json has no `model_type`, so what it is cannot be told. "
            "Download its config.json again, or choose another model."
        )
    if config.get("model_file") is not None:
        raise CheckpointError(
            f"{name} needs code of its own ({config['model_file']!r}), and dflash_mlx never runs code from a model "
            "repository. Choose a model that mlx_lm has itself."
        )
    files = model_files(config)[:1]
    remapped = any(config.get("model_type") == kind for kind, _ in mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING)
    if files and not remapped and not exists(files[0]):
        raise CheckpointError(
            f"{name} could not be loaded by mlx_lm: it has no model of the type {config['model_type']!r}. Update "
            "mlx_lm if a newer one has, or choose another model."
        )


def check_weights(source: Source) -> None:
    """Refuse a model that has no weights in a form that is read here."""
    if source.weights():
        return
    files = source.files()
    for what, (endings, why) in _ONLY.items():
        if any(name.endswith(endings) for name in files):
            error = CheckpointError if source.folder is not None else FetchError
            raise error(
                f"{source.name} has its weights as {what} only, and {source.kind.weights} is needed: {why}. "
                "Choose a safetensors repository of the same model."
            )
    if source.folder is not None:
        raise CheckpointError(
            f"{source.folder} is not a complete model folder: it has no {source.kind.weights}. Download the model's "
            "weights too, or give the folder that holds them."
        )
    raise FetchError(
        f"{source.name} has no {source.kind.weights} in its top folder, so there is nothing to load. Choose a "
        "repository with the model's weights."
    )


def _check_folder(source: Source) -> None:
    """Refuse a folder that lacks files of its weights, or any tokenizer."""
    folder, names = source.folder, source.files()
    assert folder is not None
    if missing := missing_shards(folder, names, source.kind):
        raise CheckpointError(
            f"{folder} is not a complete model folder: it lacks {len(missing)} files that its index names, for example "
            f"{missing[0]}. Download the missing files."
        )
    if not tokens.present(names):
        raise CheckpointError(
            f"{folder} has no tokenizer (tokenizer.json, or what its kind has instead), so there is no text to read or "
            "to write. Download its tokenizer files too."
        )
