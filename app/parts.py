"""The answer's text by kind (`dflash_mlx.segments`) and by origin: whose proposal its tokens were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

from dflash_mlx.app.messages import Kind, Origin, Part


class Segment(Protocol):
    @property
    def kind(self) -> Kind: ...

    @property
    def text(self) -> str: ...


class Origins:
    """Remembers whose text it was until the segments come that hold it: a marker, or a tool call, is held back.

    Text belongs to the token that completed it; one that ends in the middle of a character gives its bytes to the next.
    Invariant: segments are the text that came, in order, so their parts are too.
    """

    def __init__(self) -> None:
        self._runs: deque[tuple[Origin, int]] = deque()  # (whose, characters), oldest first

    def came(self, origin: Origin, characters: int) -> None:
        """This much text of one token goes into the segments now."""
        if characters:
            self._runs.append((origin, characters))

    def cut(self, segments: Iterable[Segment]) -> list[Part]:
        """The segments as parts of one origin each."""
        return [part for segment in segments for part in self._cut(segment.kind, segment.text)]

    def _cut(self, kind: Kind, text: str) -> Iterable[Part]:
        while text:
            origin, characters = self._runs.popleft()
            if characters > len(text):
                self._runs.appendleft((origin, characters - len(text)))
            yield Part(kind, origin, text[:characters])
            text = text[characters:]


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbours of the same kind and origin as one."""
    groups = groupby(parts, lambda part: (part.kind, part.origin))
    return tuple(Part(kind, origin, "".join(part.text for part in group)) for (kind, origin), group in groups)
