"""Being asked to stop: by Ctrl-C, by SIGTERM as a system sends it before it shuts down, or by a closed terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from dflash_mlx.errors import Interrupted
from dflash_mlx.hang_up import let_go, terminals

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Interrupted):
    """The training was asked to stop, and what it did so far is kept; the text says how to go on."""


class Interrupts:
    """While it is entered, the first signal is remembered and the second ends what runs, as Ctrl-C does.

    SIGHUP asks, and never is the second: shell and system each send one when a terminal is closed. Under nohup, which
    has it ignored, it stays so. In a thread that is not the main one signals are left alone: Python delivers them
    elsewhere.
    """

    def __init__(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """tell: is told that the first signal was heard."""
        self.asked = False
        self.number: int = signal.SIGINT  # the first signal
        self._tell, self._at_once = tell, False
        self._before: list[tuple[signal.Signals, Any]] = []
        self._terminals: list[int] = []

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._terminals = terminals()
            for number in _ASKING:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before.append((number, signal.signal(number, self._hear)))
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.pop())

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Around what changes nothing: the first signal ends it, as KeyboardInterrupt, and is remembered too."""
        if self.asked:
            raise Interrupted(number=self.number)
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go(self._terminals)
            if self.asked:
                return
        second = self.asked
        if not second:
            self.asked, self.number = True, number
        if second or self._at_once:
            raise Interrupted(number=number)
        # The step that runs has to end well, though a reader is gone (OSError) or another line half written here
        # (RuntimeError).
        with contextlib.suppress(OSError, RuntimeError):
            self._tell(
                "Stopping after this step. Once more to stop at once, without the steps since the last checkpoint."
            )
