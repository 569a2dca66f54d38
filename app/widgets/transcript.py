"""The conversation as it scrolls by: it follows the newest text, and lets go while the reader looks back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from textual import work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Click
from textual.widget import Widget
from textual.widgets import Static

from dflash_mlx.app.text import count
from dflash_mlx.app.widgets.origin_text import LEGEND
from dflash_mlx.app.widgets.turn import AnswerTurn, Notice, UserTurn

if TYPE_CHECKING:
    from dflash_mlx.app.conversation import Conversation, Turn

BATCH = 10
"""Turns of a saved chat that are laid out at once."""
MORE_BELOW = "↓ more below · Ctrl+End"


class Place(NamedTuple):
    """Where the reader is: the first turn that begins in the window and its row there; else the turn that fills the
    window, and which share of it is above."""

    turn: Widget
    row: float | None
    share: float


class Transcript(VerticalScroll, can_focus=False):
    """Holds the turns. The prompt keeps the focus, so the keys that scroll are the screen's.

    Classes: `-released` while it does not follow and there is more below; `-earlier` while turns of a saved chat are
    left to show, which happens when the reader gets to them; `-origins` while answers are shown by origin.
    """

    def __init__(self) -> None:
        super().__init__()
        self._earlier: list[Turn] = []
        self._reaching = False
        self._folded = True
        self._more_above = Static("", markup=False, id="earlier")
        self._legend = Static(LEGEND, markup=False, id="legend")
        self._more_below = Static(MORE_BELOW, markup=False, id="below")

    def compose(self) -> ComposeResult:
        yield self._legend
        yield self._more_below
        yield self._more_above

    def on_mount(self) -> None:
        self.anchor()
        self.watch(self, "scroll_y", self._scrolled, init=False)
        self.watch(self, "virtual_size", self._scrolled, init=False)

    # Turns --------------------------------------------------------------------------------------------------

    async def add_turn(self, number: int, question: str) -> AnswerTurn:
        """Show a question and the empty answer under it, and follow."""
        answer = self._new_answer(number)
        await self.mount_all([UserTurn(question), answer])
        self.follow()
        return answer

    async def add_notice(self, title: str, body: str, *, error: bool = False) -> None:
        await self.mount_all([Notice(title, body, error=error)])

    async def show(self, conversation: Conversation) -> None:
        """Show a saved chat from its end; what is above is laid out when the reader gets there."""
        await self.clear()
        self._earlier = list(conversation.turns)
        await self._show_batch()
        self.follow()

    async def drop_last_turn(self) -> None:
        """Remove the last question and everything after it."""
        turns = self._turns
        questions = [i for i, child in enumerate(turns) if isinstance(child, UserTurn)]
        await self.remove_children(turns[questions[-1] :] if questions else [])

    async def clear(self) -> None:
        self._earlier = []
        self._say_earlier()
        await self.remove_children(self._turns)
        self.follow()

    @property
    def _turns(self) -> list[Widget]:
        return [child for child in self.children if isinstance(child, (UserTurn, AnswerTurn, Notice))]

    def _new_answer(self, number: int) -> AnswerTurn:
        return AnswerTurn(number, folded=self._folded, origins=self.origins)

    async def _show_batch(self) -> None:
        """Lay out the newest turns of those that are left, above all others."""
        batch, self._earlier = self._earlier[-BATCH:], self._earlier[:-BATCH]
        answers = [(turn, self._new_answer(turn.number)) for turn in batch]
        widgets = [widget for turn, answer in answers for widget in (UserTurn(turn.user), answer)]
        await self.mount_all(widgets, after=self._more_above)
        for turn, answer in answers:
            await answer.show_saved(turn)
        self._say_earlier()

    def _say_earlier(self) -> None:
        left = len(self._earlier)
        self._more_above.update(Content(f"↑ {count(left, 'earlier turn')} · PgUp"))
        self.set_class(left > 0, "-earlier")

    @work
    async def _reach_back(self) -> None:
        """Show earlier turns, and leave the line that the reader looks at where it is."""
        if self._reaching:
            return
        self._reaching = True
        below = self.virtual_size.height - self.scroll_y
        with self.app.batch_update():
            await self._show_batch()

        def return_to_line() -> None:
            self.scroll_to(y=self.virtual_size.height - below, animate=False, immediate=True)
            self._reaching = False

        self.call_after_refresh(return_to_line)

    # Views --------------------------------------------------------------------------------------------------

    def show_origins(self, on: bool) -> None:
        """Show answers as plain text by origin, or as Markdown again; the reader stays at the same part of the text."""
        if on != self.origins:
            place = self._place()
            self.set_class(on, "-origins")
            self._redraw(place)

    def fold_thinking(self, folded: bool) -> None:
        """Fold or unfold what models thought, of these turns and of those to come."""
        if folded != self._folded:
            place = self._place()
            self._folded = folded
            self._redraw(place)

    @property
    def origins(self) -> bool:
        return self.has_class("-origins")

    @work
    async def _redraw(self, place: Place | None) -> None:
        """Bring all answers to the present views. Several of these may run at once, and all want the same."""
        with self.app.batch_update():
            for answer in self.query(AnswerTurn):
                await answer.show_as(folded=self._folded, origins=self.origins)
        if place is not None:
            self.call_after_refresh(self._return_to, place)

    def _place(self) -> Place | None:
        """None while the end is followed, or if there is nothing."""
        filling: Place | None = None
        for turn in [] if self.following else self._turns:
            region = turn.virtual_region
            row = region.y - self.scroll_y
            if 0 <= row < self.size.height:
                return Place(turn, row, 0.0)
            if row < 0 < region.bottom - self.scroll_y:
                filling = Place(turn, None, -row / region.height)
        return filling

    def _return_to(self, place: Place) -> None:
        region = place.turn.virtual_region
        y = region.y - place.row if place.row is not None else region.y + place.share * region.height
        self.scroll_to(y=round(y), animate=False, immediate=True)

    # Scrolling ----------------------------------------------------------------------------------------------

    @property
    def following(self) -> bool:
        """Whether the newest text is kept in view."""
        return self._anchored and not self._anchor_released

    def follow(self) -> None:
        """Go to the newest text and stay there."""
        self.anchor()
        self._scrolled()

    def release_anchor(self) -> None:
        """Called by whatever scrolls. One that leaves the reader at the bottom is no wish to stay behind."""
        super().release_anchor()
        self.call_after_refresh(self._settle)

    def _settle(self) -> None:
        self._check_anchor()
        self._scrolled()

    def _scrolled(self) -> None:
        self.set_class(not self.following and self.scroll_y < self.max_scroll_y, "-released")
        if self._earlier and not self.following and self.scroll_y <= 1:
            self._reach_back()

    def on_click(self, event: Click) -> None:
        if event.widget is self._more_below:
            self.follow()
        elif event.widget is self._more_above:
            self._reach_back()
