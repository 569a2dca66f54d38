"""A process whose engine thread used MLX ends with its own exit code, not with an abort."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("mlx.core")

PROGRAM = """
import queue, sys
sys.path.insert(0, {here!r})
from dataclasses import replace
from dflash_mlx.app.engine import EngineThread
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.messages import ModelReady
from scripted import Script

def backend():
    import mlx.core as mx

    fake = Script().backend()

    def load(path, options, progress):
        mx.random.seed(1)
        mx.eval(mx.random.normal((4, 4)) @ mx.random.normal((4, 4)))
        return fake.load(path, options, progress)

    return replace(fake, load=load, clear_streams={clear})

events = queue.Queue()
engine = EngineThread(events.put, backend)
engine.start()
engine.submit(LoadModel())
while not isinstance(events.get(timeout=30), ModelReady):
    pass
engine.shutdown()
engine.join(10)
sys.exit(0 if not engine.is_alive() else 5)
"""


def test_the_process_ends_with_zero_after_mlx_ran_in_the_engine_thread() -> None:
    """Without `clear_streams` as the thread's last act, mlx 0.32.4 on Linux aborts at exit (rc 134)."""
    program = PROGRAM.format(here=os.path.dirname(__file__), clear="mx.clear_streams")
    for _ in range(4):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
