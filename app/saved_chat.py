"""One chat and its file: told what happens to the conversation, it writes it down.

A line is written for every event and flushed; at the end of a turn it is on the disk. When the disk refuses, that
is raised once, and what could not be written waits: the next event tries again with all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from dflash_mlx.app import chat_file
from dflash_mlx.app.chat_file import Saved, Unsent
from dflash_mlx.app.conversation import Turn
from dflash_mlx.app.lines import LineFile, StoreError, encode
from dflash_mlx.app.titles import one_line, title_of

GROW_S = 1.0
"""A growing answer is written at most this often."""


class Chat:
    """A conversation that is kept. Its file appears with the first question, or at the end if one waits to be sent.

    conversation:    what was read, to go on with. The chat writes down what it is told, not what it finds there.
    settings_system: the system prompt in force.
    unsent:          what was written and not sent, as the file says it.
    read_only:       why nothing is saved, for the user; empty if it is.
    note:            what could not be read, for the user; empty if all could.
    """

    def __init__(
        self,
        path: Path,
        saved: Saved,
        file: LineFile | None,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
        read_only: str = "",
    ) -> None:
        self.path = path
        self.conversation = saved.conversation
        self.settings_system = saved.system
        self.unsent = saved.unsent
        self.model = saved.model
        self.read_only = read_only
        lines = "1 damaged line was" if saved.damaged == 1 else f"{saved.damaged} damaged lines were"
        self.note = f"{lines} left out of {path}." if saved.damaged else ""
        self.closed = False
        self._given_title = saved.title
        self._file = file
        self._now, self._clock = now, clock
        self._begun = file is not None
        self._waiting = b""
        self._refused = False
        self._numbers = {turn.number: turn.number + saved.last + 1 for turn in saved.conversation.turns}
        self._last = saved.last
        self._said = (0, 0)
        self._grew_at = float("-inf")
        if file is None and not read_only:
            self._waiting = encode(chat_file.head(saved.created, saved.model, saved.system))

    @property
    def id(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        """The user's, or the first question."""
        return title_of(self._given_title, self.conversation, self.unsent.waiting)

    # Each of these raises StoreError, with text for the user, the first time that the disk refuses.

    def asked(self, turn: Turn, model: str = "") -> None:
        """A question was asked. model: who is to answer, if that may have changed."""
        self._last += 1
        self._numbers[turn.number] = self._last
        self._said, self._grew_at, self._begun = (0, 0), self._clock(), True
        record = {"op": "ask", "turn": self._last, "at": self._now().isoformat(), "user": turn.user}
        if model and model != self.model:
            self.model = record["model"] = model
        self._write(record)

    def grew(self, turn: Turn) -> None:
        """The answer became longer."""
        if turn.number in self._numbers and self._clock() - self._grew_at >= GROW_S:
            self._grew_at = self._clock()
            self._write({"op": "grow", "turn": self._numbers[turn.number], "parts": self._news(turn)})

    def finished(self, turn: Turn) -> None:
        """The answer ended, with `turn.state`."""
        if turn.number in self._numbers:
            self._write(chat_file.end(self._numbers[turn.number], self._now(), self._news(turn), turn), sync=True)

    def dropped(self, number: int) -> None:
        """Turn `number` was undone."""
        if number in self._numbers:
            self._write({"op": "drop", "turn": self._numbers.pop(number)})

    def retitled(self, title: str) -> None:
        """The user gave a title; an empty one takes it back."""
        self._given_title = one_line(title)
        self._write({"op": "title", "text": self._given_title})

    def system(self, text: str) -> None:
        """From now on this is the system prompt."""
        if text != self.settings_system:
            self.settings_system = text
            self._write({"op": "system", "text": text})

    def left_unsent(self, unsent: Unsent) -> None:
        """This was written and not sent, until it is said otherwise."""
        if unsent != self.unsent:
            self.unsent = unsent
            self._write(chat_file.unsent(unsent), sync=True)

    def close(self) -> None:
        """Write what waits, an answer that still grows too, and give the file back. The chat then writes no more."""
        turn = self.conversation.open_turn
        self._begun = self._begun or bool(self.unsent.waiting)
        try:
            if turn is not None and turn.number in self._numbers:
                self._write({"op": "grow", "turn": self._numbers[turn.number], "parts": self._news(turn)}, sync=True)
            elif self._waiting:
                self._flush(sync=True)
        finally:
            self.forget()

    def forget(self) -> None:
        """Close without writing."""
        self.closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _news(self, turn: Turn) -> list[list[str]]:
        """The parts of the answer that no line has said yet."""
        count, length = self._said
        news = [[part.kind, part.origin, part.text] for part in turn.parts[count:]]
        if news:
            self._said = (len(turn.parts) - 1, len(turn.parts[-1].text))
            news[0][2] = news[0][2][length:]
        return [part for part in news if part[2]]

    def _write(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        if not self.closed and not self.read_only:
            self._waiting += encode(record)
            self._flush(sync=sync)

    def _flush(self, *, sync: bool) -> None:
        if self.closed or not self._begun:
            return
        try:
            if self._file is None:
                self._file = LineFile(self.path, make=True)
            self._file.append(self._waiting, sync=sync)
        except StoreError as error:
            if self._refused:
                return
            self._refused = True
            raise StoreError(f"{error} The chat goes on, but what is said now is not saved.") from error
        self._waiting, self._refused = b"", False
