"""Where prompts come from: the built-in set, a file, or a data set of the Hugging Face hub."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub as hub

from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.errors import explained
from dflash_mlx.training.prompts import Prompt, demo
from dflash_mlx.training.prompts.rows import SPELLINGS, Unasked, made, prompt_of

DEMO = "demo"
DEMO_COUNT = 24000
_FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")


class PromptsError(DFlashError):
    """Prompts cannot be read."""


@dataclass
class _Skipped:
    """Rows of a file without a question: how many, of how many, and what is wrong with the first."""

    file: Path
    rows: int = 0
    count: int = 0
    first: str = ""

    def line(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        were = "was" if self.count == 1 else "were"
        return f"{self.count} of {rows} of {self.file.name} {were} skipped; the first, {self.first}"


def read_prompts(
    name: str, count: int | None = None, seed: int = 0, tell: Callable[[str], None] = lambda line: None
) -> list[Prompt]:
    """Up to `count` distinct prompts in an order that the seed decides, or all.

    Args:
        name: "demo", a file (.jsonl, .json, .txt with one prompt a line, .parquet), or the name of a data set.
        tell: called with a line for each file of which rows are skipped.
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
    skipped = [_Skipped(file) for file in files]
    found = list(dict.fromkeys(prompt for each in skipped for prompt in _of_file(each.file, each)))
    lines = [each.line() for each in skipped if each.count]
    if not found:
        needed = f"Rows need one of {', '.join(SPELLINGS)}, or messages with roles."
        needed = "Write one prompt a line." if name.endswith(".txt") else needed
        raise PromptsError(
            " ".join([f"{name} has no prompts that can be read.", *(f"{line}." for line in lines), needed])
        )
    for line in lines:
        tell(f"note: {line}")
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


def _of_file(path: Path, skipped: _Skipped) -> Iterator[Prompt]:
    """Raises PromptsError."""
    if path.suffix == ".txt":
        with _readable(path):
            lines = _lines(path)
        yield from (made(line) for line in lines)
        return
    with _readable(path):
        rows = list(_rows(path))
    unit = "line" if path.name.endswith((".jsonl", ".jsonl.gz")) else "row"
    skipped.rows = len(rows)
    for number, row in rows:
        try:
            yield prompt_of(row)
        except Unasked as reason:
            skipped.count += 1
            skipped.first = skipped.first or f"{unit} {number}, {reason}"


def read_rows(path: Path) -> list[Any]:
    """The rows of a .jsonl, .jsonl.gz, .json or .parquet file as they are.

    Raises:
        PromptsError: it cannot be read; says why and where.
    """
    with _readable(path):
        return [row for _, row in _rows(path)]


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


def _rows(path: Path) -> Iterable[tuple[int, Any]]:
    """With its number, from 1 on: of its line in a .jsonl file, of the row in others."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise PromptsError(
                f"{path.name} is a Parquet file, which takes pyarrow to read. Install it (pip install pyarrow), or "
                "give the prompts as .jsonl."
            ) from None
        return enumerate(parquet.read_table(path).to_pylist(), 1)
    if path.suffix == ".json":
        whole = json.loads(_text(path))
        return enumerate(whole if isinstance(whole, list) else [whole], 1)
    return _parsed(path)


def _parsed(path: Path) -> Iterator[tuple[int, Any]]:
    """Of a .jsonl file. Raises ValueError with the number of the line."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from error


def _text(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")


def _lines(path: Path) -> list[str]:
    """Lines that are not blank. `str.splitlines` would cut at U+2028 and others, which stand within JSON strings."""
    return [line for line in _text(path).split("\n") if line.strip()]
