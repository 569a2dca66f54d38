"""The other end of `race_child`: starts it, and ends it where it hangs. A kernel that took it down stays closed.

One that hangs is closed at every size. What the system did to the process (no memory) is not held against a kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.race import Verdict, says_no_memory
from dflash_mlx.kernels.race_child import plain_case, verdict_of

IDLE_S = 120.0  # between two messages, while no kernel runs: MLX is imported, operands are made
_GRACE_S = 0.5  # for the messages themselves, on a busy machine
_KILLED = 9  # the signal by which systems take their memory back
_SAID = 200  # characters of what a process said last
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    code: its exit status; a signal as a negative number; None if it had to be killed.
    said: the last line that it wrote to stderr.
    """

    code: int | None
    said: str = ""

    def __str__(self) -> str:
        if self.code is None:
            return "was ended"
        return f"was ended by signal {-self.code}" if self.code < 0 else f"ended with status {self.code}"

    @property
    def words(self) -> str:
        """What it said, behind a colon."""
        return f": {self.said}" if self.said else ""

    @property
    def of_memory(self) -> bool:
        return self.code == -_KILLED or says_no_memory(self.said)


class Child(Protocol):
    """A process that judges kernels."""

    def read(self, timeout_s: float) -> str | None:
        """Its next line; "" when it has ended. None if neither happens in time."""
        ...

    def end(self) -> Ending:
        """Kill it if it still runs."""
        ...


Start = Callable[[Sequence[Case]], Child]


@dataclass(frozen=True)
class Raced:
    case: Case
    verdict: Verdict


def race_all(cases: Sequence[Case], start: Start | None = None) -> Generator[Raced]:
    """Judge every case, in a child process that is started again after a case that took it down.

    A verdict about the whole kernel is the last one about it: its other cases are left out.
    """
    left = list(cases)
    while left:
        try:
            child = (start or spawn)(left)
        except OSError as error:
            yield from _unraced(left, f"it could not be raced here ({error})")
            return
        raced: Raced | None = None
        done = 0
        try:
            for raced in _listen(child, left):
                done += 1
                yield raced
                if raced.verdict.scope == "kernel":
                    break
        finally:
            ended = child.end()
        if raced is None:
            text = f"it could not be raced here (the race's process {ended} before it began{ended.words})"
            yield from _unraced(left, text)
            return
        left = left[done:]
        if raced.verdict.scope == "kernel":
            left = [case for case in left if case.operation != raced.case.operation]


def _unraced(cases: Sequence[Case], reason: str) -> Generator[Raced]:
    for case in cases:
        yield Raced(case, Verdict(reason, scope="moment"))


def _listen(child: Child, cases: Sequence[Case]) -> Generator[Raced]:
    """What one child says, until it ends, or does something that it has to be ended for."""
    current: Case | None = None
    limit_s: float | None = None
    while True:
        line = child.read(IDLE_S if limit_s is None else limit_s + _GRACE_S)
        message = _parsed(line, cases)
        if message is None:
            if current is not None:
                yield Raced(current, _taken_down(line, limit_s, child))
            return
        if message.case is not None:
            current = message.case
        elif message.verdict is not None and current is not None:
            yield Raced(current, message.verdict)
            if current is cases[-1]:
                return
            current = None
        limit_s = message.limit_s


@dataclass(frozen=True)
class _Message:
    """limit_s: of work that begins; None where none runs."""

    case: Case | None
    verdict: Verdict | None
    limit_s: float | None


def _parsed(line: str | None, cases: Sequence[Case]) -> _Message | None:
    """None for what is no message: the end, a line that was cut, or one that something else wrote."""
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
        plain = json.loads(line or "")
        index, verdict, limit_s = (plain.get(name) for name in ("case", "verdict", "begin"))
        return _Message(
            None if index is None else cases[index],
            None if verdict is None else verdict_of(verdict),
            None if limit_s is None else float(limit_s),
        )
    return None


def _taken_down(line: str | None, limit_s: float | None, child: Child) -> Verdict:
    """About the case during which a child ended, said something that is no message, or hung."""
    ended = child.end()
    if line is None:
        text = f"its work took more than {limit_s or 0:.0f} s, which may freeze the screen, and was ended"
        if limit_s is None:
            text = f"the race's process said nothing for {IDLE_S:.0f} s and was ended"
        return Verdict(text, scope="kernel")
    if ended.of_memory:
        text = f"there was no memory to race it (the race's process {ended}{ended.words})"
        return Verdict(text, scope="moment")
    return Verdict(f"the race's process {ended}")


class Process:
    """A child that is a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._silent = threading.Event()  # its output is closed, so it ends by itself
        self._said: deque[str] = deque(maxlen=1)
        self._complaints = threading.Thread(target=self._read_complaints, daemon=True)
        self._complaints.start()
        threading.Thread(target=self._read, daemon=True).start()

    def _read_complaints(self) -> None:
        if self._process.stderr is not None:
            with contextlib.suppress(ValueError, OSError), self._process.stderr as lines:
                self._said.extend(text for line in lines if (text := line.strip()[:_SAID]))

    def _read(self) -> None:
        if self._process.stdout is not None:
            with contextlib.suppress(ValueError, OSError), self._process.stdout as lines:
                for line in lines:
                    self._lines.put(line)
        self._silent.set()
        self._lines.put("")

    def read(self, timeout_s: float) -> str | None:
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def end(self) -> Ending:
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=1 if self._silent.is_set() else 0)
        if code is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver; it ends when that lets go
                self._process.wait(timeout=5)
        self._complaints.join(timeout=1)
        return Ending(code, next(iter(self._said), ""))


def spawn(cases: Sequence[Case], command: Sequence[str] | None = None) -> Process:
    """Start a child that judges the cases. Raises OSError."""
    if not sys.executable:
        raise OSError("there is no Python to start")
    if getattr(sys, "frozen", False):
        raise OSError("this program is packed into one file, which would start itself and no Python")
    words = command or [sys.executable, "-P", "-m", "dflash_mlx.kernels.race_child"]
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        list(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # it died at once, which its silence will say
            process.stdin.write(json.dumps({"cases": [plain_case(case) for case in cases]}))
            process.stdin.close()
    return Process(process)
