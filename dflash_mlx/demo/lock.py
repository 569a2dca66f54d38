"""One process at a time: a lock file that the system releases when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dflash_mlx.demo.progress import Progress

_POLL_S = 0.2


@contextlib.contextmanager
def exclusive(path: Path, progress: Progress, message: str) -> Iterator[None]:
    """Hold the lock file `path`; while another process holds it, report `message` and wait.

    Waiting has no limit, but an exception that `progress` raises ends it. A file system without locks (some network
    mounts) is used without: every write of the callers is a rename, so the loser only works twice.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while not _try(descriptor):
            progress(message, None)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _try(descriptor: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
            raise
    return True
