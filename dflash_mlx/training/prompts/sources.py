"""Where prompts come from: the built-in set, a file, or a data set of the Hugging Face hub.

A row of a .jsonl file or of a data set is read in the spellings that are common: `prompt`, `instruction` (with
`input`), `question`, `text`, or a conversation in `messages` or `conversations`, of which the first question is asked.
`category` and `topic` are taken over if they are there; without a topic the text itself decides whether it is held out.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub as hub

from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.errors import explained
from dflash_mlx.training.prompts import Prompt, demo, holds_out

DEMO = "demo"
DEMO_COUNT = 24000
_FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")
_SPELLINGS = ("prompt", "instruction", "question", "query", "text")


class PromptsError(DFlashError):
    """Prompts cannot be read."""


def read_prompts(name: str, count: int | None = None, seed: int = 0) -> list[Prompt]:
    """Up to `count` distinct prompts in an order that the seed decides, or all.

    Args:
        name: "demo", a file (.jsonl, .json, .txt with one prompt a line, .parquet), or the name of a data set.
    Raises:
        PromptsError, FetchError: they cannot be had; says what to do.
        ValueError: `count` is out of range.
    """
    if count is not None and count < 1:
        raise ValueError(f"`count` has to be 1 or more, got {count}.")
    if name == DEMO:
        return demo.prompts(count or DEMO_COUNT, seed)
    path = Path(name).expanduser()
    if path.is_file():
        files = [path]
        if not path.name.endswith(_FILES):
            raise PromptsError(
                f"{name} is none of the files that are read here ({', '.join(_FILES)}), so nothing says where a prompt "
                "begins and ends. Give a .jsonl file, or a .txt file with one prompt a line."
            )
    elif path.exists() or name.endswith(_FILES) or name.startswith((".", "/", "~")):
        raise PromptsError(f"{name} is no file with prompts. Give a .jsonl or .txt file, `demo`, or a data set's name.")
    else:
        files = list(_downloaded(name))
    found = list(dict.fromkeys(prompt for file in files for prompt in _of_file(file)))
    if not found:
        needed = f"Rows need one of {', '.join(_SPELLINGS)}, or messages with roles."
        needed = "Write one prompt a line." if name.endswith(".txt") else needed
        raise PromptsError(f"{name} has no prompts that can be read. {needed}")
    random.Random(f"{seed} order").shuffle(found)
    return found[:count]


def _downloaded(name: str) -> Iterator[Path]:
    """The files of a data set, of its training split if the names tell."""
    with explained(name):
        names = [file for file in hub.list_repo_files(name, repo_type="dataset") if file.endswith(_FILES[:-1])]
    train = [file for file in names if "train" in file]
    if not names:
        raise PromptsError(
            f"The data set {name} has no files that are read here ({', '.join(_FILES)}). Choose another."
        )
    for file in train or names:
        with explained(name):
            yield Path(hub.hf_hub_download(name, file, repo_type="dataset"))


def _of_file(path: Path) -> Iterator[Prompt]:
    """Raises PromptsError."""
    if path.suffix == ".txt":
        with _readable(path):
            lines = _lines(path)
        yield from (_made(line) for line in lines)
        return
    for row in read_rows(path):
        if (prompt := _of_row(row)) and prompt.text:
            yield prompt


def read_rows(path: Path) -> list[Any]:
    """The rows of a .jsonl, .jsonl.gz, .json or .parquet file as they are.

    Raises:
        PromptsError: it cannot be read; says why and where.
    """
    with _readable(path):
        return list(_rows(path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise PromptsError(
            f"{path} is not UTF-8: line {line} has the byte 0x{error.object[error.start]:02x}. Its prompts would be "
            "others than were written. Save the file as UTF-8."
        ) from error
    except (ValueError, OSError) as error:
        raise PromptsError(f"{path} cannot be read ({error}). Check the file.") from error


def _rows(path: Path) -> Iterable[Any]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise PromptsError(
                f"{path.name} is a Parquet file, which takes pyarrow to read. Install it (pip install pyarrow), or "
                "give the prompts as .jsonl."
            ) from None
        return parquet.read_table(path).to_pylist()
    if path.suffix == ".json":
        whole = json.loads(_text(path))
        return whole if isinstance(whole, list) else [whole]
    return _parsed(path)


def _parsed(path: Path) -> Iterator[Any]:
    """Of a .jsonl file. Raises ValueError with the number of the line."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from error


def _text(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")


def _lines(path: Path) -> list[str]:
    """Lines that are not blank. `str.splitlines` would cut at U+2028 and others, which stand within JSON strings."""
    return [line for line in _text(path).split("\n") if line.strip()]


def _of_row(row: Any) -> Prompt | None:
    """None where there is no question of a user."""
    if isinstance(row, str):
        return _made(row)
    if not isinstance(row, Mapping):
        return None
    category, topic = str(row.get("category") or "other"), str(row.get("topic") or "")
    for key in ("messages", "conversations", "conversation"):
        if isinstance(row.get(key), list):
            return _of_conversation(row[key], category, topic)
    for key in _SPELLINGS:
        value = row.get(key)
        if isinstance(value, list):
            return _of_conversation(value, category, topic)
        if isinstance(value, str) and value.strip():
            more = row.get("input") if key == "instruction" else None
            system = row.get("system")
            return _made(f"{value}\n\n{more}" if more else value, category, topic, str(system) if system else None)
    return None


def _of_conversation(messages: list[Any], category: str, topic: str) -> Prompt | None:
    system = None
    for message in messages:
        if not isinstance(message, Mapping):
            return None
        role = message.get("role") or message.get("from")
        text = message.get("content") or message.get("value")
        if not isinstance(text, str):
            return None
        if role == "system":
            system = text
        elif role in ("user", "human"):
            return _made(text, category, topic, system)
    return None


def _made(text: str, category: str = "other", topic: str = "", system: str | None = None) -> Prompt:
    text = text.strip()
    return Prompt(text, category, topic, system, held_out=holds_out(topic or text))
