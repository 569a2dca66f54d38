"""How the Markdown of a model is read: quickly while it grows, within bounds, and without losing a letter.

markdown-it's GitHub flavour with these differences. HTML and reference definitions are text, since a reader would
miss what they swallow. A line break stays one: models do not wrap their text, so one that is there is meant (verse,
addresses). A list becomes several of a few items each, so that a growing one is not built anew with every word. What
would take long to lay out or parse (deep nesting, very wide tables, very long paragraphs) is shown as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markdown_it.utils import EnvType

from dflash_mlx.app.text import pasted

MAX_LEVEL = 12
"""Block levels: six lists in each other. markdown-it would drop what is below level 20 without a word."""
MAX_COLUMNS = 24
MAX_CELLS = 1_500
"""More take a quarter of a second to draw, with every word that is added."""
ITEMS = 8
"""Items of a list in one block."""
MAX_INLINE = 4_000
"""Characters of one paragraph or cell that are searched for emphasis and links: brackets take quadratic time."""


class AnswerParser(MarkdownIt):
    """Parses into tokens that Textual's Markdown can show. Stateless: one serves all answers."""

    def __init__(self) -> None:
        super().__init__("gfm-like", {"html": False})
        self.disable("reference")
        self.core.ruler.after("block", "leave_long_text", _leave_long_text)
        self.core.ruler.push("keep_line_breaks", _keep_line_breaks)

    def parse(self, src: str, env: EnvType | None = None) -> list[Token]:
        lines = src.splitlines()
        return [token for block in top_level(super().parse(src, env)) for token in _within_bounds(block, lines)]


@cache
def answer_parser() -> AnswerParser:
    """The one parser; making another takes 5 ms."""
    return AnswerParser()


def code_blocks(text: str) -> list[str]:
    """The code of all code blocks, in order, wherever they are nested, to paste; an unfinished last one too."""
    tokens = MarkdownIt.parse(answer_parser(), text)
    return [pasted(token.content) for token in tokens if token.type in ("fence", "code_block")]


def top_level(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The tokens of one top-level block after the other."""
    block: list[Token] = []
    depth = 0
    for token in tokens:
        block.append(token)
        depth += token.nesting
        if depth == 0:
            yield block
            block = []
    if block:
        yield block


def _within_bounds(block: list[Token], lines: list[str]) -> list[Token]:
    cells = sum(token.type in ("th_open", "td_open") for token in block)
    columns = sum(token.type == "th_open" for token in block)
    deep = any(token.level > MAX_LEVEL for token in block)
    if (deep or columns > MAX_COLUMNS or cells > MAX_CELLS) and block[0].map is not None:
        start, end = block[0].map
        # Any known language: without one Textual tries all lexers on the text.
        return [Token("code_block", "code", 0, map=[start, end], content="\n".join(lines[start:end]), block=True)]
    if block[0].type in ("bullet_list_open", "ordered_list_open"):
        return _few_items_each(block)
    return block


def _few_items_each(block: list[Token]) -> list[Token]:
    """A list as lists of a few items, if their numbers can still be told then. All but the last are `more`."""
    opening, closing = block[0], block[-1]
    items = list(top_level(block[1:-1]))
    if opening.type == "ordered_list_open":
        first = int(items[0][0].info)
        if [item[0].info for item in items] != [str(first + index) for index in range(len(items))]:
            return block
    split: list[Token] = []
    for start in range(0, len(items), ITEMS):
        group = items[start : start + ITEMS]
        first_map, last_map = group[0][0].map, group[-1][0].map
        assert first_map is not None and last_map is not None
        more = start + ITEMS < len(items)
        split.append(opening.copy(map=[first_map[0], last_map[1]], meta={"more": more}))
        split += [token for item in group for token in item]
        split.append(closing)
    return split


def _leave_long_text(state: StateCore) -> None:
    for token in state.tokens:
        if token.type == "inline" and len(token.content) > MAX_INLINE:
            token.children = []
            for line in token.content.split("\n"):
                if token.children:
                    token.children.append(Token("hardbreak", "br", 0))
                token.children.append(Token("text", "", 0, content=line))
            token.content = ""


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
