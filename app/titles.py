"""What a chat is called: a line that fits a list."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from dflash_mlx.app.conversation import Conversation
from dflash_mlx.app.text import visible

CELLS = 60
UNTITLED = "New chat"


def title_of(given: str, conversation: Conversation, waiting: Sequence[str] = ()) -> str:
    """The title that the user gave, or else the first question, or what would be the first if it were sent."""
    questions = (*(turn.user for turn in conversation.turns[:1]), *waiting)
    return given or one_line(next(iter(questions), "")) or UNTITLED


def one_line(text: str, cells: int = CELLS) -> str:
    """The first line of `text` that is not blank, at most `cells` wide."""
    lines = (" ".join(line.split()) for line in visible(text).splitlines())
    title = next((line for line in lines if line), "")
    if cell_len(title) <= cells:
        return title
    while cell_len(title) > cells - 1:
        title = title[:-1]
    return f"{title.rstrip()}…"
