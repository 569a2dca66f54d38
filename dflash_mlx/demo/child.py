"""Running a downloader as a child process: its folder's growth is the progress, and it ends when we do."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from dflash_mlx.demo.progress import Progress

_POLL_S = 0.2
_DEFAULTS = {"UV_HTTP_RETRIES": "1"}  # uv's own 3 take 10 s to see that there is no network (0.9 s with 1)
STALL_S = 180.0  # without a new byte for so long it will not come
_FULL = "No space left on device"


class ChildFailed(Exception):
    """The child's last words."""


def run(command: list[str], folder: Path, message: str, expected_bytes: int, progress: Progress) -> None:
    """Run `command`, which writes below `folder`; report folder size / `expected_bytes`.

    Its temporary files go below `folder` too (TMPDIR), so that they count as progress and are removed with it.

    Raises:
        ChildFailed: it could not start, ended with an error, or stalled.
        OSError: the disk is full (ENOSPC).
    """
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_DEFAULTS | os.environ | {"TMPDIR": str(scratch)},
            )
        except OSError as error:
            raise ChildFailed(f"{command[0]} did not start ({error})") from error
        try:
            _watch(child, folder, message, expected_bytes, progress)
        finally:  # also when `progress` raised, or Ctrl-C
            _end(child)
        if child.returncode != 0:
            output.seek(0)
            raise _failure(output.read().decode("utf-8", "replace"), child.returncode)


def _watch(child: subprocess.Popen[bytes], folder: Path, message: str, expected_bytes: int, progress: Progress) -> None:
    """Report until the child ends; raise ChildFailed if its folder stops growing."""
    size, grown = 0, time.monotonic()
    while child.poll() is None:
        now = _size(folder)
        if now != size:
            size, grown = now, time.monotonic()
        elif time.monotonic() - grown > STALL_S:
            raise ChildFailed(f"no data for {STALL_S:.0f} seconds")
        progress(message, min(size / expected_bytes, 0.99) if size else None)
        time.sleep(_POLL_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the child if it still runs."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=3)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _failure(output: str, code: int) -> Exception:
    """The error in what the child said."""
    if _FULL in output:
        return OSError(28, _FULL)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    said = (errors or lines or [f"exit code {code}"])[-1]
    return ChildFailed(said[:200])


def _size(folder: Path) -> int:
    """Bytes below `folder`; files that vanish while we look do not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total
