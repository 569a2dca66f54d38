"""What the user can change between two messages. Plain values, validated where they are made."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_args, get_type_hints

from dflash_mlx.app.places import Places

MODES = ("auto", "dflash", "plain")
THEMES = ("dark", "light")
_WORDS = {float: "a number", int: "a whole number", str: "a text in quotes", bool: "true or false"}


@dataclass(frozen=True)
class Settings:
    """Settings of one turn; sent to the engine with the question.

    Raises:
        ValueError: a value is outside its range; the text names the value and the range.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 0.0
    """Nucleus sampling; 0 and everything from 1 mean off, as in mlx_lm."""
    min_p: float = 0.0
    """Least share of the top probability; 0 is off."""
    top_k: int = 0
    """Ranks kept; 0 is off."""
    max_tokens: int = 1024
    """Most tokens in one answer; -1 is no limit."""
    block_size: int | None = None
    """Anchor and draft tokens together, at most what the draft was trained with; 1 is plain decoding; None leaves the
    choice to the draft."""
    mode: str = "auto"
    system: str = ""
    """System prompt; empty means the template's own."""
    seed: int | None = None
    thinking: bool | None = None
    """Reason before answering; None is the model's default."""

    def __post_init__(self) -> None:
        # The ranges of dflash_mlx.sampling.SamplingPolicy and dflash_mlx.request.plan, which import MLX; a test
        # keeps the two together. Written so that nan fails too.
        _check(0 <= self.temperature < float("inf"), "temperature", "0 or more and finite", self.temperature)
        _check(self.top_p >= 0, "top_p", "0 (off) or in 0..1 (1 and more are off too)", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "in 0..1", self.min_p)
        _check(self.top_k >= 0, "top_k", "0 (off) or more", self.top_k)
        _check(self.max_tokens >= 1 or self.max_tokens == -1, "max_tokens", "1 or more, or -1", self.max_tokens)
        _check(self.seed is None or 0 <= self.seed < 2**64, "seed", "in 0..2**64-1", self.seed)
        _check(self.block_size is None or self.block_size >= 1, "block_size", "1 (plain) or more", self.block_size)
        _check(self.mode in MODES, "mode", f"one of {', '.join(MODES)}", self.mode)
        if self.mode == "dflash" and self.block_size == 1:
            raise ValueError("block_size 1 is plain decoding, and mode is dflash. Change one of them.")


def _check(good: bool, name: str, wanted: str, value: object) -> None:
    if not good:
        raise ValueError(f"{name} has to be {wanted}, got {value}.")


@dataclass(frozen=True)
class Config:
    """What the user wrote into config.toml; the app never writes it.

    theme = "light"

    [defaults]          # keys of `Settings`; what the command line says comes first
    temperature = 0.7
    thinking = false
    """

    settings: Settings = field(default_factory=Settings)
    theme: str | None = None
    """"dark" or "light"; None if it is not said."""


def from_config(places: Places) -> Config:
    """Read config.toml; all defaults if there is none.

    Raises:
        ValueError: it cannot be read, or has a key or value that means nothing; names file, key and what is allowed.
    """
    path = places.config_file
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}). Make it readable, or move it away.") from error
    except ValueError as error:  # TOML and UTF-8 errors; the first kind names line and column
        raise ValueError(f"{path} is not TOML: {error}. Correct it, or move it away.") from error
    try:
        _known(record, ("theme", "defaults"), "at the top level")
        theme = record.get("theme")
        if theme is not None and theme not in THEMES:
            raise ValueError(f"`theme` has to be one of {', '.join(THEMES)}, got {theme!r}.")
        defaults = record.get("defaults", {})
        if not isinstance(defaults, dict):
            raise ValueError(f"`defaults` has to be a table, [defaults], got {defaults!r}.")
        return Config(_settings(defaults), theme)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _settings(record: Mapping[str, Any]) -> Settings:
    types = get_type_hints(Settings)
    _known(record, tuple(types), "in [defaults]")
    for name, value in record.items():
        allowed = [kind for kind in get_args(types[name]) or (types[name],) if kind is not NoneType]
        if float in allowed:
            allowed.append(int)
        if type(value) not in allowed:  # a bool is an int for isinstance
            wanted = _WORDS[allowed[0]]
            raise ValueError(f"`{name}` in [defaults] has to be {wanted}, got {value!r}.")
    try:
        return Settings(**record)
    except ValueError as error:
        raise ValueError(f"[defaults]: {error}") from error


def _known(record: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for name in record:
        if name not in allowed:
            raise ValueError(f"`{name}` {where} is not a key; the keys there are {', '.join(allowed)}.")
