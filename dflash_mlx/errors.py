"""Errors whose text is meant for the user: what happened with values, why it matters, what to do.

The command line and the chat print these without a traceback; everything else is a bug and keeps its own.
"""

from __future__ import annotations

import signal


class DFlashError(Exception):
    """Base of every error that this package explains to the user."""


class UnsupportedTarget(DFlashError):
    """The target's architecture or one of its cache types has no adapter with an exact rollback."""


class IncompatiblePair(DFlashError):
    """Draft and target do not belong together: sizes, layer ids, vocabulary or tokenizer differ."""


class CheckpointError(DFlashError):
    """A checkpoint or its config is incomplete, has unknown parts, or is damaged."""


class FetchError(DFlashError):
    """A model could not be found or fetched; nothing half-written is left behind."""


class CacheStateError(DFlashError):
    """begin/commit/abort came in the wrong order, or a cache cannot be used any more."""


class DraftFault(DFlashError):
    """The draft turned out not to work while it ran, and `strict` forbids to fall back to plain decoding."""


class Interrupted(KeyboardInterrupt):
    """A signal ended what ran. status: the exit status that says so, 128 and its number."""

    def __init__(self, text: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(text)
        self.status = 128 + number
