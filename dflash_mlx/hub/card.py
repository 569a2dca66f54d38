"""Model cards: what a model is derived from, as its README.md or its repository's page says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub as hub

from dflash_mlx.hub.cache import cached_file
from dflash_mlx.hub.errors import explained

TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Card:
    """bases: repositories that it names; relation: quantized, finetune, merge or adapter, None if it does not say."""

    bases: tuple[str, ...] = ()
    relation: str | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any], tags: Iterable[str] = ()) -> Card:
        """From the front matter of a README.md, and a repository's tags, in which the hub says what it inferred."""
        given = data.get("base_model") or ()
        bases = (given,) if isinstance(given, str) else tuple(str(base) for base in given)
        relation = data.get("base_model_relation")
        if relation is None and len(bases) == 1:
            tagged = [tag.split(":") for tag in tags]  # base_model:quantized:org/name
            relation = next((parts[1] for parts in tagged if parts[0] == "base_model" and len(parts) == 3), None)
        return cls(bases, str(relation) if relation else "merge" if len(bases) > 1 else None)


def read_card(path: Path) -> Card:
    """The card in a README.md; an empty one if there is none or it cannot be read."""
    try:
        return Card.of(hub.metadata_load(path) or {})
    except Exception:  # free text: yaml raises a dozen kinds, and a broken card is no reason not to load a model
        return Card()


def fetch_card(name: str, ask: bool = True) -> Card:
    """A repository's card: the copy in the hub's cache, else the hub's, or without `ask` an empty one.

    Raises:
        FetchError: the hub has to be asked and does not answer, or refuses.
    """
    with explained(name):
        held = cached_file(name, "README.md")
        if held is not None:
            return read_card(held)
        if not ask:
            return Card()
        info = hub.model_info(name, timeout=TIMEOUT_S)
    return Card.of(info.card_data.to_dict() if info.card_data else {}, info.tags or ())
