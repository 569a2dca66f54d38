"""The engine thread: one plain thread that imports MLX, loads, answers, and frees.

UI -> engine is a queue of jobs, engine -> UI is the `post` callable. Nothing here waits for the UI, and the
UI never waits for a cycle except when it quits. Its last act is `clear_streams`: without it mlx 0.32.4 on
Linux aborts the process at exit (exit status 134).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from dflash_mlx.app.backend import Backend, mlx_backend
from dflash_mlx.app.chat_engine import ChatEngine, failure
from dflash_mlx.app.jobs import Ask, Job, LoadModel, Shutdown
from dflash_mlx.app.messages import Event, ModelLoading

_EVERYTHING = 2**63


class Engine(Protocol):
    """All that the app knows of an engine."""

    def start(self) -> None: ...

    def submit(self, job: Job) -> None: ...

    def cancel(self, turn: int) -> None: ...

    def shutdown(self) -> None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


EngineFactory = Callable[[Callable[[Event], None]], Engine]
"""Makes an engine that posts to the given callable."""


class EngineThread(threading.Thread):
    """Runs jobs one after another until `Shutdown`.

    Cancelling is a mark, "everything up to this turn", rather than a flag: a flag raised for one turn could
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

    def cancel(self, turn: int) -> None:
        """Stop `turn` and all before it, after the cycle that runs. From any thread."""
        self._cancelled_to = max(self._cancelled_to, turn)

    def shutdown(self) -> None:
        """Stop whatever runs and end the thread. From any thread, more than once."""
        self.cancel(_EVERYTHING)
        self.submit(Shutdown())

    def run(self) -> None:
        backend: Backend | None = None
        try:
            self._post(ModelLoading("Importing MLX", None))
            backend = self._make_backend()
            self._work(backend)
        except Exception as error:
            self._post(failure(error, (), fatal=True))
        finally:
            if backend is not None:
                backend.clear_streams()

    def _work(self, backend: Backend) -> None:
        engine = ChatEngine(backend, self._post, lambda turn: self._cancelled_to >= turn)
        while not isinstance(job := self._jobs.get(), Shutdown):
            try:
                if isinstance(job, LoadModel):
                    engine.load(job)
                elif isinstance(job, Ask):
                    engine.answer(job)
            except Exception as error:  # a job's outermost frame: it becomes a message, the thread lives on
                turn = job.turn if isinstance(job, Ask) else None
                self._post(failure(error, backend.user_errors, fatal=turn is None, turn=turn))
