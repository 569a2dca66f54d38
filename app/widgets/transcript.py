"""The conversation as it scrolls by: it follows the newest text, and lets go while the reader looks back."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.widget import Widget

from dflash_mlx.app.widgets.turn import AnswerTurn, Notice, UserTurn


class Transcript(VerticalScroll, can_focus=False):
    """Holds the turns. The prompt keeps the focus, so the keys that scroll are the screen's."""

    def on_mount(self) -> None:
        self.anchor()

    async def add_turn(self, number: int, question: str) -> AnswerTurn:
        """Show a question and the empty answer under it, and follow."""
        answer = AnswerTurn(number)
        await self.mount(UserTurn(question), answer)
        self.follow()
        return answer

    async def add_notice(self, title: str, body: str, *, error: bool = False) -> None:
        await self.mount(Notice(title, body, error=error))

    async def drop_last_turn(self) -> None:
        """Remove the last question and everything after it."""
        children = list(self.children)
        questions = [i for i, child in enumerate(children) if isinstance(child, UserTurn)]
        await self.remove_children(children[questions[-1] :] if questions else [])

    async def clear(self) -> None:
        turns: list[Widget] = list(self.children)
        await self.remove_children(turns)
        self.follow()

    def follow(self) -> None:
        """Go to the newest text and stay there."""
        self.scroll_end(animate=False)
