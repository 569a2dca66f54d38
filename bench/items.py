"""A prompt before any model's template."""

from __future__ import annotations

from dataclasses import dataclass

from .record import Task


@dataclass(frozen=True)
class Item:
    """turns: of the user; behind each but the last comes the model's own answer.

    task, expected, tests: as `record.Prompt`, of the answer to the last turn.
    document, tokens: a text that the turn is about, of which as much is given as makes the prompt `tokens` long; its
        end if `keep_end`, else its beginning.
    """

    name: str
    category: str
    turns: tuple[str, ...]
    task: Task = "text"
    expected: str | None = None
    tests: str | None = None
    document: str | None = None
    tokens: int | None = None
    keep_end: bool = False
