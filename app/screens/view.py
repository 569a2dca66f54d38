"""What the chat's window is made of, and how it is told what to show. What happens in it is in `talk` and `chat`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from dflash_mlx.app.session import Session
from dflash_mlx.app.text import pair_name, visible
from dflash_mlx.app.widgets.prompt import Prompt
from dflash_mlx.app.widgets.queue import QueueLine
from dflash_mlx.app.widgets.stats_bar import StatsBar
from dflash_mlx.app.widgets.transcript import Transcript
from dflash_mlx.app.widgets.welcome import Welcome

if TYPE_CHECKING:
    from dflash_mlx.app.app import ChatApp

WIDGETS = Path(__file__).parent.parent / "widgets"

HINT_ROWS = 6
"""Commands that are listed while one is being written; as `max-height` of #hint."""


class ChatView(Screen[None]):
    """Class `-chatting` once there is a turn to show; `-short` and `-narrow` by the terminal's size."""

    CSS_PATH: ClassVar = ["chat.tcss", *(f"../widgets/{path.name}" for path in sorted(WIDGETS.glob("*.tcss")))]
    AUTO_FOCUS = "Prompt"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (64, "-wide")]  # noqa: RUF012 (the base declares it unannotated)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall"), (32, "-roomy")]  # noqa: RUF012

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def compose(self) -> ComposeResult:
        with Horizontal(id="header"):
            yield Static("dflash", id="name")
            yield Static("", markup=False, id="pair")
            yield Static("", markup=False, id="chat-title")
        yield Welcome()
        yield Transcript()
        yield QueueLine()
        yield Static("", markup=False, id="hint")
        prompt = Prompt()
        self.session.written = lambda: prompt.written
        yield prompt
        yield StatsBar()

    @property
    def chat_app(self) -> ChatApp:
        from dflash_mlx.app.app import ChatApp

        assert isinstance(self.app, ChatApp)
        return self.app

    @property
    def prompt(self) -> Prompt:
        return self.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def welcome(self) -> Welcome:
        return self.query_one(Welcome)

    def show_numbers(self) -> None:
        session = self.session
        bar = self.query_one(StatsBar)
        bar.show(session.numbers, session.card, session.baseline, session.context_used, session.known_notes)

    def show_names(self) -> None:
        """What is loaded, and what the chat is called."""
        card = self.session.card
        self.query_one("#pair", Static).update(Content(visible(pair_name(card)) if card is not None else ""))
        self.query_one("#chat-title", Static).update(Content(visible(self.session.keeper.title)))

    def show_waiting(self) -> None:
        """The messages that wait, and whether the box would have to."""
        session = self.session
        self.query_one(QueueLine).show([waiting.text for waiting in session.waiting], held=session.held)
        self.prompt.set_busy(session.conversation.open_turn is not None)

    def show_loading(self, text: str, fraction: float | None) -> None:
        """A pair is being loaded: which, in the header; what is done, on the first page or, without it, there too."""
        self.welcome.show_loading(text, fraction)
        share = "" if fraction is None else f" · {fraction:.0%}"
        said = f"{visible(text)}{share}" if self.has_class("-chatting") else visible(self.session.wanted)
        self.query_one("#pair", Static).update(Content(said))

    def show_unloaded(self) -> None:
        """No model is loaded, and none is being loaded."""
        self.welcome.show_idle()
        self.show_names()
        self.show_numbers()
        self.show_waiting()

    def show_state(self) -> None:
        """How the reader likes to see things, as the app remembers it."""
        state = self.chat_app.state
        self.transcript.fold_thinking(state.fold_thinking)
        self.transcript.show_origins(state.origins)
        self.query_one(StatsBar).density = "full" if state.verbose else "calm"

    def hint(self, text: str | Content) -> None:
        """A line above the box; gone with the next key."""
        hint = self.query_one("#hint", Static)
        content = Content(visible(text)) if isinstance(text, str) else text
        hint.update(content)
        hint.set_class(bool(content), "-shown")

    async def notice(self, title: str, body: str, *, error: bool = False) -> None:
        """Something the chat itself has to say: in the transcript, or above the box while there is none."""
        if self.has_class("-chatting"):
            await self.transcript.add_notice(title, body, error=error)
        else:
            self.hint(f"{title}. {body}")

    def action_page(self, direction: int) -> None:
        shown = self.transcript if self.has_class("-chatting") else self.welcome
        if direction < 0:
            shown.scroll_page_up(animate=False)
        else:
            shown.scroll_page_down(animate=False)

    def action_follow(self) -> None:
        self.transcript.follow()
