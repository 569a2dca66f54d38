"""Downloading a repository with its progress in bytes, in a way that can be cancelled.

huggingface_hub reports from many threads, and its Xet library swallows what a report raises. So the download runs in
a thread of its own, whose bars only count, and the caller's thread looks at them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from tqdm import tqdm

from dflash_mlx.hub.cache import IN_FOLDERS

Progress = Callable[[str, float | None], None]
POLL_S = 0.1  # at most ten reports a second
_LEAVE_S = 1.0  # how long a cancelled download may take to notice; its next bytes end it in any case


class _Stopped(Exception):
    """Raised in the threads of a download that nobody waits for any more."""


def download(name: str, revision: str | None, patterns: Sequence[str], size: int, tell: Progress) -> Path:
    """The snapshot of a repository, fetched into the hub's cache.

    What `tell` raises stops the download and comes out here; so does Ctrl-C. Files that are complete stay; of one that
    was under way the hub keeps nothing but what Xet has in its own cache (2.4.0).

    Args:
        size: bytes that are missing, 0 if that is not known.
    Raises:
        what huggingface_hub raises.
    """
    tell(_message(name, 0, size), 0.0 if size else None)
    fetching = _Fetching(name, revision, patterns)
    fetching.start()
    try:
        while not fetching.wait(POLL_S):
            done = min(fetching.bytes, size) if size else fetching.bytes
            tell(_message(name, done, size), done / size if size else None)
    except BaseException:
        fetching.stop()
        raise
    folder = fetching.result()
    if size:  # what came between two looks was not reported
        tell(_message(name, size, size), 1.0)
    return folder


def _message(name: str, done: int, size: int) -> str:
    if not size:
        return f"Fetching {name}"
    shown = f"{done / 1e9:.2f} of {size / 1e9:.2f} GB" if size >= 1e8 else f"{done / 1e6:.1f} of {size / 1e6:.1f} MB"
    return f"Fetching {name} ({shown})"


class _Fetching:
    """`snapshot_download` in a thread that ends with the process at the latest."""

    def __init__(self, name: str, revision: str | None, patterns: Sequence[str]) -> None:
        self._what = (name, revision, list(patterns))
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._counts: list[int] = []
        self._folder = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"fetch {name}", daemon=True)

    @property
    def bytes(self) -> int:
        """Received so far. The hub counts them on their way and again on the disk; resumed ones are in one of both."""
        return max(self._counts, default=0)

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended."""
        return self._ended.wait(seconds)

    def stop(self) -> None:
        """Have it end at its next bytes, and wait a little for that."""
        self._stopped.set()
        with suppress(Exception):  # not public, and missing in older versions: then Xet ends with the file it is at
            from huggingface_hub.utils._xet import abort_xet_session

            abort_xet_session()
        self._thread.join(_LEAVE_S)

    def result(self) -> Path:
        if self._error is not None:
            raise self._error
        return Path(self._folder)

    def _run(self) -> None:
        name, revision, patterns = self._what
        try:
            self._folder = hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=IN_FOLDERS,
                tqdm_class=self._bar(),
            )
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._ended.set()

    def _bar(self) -> type[tqdm]:
        """A bar that shows nothing: it counts bytes here, and ends its thread after `stop`."""
        fetching = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})
                self._index = None
                if options.get("unit") == "B":  # the other one counts files
                    self._index = len(fetching._counts)
                    fetching._counts.append(0)

            def update(self, n: float | None = 1) -> None:
                if fetching._stopped.is_set():
                    raise _Stopped
                if self._index is not None:
                    with self.get_lock():
                        fetching._counts[self._index] += int(n or 0)
                        self.n = fetching._counts[self._index]

        return Bar
