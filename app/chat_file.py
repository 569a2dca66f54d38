"""The file of one chat: a head, then what happened, a line each. Reading it again is doing it again.

    {"format":"dflash-metal chat","version":1,"created":"2026-03-01T09:00:00+00:00","model":"demo","system":""}
    {"op":"ask","turn":1,"at":"...","user":"Hi"}                              a question, perhaps with another model
    {"op":"grow","turn":1,"parts":[["answer","draft","Hel"]]}                 what the answer has more
    {"op":"end","turn":1,"at":"...","parts":[...],"state":"stop","closing":"...","numbers":{...}}
    {"op":"drop","turn":1}                                                    undo, regenerate
    {"op":"title","text":"..."}   {"op":"system","text":"..."}
    {"op":"unsent","waiting":["..."],"box":"..."}                             written, not sent: all of it, as it is now

Turns are numbered by the file, from 1, and never twice. A line that is not understood is skipped and counted. A
change that older readers would get wrong takes a new `VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from dflash_mlx.app.conversation import Conversation, Turn
from dflash_mlx.app.lines import StoreError, decode, reason
from dflash_mlx.app.messages import Kind, Numbers, Origin, Part, Reason

FORMAT = "dflash-metal chat"
VERSION = 1
INTERRUPTED = "the program ended before the answer did; this much was saved"
_LONGEST_HEAD = 1 << 24
_GROW = b'{"op":"grow",'
_ENDS = (*get_args(Reason), "failed")


@dataclass(frozen=True)
class Unsent:
    """What was written and not sent: messages that waited, the next one first, and what stood in the box."""

    waiting: tuple[str, ...] = ()
    box: str = ""


@dataclass
class Saved:
    """What a file says."""

    created: datetime
    changed: datetime
    """Of the last question or answer."""
    model: str
    system: str
    title: str = ""
    """As the user gave it; empty if they did not."""
    conversation: Conversation = field(default_factory=Conversation)
    unsent: Unsent = Unsent()
    last: int = 0
    """The highest turn number in the file."""
    damaged: int = 0
    """Lines that were skipped."""


def read(path: Path, *, answers: bool = True) -> Saved:
    """Read a chat. Its turns get the numbers ..., -2, -1, so that they are no job's.

    Args:
        answers: read what the answers say, which is nearly all of a file; a list needs none of it.
    Raises:
        StoreError: it cannot be read, is no chat, or is one of a newer version.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is no file.")
    try:
        with path.open("rb") as file:
            saved = _head(path, file.readline(_LONGEST_HEAD))
            for line in file:
                if line.endswith(b"\n") and (answers or not line.startswith(_GROW)):  # without an end it was cut off
                    saved.damaged += not _apply(saved, decode(line))
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({reason(error)}).") from error
    _close_open_turn(saved.conversation)
    for turn in saved.conversation.turns:
        turn.number -= saved.last + 1
    return saved


def head(created: datetime, model: str, system: str) -> dict[str, Any]:
    """The first line."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": created.isoformat(),
        "model": model,
        "system": system,
    }


def end(number: int, at: datetime, parts: list[list[str]], turn: Turn) -> dict[str, Any]:
    """The last line of a turn. parts: what no line has said yet."""
    numbers = None if turn.numbers is None else asdict(turn.numbers)
    record = {"op": "end", "turn": number, "at": at.isoformat(), "parts": parts, "state": turn.state}
    return {**record, "closing": turn.closing, "numbers": numbers}


def unsent(what: Unsent) -> dict[str, Any]:
    """In the place of every such line before it."""
    return {"op": "unsent", "waiting": what.waiting, "box": what.box}


def _head(path: Path, line: bytes) -> Saved:
    record = decode(line) if line.endswith(b"\n") else None
    if record is None or record.get("format") != FORMAT:
        raise StoreError(f"{path} is not a saved chat.")
    version = record.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise StoreError(
            f"{path} was written by a newer dflash-metal (format {version}, this one reads up to {VERSION}). "
            "Update dflash-metal to open it; it was left as it is."
        )
    try:
        created = _time(record, "created")
        return Saved(created, created, _text(record, "model"), _text(record, "system"))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} has a damaged first line, so it cannot be opened.") from error


def _apply(saved: Saved, record: Mapping[str, Any] | None) -> bool:
    """Do what a line says; False, and nothing is done, if it says nothing that can be understood."""
    if record is None:
        return False
    try:
        match record["op"]:
            case "title":
                saved.title = _text(record, "text")
            case "system":
                saved.system = _text(record, "text")
            case "unsent":
                saved.unsent = Unsent(_texts(record, "waiting"), _text(record, "box"))
            case "ask" | "grow" | "end" | "drop":
                _apply_turn(saved, record, record["op"])
            case _:
                return False
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _apply_turn(saved: Saved, record: Mapping[str, Any], op: str) -> None:
    number, talk = record["turn"], saved.conversation
    if type(number) is not int:
        raise TypeError(number)
    if op == "ask":
        user, at, model = _text(record, "user"), _time(record, "at"), _text(record, "model", saved.model)
        if number <= saved.last:
            raise ValueError(number)
        _close_open_turn(talk)
        talk.ask(user, number)
        saved.last, saved.changed, saved.model = number, at, model
    elif op == "grow":
        talk.append(number, _parts(record))
    elif op == "end":
        parts, at, closing = _parts(record), _time(record, "at"), _text(record, "closing", "")
        state, numbers = record["state"], _numbers(record.get("numbers"))
        if state not in _ENDS:
            raise ValueError(state)
        talk.append(number, parts)
        if talk.finish(number, state, closing, numbers) is not None:
            saved.changed = at
    else:
        talk.turns = [turn for turn in talk.turns if turn.number != number]


def _close_open_turn(talk: Conversation) -> None:
    turn = talk.open_turn
    if turn is not None:
        talk.finish(turn.number, "cancelled", INTERRUPTED)


def _text(record: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = record[key] if default is None else record.get(key, default)
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def _texts(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    texts = record[key]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(key)
    return tuple(texts)


def _time(record: Mapping[str, Any], key: str) -> datetime:
    time = datetime.fromisoformat(_text(record, key))
    if time.tzinfo is None:
        raise ValueError(key)  # it could not be compared with the others
    return time


def _parts(record: Mapping[str, Any]) -> list[Part]:
    parts = [Part(kind, origin, text) for kind, origin, text in record["parts"]]
    for part in parts:
        if part.kind not in get_args(Kind) or part.origin not in get_args(Origin) or not isinstance(part.text, str):
            raise ValueError(part)
    return parts


def _numbers(record: object) -> Numbers | None:
    """What this version knows of the numbers; another one may have written more, or less."""
    if record is None:
        return None
    if not isinstance(record, Mapping):
        raise TypeError(record)
    known = {f.name for f in fields(Numbers)}
    return Numbers(**{name: _frozen(value) for name, value in record.items() if name in known})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
