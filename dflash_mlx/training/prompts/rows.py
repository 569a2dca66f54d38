"""A row of a .jsonl file or of a data set as a prompt, in the spellings that are common.

They are `prompt`, `instruction` (with `input`), `question`, `query`, `text`, or a conversation in `messages` or
`conversations`, of which the first question is asked. `category` and `topic` are taken over if they are there; without
a topic the text itself decides whether it is held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from dflash_mlx.training.prompts import Prompt, holds_out

SPELLINGS = ("prompt", "instruction", "question", "query", "text")


class Unasked(Exception):
    """A row has no question of a user; the text says what it has instead."""


def prompt_of(row: Any) -> Prompt:
    """Raises Unasked."""
    if isinstance(row, str):
        return _asked(row)
    if not isinstance(row, Mapping):
        raise Unasked("is neither an object nor a text")
    category, topic = str(row.get("category") or "other"), str(row.get("topic") or "")
    for key in ("messages", "conversations", "conversation"):
        if isinstance(row.get(key), list):
            return _of_conversation(row[key], category, topic)
    for key in SPELLINGS:
        value = row.get(key)
        if isinstance(value, list):
            return _of_conversation(value, category, topic)
        if isinstance(value, str) and value.strip():
            more = row.get("input") if key == "instruction" else None
            system = row.get("system")
            return made(f"{value}\n\n{more}" if more else value, category, topic, str(system) if system else None)
    given = [key for key in SPELLINGS if key in row]
    if given:
        raise Unasked(f"has no text in `{given[0]}`")
    raise Unasked(f"has only {shorten(', '.join(map(str, row)), 80)}" if row else "is empty")


def _of_conversation(messages: list[Any], category: str, topic: str) -> Prompt:
    """Raises Unasked."""
    system = None
    for message in messages:
        if not isinstance(message, Mapping):
            raise Unasked("has a message that is no object")
        role = message.get("role") or message.get("from")
        text = message.get("content") or message.get("value")
        if not isinstance(text, str):
            raise Unasked(f"has a message of {role or 'nobody'} whose content is no text")
        if role == "system":
            system = text
        elif role in ("user", "human"):
            return _asked(text, category, topic, system)
    raise Unasked("has a conversation without a message of the user")


def _asked(text: str, category: str = "other", topic: str = "", system: str | None = None) -> Prompt:
    """Raises Unasked."""
    if not text.strip():
        raise Unasked("asks nothing: its question is blank")
    return made(text, category, topic, system)


def made(text: str, category: str = "other", topic: str = "", system: str | None = None) -> Prompt:
    text = text.strip()
    return Prompt(text, category, topic, system, held_out=holds_out(topic or text))
