"""Keeps the chat on disk while it is talked in, and the numbers of its turns. A disk that fails is said once, by the
chat's file or the metrics log themselves; the talk goes on.

No Textual: what there is to say goes through `tell`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_mlx.app.chat_file import Unsent
from dflash_mlx.app.conversation import Conversation, Turn
from dflash_mlx.app.lines import StoreError
from dflash_mlx.app.metrics import MetricsLog
from dflash_mlx.app.places import Places
from dflash_mlx.app.store import Chat, ChatStore

Tell = Callable[[str, str], None]
"""(title, body), for the user."""


class Keeper:
    """Writes one chat at a time. A chat has no file before its first question, sent or left waiting.

    Args:
        save, metrics: whether chats, and the numbers of their turns, are written at all.
    """

    def __init__(self, places: Places, tell: Tell, *, save: bool = True, metrics: bool = True) -> None:
        self.store = ChatStore(places.chats)
        self.saves = save
        self._tell = tell
        self._metrics = MetricsLog(places.metrics) if metrics else None
        self._chat: Chat | None = None

    @property
    def id(self) -> str | None:
        """Of the chat that is being kept; None if none is."""
        return self._chat.id if self._chat is not None else None

    @property
    def title(self) -> str:
        """The chat's; empty before there is something to name."""
        chat = self._chat
        return chat.title if chat is not None and chat.conversation.turns else ""

    @property
    def lost(self) -> bool:
        """The chat was deleted while it was open."""
        return self._chat is not None and self._chat.closed

    @property
    def newest(self) -> str:
        """Id of the chat that was talked in last; empty if there is none."""
        try:
            chats = self.store.list()
        except StoreError as error:
            self._tell("Saved chats", str(error))
            return ""
        return chats[0].id if chats else ""

    def new(self, model: str, system: str) -> Conversation:
        """Begin another chat."""
        self.close()
        self._chat = self.store.create(model, system) if self.saves else None
        return self._chat.conversation if self._chat is not None else Conversation()

    def open(self, id: str) -> Chat:
        """Go on with a saved chat.

        Raises:
            StoreError: it cannot be read, and what was open stays so.
        """
        if all(chat.id != id for chat in self.store.list()):
            lost = f"There is no saved chat {id}. F3 or /chats lists them."
            raise StoreError(lost if id else "No chat is saved yet.")
        chat = self.store.open(id)
        if chat is not self._chat:
            self.close()
            self._chat = chat
        for problem in filter(None, (chat.read_only, chat.note)):
            self._tell("About this chat", problem)
        return chat

    def asked(self, turn: Turn, model: str) -> None:
        """A question was asked; the first one makes the file."""
        self._write(lambda chat: chat.asked(turn, model))

    def grew(self, turn: Turn) -> None:
        """The answer grew; the chat writes it about once a second."""
        self._write(lambda chat: chat.grew(turn))

    def finished(self, turn: Turn) -> None:
        self._write(lambda chat: chat.finished(turn))

    def dropped(self, number: int) -> None:
        """The turn was taken back."""
        self._write(lambda chat: chat.dropped(number))

    def retitled(self, title: str) -> None:
        self._write(lambda chat: chat.retitled(title))

    def system(self, text: str) -> None:
        self._write(lambda chat: chat.system(text))

    def left_unsent(self, unsent: Unsent) -> None:
        """What was written and not sent is this now."""
        self._write(lambda chat: chat.left_unsent(unsent))

    def measured(self, record: Mapping[str, Any]) -> None:
        """Append a turn's record to the metrics file."""
        if self._metrics is None or not record:
            return
        try:
            self._metrics.write(record)
        except StoreError as error:
            self._tell("The numbers of this turn are not kept", str(error))

    def close(self) -> None:
        self._write(lambda chat: chat.close())
        self._chat = None

    def _write(self, what: Callable[[Chat], None]) -> None:
        if self._chat is None:
            return
        try:
            what(self._chat)
        except StoreError as error:
            self._tell("This chat is not saved", str(error))
