"""What was sent, to be sent again: the entries that Up and Down walk through."""

from __future__ import annotations


class History:
    """Entries, oldest first, and where the reader stands; after the newest one stands the empty box."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._at = 0

    def add(self, text: str) -> None:
        """Remember `text` as the newest entry, once, and stand behind it."""
        if text.strip() and (not self.entries or self.entries[-1] != text):
            self.entries.append(text)
        self.leave()

    def replace(self, entries: list[str]) -> None:
        """Begin anew, with the questions of a resumed chat say."""
        self.entries = list(entries)
        self.leave()

    def leave(self) -> None:
        """Stand behind the newest entry."""
        self._at = len(self.entries)

    @property
    def at_newest(self) -> bool:
        """Whether the reader stands at the newest entry."""
        return bool(self.entries) and self._at == len(self.entries) - 1

    def back(self) -> str | None:
        """The entry before; None at the oldest one."""
        if self._at == 0:
            return None
        self._at -= 1
        return self.entries[self._at]

    def forward(self) -> str | None:
        """The entry after; empty behind the newest one; None if the reader stands there already."""
        if self._at == len(self.entries):
            return None
        self._at += 1
        return self.entries[self._at] if self._at < len(self.entries) else ""
