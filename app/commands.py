"""Slash commands: text in, a frozen dataclass out. Nothing is done here; no unknown one reaches the model.

Commands that do something come from the table in `actions`, those that change a setting from the one below. ollama's
`/set` is another spelling of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from dflash_mlx.app import actions
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.settings import Settings

QUOTES = '"""'
"""Opens and closes a text of many lines, as in ollama."""


@dataclass(frozen=True)
class Say:
    """Not a command: send this text to the model."""

    text: str


@dataclass(frozen=True)
class Run:
    """An action of the table, with what was written behind its name."""

    name: str
    value: str = ""


@dataclass(frozen=True)
class Change:
    """Use these settings from the next message on."""

    settings: Settings
    said: str


@dataclass(frozen=True)
class Hint:
    """The input was understood as a command but cannot be done; keep it in the box and say why."""

    text: str


Command: TypeAlias = Say | Run | Change | Hint


@dataclass(frozen=True)
class Setting:
    """A setting that a command changes. `usage` is an example; `meaning` is for the help page."""

    usage: str
    meaning: str
    change: Callable[[Settings, str], Change]


def _temp(settings: Settings, value: str) -> Change:
    new = replace(settings, temperature=float(value))
    return Change(new, f"temperature {new.temperature:g}" + (" (greedy)" if new.temperature == 0 else ""))


def _top_p(settings: Settings, value: str) -> Change:
    new = replace(settings, top_p=float(value))
    return Change(new, f"top_p {new.top_p:g}")


def _top_k(settings: Settings, value: str) -> Change:
    new = replace(settings, top_k=int(value))
    return Change(new, f"top_k {new.top_k}")


def _min_p(settings: Settings, value: str) -> Change:
    new = replace(settings, min_p=float(value))
    return Change(new, f"min_p {new.min_p:g}")


def _max(settings: Settings, value: str) -> Change:
    if value == "off":
        return Change(replace(settings, max_tokens=-1), "no limit to the tokens in an answer")
    new = replace(settings, max_tokens=int(value))
    return Change(new, f"at most {new.max_tokens} tokens in an answer")


def _mode(settings: Settings, value: str) -> Change:
    return Change(replace(settings, mode=value), f"mode {value}")


def _block(settings: Settings, value: str) -> Change:
    return Change(replace(settings, block_size=None if value == "auto" else int(value)), f"block size {value}")


def _seed(settings: Settings, value: str) -> Change:
    return Change(replace(settings, seed=None if value == "off" else int(value)), f"seed {value}")


def _think(settings: Settings, value: str) -> Change:
    if value not in ("on", "off", "auto"):
        raise ValueError(value)
    return Change(replace(settings, thinking=None if value == "auto" else value == "on"), f"thinking {value}")


SETTINGS: dict[str, Setting] = {
    "temp": Setting("/temp 0.7", "temperature; 0 is greedy", _temp),
    "top_p": Setting("/top_p 0.9", "nucleus sampling; 0 is off", _top_p),
    "top_k": Setting("/top_k 40", "ranks kept; 0 is off", _top_k),
    "min_p": Setting("/min_p 0.05", "least share of the top probability; 0 is off", _min_p),
    "max": Setting("/max 512 or /max off", "most tokens in an answer", _max),
    "mode": Setting("/mode auto, /mode dflash or /mode plain", "whether drafts are used", _mode),
    "block": Setting("/block 4 or /block auto", "block size; 1 is plain", _block),
    "seed": Setting("/seed 7 or /seed off", "seed for sampling", _seed),
    "think": Setting("/think on, /think off or /think auto", "reason before answering", _think),
}

OLLAMA_PARAMETERS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "num_predict": "max",
    "seed": "seed",
}
"""ollama's names of parameters that the chat has."""

HOW_TO_QUIT = "To leave, press Ctrl+Q or type /quit."
SET_USAGE = "Use /set parameter NAME VALUE, /set system TEXT, /set think, /set nothink, /set verbose or /set quiet."


def setting_rows() -> tuple[tuple[str, str], ...]:
    """(command, what it sets), for the help page and for completion."""
    rows = [(setting.usage.split(" or ")[0].split(",")[0], setting.meaning) for setting in SETTINGS.values()]
    return (*rows, ("/set …", "as in ollama: parameter, system, think, nothink, verbose, quiet"))


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


def unfinished(text: str) -> bool:
    '''Whether `text` opened a `"""` that is not closed yet, so that Enter is a new line.'''
    start = text.lstrip()
    opened = start.startswith(QUOTES) or (start.startswith(("/system", "/set system")) and QUOTES in start)
    return opened and start.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    '''What stands between `"""` and `"""`, or the text as it is.'''
    text = text.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def completions(text: str) -> tuple[tuple[str, str], ...]:
    """Commands that begin as `text` does, with what they do; none unless a command's name is being written."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return ()
    rows = (*actions.command_rows(), *setting_rows())
    return tuple(row for row in rows if row[0].split()[0].startswith(text))


def parse(text: str, settings: Settings, card: ModelCard | None = None) -> Command:
    """Understand what was typed. A leading space sends text that begins with a slash."""
    if text.strip() in ("q", "quit", "exit"):
        return Hint(HOW_TO_QUIT)
    if not text.startswith("/"):
        return Say(unquoted(text))
    name, _, value = text[1:].strip().partition(" ")
    value = value.strip()
    if name == "set":
        return _set(value, settings, card)
    if name == "show" and value not in ("", "info", "parameters", "system"):
        return Hint(f"/show {value} is not known here; use /show info, /show parameters or /show system.")
    if name == "theme" and value not in ("", "dark", "light"):
        return Hint("Use /theme dark or /theme light.")
    if name == "system" and value:
        return _system(value, settings)
    if action := actions.BY_COMMAND.get(name):
        if value and not action.takes and not (name == "?" and value == "shortcuts"):
            return Hint(f"/{name} takes no value.")
        if not value and action.takes and not action.takes.startswith("["):
            return Hint(f"Use {action.command}.")
        return Run(action.name, unquoted(value))
    if name in SETTINGS:
        return _change(name, value, settings, card)
    return Hint(f"/{name} is not a command; F1 lists them. A space before the slash sends it as text.")


def _change(name: str, value: str, settings: Settings, card: ModelCard | None) -> Command:
    setting = SETTINGS[name]
    if not value:
        return Hint(f"Use {setting.usage}.")
    try:
        made = setting.change(settings, value)
        problem = misfit(made.settings, card) if name in ("block", "mode") else ""
        return Hint(f"{problem} Use {setting.usage}.") if problem else made
    except ValueError as error:
        return Hint(f"{error} Use {setting.usage}." if str(error).endswith(".") else f"Use {setting.usage}.")


def _system(value: str, settings: Settings) -> Command:
    text = unquoted(value)
    return Change(replace(settings, system=text), "system prompt set" if text else "no system prompt")


def _set(value: str, settings: Settings, card: ModelCard | None) -> Command:
    """ollama's `/set`."""
    what, _, rest = value.partition(" ")
    rest = rest.strip()
    if what == "parameter":
        name, _, number = rest.partition(" ")
        if name in OLLAMA_PARAMETERS:
            return _change(OLLAMA_PARAMETERS[name], number.strip(), settings, card)
        if name == "num_ctx":
            return Hint("num_ctx has no meaning here: the context grows with the chat, up to the model's own length.")
        return Hint(f"/set parameter knows {', '.join(OLLAMA_PARAMETERS)}.")
    if what == "system" and rest:
        return _system(rest, settings)
    if what in ("think", "nothink") and not rest:
        return _change("think", "on" if what == "think" else "off", settings, card)
    if what in ("verbose", "quiet") and not rest:
        return Run("verbose", "on" if what == "verbose" else "off")
    if what in ("history", "nohistory", "wordwrap", "nowordwrap", "format", "noformat"):
        return Hint(f"/set {what} has no meaning here: chats are saved, and text wraps. {SET_USAGE}")
    return Hint(SET_USAGE)
