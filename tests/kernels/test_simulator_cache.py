"""Compiled kernels are kept in a folder that several processes use at once, as pytest-xdist's do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.checks import simulator
from tests.kernels.simulator.compiler import _tools, why_unavailable

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
from tests.kernels.simulator.snippets import run
for number in range(3):
    assert run(f"out[thread_position_in_grid.x] = {number};").tolist() == [number] * 64
"""


def start(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"DFLASH_SIMULATOR_CACHE": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_start_at_once_share_a_folder_and_a_later_one_compiles_nothing(tmp_path):
    """A half-written object, or a precompiled header whose text was written again, would fail in one run of many."""
    simulator()
    processes = [start(tmp_path) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sum(name.endswith(".so") for name in made) == 3
    assert {Path(name).suffix for name in made} == {".so", ".o", ".h", ".pch"}
    later = start(tmp_path)
    assert later.wait() == 0, later.stderr and later.stderr.read()
    assert made == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_a_machine_without_a_compiler_says_what_is_missing(monkeypatch):
    """Tests are then skipped with this reason; a silent skip would look like a pass."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("DFLASH_SIMULATOR_CLANG", raising=False)
    _tools.cache_clear()
    try:
        assert "ziglang" in (why_unavailable() or "")
    finally:
        _tools.cache_clear()


@pytest.mark.parametrize("system, machine", [("darwin", "arm64"), ("linux", "aarch64")])
def test_other_machines_are_named_in_the_reason(monkeypatch, system: str, machine: str):
    """The fibers are written for one processor; on a Mac kernels run on Metal."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    reason = why_unavailable() or ""
    assert system in reason and machine in reason
