"""What the hub's cache on this machine holds: files, and snapshots that can be loaded without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub import errors

from dflash_mlx.hub.errors import explained

_BESIDE = ["*.json", "*.txt", "*.jinja", "*.jsonl", "tokenizer.model", "tiktoken.model", "*.tiktoken"]
_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tekken.json")
IN_FOLDERS = ["*/*"]  # other formats of the same weights, often as large again


@dataclass(frozen=True)
class Kind:
    """Which files a model consists of beside its config. weights: pattern; tokenizer: whether it needs one."""

    weights: str
    tokenizer: bool

    @property
    def patterns(self) -> list[str]:
        return [*_BESIDE, self.weights]


TARGET = Kind("model*.safetensors", True)  # what mlx_lm loads
DRAFT = Kind("*.safetensors", False)


def cached_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """A file of a repository."""
    found = hub.try_to_load_from_cache(name, file, revision=revision)
    return Path(found) if isinstance(found, str) else None


def cached_snapshot(name: str, kind: Kind, revision: str | None) -> tuple[Path | None, bool]:
    """A snapshot that can be loaded, and whether nothing of it is missing. Raises FetchError for no name of one."""
    found: str | None = None
    certain = True
    with explained(name, revision):
        try:
            found = hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=kind.patterns,
                ignore_patterns=IN_FOLDERS,
                local_files_only=True,
            )
        except errors.LocalEntryNotFoundError as error:
            found, certain = getattr(error, "snapshot_path", None), False
    return (Path(found), certain) if found and loadable(Path(found), kind) else (None, False)


def loadable(folder: Path, kind: Kind) -> bool:
    """Whether config, tokenizer and every file that the index names are there.

    Older versions of huggingface_hub return a snapshot that was interrupted as if it were complete.
    """
    names = [path.name for path in folder.iterdir() if path.exists()]  # a link may lead nowhere
    if "config.json" not in names or not any(fnmatch(name, kind.weights) for name in names):
        return False
    if kind.tokenizer and not any(fnmatch(name, pattern) for name in names for pattern in _TOKENIZERS):
        return False
    return not missing_shards(folder, names, kind)


def missing_shards(folder: Path, names: Iterable[str], kind: Kind) -> list[str]:
    """Files of weights that the index of a folder names and that are not among `names`.

    mlx_lm never reads the index, so one that cannot be read, or of which nothing is there, says nothing; nor do files
    in it that are no part of the model (an extra head's).
    """
    index = folder / "model.safetensors.index.json"
    try:
        named = {str(name).removeprefix("./") for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError, OSError):
        return []
    shards = {name for name in named if "/" not in name and fnmatch(name, kind.weights)}
    return sorted(shards - set(names)) if shards & set(names) else []
