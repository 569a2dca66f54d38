"""Signals that end the process: the terminal was closed (SIGHUP), or somebody wants it gone (SIGTERM; SIGINT, since in
the app Ctrl+C is a key and no signal).

The app closes as it does on a key. If it cannot (its event loop may hang in a write to a terminal that is gone), the
process ends all the same, after what is on the screen has been saved.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from dflash_mlx.hang_up import let_go, terminals

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
GRACE_S = 8.0
"""From a signal to the end by force; more than what closing waits for the engine."""


class Endings:
    """Watches for signals from `watch` to `leave`.

    Args:
        ended: called in the event loop with the signal's name and the exit code (128 + number).
        save:  called in a thread of its own before the process is ended by force.
    """

    def __init__(self, ended: Callable[[str, int], None], save: Callable[[], object]) -> None:
        self._ended = ended
        self._save = save
        self._loop: asyncio.AbstractEventLoop | None = None
        self._former: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []

    def watch(self) -> None:
        """Call it in the event loop. Off the main thread nothing can be watched, and nothing is."""
        self._loop = asyncio.get_running_loop()
        self._terminals = terminals()
        with suppress(ValueError):
            for number in ENDING:
                self._former[number] = signal.signal(number, self._caught)

    def leave(self) -> None:
        """Give the signals their former meaning back."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _caught(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between two steps of whatever it is doing, a write that waits included."""
        code = 128 + number
        if number == signal.SIGHUP:
            let_go(self._terminals)
        threading.Thread(target=self._force, args=(code,), name="dflash-ending", daemon=True).start()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed: the app is ending already
                self._loop.call_soon_threadsafe(self._ended, signal.Signals(number).name, code)

    def _force(self, code: int) -> None:
        threading.Event().wait(GRACE_S)
        try:
            self._save()
        finally:
            os._exit(code)
