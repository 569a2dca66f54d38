"""The saved chats: a folder of append-only files, one a chat, that only their owner can read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dflash_mlx.app import chat_file
from dflash_mlx.app.chat_file import Saved
from dflash_mlx.app.lines import LineFile, StoreError, reason
from dflash_mlx.app.saved_chat import Chat
from dflash_mlx.app.titles import title_of

__all__ = ["Chat", "ChatStore", "ChatSummary", "StoreError"]

_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class ChatSummary:
    """A chat as a list shows it. Times are in UTC."""

    id: str
    title: str
    created: datetime
    changed: datetime
    """Of the last question or answer."""
    turns: int
    model: str


def _utc() -> datetime:
    return datetime.now(UTC)


class ChatStore:
    """Chats in `folder`, which is made with the first one.

    notes: what the last `list` had to leave out, for the user.
    """

    def __init__(
        self, folder: Path, *, now: Callable[[], datetime] = _utc, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self.notes: tuple[str, ...] = ()
        self._now, self._clock = now, clock
        self._open: dict[str, Chat] = {}
        self._known: dict[Path, tuple[tuple[int, int], ChatSummary]] = {}

    def list(self) -> list[ChatSummary]:
        """All chats, the newest first. Files that are none are left out, with a note.

        Raises:
            StoreError: the folder cannot be read.
        """
        try:
            paths = sorted(path for path in self.folder.iterdir() if path.suffix == _SUFFIX and path.name[0] != ".")
        except FileNotFoundError:
            paths = []
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be read ({reason(error)}).") from error
        found, notes = [], []
        for path in paths:
            try:
                found.append(self._summary(path))
            except StoreError as error:
                notes.append(str(error))
        self.notes = tuple(notes)
        return sorted(found, key=lambda chat: (chat.changed, chat.id), reverse=True)

    def _summary(self, path: Path) -> ChatSummary:
        try:
            stat = path.stat()
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({reason(error)}).") from error
        stamp = (stat.st_mtime_ns, stat.st_size)
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        saved = chat_file.read(path, answers=False)
        title = title_of(saved.title, saved.conversation, saved.unsent.waiting)
        turns = len(saved.conversation.turns)
        summary = ChatSummary(path.stem, title, saved.created, saved.changed, turns, saved.model)
        self._known[path] = (stamp, summary)
        return summary

    def create(self, model: str, system: str = "") -> Chat:
        """A new chat. Nothing is written before its first question."""
        now = self._now()
        path = self._path(f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}")
        chat = Chat(path, Saved(now, now, model, system), None, now=self._now, clock=self._clock)
        self._open[chat.id] = chat
        return chat

    def open(self, id: str) -> Chat:
        """A saved chat, to go on with: the same object while it is open here, read-only if it is open elsewhere.

        Raises:
            StoreError: it cannot be read.
        """
        chat = self._open_here(id)
        if chat is not None:
            return chat
        path = self._path(id)
        file, read_only = None, ""
        try:
            file = LineFile(path, make=False)
        except StoreError as error:
            read_only = f"{error} What is said here is not saved."
        try:
            saved = chat_file.read(path)  # after it was locked, so that nobody writes in between
        except BaseException:
            if file is not None:
                file.close()
            raise
        chat = Chat(path, saved, file, now=self._now, clock=self._clock, read_only=read_only)
        if not read_only:
            self._open[id] = chat
        return chat

    def delete(self, id: str) -> None:
        """Delete a chat for good.

        Raises:
            StoreError: it is open elsewhere, or cannot be deleted.
        """
        chat, path = self._open_here(id), self._path(id)
        file = LineFile(path, make=False) if chat is None else None
        try:
            path.unlink(missing_ok=chat is not None)
        except OSError as error:
            raise StoreError(f"{path} cannot be deleted ({reason(error)}).") from error
        finally:
            if file is not None:
                file.close()
        if chat is not None:
            chat.forget()
        self._known.pop(path, None)

    def rename(self, id: str, title: str) -> None:
        """Give a chat a title; an empty one takes it back to its first question.

        Raises:
            StoreError: it is open elsewhere, or cannot be written.
        """
        chat = self._open_here(id)
        if chat is not None:
            chat.retitled(title)
            return
        chat = self.open(id)
        try:
            if chat.read_only:
                raise StoreError(f"It keeps its title: {chat.read_only}")
            chat.retitled(title)
        finally:
            chat.close()

    def _open_here(self, id: str) -> Chat | None:
        chat = self._open.get(id)
        return None if chat is None or chat.closed else chat

    def _path(self, id: str) -> Path:
        if not id or Path(id).name != id or id.startswith("."):
            raise StoreError(f"{id!r} is no chat's id.")
        return self.folder / f"{id}{_SUFFIX}"
