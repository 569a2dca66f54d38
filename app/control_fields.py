"""The fields of the controls: each is one of the `Settings`, as text and back. The ranges are the settings' own.

No Textual and no MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.app.commands import misfit
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.settings import MODES, Settings

THINKING = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True)
class Field:
    """One setting.

    name:   of the attribute of `Settings`.
    parse:  text to value; ValueError if it is none.
    none:   the word for "not set", which an empty field means too.
    unset:  the value that this word stands for.
    words:  if the field is a choice.
    """

    name: str
    label: str
    meaning: str
    parse: Callable[[str], Any] = str
    none: str = ""
    unset: Any = None
    words: tuple[str, ...] = ()

    def show(self, settings: Settings) -> str:
        value = getattr(settings, self.name)
        if self.name == "thinking":
            return next(word for word, meant in THINKING.items() if meant is value)
        if value == self.unset and self.none:
            return self.none
        return f"{value:g}" if isinstance(value, float) else str(value)

    def read(self, text: str) -> Any:
        """The value that `text` stands for.

        Raises:
            ValueError: it is not one, in words for the user.
        """
        text = text.strip()
        if self.none and text in ("", self.none):
            return self.unset
        try:
            return self.parse(text)
        except ValueError:
            kind = "a number" if self.parse is float else "a whole number"
            either = f"{self.none} or " if self.none else ""
            raise ValueError(f"{self.label} has to be {either}{kind}, got {text or 'nothing'}.") from None


FIELDS: tuple[Field, ...] = (
    Field("mode", "mode", "auto: drafts where they can be used", words=MODES),
    Field("block_size", "block size", "auto, or a number; 1 is plain", int, "auto"),
    Field("temperature", "temperature", "0 is greedy", float),
    Field("top_p", "top-p", "nucleus sampling; 0 is off", float, "off", 0.0),
    Field("top_k", "top-k", "ranks kept; 0 is off", int, "off", 0),
    Field("min_p", "min-p", "least share of the top probability", float, "off", 0.0),
    Field("seed", "seed", "for sampling; off draws a new one", int, "off"),
    Field("max_tokens", "max tokens", "in one answer; off is no limit", int, "off", -1),
    Field("thinking", "thinking", "reason before answering", THINKING.__getitem__, words=tuple(THINKING)),
)


def meaning(field: Field, card: ModelCard | None) -> str:
    """What a field is for, with the limits of the loaded pair."""
    if field.name == "block_size" and card is not None and card.largest_block is not None:
        return f"auto, or 1..{card.largest_block}; 1 is plain decoding"
    if field.name == "mode" and card is not None and card.draft is None:
        return "no draft is loaded: auto is plain"
    if field.name == "thinking" and card is not None and not card.thinks:
        return "this model's template has no switch for it"
    return field.meaning


def problem(field: Field, text: str, card: ModelCard | None) -> str:
    """Why `text` cannot be this field's value, whatever the others are; empty if it can."""
    try:
        alone = replace(Settings(), **{field.name: field.read(text)})
    except ValueError as error:
        return str(error)
    return misfit(alone, card)


def build(settings: Settings, texts: Mapping[str, str], card: ModelCard | None) -> Settings | dict[str, str]:
    """`settings` with what the fields say, or what is wrong, by the field's name.

    Args:
        texts: of every field, by name.
    """
    problems = {field.name: why for field in FIELDS if (why := problem(field, texts[field.name], card))}
    if problems:
        return problems
    try:
        return replace(settings, **{field.name: field.read(texts[field.name]) for field in FIELDS})
    except ValueError as error:  # each is right and two of them do not go together: block size 1 and mode dflash
        return {"block_size": str(error)}
