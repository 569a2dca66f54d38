"""What can be refused before gigabytes are fetched: from configs, heads of files, lists of files and the free disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils

from dflash_mlx import demo, spellings
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft import checkpoint
from dflash_mlx.draft.formats import MODELOPT, PICKLED, explain_folder
from dflash_mlx.errors import CheckpointError, FetchError, UnsupportedTarget
from dflash_mlx.hub.cache import DRAFT
from dflash_mlx.hub.repository import Source, find
from dflash_mlx.registry import DEMO
from dflash_mlx.resolve import Resolution
from dflash_mlx.targets import TargetSpec

_ONLY = {"GGUF": (".gguf",), "pickle": PICKLED}


def draft_source(resolution: Resolution) -> Source | None:
    """Where the draft is that was resolved; None if there is none.

    Raises:
        FetchError: it cannot be found; says how to go on without it where it was not asked for by name.
        UnsupportedTarget: it is known that its target cannot be run here.
        ValueError: a revision of what has none.
    """
    if resolution.draft is None:
        return None
    if resolution.refused:
        raise UnsupportedTarget(
            f"The target of {resolution.draft} cannot be run here ({resolution.refused}). Run it with mlx_lm itself, "
            "or choose another target: `dflash-metal models` lists them."
        )
    if resolution.draft == DEMO:
        if resolution.revision is not None:
            raise ValueError("`draft_revision` is not honoured for the demo draft. Leave it out.")
        return Source(DEMO, DRAFT, folder=demo.draft_folder())
    try:
        return find(resolution.draft, DRAFT, resolution.revision)
    except FetchError as error:
        if resolution.asked:
            raise
        raise type(error)(f"{error} Or go without a draft: draft=None, on the command line --draft none.") from error


def check(target: Source, draft: Source | None) -> None:
    """Refuse what cannot be loaded together.

    Raises:
        CheckpointError: one of the two is not what it has to be, or incomplete.
        IncompatiblePair: the draft is of another target.
        FetchError: a config cannot be had, there are no safetensors, or the disk is too small.
    """
    config = target.config()
    if spellings.is_draft(config):
        raise CheckpointError(
            f"{target.name} is a DFlash draft, which has no embedding and no head of its own, so it cannot run alone. "
            "Load the target that it was trained for, and pass this as its draft (`draft=`, on the command line "
            "--draft)."
        )
    check_family(config, target.name)
    check_weights(target)
    if draft is not None:
        draft_config = check_draft(draft)
        checkpoint.check_sizes(draft_config, draft.name, target_spec(config, draft_config), target.name)
    check_disk([source for source in (target, draft) if source is not None])


def check_draft(draft: Source) -> DraftConfig:
    """The draft's config, and for a repository whether its tensors fit it. Raises as `check`."""
    if draft.folder is not None:
        if not draft.weights():
            raise explain_folder(draft.folder)
        return checkpoint.read_config(draft.folder)  # the tensors are looked at when they are loaded
    check_weights(draft)
    if MODELOPT in draft.files():
        raise spellings.packed_elsewhere(f"{draft.name} has a {MODELOPT}")
    config = DraftConfig.from_dict(draft.config())
    checkpoint.check_shapes(config, draft.shapes(), draft.name)
    return config


def target_spec(config: Mapping[str, Any], draft: DraftConfig) -> TargetSpec:
    """A target's sizes by its config.json; what that leaves to mlx_lm's defaults counts as fitting the draft."""
    text = config.get("text_config") or {}

    def size(key: str, otherwise: int) -> int:
        value = text.get(key, config.get(key))
        return value if isinstance(value, int) else otherwise

    return TargetSpec(
        model_type=str(text.get("model_type", config.get("model_type"))),
        n_layers=size("num_hidden_layers", draft.num_target_layers),
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
    for what, endings in _ONLY.items():
        if any(name.endswith(endings) for name in files):
            error = CheckpointError if source.folder is not None else FetchError
            raise error(
                f"{source.name} has its weights as {what} only, and {source.kind.weights} is needed: pickle can run "
                "code, and GGUF is read for the demo only. Choose a safetensors repository of the same model, or "
                "convert it with mlx_lm.convert."
            )
    if source.folder is None:
        raise FetchError(
            f"{source.name} has no {source.kind.weights} in its top folder, so there is nothing to load. Choose a "
            "repository with the model's weights."
        )


def check_disk(sources: Sequence[Source]) -> None:
    """Refuse a download that cannot fit on the disk."""
    needed = {source.name: sum(source.missing().values()) for source in sources}
    total = sum(needed.values())
    if not total:
        return
    folder = Path(hub.constants.HF_HUB_CACHE)
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if total > free:
        parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needed.items() if size)
        raise FetchError(
            f"{total / 1e9:.2f} GB are still to be fetched ({parts}), and {free / 1e9:.2f} GB are free in {folder}. "
            "Free some space, or name a folder on another disk in HF_HOME."
        )


def differing_tokens(draft: Path, vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the draft's own tokenizer whose ids differ from the target's; empty if it ships none.

    Raises:
        CheckpointError: its tokenizer.json cannot be read.
    """
    path = draft / "tokenizer.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        theirs = dict(content["model"]["vocab"]) | {t["content"]: t["id"] for t in content.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Download the draft again.") from error
    return {token: index for token, index in theirs.items() if vocabulary.get(token, index) != index}
