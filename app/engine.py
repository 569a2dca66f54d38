"""The engine thread: one plain thread that imports MLX, loads, answers, and frees.

UI -> engine is a queue of jobs, engine -> UI is the `post` callable. Nothing here waits for the UI, and the
UI never waits for a cycle except when it quits. Its last act is `clear_streams`: without it mlx 0.32.4 on
Linux aborts the process at exit (exit status 134).
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from dflash_mlx.app.backend import Backend
from dflash_mlx.app.chat_engine import ChatEngine
from dflash_mlx.app.failures import Doing, failure
from dflash_mlx.app.jobs import Ask, Job, LoadModel, Race, Shutdown
from dflash_mlx.app.library import mlx_backend
from dflash_mlx.app.messages import EngineFailed, Event, ModelLoading

_EVERYTHING = 2**63
SWITCH_S = 0.0005
"""How long Python lets the window's thread run on while this one waits for it; 0.005 unless told otherwise, which
is a share of a cycle (bench/chat_pace.py)."""


class Engine(Protocol):
    """All that the app knows of an engine."""

    def start(self) -> None: ...

    def submit(self, job: Job) -> None: ...

    def cancel(self, number: int) -> None: ...

    def shutdown(self) -> None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


EngineFactory = Callable[[Callable[[Event], None]], Engine]
"""Makes an engine that posts to the given callable."""


class EngineThread(threading.Thread):
    """Runs jobs one after another until `Shutdown`.

    Cancelling is a mark, "everything up to this job", rather than a flag: a flag raised for one job could
    be cleared by, or stop, the next one. The engine reads it between cycles, prefill chunks and load steps.
    """

    def __init__(self, post: Callable[[Event], None], backend: Callable[[], Backend] = mlx_backend) -> None:
        # A daemon only as the last resort: the app joins it, see `chat.py`.
        super().__init__(name="dflash-engine", daemon=True)
        self._post = post
        self._make_backend = backend
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._cancelled_to = -1

    def submit(self, job: Job) -> None:
        """Queue a job. From any thread."""
        self._jobs.put(job)

    def cancel(self, number: int) -> None:
        """Stop the job of this number and all before it, after the cycle that runs. From any thread."""
        self._cancelled_to = max(self._cancelled_to, number)

    def shutdown(self) -> None:
        """Stop whatever runs and end the thread. From any thread, more than once."""
        self.cancel(_EVERYTHING)
        self.submit(Shutdown())

    def run(self) -> None:
        backend: Backend | None = None
        former = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            self._post(ModelLoading("Importing MLX", None))
            backend = self._make_backend()
            self._work(backend)
        except Exception as error:
            self._post(failure(error, None, "load"))
        finally:
            sys.setswitchinterval(former)
            if backend is not None:
                backend.clear_streams()

    def _work(self, backend: Backend) -> None:
        engine = ChatEngine(backend, self._post, lambda number: self._cancelled_to >= number)
        while not isinstance(job := self._jobs.get(), Shutdown):
            failed = self._run_job(engine, job, backend)
            if failed is not None:
                engine.recover()
                self._post(failed)

    def _run_job(self, engine: ChatEngine, job: Job, backend: Backend) -> EngineFailed | None:
        """A job's outermost frame: an error becomes a message, and the thread lives on."""
        doing: Doing = "load"
        number: int | None = None
        try:
            if isinstance(job, LoadModel):
                number = job.number
                engine.load(job)
            elif isinstance(job, Ask):
                doing, number = "answer", job.turn
                engine.answer(job)
            elif isinstance(job, Race):
                doing, number = "race", job.number
                engine.race(job)
        except Exception as error:
            before = (engine.card, engine.replaced) if doing == "load" else (None, None)
            return failure(error, backend, doing, number, *before)
        return None
