"""What went wrong, in words for the user."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Literal, TypeAlias

from dflash_mlx.app.backend import Backend, TooLarge
from dflash_mlx.app.messages import EngineFailed, ModelCard
from dflash_mlx.app.text import pair_name

Doing: TypeAlias = Literal["load", "answer", "race"]
_FAILED = {"load": "The model could not be loaded", "answer": "No answer", "race": "No race"}
_NO_MEMORY = {
    "load": "The model does not fit into the memory that is free, and nothing of it is kept. Close other programs, or "
    "choose a smaller model, one in fewer bits, or none with a draft.",
    "answer": "The prompt cache was dropped. Try a shorter conversation (/clear), a smaller model, or a smaller block "
    "size (/block 4).",
    "race": "A race needs room for a second prompt cache. Race in a shorter conversation, or with fewer tokens "
    "(/max 256).",
}
# Metal's and the common allocator, a command buffer that Metal ended, C++.
_ALLOCATION_FAILED = (
    "unable to allocate",
    "[metal::malloc]",
    "insufficient memory",
    "outofmemory",
    "out of memory",
    "bad_alloc",
)


def failure(
    error: Exception,
    backend: Backend | None,
    doing: Doing,
    number: int | None = None,
    kept: ModelCard | None = None,
    replaced: ModelCard | None = None,
) -> EngineFailed:
    """Say an error to the user: its own text if it was written for them, otherwise what kind of bug it is.

    Args:
        number: of the turn, race or load that failed. A load that failed is fatal, unless
        kept: the pair before it is still loaded.
        replaced: the pair that was freed for it, which is gone.
    """
    details = ""
    if out_of_memory(error):
        title, body = "Out of memory", _NO_MEMORY[doing]
    elif backend is not None and isinstance(error, backend.user_errors):
        title, body = _FAILED[doing], str(error)
    else:
        title = "Something unexpected went wrong"
        body = f"{type(error).__name__}: {error}\nThis is a bug in dflash_mlx; its traceback is shown when you quit."
        details = "".join(traceback.format_exception(error))
    if kept is not None:
        body += f"\n{still_loaded(kept)}"
    elif replaced is not None:
        body += f"\n{pair_name(replaced)} was freed for it: /load {replaced.model} loads that again."
    fatal = doing == "load" and kept is None
    return EngineFailed(title, body, fatal, number, details, kept, may_insist=isinstance(error, TooLarge))


def still_loaded(card: ModelCard) -> str:
    return f"{pair_name(card)} is still loaded."


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, is an allocation that failed.

    MLX has no class for that: it raises RuntimeError, which loaders then take for a damaged file.
    """
    return any(
        isinstance(each, MemoryError) or any(words in str(each).lower() for words in _ALLOCATION_FAILED)
        for each in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
