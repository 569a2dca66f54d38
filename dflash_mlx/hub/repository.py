"""Where a model is: a folder, the hub's cache on this machine, or a repository that is still to be fetched.

Everything goes through huggingface_hub (`cache`: what is on this machine; `errors`: what it raises). What the
cache holds completely is used as it is, without asking for something newer; `hf download NAME` brings it up to date.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub import errors
from huggingface_hub.utils import TensorInfo

from dflash_mlx.errors import CheckpointError, FetchError
from dflash_mlx.hub.cache import TARGET, Kind, cached_file, cached_snapshot
from dflash_mlx.hub.card import TIMEOUT_S, Card, fetch_card, read_card
from dflash_mlx.hub.download import Progress, download
from dflash_mlx.hub.errors import NoRepository, Unreachable, explained
from dflash_mlx.hub.names import cached_repository

_QUANTIZED = ("quantization", "quantization_config")


@dataclass(frozen=True)
class Listing:
    """A repository at a commit. sizes: bytes of the files in its top folder."""

    name: str
    commit: str
    sizes: Mapping[str, int] = field(repr=False)
    card: Card = field(default_factory=Card)


@dataclass(frozen=True)
class Source:
    """A model as it was asked for, and where it is.

    folder: complete on this machine; else `listing` says what its repository has.
    given: whether the folder is what was asked for, not the hub's cache.
    """

    name: str
    kind: Kind
    revision: str | None = None
    folder: Path | None = None
    listing: Listing | None = None
    given: bool = False

    def files(self) -> list[str]:
        if self.folder is not None:
            return sorted(path.name for path in self.folder.iterdir() if path.is_file())
        return sorted(self.listing.sizes) if self.listing else []

    def weights(self) -> list[str]:
        return [name for name in self.files() if fnmatch(name, self.kind.weights)]

    def missing(self) -> dict[str, int]:
        """Files that are still to be fetched, with their bytes."""
        if self.listing is None:
            return {}
        sizes, commit = self.listing.sizes, self.listing.commit
        wanted = [name for name in self.files() if any(fnmatch(name, pattern) for pattern in self.kind.patterns)]
        return {name: sizes[name] for name in wanted if cached_file(self.name, name, commit) is None}

    def config(self, name: str = "config.json") -> dict[str, Any]:
        """The object in config.json, or in another JSON file, which is fetched if need be.

        Raises:
            FetchError, CheckpointError: it cannot be had, or is no object.
        """
        if self.folder is not None:
            path = self.folder / name
        else:
            if self.listing and name not in self.listing.sizes:
                raise FetchError(
                    f"{self.name} has no {name} in its top folder, so it is not a model that is loaded from here. "
                    "Choose another repository; for one of its subfolders, download that and give its path."
                )
            commit = self.listing.commit if self.listing else self.revision
            with explained(self.name, self.revision):
                path = Path(hub.hf_hub_download(self.name, name, revision=commit))
        return read_object(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a repository, from the heads of its files.

        Raises:
            FetchError: they cannot be had.
        """
        heads = [self.head(name) for name in self.weights()]
        return {key: tuple(tensor.shape) for head in heads for key, tensor in head.items()}

    def head(self, name: str) -> dict[str, TensorInfo]:
        """The tensors of a file of a repository, of which only the head is fetched.

        Raises:
            FetchError: it cannot be had.
        """
        commit = self.listing.commit if self.listing else self.revision
        try:
            with explained(self.name, self.revision):
                return hub.parse_safetensors_file_metadata(self.name, name, revision=commit).tensors
        except errors.SafetensorsParsingError as error:
            raise FetchError(
                f"{name} of {self.name} is not a safetensors file ({error}), so it cannot be read. Choose another "
                "repository."
            ) from error

    def card(self, ask: bool = True) -> Card:
        """Where the model comes from, as its README.md says; nothing if it says nothing, or is not here without `ask`.

        Raises:
            FetchError: the hub has to be asked and does not answer.
        """
        if self.listing is not None:
            return self.listing.card
        if self.folder is None:
            return fetch_card(self.name, ask)
        path = self.folder / "README.md"
        repository = cached_repository(str(self.folder))
        if repository and not path.is_file():
            return fetch_card(repository, ask)
        found = read_card(path)
        if found.relation is None and not self.config().keys().isdisjoint(_QUANTIZED):
            return replace(found, relation="quantized")  # as converters leave it: they name what they read
        return found

    def fetch(self, tell: Progress) -> Path:
        """The complete folder, downloaded if need be. What `tell` raises cancels that, and comes out here.

        Raises:
            FetchError: says what to do; what arrived is kept.
        """
        if self.folder is not None:
            return self.folder
        patterns = [*self.kind.patterns, "README.md", "LICENSE*"]  # a converted copy takes them along
        size = sum(self.missing().values())
        with explained(self.name, self.revision):
            return download(self.name, self.revision, patterns, size, tell)


def find(name: str, kind: Kind, revision: str | None = None) -> Source:
    """Where a model is. Nothing but a list of files is fetched, and nothing at all if it is on this machine.

    Raises:
        FetchError: no such folder, no such repository or revision, no access, or neither network nor a copy here.
        ValueError: a revision of a folder.
    """
    path = Path(os.path.expanduser(name))  # which leaves the name of an unknown user as it is
    if os.path.isfile(path):
        raise CheckpointError(f"{name} is a file. Give the folder that holds the config.json and the safetensors.")
    if os.path.exists(path):
        if revision is not None:
            argument = "revision" if kind is TARGET else "draft_revision"
            raise ValueError(f"`{argument}` ({revision!r}) is of a repository, and {name} is a folder. Leave it out.")
        return Source(name, kind, folder=path, given=True)
    if path.is_absolute() or name.startswith((".", "~")):
        raise FetchError(f"{path} does not exist. Give a folder with a config.json, or a Hugging Face repository.")
    cached, certain = cached_snapshot(name, kind, revision)
    if cached is not None and certain:
        return Source(name, kind, revision, folder=cached)
    try:
        return Source(name, kind, revision, listing=listing(name, revision))
    except FetchError as error:
        if cached is None and isinstance(error, (NoRepository, Unreachable)):
            raise type(error)(f"There is no folder {name} here, and {_continued(error)}") from error
        if cached is None:
            raise
        return Source(name, kind, revision, folder=cached)  # all that is loaded is there


def _continued(error: Exception) -> str:
    """Its text as the second half of a sentence."""
    text = str(error)
    return "the" + text[3:] if text.startswith("The ") else text


def listing(name: str, revision: str | None = None) -> Listing:
    """What a repository has at a revision. Raises FetchError."""
    with explained(name, revision):
        info = hub.model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    files = {each.rfilename: each.size or 0 for each in info.siblings or () if "/" not in each.rfilename}
    data = info.card_data.to_dict() if info.card_data else {}
    return Listing(name, info.sha or revision or "main", files, Card.of(data, info.tags or ()))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}, so it is not a model folder. Give the folder or repository that holds "
            "the config.json and the safetensors."
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object. Fetch it again.")
    return content
