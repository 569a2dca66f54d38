"""Prompts of a given length, for curves over the context: context:4096, context:4096:FILE.

Ours are Python files of this package in the order of their names, as many as it takes, and at their end a text that is
to be summarised: what is asked is the same at every length, and nothing is repeated, since drafts guess what repeats.
The files change with the version of the package; records hold the hash of what was asked.

FILE holds documents, one a row: `context`, `report`, `document` or `text`, and if wanted a question in `input`
(LongBench's GovReport and HotpotQA are like that). Each is cut behind N tokens; shorter ones are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash_mlx
from dflash_mlx.training.prompts.sources import read_rows

from .form import BenchError
from .items import Item

NAME = "context"
LEAST = 1024
_DOCUMENTS = ("context", "report", "document", "text")
_SUMMARISE = "Write a summary of the text above in about 200 words."
_ENDING = "Above are files of a program, and behind them a text. Summarise that last text in about 200 words."
_CHARACTERS = 6  # of a token, at most, over some thousand of them
_SLACK = 16  # tokens that a cut in the middle of a word may add or take


def read(argument: str) -> list[Item]:
    """argument: what stands behind `context:`.

    Raises:
        BenchError: it is no length, or the file holds no documents.
    """
    length, _, file = argument.partition(":")
    if not length.isdecimal() or int(length) < LEAST:
        raise BenchError(f"`context:` needs a number of tokens of {LEAST} or more, as in context:4096, got {length!r}.")
    tokens, category = int(length), f"{NAME}-{length}"
    if file:
        return _of_file(Path(file), tokens, category)
    return [
        Item(f"{category}-{number}", category, (_ENDING,), document=document, tokens=tokens, keep_end=True)
        for number, document in enumerate(_own(tokens), 1)
    ]


def _own(tokens: int) -> list[str]:
    files = sorted(Path(dflash_mlx.__file__).parent.glob("*.py"))
    program, size = [], 0
    for file in files:
        program.append(f"{file.name}\n\n{file.read_text('utf-8')}")
        size += len(program[-1])
        if size > tokens * _CHARACTERS:
            break
    texts = [row["document"] for row in read_rows(Path(__file__).parent / "prompts" / "summarise.jsonl")]
    short = [text for text in texts if len(text) < 4000]
    return ["\n\n".join([*program, text]) for text in short]


def _of_file(path: Path, tokens: int, category: str) -> list[Item]:
    made: list[Item] = []
    for row in read_rows(path):
        document = next((row[key] for key in _DOCUMENTS if row.get(key)), None) if isinstance(row, Mapping) else None
        if isinstance(document, str) and len(document) >= tokens:  # a token has a character at least
            question = row.get("input") or _SUMMARISE
            name = f"{category}-{len(made) + 1}"
            made.append(Item(name, category, (question,), document=document, tokens=tokens))
    if not made:
        raise BenchError(
            f"{path} has no document of {tokens} tokens in {', '.join(_DOCUMENTS)}, so that context cannot be filled. "
            "Give longer ones, or a shorter context."
        )
    return made


def filled(item: Item, tokenizer: Any, ids: Callable[[str], list[int]]) -> Item:
    """The item with as much of its document as it is to have.

    Args:
        ids: of a text, through the chat template if there is one.
    Raises:
        BenchError: the document is too short.
    """
    if item.document is None or item.tokens is None:
        return item
    (question,) = item.turns
    around = len(ids(f"\n\n{question}"))
    document = tokenizer.encode(item.document, add_special_tokens=False)
    room = item.tokens - around
    if len(document) < room:
        raise BenchError(
            f"The document of {item.name} has {len(document)} tokens, and {room} are needed: text that repeats would "
            "be easier to guess than any real one. Give longer documents (context:N:FILE), or a shorter context."
        )
    kept = tokenizer.decode(document[-room:] if item.keep_end else document[:room])
    return replace(item, turns=(f"{kept}\n\n{question}",), document=None)
