"""The metrics file has one whole line for every turn, from every window."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.app.metrics import MetricsLog
from dflash_mlx.app.store import StoreError

WRITER = """
import sys
from pathlib import Path
from dflash_mlx.app.metrics import MetricsLog
sys.stdin.read(1)
log = MetricsLog(Path(sys.argv[1]))
for turn in range(200):
    log.write({"window": sys.argv[2], "turn": turn, "padding": "x" * 9000})
"""


def test_two_windows_that_write_at_once_lose_no_line(tmp_path: Path) -> None:
    """Half a line in the middle would make the whole file unreadable to a script."""
    path = tmp_path / "below" / "metrics.jsonl"
    windows = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdin=subprocess.PIPE) for name in "ab"
    ]
    for window in windows:
        assert window.stdin is not None
        window.stdin.close()
    assert [window.wait(60) for window in windows] == [0, 0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for name in "ab":
        assert [record["turn"] for record in records if record["window"] == name] == list(range(200))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_a_crash_cut_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"turn": 1}\n{"tur')
    MetricsLog(path).write({"turn": 3})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"turn": 1}, {"turn": 3}]


def test_a_full_disk_is_said_once_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"turn": 1})
    before, write = path.read_bytes(), os.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) <= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, memoryview(data)[:4])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match=r"metrics\.jsonl cannot be written \(the disk is full\).*not kept"):
        log.write({"turn": 2})
    log.write({"turn": 3})
    assert path.read_bytes() == before
    monkeypatch.setattr(os, "write", write)
    log.write({"turn": 4})
    assert [json.loads(line)["turn"] for line in path.read_text().splitlines()] == [1, 4]
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="the disk is full"):
        log.write({"turn": 5})
