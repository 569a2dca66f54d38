"""The conversation as the model sees it: a system prompt and turns. No Textual, no MLX.

Invariant: `messages()` always alternates user and assistant. A turn that has no answer (stopped before the
first token, or failed) is left out, so that history and prompt cache agree about what was said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dflash_mlx.app.jobs import Messages
from dflash_mlx.app.messages import Reason


@dataclass
class Turn:
    """A question and as much of its answer as there is."""

    number: int
    user: str
    answer: str = ""
    state: Literal["open", "failed"] | Reason = "open"


@dataclass
class Conversation:
    """Turns, oldest first. Turn numbers are never reused, also not by `clear`."""

    turns: list[Turn] = field(default_factory=list)
    _last: int = 0

    @property
    def open_turn(self) -> Turn | None:
        """The turn that is being answered now."""
        return self.turns[-1] if self.turns and self.turns[-1].state == "open" else None

    def ask(self, text: str) -> Turn:
        """Open a turn.

        Raises:
            ValueError: the previous turn is still open.
        """
        if self.open_turn is not None:
            raise ValueError("the previous turn is still being answered")
        self._last += 1
        turn = Turn(self._last, text)
        self.turns.append(turn)
        return turn

    def append(self, number: int, text: str) -> bool:
        """Add answer text to the open turn; False if the text belongs to another one."""
        turn = self.open_turn
        if turn is None or turn.number != number:
            return False
        turn.answer += text
        return True

    def finish(self, number: int, state: Reason | Literal["failed"]) -> Turn | None:
        """Close the open turn; None if it is another one."""
        turn = self.open_turn
        if turn is None or turn.number != number:
            return None
        turn.state = state
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

    def take_last_question(self) -> str | None:
        """Drop the last, closed turn and return its question, to ask it again."""
        if not self.turns or self.open_turn is not None:
            return None
        return self.turns.pop().user

    def clear(self) -> None:
        self.turns.clear()
