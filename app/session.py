"""What the chat knows, between the engine and the screen: conversation, what waits, settings, the loaded pair, numbers.

No Textual and no MLX. The screen calls it when the user acts and tells it what the engine said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dflash_mlx.app.baseline import Baseline, context_tokens
from dflash_mlx.app.chat_file import Unsent
from dflash_mlx.app.conversation import Conversation, End, Turn
from dflash_mlx.app.engine import Engine
from dflash_mlx.app.jobs import Ask, LoadModel, Messages, Race
from dflash_mlx.app.keeper import Keeper
from dflash_mlx.app.messages import ModelCard, Numbers, Part, PrefillProgress, RaceDone
from dflash_mlx.app.settings import Settings

NO_MODEL = "No model is loaded, so nothing can be asked. F2 or /models chooses one."
NO_ENGINE = "The engine has ended, so nothing can be asked. Ctrl+Q quits; start the chat again."


@dataclass(frozen=True)
class Waiting:
    """A message that waits for its turn. Its clocks start when it is sent: the wait before it was the user's wish."""

    text: str


class Session:
    """One conversation with one engine.

    card:    what is loaded; None if nothing is.
    loading: number of the load that runs.
    racing:  number of the race that runs.
    numbers: of the running or the last turn.
    waiting: messages to be sent, the next one first; `held` after a stop, until the user goes on.
    written: what stands in the box, not sent yet.
    """

    def __init__(self, engine: Engine, settings: Settings, keeper: Keeper) -> None:
        self.settings = settings
        self.keeper = keeper
        self.conversation = keeper.new("", settings.system)
        self.card: ModelCard | None = None
        self.loading: int | None = None
        self.racing: int | None = None
        self.numbers = Numbers()
        self.baseline: Baseline | None = None
        self._measured: ModelCard | None = None
        self.waiting: list[Waiting] = []
        self.held = False
        self.written: Callable[[], str] = lambda: ""
        self._engine = engine
        self._load = LoadModel()
        self._number = 0

    # The model --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine, which imports MLX in its own thread."""
        self._engine.start()

    def load(self, job: LoadModel) -> None:
        """Stop whatever runs and load another pair. The conversation stays; its next turn is read anew."""
        self.stop()
        self._number += 1
        self._load, self.loading = replace(job, number=self._number), self._number
        self.card = None
        self._engine.submit(self._load)

    def loaded(self, card: ModelCard) -> None:
        """What was measured is of another pair: the turn that loading stopped may have ended after it began."""
        self.card, self.baseline, self.loading = card, None, None
        self._measured = card

    def kept(self, card: ModelCard) -> None:
        """Loading was cancelled or failed, and the pair before is still there."""
        if card != self._measured:  # a load that was overtaken had ended by then
            self.loaded(card)
        self.card, self.loading = card, None
        self.held = bool(self.waiting)  # it was meant for the other pair

    @property
    def wanted(self) -> str:
        """The model that is loaded or being loaded, as it was asked for; empty before the first one."""
        return self._load.model if self._number else ""

    def not_loaded(self) -> None:
        """Loading was cancelled or failed: there is no model now."""
        self.card, self.baseline, self.loading = None, None, None
        self.held = bool(self.waiting)

    # Asking -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """A message would have to wait."""
        return self.loading is not None or self.racing is not None or self.conversation.open_turn is not None

    @property
    def refusal(self) -> str:
        """Why nothing can be asked, now or later, for the user; empty if it can."""
        if not self._engine.is_alive():
            return NO_ENGINE
        return "" if self.card is not None or self.loading is not None else NO_MODEL

    def ask(self, question: str, requested_at: float | None = None) -> Turn:
        """Open a turn and send it, with all that was said before. Only if not `busy`, and without a `refusal`.

        Args:
            requested_at: `time.perf_counter()` when the user asked; None is now.
        """
        if requested_at is None:
            requested_at = time.perf_counter()
        self._number += 1
        turn = self.conversation.ask(question, self._number)
        self.numbers = Numbers(asked_mode=self.settings.mode, reading=0.0)
        self.keeper.asked(turn, self.card.model if self.card is not None else "")
        self._keep_unsent()
        messages = self.conversation.messages(self.settings.system)
        self._engine.submit(Ask(turn.number, messages, self.settings, requested_at))
        return turn

    def wait(self, text: str) -> None:
        """Send `text` after what is running and what waits already."""
        self.waiting.append(Waiting(text))
        self.held = False
        self._keep_unsent()

    def next_waiting(self) -> str | None:
        """Take the next message if it can be sent now; it is still saved as waiting until it is asked."""
        if self.busy or self.held or not self.waiting or self.refusal:
            return None
        return self.waiting.pop(0).text

    def drop_waiting(self) -> bool:
        """Forget what waits; False if nothing did."""
        dropped, self.waiting, self.held = bool(self.waiting), [], False
        self._keep_unsent()
        return dropped

    def take_back(self) -> str | None:
        """Out of the queue again: the message that was sent last."""
        text = self.waiting.pop().text if self.waiting else None
        self.held = self.held and bool(self.waiting)
        self._keep_unsent(text or "")
        return text

    def _keep_unsent(self, written: str = "") -> None:
        """Save what waits, so that no end of the program loses it. What is in the box is saved when it comes from
        there or the app closes, not with every key."""
        self.keeper.left_unsent(Unsent(tuple(message.text for message in self.waiting), written))

    # What the engine said ---------------------------------------------------------------------------------

    def read(self, progress: PrefillProgress) -> None:
        """The prompt has been read this far."""
        self.numbers = replace(self.numbers, reading=progress.done / max(progress.total, 1))

    def write(self, number: int, parts: Iterable[Part]) -> None:
        """The answer of turn `number` grew."""
        if self.conversation.append(number, parts) and (turn := self.conversation.open_turn) is not None:
            self.keeper.grew(turn)

    def finish(self, number: int, state: End, closing: str, numbers: Numbers) -> Turn | None:
        """Turn `number` has ended; None if it was not open."""
        turn = self.conversation.finish(number, state, closing, numbers)
        if turn is not None:
            self.numbers = replace(numbers, reading=None)
            self.baseline = Baseline.of_turn(numbers) or self.baseline
            self.held = bool(self.waiting) and state in ("cancelled", "failed")
            self.keeper.finished(turn)
        return turn

    def is_open(self, number: int) -> bool:
        """Whether turn `number` is being answered; events of any other turn are late and to be ignored."""
        turn = self.conversation.open_turn
        return turn is not None and turn.number == number

    @property
    def context_used(self) -> int:
        """Positions that the conversation takes, as of its newest answer."""
        return context_tokens(self.numbers)

    @property
    def known_notes(self) -> frozenset[str]:
        """Notes of the turns before the last one."""
        return frozenset(
            note for turn in self.conversation.turns[:-1] if turn.numbers is not None for note in turn.numbers.notes
        )

    # Going back -------------------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Stop what runs after its cycle, or loading between its steps; False if nothing runs."""
        running = self.busy
        if running:
            self._engine.cancel(self._number)
        return running

    def undo(self) -> Turn | None:
        """Take back the last, closed turn; None if there is none."""
        turn = self.conversation.undo()
        if turn is not None:
            self.keeper.dropped(turn.number)
            last = self.conversation.turns[-1].numbers if self.conversation.turns else None
            self.numbers = last or Numbers()
        return turn

    def clear(self) -> None:
        """Stop the answer and begin another chat. The cache finds out: it keeps what the next prompt shares."""
        self._leave()
        self._show(self.keeper.new(self.card.model if self.card is not None else "", self.settings.system), Unsent())

    def resume(self, id: str) -> str:
        """Go on with a saved chat. What waited there is held; returns what stood in the box.

        Raises:
            StoreError: it cannot be read; the conversation stays, though what ran has been stopped.
        """
        self._leave()
        chat = self.keeper.open(id)
        unsent = Unsent() if chat.read_only else chat.unsent  # else it is the other window's
        self._show(chat.conversation, unsent)
        self.settings = replace(self.settings, system=chat.settings_system)
        return unsent.box

    def _leave(self) -> None:
        """End what runs in this conversation. What waits stays with it, what is in the box with the window."""
        turn = self.conversation.open_turn
        if turn is not None:
            self._engine.cancel(turn.number)
            self.finish(turn.number, "cancelled", "left before its end", self.numbers)
        self._keep_unsent()

    def _show(self, conversation: Conversation, unsent: Unsent) -> None:
        self.conversation = conversation
        self.waiting = [Waiting(text) for text in unsent.waiting]
        self.held = bool(self.waiting)
        last = conversation.turns[-1].numbers if conversation.turns else None
        self.numbers = last or Numbers()

    def close(self) -> None:
        """The app ends: an answer that is being written is kept as far as it came, and what was not sent too."""
        turn = self.conversation.open_turn
        if turn is not None:
            self.finish(turn.number, "cancelled", "the chat was closed; this much is kept", self.numbers)
        self._keep_unsent(self.written())
        self.keeper.close()

    @property
    def saved(self) -> str | None:
        """Id of the chat, if there is anything in it to go on with."""
        return self.keeper.id if self.conversation.turns or self.waiting else None

    # Settings and races -----------------------------------------------------------------------------------

    def change(self, settings: Settings) -> None:
        """Use these settings from the next message on."""
        if settings.system != self.settings.system:
            self.keeper.system(settings.system)
        self.settings = settings

    def race(self, question: str = "") -> tuple[int, str] | None:
        """Race `question`, or the last one if it is empty. Returns the race's number and the question; None if there
        is no question yet. Only if not `busy`."""
        turns = self.conversation.turns
        messages = self.conversation.messages(self.settings.system)
        if not question:
            if not turns:
                return None
            question = turns[-1].user
            messages = _before_answer(messages, answered=bool(turns[-1].answer))
        self._number += 1
        self.racing = self._number
        self._engine.submit(Race(self._number, (*messages, ("user", question)), self.settings))
        return self._number, question

    def raced(self, race: RaceDone | None = None) -> None:
        """The race has ended; None: without a result."""
        self.racing = None
        if race is not None:
            self.baseline = Baseline.of_race(race) or self.baseline


def _before_answer(messages: Messages, *, answered: bool) -> Messages:
    """Without the last question and its answer, if that turn is part of the history at all."""
    return messages[:-2] if answered else messages
