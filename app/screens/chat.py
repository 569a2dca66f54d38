"""The chat: shows the conversation and turns keys, commands and engine events into changes of it.

State lives in `Session`; widgets only show it. Events of a turn that is no longer open (after /clear, say) are
ignored by their turn number.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from dflash_mlx.app import commands
from dflash_mlx.app.engine import Engine
from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.messages import (
    Chunk,
    CycleTick,
    EngineFailed,
    ModelLoading,
    ModelReady,
    PrefillProgress,
    TurnDone,
)
from dflash_mlx.app.screens.help import HelpScreen
from dflash_mlx.app.session import Session
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.text import closing_line, pair_name, prefill_line, visible
from dflash_mlx.app.widgets.answer_markdown import AnswerMarkdown
from dflash_mlx.app.widgets.prompt import Prompt
from dflash_mlx.app.widgets.stats_bar import StatsBar
from dflash_mlx.app.widgets.transcript import Transcript
from dflash_mlx.app.widgets.turn import AnswerTurn
from dflash_mlx.app.widgets.welcome import Welcome

if TYPE_CHECKING:
    from dflash_mlx.app.app import ChatApp

HOW_TO_QUIT = "Nothing to stop or copy. Ctrl+Q quits."


class ChatScreen(Screen[None]):
    """Class `-chatting` once there is a turn to show; `-short` and `-narrow` by the terminal's size."""

    CSS_PATH: ClassVar = [
        "chat.tcss",
        "../widgets/prompt.tcss",
        "../widgets/stats_bar.tcss",
        "../widgets/transcript.tcss",
        "../widgets/turn.tcss",
        "../widgets/welcome.tcss",
    ]
    AUTO_FOCUS = "Prompt"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (64, "-wide")]  # noqa: RUF012 (the base declares it unannotated)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall"), (32, "-roomy")]  # noqa: RUF012
    BINDINGS: ClassVar = [
        Binding("escape", "stop", "Stop", show=False),
        Binding("ctrl+c,super+c", "interrupt", "Copy or stop", show=False),
        Binding("ctrl+l", "clear", "New conversation", show=False),
        Binding("ctrl+r", "regenerate", "Answer again", show=False),
        Binding("f1", "help", "Help", show=False),
    ]

    def __init__(self, engine: Engine, load: LoadModel, settings: Settings) -> None:
        super().__init__()
        self.session = Session(engine, load, settings)
        self._answer: AnswerTurn | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="header"):
            yield Static("dflash", id="name")
            yield Static("", markup=False, id="pair")
        yield Welcome()
        yield Transcript()
        yield Static("", markup=False, id="hint")
        yield Prompt()
        yield StatsBar()

    def on_mount(self) -> None:
        self.show_numbers()
        # After the first paint: the thread imports MLX, which takes seconds (D9).
        self.call_after_refresh(self.session.start)

    # What the user does -----------------------------------------------------------------------------------

    @on(Prompt.Submitted)
    async def _submitted(self, event: Prompt.Submitted) -> None:
        prompt = self.query_one(Prompt)
        match commands.parse(event.text, self.session.settings, self.session.card):
            case commands.Say(text=text):
                if text and await self.ask(text, event.pressed_at):
                    prompt.clear()
            case commands.Do(what=what):
                prompt.clear()
                await self.run_action(f"screen.{what}")
            case commands.Change(settings=settings, said=said):
                prompt.clear()
                self.session.settings = settings
                self.show_numbers()
                self.hint(f"{said[:1].upper()}{said[1:]}, from the next message on.")
            case commands.Look(dark=dark):
                prompt.clear()
                self.app.theme = "dflash-dark" if dark else "dflash-light"
            case commands.Hint(text=text):
                self.hint(text)

    async def ask(self, question: str, requested_at: float) -> bool:
        """Send a question asked at `requested_at`; False, with a hint, if that is not possible now."""
        refusal = self.session.refusal
        self.hint(refusal)
        if refusal:
            return False
        turn = self.session.ask(question, requested_at)
        self.show_numbers()
        self.add_class("-chatting")
        self._answer = await self.query_one(Transcript).add_turn(turn.number, question)
        self._answer.say("reading the prompt")
        self.query_one(Prompt).set_busy(True)
        return True

    @on(Prompt.Edited)
    def _edited(self) -> None:
        self.hint("")

    @on(AnswerMarkdown.LinkRefused)
    def _link_refused(self, event: AnswerMarkdown.LinkRefused) -> None:
        self.hint(f"Not opened, only http and https links are: {event.href[:60]}")

    def action_stop(self) -> None:
        if self.session.stop() and self._answer is not None:
            self._answer.say("stopping")

    def action_interrupt(self) -> None:
        """Ctrl+C: copy, else stop, else say how to quit."""
        selected = self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
            self.clear_selection()
            self.hint("Copied.")
        elif self.session.conversation.open_turn is not None:
            self.action_stop()
        else:
            self.hint(HOW_TO_QUIT)

    async def action_clear(self) -> None:
        self.session.clear()
        if self._answer is not None:
            await self._answer.finish("")
            self._answer = None
        await self.query_one(Transcript).clear()
        self.remove_class("-chatting")
        self.query_one(Prompt).set_busy(False)
        self.show_numbers()

    async def action_regenerate(self) -> None:
        pressed_at = time.perf_counter()
        refusal = self.session.refusal
        question = None if refusal else self.session.conversation.take_last_question()
        if question is None:
            self.hint(refusal or "There is no answer to write again.")
            return
        await self.query_one(Transcript).drop_last_turn()
        await self.ask(question, pressed_at)

    @on(Prompt.HelpWanted)
    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    async def action_quit(self) -> None:
        await self.app.action_quit()

    def action_page(self, direction: int) -> None:
        shown = self.query_one(Transcript if self.has_class("-chatting") else Welcome)
        if direction < 0:
            shown.scroll_page_up(animate=False)
        else:
            shown.scroll_page_down(animate=False)

    def action_follow(self) -> None:
        self.query_one(Transcript).follow()

    # What the engine does ---------------------------------------------------------------------------------

    async def on_engine_message(self, message: EngineMessage) -> None:
        match message.event:
            case ModelLoading(text=text, fraction=fraction):
                self.query_one(Welcome).show_loading(text, fraction)
            case ModelReady(card=card):
                self.session.card = card
                self.query_one(Welcome).show_ready(card)
                self.hint(commands.misfit(self.session.settings, card))
                self.query_one("#pair", Static).update(Content(visible(pair_name(card))))
                self.show_numbers()
            case PrefillProgress() as progress if answer := self._open_answer(progress.turn):
                answer.say(prefill_line(progress))
                self.session.read(progress)
                self.show_numbers()
            case Chunk(turn=number, text=text) if answer := self._open_answer(number):
                self.session.conversation.append(number, text)
                answer.say("writing")
                await answer.write(text)
            case CycleTick(turn=number, numbers=numbers) if self._open_answer(number):
                self.session.numbers = numbers
                self.show_numbers()
            case TurnDone() as done:
                await self._turn_done(done)
            case EngineFailed() as failed:
                await self._engine_failed(failed)

    def _open_answer(self, number: int) -> AnswerTurn | None:
        """The widget of turn `number` if that turn is being answered."""
        return self._answer if self.session.is_open(number) else None

    async def _turn_done(self, done: TurnDone) -> None:
        answer = self._open_answer(done.turn)
        turn = self.session.conversation.finish(done.turn, done.reason)
        if answer is None or turn is None:
            return
        self.session.numbers = done.numbers
        self.show_numbers()
        self.query_one(Prompt).set_busy(False)
        await answer.finish(closing_line(done, empty=not turn.answer))

    async def _engine_failed(self, failed: EngineFailed) -> None:
        if failed.details:
            self.chat_app.tracebacks.append(failed.details)
        if failed.fatal:
            self.session.broken = True
            self.chat_app.failure = failed
        if failed.fatal and not self.session.conversation.turns:
            self.query_one(Welcome).show_failure(failed.title, failed.body)
            return
        if failed.turn is not None:
            answer = self._open_answer(failed.turn)
            if answer is None:
                return
            self.session.fail(failed.turn)
            self.show_numbers()
            await answer.finish("failed")
        self.query_one(Prompt).set_busy(False)
        await self.query_one(Transcript).add_notice(failed.title, failed.body, error=True)

    # What is shown ----------------------------------------------------------------------------------------

    @property
    def chat_app(self) -> ChatApp:
        from dflash_mlx.app.app import ChatApp

        assert isinstance(self.app, ChatApp)
        return self.app

    def show_numbers(self) -> None:
        session = self.session
        self.query_one(StatsBar).show(session.numbers, session.card)

    def hint(self, text: str) -> None:
        """One line above the box; gone with the next key."""
        hint = self.query_one("#hint", Static)
        hint.update(Content(visible(text)))
        hint.set_class(bool(text), "-shown")
