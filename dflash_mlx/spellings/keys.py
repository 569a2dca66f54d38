"""Looks a key up wherever a config may keep it, insists that the places agree, and checks its type.

JSON has no schema: a number may come as text, a list as a number, `true` as 1. Whatever a file holds, what comes out
of here is of the type that was asked for, or a `CheckpointError` that names the key.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

from dflash_mlx.config import FIX
from dflash_mlx.errors import CheckpointError

LARGEST = 2**31 - 1
_LARGEST_FLOAT = 1e300  # below what float() takes; neither NaN nor infinity is at most this
NEEDED: Any = object()  # no default


def bad(what: str) -> CheckpointError:
    """An error of the config, with what to do."""
    return CheckpointError(f"Draft config: {what}. {FIX}")


def shown(value: object) -> str:
    """A value of the file, cut short if it is long."""
    return reprlib.repr(value)


def is_integer(value: object, low: int, high: int = LARGEST) -> TypeGuard[int]:
    return type(value) is int and low <= value <= high


class Keys:
    """Values of a config, looked up in several places.

    places: (how messages call it, what is there), the more specific one first.
    """

    def __init__(self, *places: tuple[str, Mapping[str, Any]]) -> None:
        self._places = places
        self.asked: set[str] = set()  # every name that was looked up

    def find(self, *names: str) -> Any:
        """The value under these names (spellings of one thing), or None; null counts as absent.

        Raises:
            CheckpointError: two of them are there and differ.
        """
        self.asked.update(names)
        held = [(name, where, place.get(name)) for where, place in self._places for name in names]
        held = [entry for entry in held if entry[2] is not None]
        for name, where, value in held[1:]:
            first, its_place, other = held[0]
            if value != other:
                raise CheckpointError(
                    f"Draft config: `{first}` is {shown(other)} {its_place} and `{name}` is {shown(value)} {where}. "
                    f"One of them is wrong, and a wrong value silently costs acceptance. {FIX}"
                )
        return held[0][2] if held else None

    def needed(self, *names: str) -> Any:
        value = self.find(*names)
        if value is None:
            places = " and ".join(where for where, _ in self._places)
            raise CheckpointError(
                f"Draft config: `{names[0]}` is missing ({places}). It cannot be guessed without spoiling the draft. "
                "Get the config.json from the draft's own repository."
            )
        return value

    def integer(self, *names: str, default: Any = NEEDED, low: int = 1, high: int = LARGEST) -> Any:
        """An int in low..high; the default, if there is one and the key is absent."""
        value = self.needed(*names) if default is NEEDED else self.find(*names)
        if value is None:
            return default
        if not is_integer(value, low, high):
            end = f"{low} or more" if high == LARGEST else f"in {low}..{high}"
            raise bad(f"`{names[0]}` has to be an integer, {end}, got {shown(value)}")
        return value

    def number(self, *names: str, default: Any = NEEDED) -> Any:
        """A finite float above 0."""
        value = self.needed(*names) if default is NEEDED else self.find(*names)
        return default if value is None else positive(names[0], value)

    def flag(self, *names: str, default: Any = None) -> Any:
        value = self.find(*names)
        if value is not None and not isinstance(value, bool):
            raise bad(f"`{names[0]}` has to be true or false, got {shown(value)}")
        return default if value is None else value

    def integers(self, name: str, low: int = 0) -> tuple[int, ...]:
        value = self.needed(name)
        if not isinstance(value, list) or not value or not all(is_integer(each, low) for each in value):
            raise bad(f"`{name}` has to be a list of integers, {low} or more, got {shown(value)}")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Empty if absent."""
        value = self.find(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise bad(f"`{name}` has to be a list of names, got {shown(value)}")
        return tuple(value)

    def table(self, name: str) -> Mapping[str, Any]:
        """An object; empty if absent."""
        value = self.find(name)
        if value is not None and not isinstance(value, Mapping):
            raise bad(f"`{name}` has to be an object, got {shown(value)}")
        return value or {}


def positive(name: str, value: object) -> float:
    """A finite float above 0.

    Raises:
        CheckpointError: it is something else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST_FLOAT:
        return float(value)
    raise bad(f"`{name}` has to be a number above 0, got {shown(value)}")
