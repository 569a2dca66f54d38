"""MLX in a worker thread, without an abort when the process ends.

A thread that ran MLX and ended without `mx.clear_streams()` can abort the process at exit ("terminate called without
an active exception", exit status 134; mlx 0.32.4 on Linux, 2 of 5 runs of a thread that generated 20 tokens).
"""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn


class _ClearStreams:
    def __del__(self) -> None:
        mx.clear_streams()


class _PerThread(threading.local):
    """CPython drops a thread's values in that thread, as its last act."""

    def __init__(self) -> None:  # runs once per thread, at its first use
        self.mark = object()
        if threading.current_thread() is not threading.main_thread():
            self.guard = _ClearStreams()


_held = _PerThread()


def leave_cleanly() -> None:
    """Have the current thread clear its MLX streams when it ends. Nothing to do in the main thread."""
    vars(_held)


def this_thread() -> object:
    """An object that no other thread has. The number of a thread is given to another one when it has ended."""
    return _held.mark


def compute_constants(model: nn.Module) -> None:
    """Compute what modules hold beside parameters (a rope's frequencies), which another thread could not do later."""
    mx.eval([value for module in model.modules() for key, value in module.items() if key.startswith("_")])
