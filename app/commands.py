"""Slash commands: text in, a frozen dataclass out. Nothing is done here; no unknown one reaches the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.settings import Settings


@dataclass(frozen=True)
class Say:
    """Not a command: send this text to the model."""

    text: str


@dataclass(frozen=True)
class Do:
    """A command without a value."""

    what: Literal["clear", "help", "quit", "regenerate"]


@dataclass(frozen=True)
class Change:
    """Use these settings from the next message on."""

    settings: Settings
    said: str


@dataclass(frozen=True)
class Look:
    """Switch the theme."""

    dark: bool


@dataclass(frozen=True)
class Hint:
    """The input was understood as a command but cannot be done; keep it in the box and say why."""

    text: str


Command: TypeAlias = Say | Do | Change | Look | Hint

_PLAIN: dict[str, Do] = {
    "clear": Do("clear"),
    "new": Do("clear"),
    "r": Do("clear"),
    "help": Do("help"),
    "h": Do("help"),
    "?": Do("help"),
    "quit": Do("quit"),
    "exit": Do("quit"),
    "bye": Do("quit"),
    "q": Do("quit"),
    "regen": Do("regenerate"),
}

USAGE: tuple[tuple[str, str], ...] = (
    ("/clear", "new conversation (Ctrl+L)"),
    ("/regen", "answer the last message again (Ctrl+R)"),
    ("/temp 0.7", "temperature; 0 is greedy"),
    ("/top_p 0.9", "nucleus sampling; 0 is off"),
    ("/max 512", "most tokens in an answer, or off"),
    ("/mode plain", "plain, dflash or auto"),
    ("/block 4", "block size, or auto; 1 is plain"),
    ("/seed 7", "seed for sampling, or off"),
    ("/think off", "reason before answering: on, off or auto"),
    ("/system text", "system prompt; without text it is removed"),
    ("/theme light", "light or dark"),
    ("/quit", "leave (Ctrl+Q)"),
)


def _temp(settings: Settings, value: str) -> Change:
    new = replace(settings, temperature=float(value))
    return Change(new, f"temperature {new.temperature:g}" + (" (greedy)" if new.temperature == 0 else ""))


def _top_p(settings: Settings, value: str) -> Change:
    new = replace(settings, top_p=float(value))
    return Change(new, f"top_p {new.top_p:g}")


def _max(settings: Settings, value: str) -> Change:
    if value == "off":
        return Change(replace(settings, max_tokens=-1), "no limit to the tokens in an answer")
    new = replace(settings, max_tokens=int(value))
    return Change(new, f"at most {new.max_tokens} tokens in an answer")


def _mode(settings: Settings, value: str) -> Change:
    new = replace(settings, mode=value)
    return Change(new, f"mode {value}")


def _block(settings: Settings, value: str) -> Change:
    new = replace(settings, block_size=None if value == "auto" else int(value))
    return Change(new, f"block size {value}")


def _seed(settings: Settings, value: str) -> Change:
    new = replace(settings, seed=None if value == "off" else int(value))
    return Change(new, f"seed {value}")


def _think(settings: Settings, value: str) -> Change:
    if value not in ("on", "off", "auto"):
        raise ValueError(value)
    new = replace(settings, thinking=None if value == "auto" else value == "on")
    return Change(new, f"thinking {value}")


_WITH_VALUE: dict[str, tuple[Callable[[Settings, str], Change], str]] = {
    "temp": (_temp, "/temp 0.7"),
    "top_p": (_top_p, "/top_p 0.9"),
    "max": (_max, "/max 512 or /max off"),
    "mode": (_mode, "/mode auto, /mode dflash or /mode plain"),
    "block": (_block, "/block 4 or /block auto"),
    "seed": (_seed, "/seed 7 or /seed off"),
    "think": (_think, "/think on, /think off or /think auto"),
}


def misfit(settings: Settings, card: ModelCard | None) -> str:
    """Why the loaded pair cannot run these settings, for the user; empty if it can, or if none is loaded yet."""
    if card is None:
        return ""
    if card.draft is None:
        return "mode dflash needs a draft, and none is loaded." if settings.mode == "dflash" else ""
    largest = card.largest_block
    if largest is not None and settings.block_size is not None and settings.block_size > largest:
        return (
            f"block_size has to be in 1..{largest} (1 is plain decoding; {card.draft} was trained with {largest}), "
            f"got {settings.block_size}."
        )
    return ""


def parse(text: str, settings: Settings, card: ModelCard | None = None) -> Command:
    """Understand what was typed. A leading space sends text that begins with a slash."""
    if text.strip() in ("q", "quit", "exit"):
        return Hint("To leave, press Ctrl+Q or type /quit.")
    if not text.startswith("/"):
        return Say(text.strip())
    name, _, value = text[1:].strip().partition(" ")
    value = value.strip()
    if name in _PLAIN:
        return Hint(f"/{name} takes no value.") if value else _PLAIN[name]
    if name == "system":
        return Change(replace(settings, system=value), "system prompt set" if value else "no system prompt")
    if name == "theme":
        known = value in ("dark", "light")
        return Look(value == "dark") if known else Hint("Use /theme dark or /theme light.")
    if name in _WITH_VALUE:
        change, usage = _WITH_VALUE[name]
        if not value:
            return Hint(f"Use {usage}.")
        try:
            made = change(settings, value)
            problem = misfit(made.settings, card) if name in ("block", "mode") else ""
            return Hint(f"{problem} Use {usage}.") if problem else made
        except ValueError as error:
            return Hint(f"{error} Use {usage}." if str(error).endswith(".") else f"Use {usage}.")
    return Hint(f"/{name} is not a command; F1 lists them. A space before the slash sends it as text.")
