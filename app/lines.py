"""A file of JSON lines that only grows: whatever ends the process, at most the line being written is lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mlx.files import FULL

_CHUNK = 1 << 16


class StoreError(Exception):
    """Something that the chat keeps on disk cannot be read or written; the text is for the user."""


def encode(record: Mapping[str, Any]) -> bytes:
    """One line. Readable letters, unless the text has half a surrogate pair, which UTF-8 cannot write."""
    try:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        line = json.dumps(record, separators=(",", ":")).encode()
    return line + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None if there is none, because it was cut or is something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class LineFile:
    """An open file, locked for this process and private to the user.

    Args:
        make: make the file, and the folders above it, if it is not there.
        wait: wait while another process holds the file, instead of raising.
    Raises:
        StoreError: it cannot be opened or made, or another process holds it.
    """

    def __init__(self, path: Path, *, make: bool, wait: bool = False) -> None:
        self.path = path
        self._make = make
        try:
            if make:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if make else 0)
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened for writing ({reason(error)}).") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return  # a network disk without locks: better unlocked than not saved
            os.close(self._descriptor)
            taken = isinstance(error, BlockingIOError)
            raise StoreError(f"{path} is {'open in another window' if taken else reason(error)}.") from error

    def append(self, lines: bytes, *, sync: bool = False) -> None:
        """Add whole lines: all of them or, with an error, none.

        Args:
            sync: return when they are on the disk, not only in the system's memory.
        Raises:
            StoreError: they could not be written; the lines before them are as they were.
        """
        end = None
        try:
            if os.fstat(self._descriptor).st_nlink == 0:
                raise OSError(errno.ENOENT, "it was deleted")
            end = self._cut_torn_line()
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            if end is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, end)
            raise StoreError(f"{self.path} cannot be written ({reason(error)}).") from error

    def _cut_torn_line(self) -> int:
        """Remove what a crash left behind the last whole line, which no reader uses; the length that is left."""
        end = size = os.fstat(self._descriptor).st_size
        while end > 0:
            start = max(end - _CHUNK, 0)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._descriptor, end)
        return end

    def close(self) -> None:
        """Give the file and its lock back. One that was made and never written, on a full disk say, goes."""
        with contextlib.suppress(OSError):
            if self._make and os.fstat(self._descriptor).st_size == 0:
                self.path.unlink()
        os.close(self._descriptor)


def reason(error: OSError) -> str:
    """What the system said, in its words."""
    return "the disk is full" if error.errno in FULL else (error.strerror or str(error)).lower()
