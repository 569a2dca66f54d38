"""A tokenizer for Metal text that loses nothing: the tokens, joined, are the text."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|"  # comments
    r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|'  # strings and characters
    r"[A-Za-z_]\w*|"  # words
    r"0[xX][\da-fA-F\']+[uUlL]*|(?:\d[\d\']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*|"  # numbers
    r"\s+|::|->|&&|\|\||<<|>>|.",
    re.S,
)
_SPACE = re.compile(r"\s+|//.*|/\*.*", re.S)
OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")


def split(text: str) -> list[str]:
    """The tokens of `text`, white space and comments among them."""
    return _TOKEN.findall(text)


def is_space(token: str) -> bool:
    """Whether the compiler skips it: white space or a comment."""
    return _SPACE.fullmatch(token) is not None


def is_word(token: str) -> bool:
    return token[:1].isalpha() or token[:1] == "_"


def skip(tokens: list[str], at: int) -> int:
    """The index of the first token from `at` on that is not space, or the length."""
    while at < len(tokens) and is_space(tokens[at]):
        at += 1
    return at


def after_angle(tokens: list[str], at: int) -> int | None:
    """`tokens[at]` is "<": the index after its ">", or None where it is a comparison."""
    depth = 0
    for index in range(at, len(tokens)):
        token = tokens[index]
        if token in (";", "{"):
            return None
        depth += (token == "<") - (token == ">") - 2 * (token == ">>")
        if depth <= 0:
            return index + 1
    return None


def newlines(tokens: list[str]) -> str:
    """The newlines in these tokens: what replaces them keeps the lines of the source."""
    return "\n" * sum(token.count("\n") for token in tokens)
