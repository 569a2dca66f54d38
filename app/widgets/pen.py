"""Writes an answer as fast as the screen can show it without holding up keys or the engine.

Every write costs a parse, a layout and a paint, and more of them the longer the last block is. What arrives meanwhile
is merged; after a write the pen rests for as long as its event loop's thread needs to stay below `SHARE` of one core,
since the engine's thread has to wait while Python computes here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from dflash_mlx.app.messages import Part
from dflash_mlx.app.parts import merged

INTERVAL_S = 0.05
"""Least time from one write to the next; the engine posts no faster."""
SHARE = 0.15
"""With 0.25 a scripted engine at 300 blocks a second lost twice as much to the screen (`bench.chat_pace`)."""
LONGEST_REST_S = 1.0


class Pen:
    """Hands merged parts to `put`, one call at a time. Nothing is lost, nothing is written after `stop`."""

    def __init__(self, put: Callable[[list[Part]], Awaitable[None]]) -> None:
        self._put = put
        self._pending: list[Part] = []
        self._more = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def write(self, parts: Iterable[Part]) -> None:
        self._pending.extend(parts)
        self._more.set()

    async def stop(self) -> None:
        """Write what is left, at once; return, too, when that is dropped meanwhile."""
        self._stopping.set()
        self._more.set()
        await asyncio.wait([self._task])  # to await a task that is cancelled would end the window's own
        if not self._task.cancelled():
            self._task.result()

    def drop(self) -> None:
        """Forget what is left: there is nothing to write on any more."""
        self._task.cancel()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self._more.wait()
            self._more.clear()
            started, busy = time.monotonic(), time.thread_time()
            await self._flush()
            await self._rest(INTERVAL_S)  # layout and paint happen in here
            due = (time.thread_time() - busy) / SHARE
            await self._rest(min(due, LONGEST_REST_S) - (time.monotonic() - started))
        await self._flush()

    async def _flush(self) -> None:
        if self._pending:
            parts, self._pending = list(merged(self._pending)), []
            await self._put(parts)

    async def _rest(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
