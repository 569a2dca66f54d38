"""A program in a pseudo-terminal, seen as its user sees it: keys go in, a screen of characters comes out.

The screen is kept by pyte. It knows neither the alternate screen nor the keyboard protocol of kitty, whose sequences it
would print; both are read from the raw bytes here.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyte

KEYS = {
    "enter": "\r",
    "escape": "\x1b",
    "tab": "\t",
    "backspace": "\x7f",
    "up": "\x1b[A",
    "down": "\x1b[B",
    "pageup": "\x1b[5~",
    "pagedown": "\x1b[6~",
    "f1": "\x1bOP",
    "f2": "\x1bOQ",
    "f3": "\x1bOR",
    "f4": "\x1bOS",
    "f5": "\x1b[15~",
    "f6": "\x1b[17~",
}
_UNKNOWN_TO_PYTE = re.compile(rb"\x1b\[[<>=][0-9;]*u")
# What a program that took the terminal over has to have given back, as (taken, given back).
_MODES = (
    ("alternate screen", b"\x1b[?1049h", b"\x1b[?1049l"),
    ("bracketed paste", b"\x1b[?2004h", b"\x1b[?2004l"),
    ("mouse", b"\x1b[?1000h", b"\x1b[?1000l"),
    ("hidden cursor", b"\x1b[?25l", b"\x1b[?25h"),
)


class Terminal:
    """Runs `argv`; leave it with `with`, so that nothing runs on.

    Args:
        env: added to this process's environment.
        size: columns, rows.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, size: tuple[int, int] = (100, 30)
    ) -> None:
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        self._set_size(size)
        self._before = termios.tcgetattr(self._ours)
        self.raw = b""
        """All that the program wrote."""
        self._process = subprocess.Popen(
            argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
            cwd=cwd,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **env},
        )
        self._theirs = theirs  # kept open: the settings can be read after the program has ended

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        for descriptor in (self._ours, self._theirs):
            if descriptor >= 0:
                os.close(descriptor)

    # What the user does

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def press(self, *keys: str) -> None:
        """Keys by name; `ctrl+x` for any letter."""
        for key in keys:
            self.type(chr(ord(key[-1]) - 96) if key.startswith("ctrl+") else KEYS[key])

    def paste(self, text: str) -> None:
        """As a terminal with bracketed paste does."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns: int, rows: int) -> None:
        self._set_size((columns, rows))
        self._screen.resize(rows, columns)
        os.killpg(self._process.pid, signal.SIGWINCH)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def hang_up(self) -> int:
        """Close the terminal under the program; returns its exit status."""
        os.close(self._ours)
        self._ours = -1
        return self._process.wait(30)

    # What the user sees

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def until(self, seen: str | Callable[[str], bool], timeout_s: float = 30.0) -> str:
        """Wait until the screen has this text, or is as wanted; returns the screen, drawn to its end."""
        wanted = (lambda text: seen in text) if isinstance(seen, str) else seen
        end = time.monotonic() + timeout_s
        while not wanted(self.text):
            assert time.monotonic() < end, f"never seen: {seen}\n{self.text}"
            assert self._read(0.1) or self._process.poll() is None, f"ended before {seen} was seen\n{self.text}"
        shown, end = self.text, min(end, time.monotonic() + 0.5)
        while time.monotonic() < end and self._read(0.05):  # what was read may end within a picture
            shown = self.text if wanted(self.text) else shown
        return shown

    def end(self, timeout_s: float = 20.0) -> int:
        """Wait for the end of the program; returns its exit status."""
        end = time.monotonic() + timeout_s
        while self._process.poll() is None:
            assert time.monotonic() < end, f"still running\n{self.text}"
            self._read(0.1)
        while self._read(0.05):
            pass
        return self._process.returncode

    def left_behind(self) -> list[str]:
        """What the program took of the terminal and did not give back."""
        left = [name for name, taken, given in _MODES if self.raw.rfind(taken) > self.raw.rfind(given)]
        return left + (["line settings"] if termios.tcgetattr(self._theirs) != self._before else [])

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # Linux says so when the last program has closed it
            return False
        self.raw += data
        self._stream.feed(_UNKNOWN_TO_PYTE.sub(b"", data))
        return bool(data)

    def _set_size(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
