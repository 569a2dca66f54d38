"""What is known of a trained draft, for its card: target, licence, data, training and evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub as hub

from dflash_mlx.hub.names import cached_repository
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.training.recipe import Recipe

_DEMO_BASE, _DEMO_LICENCE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"


@dataclass(frozen=True)
class TargetFacts:
    """The target of a draft.

    name: how `load` is asked for it; of a folder its name only. repository: on the hub, if it is known. licence: as
    its card says; None: it does not.
    """

    name: str
    repository: str | None = None
    revision: str | None = None
    dtype: str | None = None
    licence: str | None = None

    @classmethod
    def of(cls, identity: Mapping[str, Any], folder: Path | None) -> TargetFacts:
        """From `target_identity.identity`, and from the README.md and the config.json of the folder that it is in."""
        name, revision, dtype = str(identity["name"]), identity.get("revision"), identity.get("dtype")
        if name == DEMO:
            return cls(DEMO, _DEMO_BASE, None, dtype, _DEMO_LICENCE)
        local = Path(name).expanduser()
        if not local.exists():
            return cls(name, name, revision, dtype, licence_in(folder))
        return cls(local.resolve().name, cached_repository(str(local.resolve())), revision, dtype, licence_in(local))


def licence_in(folder: Path | None) -> str | None:
    """What the front matter of a model's README.md, or its config.json, names as its licence; None if neither does."""
    if folder is None:
        return None
    found: Any = None
    try:
        found = (hub.metadata_load(folder / "README.md") or {}).get("license")
    except Exception:  # no file, or free text: yaml raises a dozen kinds, and a broken card names no licence
        found = None
    if found is None:
        try:
            found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("license")
        except (OSError, ValueError, AttributeError):
            return None
    names = found if isinstance(found, list) else [found]
    return ", ".join(names) if names and all(isinstance(name, str) and name for name in names) else None


@dataclass(frozen=True)
class Stored:
    """How weights are stored: the layers' matrices in `bits` if given (groups of `group_size`), others in `dtype`.

    bits: 4 or 8. dtype: "float32" or "bfloat16".
    """

    dtype: str = "bfloat16"
    bits: int | None = None
    group_size: int = 64

    def __str__(self) -> str:
        packed = f"the layers' matrices in {self.bits} bits (groups of {self.group_size}), the rest in "
        return (packed if self.bits is not None else "") + self.dtype


@dataclass(frozen=True)
class About:
    """What is known of a draft; None is unknown, and the card says so.

    data: manifest of its data set. answers, tokens: that it learned from, tokens without the prompts'. usable: answers
    that a longer training would have learned from. row_scale: by what the rows of the target's embedding are multiplied
    in a block. recipe: with what was settled. steps, seconds: of training. evaluation: a record of the log, of held-out
    prompts.
    """

    target: TargetFacts
    data: Mapping[str, Any] | None = None
    answers: int | None = None
    tokens: int | None = None
    usable: int | None = None
    row_scale: float = 1.0
    recipe: Recipe | None = None
    steps: int | None = None
    seconds: float | None = None
    evaluation: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
