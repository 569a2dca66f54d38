"""The conversation as the model sees it: a system prompt and turns. No Textual, no MLX, no file.

Invariant: `messages()` always alternates user and assistant. A turn that has no answer (stopped before the
first token, or failed) is left out, so that history and prompt cache agree about what was said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from dflash_mlx.app.jobs import Messages
from dflash_mlx.app.messages import Kind, Numbers, Part, Reason

End: TypeAlias = Reason | Literal["failed"]


@dataclass
class Turn:
    """A question and as much of its answer as there is."""

    number: int
    """Its number as a job. Turns of a chat that was read from a file have negative ones, oldest first."""
    user: str
    parts: list[Part] = field(default_factory=list)
    """The answer; neighbours differ in kind or origin, and none is empty."""
    state: Literal["open"] | End = "open"
    closing: str = ""
    """The line under the finished answer."""
    numbers: Numbers | None = None
    """As they were when the answer ended."""

    @property
    def answer(self) -> str:
        """What the model wrote, markers and reasoning included: what the template gets."""
        return "".join(part.text for part in self.parts)

    @property
    def shown(self) -> str:
        """The answer alone: what is copied and exported."""
        return self._text("answer")

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    def _text(self, kind: Kind) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    def add(self, parts: Iterable[Part]) -> None:
        """Append to the answer, merging what has the same kind and origin as the piece before it."""
        for part in parts:
            last = self.parts[-1] if self.parts else None
            if last is not None and (last.kind, last.origin) == (part.kind, part.origin):
                self.parts[-1] = replace(last, text=last.text + part.text)
            elif part.text:
                self.parts.append(part)


@dataclass
class Conversation:
    """Turns, oldest first. Their numbers grow; who asks counts them and never gives one twice."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def open_turn(self) -> Turn | None:
        """The turn that is being answered now."""
        return self.turns[-1] if self.turns and self.turns[-1].state == "open" else None

    def ask(self, text: str, number: int) -> Turn:
        """Open a turn.

        Raises:
            ValueError: the previous turn is still open, or `number` is not above its number.
        """
        if self.open_turn is not None:
            raise ValueError("the previous turn is still being answered")
        if self.turns and number <= self.turns[-1].number:
            raise ValueError(f"`number` has to be above {self.turns[-1].number}, the turn before, got {number}")
        turn = Turn(number, text)
        self.turns.append(turn)
        return turn

    def append(self, number: int, parts: Iterable[Part]) -> bool:
        """Add to the answer of the open turn; False if the parts belong to another one."""
        turn = self.open_turn
        if turn is None or turn.number != number:
            return False
        turn.add(parts)
        return True

    def finish(self, number: int, state: End, closing: str = "", numbers: Numbers | None = None) -> Turn | None:
        """Close the open turn; None if it is another one."""
        turn = self.open_turn
        if turn is None or turn.number != number:
            return None
        turn.state, turn.closing, turn.numbers = state, closing, numbers
        return turn

    def messages(self, system: str = "") -> Messages:
        """(role, text) pairs for the chat template, the open question last."""
        pairs: list[tuple[str, str]] = [("system", system)] if system else []
        for turn in self.turns:
            if turn.state == "open":
                pairs.append(("user", turn.user))
            elif turn.answer:
                pairs += [("user", turn.user), ("assistant", turn.answer)]
        return tuple(pairs)

    def undo(self) -> Turn | None:
        """Drop the last turn and return it; None, and nothing is dropped, if it is open or there is none."""
        return None if not self.turns or self.open_turn is not None else self.turns.pop()

    def take_last_question(self) -> str | None:
        """Drop the last, closed turn and return its question, to ask it again, edited or not."""
        turn = self.undo()
        return None if turn is None else turn.user

    def clear(self) -> None:
        self.turns.clear()
