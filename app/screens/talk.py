"""Asking and answering: a question is sent or waits, its answer is shown as it grows, a turn is stopped, asked again,
edited or taken back.

Events of a turn that is no longer open (after /clear, say) are ignored by their turn number. A key's action runs in the
app's task, beside this window's own; what changes the turns is handed over with `call_next`, so that it never meets an
event of the engine half done.
"""

from __future__ import annotations

import time

from dflash_mlx.app.history import History
from dflash_mlx.app.messages import Chunk, CycleTick, EngineFailed, PrefillProgress, TurnDone
from dflash_mlx.app.screens.view import ChatView
from dflash_mlx.app.session import Session
from dflash_mlx.app.text import closing_line, prefill_line
from dflash_mlx.app.widgets.turn import AnswerTurn

EDITING = "editing the last message: Enter resends, Esc leaves"
NOT_NOW = "An answer is being written: Esc stops it first."


class Talk(ChatView):
    """Turns of one conversation."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.history = History()
        self.editing = False
        """The box holds the last question, and Enter sends it in its place."""
        self._answer: AnswerTurn | None = None

    # Sending ----------------------------------------------------------------------------------------------

    async def say(self, text: str, pressed_at: float) -> bool:
        """Send a message, or let it wait; False, with a hint, if it can neither. An empty one goes on after a stop."""
        refusal = self.session.refusal
        self.hint(refusal)
        if refusal:
            return False
        if not text:
            self.session.held = False
            await self.send_waiting()
            return False
        self.history.add(text)
        if self.editing:
            await self._drop_last()
        if self.session.busy or self.session.waiting:
            self.session.wait(text)
            self.show_waiting()
            await self.send_waiting()
        else:
            await self.ask(text, pressed_at)
        return True

    async def send_waiting(self) -> None:
        """Send the message that waits longest, if it can be sent now; not while the app closes."""
        text = self.session.next_waiting() if self.is_attached else None
        if text is not None:
            await self.ask(text, time.perf_counter())

    async def ask(self, question: str, requested_at: float) -> None:
        """Send a question asked at `requested_at`; the session is neither busy nor refusing."""
        turn = self.session.ask(question, requested_at)
        self.show_numbers()
        self.show_names()
        self.add_class("-chatting")
        self._answer = await self.transcript.add_turn(turn.number, question)
        self._answer.say("reading the prompt")
        self.show_waiting()

    # Going back -------------------------------------------------------------------------------------------

    def action_stop(self) -> None:
        """Esc: leave editing, else stop, else forget what waits."""
        session = self.session
        if self.editing:
            self.leave_editing()
        elif session.conversation.open_turn is not None:
            session.stop()
            if self._answer is not None:
                self._answer.say("stopping")
        elif session.loading is not None:
            session.stop()
            self.welcome.show_loading("Cancelling", None)
        elif session.drop_waiting():
            self.show_waiting()
            self.hint("What waited is dropped; Up brings it back.")
        else:
            self.hint("")

    def action_regenerate(self) -> None:
        self.call_next(self._regenerate, time.perf_counter())

    async def _regenerate(self, pressed_at: float) -> None:
        question = self._last_question("There is no answer to write again.")
        if question is not None:
            await self._drop_last()
            await self.ask(question, pressed_at)

    def action_edit_last(self) -> None:
        question = self._last_question("There is no message to edit.")
        if question is not None:
            self.editing = True
            self.history.leave()
            self.prompt.recall(question, EDITING)

    def action_undo(self) -> None:
        self.call_next(self._undo)

    async def _undo(self) -> None:
        question = self._last_question("There is nothing to take back.")
        if question is not None:
            await self._drop_last()
            self.history.add(question)
            self.hint("Taken back; Up brings the message.")

    async def _drop_last(self) -> None:
        self.leave_editing(clear=False)
        if self.session.undo() is None:
            return
        self._answer = None
        await self.transcript.drop_last_turn()
        self.set_class(bool(self.session.conversation.turns), "-chatting")
        self.show_numbers()

    def _last_question(self, otherwise: str) -> str | None:
        """The last question if its turn can be replaced now; None with a hint if not."""
        turns = self.session.conversation.turns
        problem = self.session.refusal or (NOT_NOW if self.session.busy else "" if turns else otherwise)
        self.hint(problem)
        return None if problem else turns[-1].user

    def recall(self, direction: int) -> None:
        """Up and Down: what waits comes back first, then earlier messages, the last question to be edited in place."""
        session, prompt = self.session, self.prompt
        if direction < 0 and not prompt.text and (waited := session.take_back()) is not None:
            self.show_waiting()
            prompt.set_text(waited)
            return
        text = self.history.back() if direction < 0 else self.history.forward()
        if text is None:
            return
        turns = session.conversation.turns
        newest = self.history.at_newest
        self.editing = newest and not session.busy and bool(turns) and turns[-1].user == text
        prompt.recall(text, EDITING if self.editing else "")

    def leave_editing(self, *, clear: bool = True) -> None:
        self.editing = False
        self.prompt.border_title = ""
        if clear:
            self.history.leave()
            self.prompt.clear()

    # What the engine does ---------------------------------------------------------------------------------

    async def turn_event(self, event: PrefillProgress | Chunk | CycleTick | TurnDone) -> None:
        """Something about a turn; nothing happens if it is not the open one."""
        answer = self._open_answer(event.turn)
        match event:
            case _ if answer is None:
                return
            case PrefillProgress() as progress:
                answer.say(prefill_line(progress))
                self.session.read(progress)
                self.show_numbers()
            case Chunk(turn=number, parts=parts):
                self.session.write(number, parts)
                answer.say("writing")
                await answer.write(parts)
            case CycleTick(numbers=numbers):
                self.session.numbers = numbers
                self.show_numbers()
            case TurnDone() as done:
                await self._turn_done(done, answer)

    async def _turn_done(self, done: TurnDone, answer: AnswerTurn) -> None:
        turn = self.session.conversation.open_turn
        closing = closing_line(done, empty=turn is None or not turn.answer)
        self.session.finish(done.turn, done.reason, closing, done.numbers)
        self.session.keeper.measured(done.record)
        self.show_numbers()
        self.show_names()
        await answer.finish(closing)
        self.show_waiting()
        await self.send_waiting()

    async def turn_failed(self, failed: EngineFailed, number: int) -> None:
        """Turn `number` ended with an error."""
        answer = self._open_answer(number)
        if answer is None:
            return
        self.session.finish(number, "failed", "failed", self.session.numbers)
        self.show_numbers()
        await answer.finish("failed")
        await self.notice(failed.title, failed.body, error=True)
        self.show_waiting()

    def _open_answer(self, number: int) -> AnswerTurn | None:
        """The widget of turn `number` if that turn is being answered."""
        return self._answer if self.session.is_open(number) else None

    async def show_conversation(self) -> None:
        """The session has another conversation: show that."""
        if self._answer is not None:
            await self._answer.finish("")
        self._answer = None
        self.editing = False
        conversation = self.session.conversation
        waiting = [message.text for message in self.session.waiting]
        self.history.replace([turn.user for turn in conversation.turns] + waiting or self.history.entries)
        await self.transcript.show(conversation)
        self.set_class(bool(conversation.turns), "-chatting")
        self.show_waiting()
        self.show_numbers()
        self.show_names()
