"""The chat's window: turns what is typed, keys and engine events into actions.

State lives in `Session`; widgets only show it. The actions are those of the table in `actions`: about turns in `talk`,
with a screen of their own in `dialogs`; what the window is made of is in `view`.
"""

from __future__ import annotations

import gc
from typing import ClassVar

from textual import on
from textual.content import Content
from textual.widgets import TextArea

from dflash_mlx.app import actions, commands
from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.failures import still_loaded
from dflash_mlx.app.messages import (
    Chunk,
    CycleTick,
    EngineFailed,
    LoadCancelled,
    ModelCard,
    ModelLoading,
    ModelReady,
    Noticed,
    PrefillProgress,
    RaceCancelled,
    RaceDone,
    TurnDone,
)
from dflash_mlx.app.screens.dialogs import Dialogs
from dflash_mlx.app.screens.view import HINT_ROWS
from dflash_mlx.app.widgets.answer_markdown import AnswerMarkdown
from dflash_mlx.app.widgets.answer_parser import code_blocks
from dflash_mlx.app.widgets.prompt import Prompt

NOTHING_RUNS = "Nothing to stop or copy. Ctrl+Q quits."
HOW_TO_CLEAR = "Nothing to stop or copy. Ctrl+U empties the box, Ctrl+Q quits."


class ChatScreen(Dialogs):
    """One window with one conversation."""

    BINDINGS: ClassVar = actions.bindings()

    def on_mount(self) -> None:
        self.show_numbers()
        # After the first paint: the thread imports MLX, which takes seconds (D9).
        self.call_after_refresh(self.chat_app.begin)

    # What is typed ----------------------------------------------------------------------------------------

    @on(Prompt.Submitted)
    async def _submitted(self, event: Prompt.Submitted) -> None:
        command = commands.parse(event.text, self.session.settings, self.session.card)
        if isinstance(command, commands.Say):
            if not await self.say(command.text, event.pressed_at):
                self.prompt.give_back(event.text)
            return
        if isinstance(command, commands.Hint):
            self.hint(command.text)
            self.prompt.give_back(event.text)
            return
        self.leave_editing(clear=False)
        self.history.add(event.text)
        self.hint("")
        if isinstance(command, commands.Change):
            self.change(command.settings, command.said)
        elif command.value:
            await getattr(self, f"command_{command.name}")(command.value)
        else:
            await self.run_action(f"screen.{command.name}")

    @on(Prompt.Edited)
    def _edited(self) -> None:
        self.hint("")
        self._suggest()

    @on(TextArea.Changed)
    def _suggest(self) -> None:
        """Commands that begin like this one."""
        rows = commands.completions(self.prompt.text)
        if rows:
            lines = [Content.assemble((f"{command}  ", "bold"), (said, "$quiet")) for command, said in rows]
            if len(lines) > HINT_ROWS:
                lines = [*lines[: HINT_ROWS - 1], Content(f"and {len(rows) - HINT_ROWS + 1} more; F1 lists them all")]
            self.hint(Content("\n").join(lines))

    @on(Prompt.LeaveWanted)
    def _leave_wanted(self) -> None:
        self.hint(commands.HOW_TO_QUIT)

    @on(Prompt.Recall)
    def _recall(self, event: Prompt.Recall) -> None:
        self.recall(event.direction)

    @on(AnswerMarkdown.LinkRefused)
    def _link_refused(self, event: AnswerMarkdown.LinkRefused) -> None:
        self.hint(f"Not opened, only http and https links are: {event.href[:60]}")

    # Copying ----------------------------------------------------------------------------------------------

    def copy(self, text: str, said: str) -> None:
        self.app.copy_to_clipboard(text)
        self.hint(said)

    def action_interrupt(self) -> None:
        """Ctrl+C: copy, else stop, else say how to quit."""
        selected = self.get_selected_text()
        if selected:
            self.copy(selected, "Copied.")
            self.clear_selection()
        elif self.session.busy:
            self.action_stop()
        else:
            self.hint(HOW_TO_CLEAR if self.prompt.text else NOTHING_RUNS)

    def action_copy_answer(self) -> None:
        if answer := self._last_answer:
            self.copy(answer, "The answer is copied.")
        else:
            self.hint("There is no answer to copy.")

    def action_copy_code(self) -> None:
        if blocks := code_blocks(self._last_answer):
            self.copy(blocks[-1], "The last code block is copied.")
        else:
            self.hint("The last answer has no code block.")

    @property
    def _last_answer(self) -> str:
        """The newest answer, as far as it is written; empty if there is none."""
        answers = (turn.shown.strip("\n") for turn in reversed(self.session.conversation.turns))
        return next((answer for answer in answers if answer.strip()), "")

    # The look ---------------------------------------------------------------------------------------------

    def action_fold_thinking(self) -> None:
        self.chat_app.remember(fold_thinking=not self.chat_app.state.fold_thinking)
        self.show_state()

    def action_origins(self) -> None:
        self.chat_app.remember(origins=not self.chat_app.state.origins)
        self.show_state()

    async def action_verbose(self) -> None:
        await self.command_verbose("off" if self.chat_app.state.verbose else "on")

    async def command_verbose(self, value: str) -> None:
        self.chat_app.remember(verbose=value == "on")
        self.show_state()

    async def action_theme(self) -> None:
        await self.command_theme("light" if self.app.current_theme.dark else "dark")

    async def command_theme(self, value: str) -> None:
        self.app.theme = f"dflash-{value}"
        self.chat_app.remember(theme=self.app.theme)

    async def action_quit(self) -> None:
        await self.app.action_quit()

    # What the engine does ---------------------------------------------------------------------------------

    async def on_engine_message(self, message: EngineMessage) -> None:
        match message.event:
            case PrefillProgress() | Chunk() | CycleTick() | TurnDone() as event:
                await self.turn_event(event)
            case ModelLoading(text=text, fraction=fraction):
                if self.session.loading is not None:
                    self.show_loading(text, fraction)
            case ModelReady(card=card, number=number):
                if number == self.session.loading:
                    await self._ready(card)
            case LoadCancelled(number=number, kept=kept):
                if number == self.session.loading:
                    await self._load_cancelled(kept)
            case RaceDone() as done:
                self.session.raced(done)
                self.show_numbers()
                await self.send_waiting()
            case RaceCancelled():
                self.session.raced()
                await self.send_waiting()
            case Noticed(title=title, body=body):
                await self.notice(title, body)
            case EngineFailed() as failed:
                await self._engine_failed(failed)

    async def _ready(self, card: ModelCard) -> None:
        self.session.loaded(card)
        self.chat_app.loaded()
        if misfit := commands.misfit(self.session.settings, card):
            self.hint(misfit)
        if self.has_class("-chatting"):
            await self.notice("Loaded", card.target)
        self._show_loaded(card)
        await self.send_waiting()

    def _show_loaded(self, card: ModelCard) -> None:
        self.welcome.show_ready(card)
        self.show_names()
        self.show_numbers()
        self.show_waiting()
        # What is here now stays: a full collection would look at all of it again, and keys would wait 0.2 s for that.
        gc.collect()
        gc.freeze()

    def _kept(self, card: ModelCard, *, may_insist: bool = False) -> None:
        """Another pair was not loaded, and the one before is still there."""
        self.session.kept(card)
        self.chat_app.kept(card, may_insist=may_insist)
        self._show_loaded(card)

    async def _load_cancelled(self, kept: ModelCard | None) -> None:
        if kept is not None:
            self._kept(kept)
            await self.notice("Cancelled", still_loaded(kept))
            return
        self.chat_app.lost()
        self.session.not_loaded()
        self.show_unloaded()
        self.chat_app.choose_model()

    async def _engine_failed(self, failed: EngineFailed) -> None:
        if failed.details:
            self.chat_app.tracebacks.append(failed.details)
        session = self.session
        overtaken = session.loading is not None and failed.turn not in (None, session.loading)
        if (failed.fatal or failed.kept is not None) and overtaken:
            return  # of a load in whose place another one came
        if failed.kept is not None:
            self._kept(failed.kept, may_insist=failed.may_insist)
        if failed.fatal:
            self.chat_app.failure = failed
            self.chat_app.lost()
            session.not_loaded()
            self.show_unloaded()
            self.welcome.show_failure(failed.title, failed.body)
        turn = session.conversation.open_turn
        if turn is not None and (failed.fatal or failed.turn == turn.number):
            await self.turn_failed(failed, turn.number)
        elif session.racing is not None and failed.turn in (None, session.racing):
            session.raced()  # its screen says why
            await self.send_waiting()
        elif not failed.fatal or self.has_class("-chatting"):
            await self.notice(failed.title, failed.body, error=True)
        self.show_waiting()
