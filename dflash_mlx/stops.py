"""Stop strings on streamed text: hold back what may become a match, cut exactly before the first one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text as it is decoded; get back what may be shown.

    Matching is on text, so a stop string may span tokens and blocks. With several stop strings the one that
    completes first wins, and of those the one that starts first.

    Raises:
        ValueError: a stop string is empty, or none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str):
                raise ValueError(f"`stop` has to hold strings, got {stop!r}. End tokens belong to the tokenizer.")
        if any(not stop for stop in stops):
            raise ValueError("`stop` holds an empty string, which would match everywhere.")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        self.rest = ""
        """What was fed behind the match."""

    def feed(self, text: str) -> str:
        """Text that can no longer be part of a match. After a match: nothing."""
        if self.matched is not None or not text:
            return ""
        self._held += text
        hits = [
            (self._held.index(stop) + len(stop), self._held.index(stop), stop)
            for stop in self._stops
            if stop in self._held
        ]
        if hits:
            end, start, self.matched = min(hits)
            shown, self.rest, self._held = self._held[:start], self._held[end:], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
