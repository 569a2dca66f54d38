"""A tokenizer as its folder describes it: which token has which id, found out without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from dflash_mlx.errors import CheckpointError

FILE = "tokenizer.json"
_NEEDED = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def present(files: Iterable[str]) -> bool:
    """Whether some of a folder's files can be a tokenizer's."""
    return any(fnmatch(name, pattern) for name in files for pattern in _NEEDED)


def ids_in(folder: Path) -> dict[str, int]:
    """Token -> id by its tokenizer.json; empty if there is none.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram's pairs of token and score, in the order of their ids
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        return dict(vocabulary) | {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, OSError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"{path} cannot be read ({why}), so which ids its tokens have is not known. Download the file again."
        ) from error


def differing(draft: Path, target: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the draft's own tokenizer whose ids are not the target's, with those ids; empty if it ships none."""
    return {token: index for token, index in ids_in(draft).items() if target.get(token, index) != index}
