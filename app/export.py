"""A conversation as a Markdown file that renders like the chat did."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt

from dflash_mlx.app.conversation import Conversation, Turn
from dflash_mlx.app.lines import StoreError, reason
from dflash_mlx.files import refuse_existing, whole_file

_ENDED = {"cancelled": "stopped", "length": "token limit reached", "failed": "failed", "open": "still being written"}
_MARK = "MARK7f3a"
_ENDINGS = ("-->", "?>", "]]>", ">", "</pre>", "</script>", "</style>", "</textarea>")
"""Of the HTML blocks that go on until they are closed (CommonMark 4.6, kinds 1 to 5)."""


def to_markdown(conversation: Conversation, title: str, model: str, system: str = "") -> str:
    """Questions are quoted, reasoning is folded into `<details>`, answers are as the model wrote them."""
    blocks = [f"# {_escaped(title)}", f"- Model: {_escaped(model)}\n- Turns: {len(conversation.turns)}"]
    if system:
        blocks += ["**System prompt**", _quoted(system)]
    for turn in conversation.turns:
        blocks += _turn(turn)
    return "\n\n".join(blocks) + "\n"


def default_name(title: str) -> str:
    """A file name that every system takes."""
    words = re.sub(r"[^\w]+", "-", title).strip("-_")[:60].rstrip("-_")
    return f"{words or 'chat'}.md"


def write_markdown(path: Path, text: str) -> None:
    """Write an export, whole or not at all. What is at `path` is never overwritten.

    Raises:
        StoreError: something is there already, or it cannot be written.
    """
    try:
        with whole_file(path) as aside:
            aside.write_text(text, encoding="utf-8", errors="replace", newline="\n")
            refuse_existing(path)
    except FileExistsError as error:
        raise StoreError(str(error)) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({reason(error)}). Give another name.") from error


def _turn(turn: Turn) -> list[str]:
    blocks = ["## Question", _quoted(turn.user), "## Answer"]
    if turn.reasoning.strip():
        reasoning = _quoted(re.sub("</(?=details)", "&lt;/", turn.reasoning.strip("\n"), flags=re.IGNORECASE))
        blocks += ["<details>\n<summary>Reasoning</summary>", reasoning, "</details>"]
    if turn.shown.strip():
        blocks.append(_closed(turn.shown.strip("\n")))
    if turn.state in _ENDED:
        blocks.append(f"*({_ENDED[turn.state]})*")
    return blocks


def _escaped(line: str) -> str:
    """Text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~!])", r"\\\1", line)


def _quoted(text: str) -> str:
    """A block quote: it ends with itself, whatever the text leaves open."""
    return "\n".join(f"> {line}".rstrip() for line in re.split(r"\r\n|\r|\n", text))


def _closed(text: str) -> str:
    """The text, with an end for a code or HTML block that an answer cut short leaves open.

    Otherwise the rest of the file would become a part of it.
    """
    tokens = MarkdownIt("commonmark").parse(f"{text}\n\n{_MARK}")
    fences = [token.markup for token in tokens if token.type == "fence" and _MARK in token.content]
    endings = ("", *(f"\n{ending}" for ending in (*fences, *_ENDINGS)))
    return next((text + ending for ending in endings if _is_closed(text + ending)), _quoted(text))


def _is_closed(text: str) -> bool:
    """Whether what comes after `text` is a paragraph of its own."""
    tokens = MarkdownIt("commonmark").parse(f"{text}\n\n{_MARK}")
    return [(token.level, token.content) for token in tokens[-3:]] == [(0, ""), (1, _MARK), (0, "")]
