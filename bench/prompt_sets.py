"""Sets of prompts, and how a model is given them.

offline             48 of our own in six categories, which come with the package: chat, code, math, summarise,
                    edit, json; each is a set by its name too
demo                those that the demo's table is made of
gsm8k, ...          public sets (`public_sets`), from the hub; gsm8k:FILE from a file
context:N[:FILE]    as long as N tokens, for curves over the context
FILE                .jsonl, .json or .parquet: `prompt` or `turns`, if wanted `document` (a text that the prompt is
                    about), `name`, `category`, `task`, `answer` and `tests` (as `record.Prompt`)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dflash_mlx.cli import chat_ids
from dflash_mlx.templates import render
from dflash_mlx.training.prompts.sources import read_rows

from . import contexts, public_sets
from .form import BenchError
from .items import Item
from .record import Prompt, Task

SEED = 42  # z-lab's
OFFLINE = ("chat", "code", "math", "summarise", "edit", "json")
OWN = ("offline", "demo", *OFFLINE)
_HERE = Path(__file__).parent / "prompts"
_FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
Answer = Callable[[Prompt], str]


@dataclass(frozen=True)
class Rendering:
    """How items become ids. raw: without the chat template. thinking: its switch, None for the model's default."""

    raw: bool = False
    thinking: bool | None = None


def read_set(name: str, limit: int | None = None) -> list[Item]:
    """The prompts of a set; of each category `limit` at most, chosen as z-lab's benchmark does: shuffled with seed 42
    where there are more, else in their order. Our own are in an order of their own, and the first are taken.

    Raises:
        BenchError, FetchError, PromptsError: it cannot be had; says what to do.
    """
    kind, _, rest = name.partition(":")
    if name in OWN:
        files = OFFLINE if name == "offline" else (name,)
        return [item for file in files for some in _by_category(_own(file)) for item in some[:limit]]
    if kind == contexts.NAME:
        return contexts.read(rest)[:limit]
    if kind in public_sets.SETS:
        return _some(public_sets.read(kind, Path(rest) if rest else None), limit)
    if name.endswith(_FILES) or Path(name).exists():
        return _some(_of_file(Path(name)), limit)
    raise BenchError(
        f"There is no set of prompts {name!r}, and no such file. Give one of {', '.join((*OWN, *public_sets.SETS))}, "
        "context:N, or a .jsonl file."
    )


def _own(name: str) -> list[Item]:
    return _of_file(_HERE / f"{name}.jsonl")


def _some(items: list[Item], limit: int | None) -> list[Item]:
    """Of each category."""
    if limit is None:
        return items
    return [item for some in _by_category(items) for item in _limited(some, limit)]


def _by_category(items: list[Item]) -> list[list[Item]]:
    categories: dict[str, list[Item]] = {}
    for item in items:
        categories.setdefault(item.category, []).append(item)
    return list(categories.values())


def _limited(items: list[Item], limit: int) -> list[Item]:
    if len(items) > limit:
        items = list(items)
        random.Random(SEED).shuffle(items)
    return items[:limit]


def _of_file(path: Path) -> list[Item]:
    found = [_item(row, path, number) for number, row in enumerate(read_rows(path), 1)]
    if not found:
        raise BenchError(f"{path} holds no prompts. Write one object with a `prompt` a line.")
    return found


def _item(row: Any, path: Path, number: int) -> Item:
    where = f"prompt {number} of {path.name}"
    if not isinstance(row, Mapping):
        raise BenchError(f"{where} is {str(row)[:40]!r} and no object, so nothing says what to ask. Give a `prompt`.")
    turns = row.get("turns") or row.get("prompt")
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise BenchError(
            f"{where} has no `prompt` (a text) and no `turns` (texts), so nothing says what to ask. Add it."
        )
    task = row.get("task", "text")
    if task not in get_args(Task):
        raise BenchError(
            f"{where} has the task {task!r}, by which answers cannot be compared. Use one of "
            f"{', '.join(get_args(Task))}."
        )
    if row.get("document"):
        turns = [f"{turns[0]}\n\n{row['document']}", *turns[1:]]
    answer, tests = row.get("answer"), row.get("tests")
    category = str(row.get("category") or path.name.partition(".")[0])
    name = str(row.get("name") or f"{category}-{number}")
    return Item(name, category, tuple(turns), task, None if answer is None else str(answer), tests)


def as_prompts(items: Iterable[Item], tokenizer: Any, rendering: Rendering, answer: Answer) -> list[Prompt]:
    """Prompts with the ids that every arm is given; each turn of a conversation is one.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
        answer: the model's own answer to a turn, which the next one follows. Asked once, so that all arms are given
            the same.
    Raises:
        BenchError: two prompts of one name, or a context that cannot be filled.
        ValueError: the model has no switch for thinking.
    """
    made: list[Prompt] = []
    for item in items:
        item = contexts.filled(item, tokenizer, lambda text: _ids(tokenizer, [text], rendering))
        said: list[str] = []
        for number, turn in enumerate(item.turns, 1):
            said.append(turn)
            ids, last = _ids(tokenizer, said, rendering), number == len(item.turns)
            name = item.name if number == 1 else f"{item.name}/{number}"
            one = Prompt(name, item.category, tuple(ids), turn)
            if last:
                one = Prompt(name, item.category, tuple(ids), turn, item.task, item.expected, item.tests)
            made.append(one)
            if not last:
                said.append(answer(one))
    names = [prompt.name for prompt in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BenchError(f"Two prompts are called {twice!r}, so their numbers would mix. Name them differently.")
    return made


def _ids(tokenizer: Any, said: Sequence[str], rendering: Rendering) -> list[int]:
    """User and assistant in turn."""
    from dflash_mlx.generate import encode

    if len(said) == 1:
        return encode(tokenizer, chat_ids(tokenizer, said[0], None, raw=rendering.raw, thinking=rendering.thinking))
    if rendering.raw or not tokenizer.has_chat_template:
        raise BenchError("A conversation needs a chat template, and these prompts go without. Leave --raw out.")
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    return render(tokenizer, messages, rendering.thinking)
