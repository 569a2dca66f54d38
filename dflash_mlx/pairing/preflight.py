"""What can be refused before gigabytes are fetched: from configs, heads of files, lists of files and the free disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub as hub

from dflash_mlx import demo, spellings
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft import checkpoint
from dflash_mlx.draft.formats import MODELOPT, explain_folder, read_tensors
from dflash_mlx.draft.formats_shapes import fitting
from dflash_mlx.draft.formats_vocabulary import take_target_ids
from dflash_mlx.draft.vocabulary import FILE, listed_in, read_vocabulary
from dflash_mlx.errors import CheckpointError, FetchError, UnsupportedTarget
from dflash_mlx.hub.cache import DRAFT
from dflash_mlx.hub.repository import Source, find
from dflash_mlx.pairing import tokens
from dflash_mlx.pairing.preflight_target import check_weights, target_spec
from dflash_mlx.pairing.registry import DEMO, draft_for
from dflash_mlx.pairing.resolve import Resolution


def model_name(argument: str, value: Any) -> str:
    """A folder or repository as text.

    Raises:
        ValueError: it can be neither; names the argument.
    """
    name = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(name, str) or not name:
        choices = ", 'auto' or None" if argument == "draft" else " or 'demo'"
        raise ValueError(f"`{argument}` has to be a folder, a Hugging Face repository{choices}; got {value!r}.")
    if argument == "draft" and name.lower() == "none" and not Path(name).is_dir():
        raise ValueError(f"`draft` is {name!r}, and there is no folder of that name. To go without a draft, pass None.")
    return name


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
        raise _cannot_run(f"The target of {resolution.draft}", resolution.refused)
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


def refuse_by_name(target: str) -> None:
    """Refuse a target that the registry knows cannot be run here, before the hub is asked for it.

    Raises:
        UnsupportedTarget: says why.
    """
    row = draft_for(target)
    if row is not None and row.refused and not os.path.exists(os.path.expanduser(target)):  # a folder has a config
        raise _cannot_run(target, row.refused)


def _cannot_run(what: str, why: str) -> UnsupportedTarget:
    return UnsupportedTarget(
        f"{what} cannot be run here ({why}). Run it with mlx_lm itself, or choose another target: "
        "`dflash-metal models` lists them."
    )


def check_draft_of(config: Mapping[str, Any], target: Source, draft: Source) -> None:
    """Refuse a draft that does not fit this target.

    Args:
        config: the target's, as `check_target` returns it.
    Raises:
        CheckpointError: it is not what it has to be, or incomplete.
        IncompatiblePair: it is of another target.
        FetchError: its config cannot be had, or there are no safetensors.
    """
    draft_config = check_draft(draft)
    checkpoint.check_sizes(draft_config, draft.name, target_spec(config, draft_config), target.name)
    if target.folder is not None and draft.folder is not None and tokens.FILE in draft.files():
        check_tokens(draft.folder, draft.name, tokens.ids_in(target.folder), target.name)


def check_draft(draft: Source) -> DraftConfig:
    """The draft's config, with what only its tensors tell, once names and shapes fit it. Raises as `check_draft_of`."""
    with named(draft.name):
        if draft.folder is not None:
            if not draft.weights():
                raise explain_folder(draft.folder)
            config = checkpoint.read_config(draft.folder)
            tensors = read_tensors(draft.folder, evaluate=False)
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            fitted = fitting(shapes, config, draft.name, draft.folder).config
            take_target_ids(tensors, fitted, draft.name)
            read_vocabulary(draft.folder, fitted, draft.name)
            return fitted
        check_weights(draft)
        if MODELOPT in draft.files():
            raise spellings.packed_elsewhere(f"{draft.name} has a {MODELOPT}")
        config = checkpoint.check_shapes(DraftConfig.from_dict(draft.config()), draft.shapes(), draft.name)
        if FILE in draft.files():
            listed_in(draft.config(FILE), config, draft.name)
        return config


def check_tokens(folder: Path, name: str, target: Mapping[str, int], target_name: str) -> None:
    """Refuse the draft in a folder if its own tokenizer numbers tokens otherwise. target: token -> id.

    Raises:
        CheckpointError, IncompatiblePair: its tokenizer.json cannot be read, or is another.
    """
    with named(name):
        if differing := tokens.differing(folder, target):
            checkpoint.check_tokens(checkpoint.read_config(folder), name, differing, target_name)


@contextmanager
def named(draft: str) -> Iterator[None]:
    """Put the draft's name before a CheckpointError that does not say which draft it is about."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        if draft in text if "/" in draft else f"{draft}/" in text:
            raise
        raise CheckpointError(f"The draft {draft}: {text}") from error


def check_disk(*sources: Source | None) -> None:
    """Refuse a download that cannot fit on the disk. Raises FetchError."""
    needed = {source.name: sum(source.missing().values()) for source in sources if source is not None}
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
