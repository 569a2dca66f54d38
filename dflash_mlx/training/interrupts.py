"""Being asked to stop: by Ctrl-C or by SIGTERM, as a system does before it shuts down."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """The training was asked to stop, and what it did so far is kept; the text says how to go on."""


class Interrupts:
    """While it is entered, the first signal is remembered and the second ends what runs, as Ctrl-C does.

    In a thread that is not the main one signals are left alone: Python delivers them elsewhere.
    """

    def __init__(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """tell: is told that the first signal was heard."""
        self.asked = False
        self._tell, self._at_once = tell, False
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before.append((number, signal.signal(number, self._hear)))
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.pop())

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Around what changes nothing: the first signal ends it, as KeyboardInterrupt, and is remembered too."""
        if self.asked:
            raise KeyboardInterrupt
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        second, self.asked = self.asked, True
        if second or self._at_once:
            raise KeyboardInterrupt
        self._tell("Stopping after this step. Once more to stop at once, without the steps since the last checkpoint.")
