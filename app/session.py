"""What the chat knows, between the engine and the screen: conversation, settings, the loaded pair, the numbers.

No Textual and no MLX. The screen calls it when the user acts and tells it what the engine said.
"""

from __future__ import annotations

import time
from dataclasses import replace

from dflash_mlx.app.conversation import Conversation, Turn
from dflash_mlx.app.engine import Engine
from dflash_mlx.app.jobs import Ask, LoadModel
from dflash_mlx.app.messages import ModelCard, Numbers, PrefillProgress
from dflash_mlx.app.settings import Settings

STILL_LOADING = "The model is still loading. Your message stays in the box."
STILL_ANSWERING = "An answer is being written: Esc stops it. Your message stays in the box."
NO_MODEL = "No model is loaded, so nothing can be asked. Ctrl+Q quits."


class Session:
    """One conversation with one engine.

    card:    what was loaded; None before that.
    broken:  the engine said that no question can be asked any more.
    numbers: of the running or the last turn.
    """

    def __init__(self, engine: Engine, load: LoadModel, settings: Settings) -> None:
        self.settings = settings
        self.conversation = Conversation()
        self.card: ModelCard | None = None
        self.broken = False
        self.numbers = Numbers()
        self._engine = engine
        self._load = load

    def start(self) -> None:
        """Start the engine and load. Slow things happen in its thread."""
        self._engine.start()
        self._engine.submit(self._load)

    @property
    def refusal(self) -> str:
        """Why nothing can be asked now, for the user; empty if it can."""
        if self.broken:
            return NO_MODEL
        if self.card is None:
            return STILL_LOADING
        return STILL_ANSWERING if self.conversation.open_turn is not None else ""

    def ask(self, question: str, requested_at: float | None = None) -> Turn:
        """Open a turn and send it, with all that was said before. Only without a `refusal`.

        Args:
            requested_at: `time.perf_counter()` when the user asked; None is now.
        """
        if requested_at is None:
            requested_at = time.perf_counter()
        turn = self.conversation.ask(question)
        self.numbers = Numbers(asked_mode=self.settings.mode, reading=0.0)
        messages = self.conversation.messages(self.settings.system)
        self._engine.submit(Ask(turn.number, messages, self.settings, requested_at))
        return turn

    def read(self, progress: PrefillProgress) -> None:
        """The prompt has been read this far."""
        self.numbers = replace(self.numbers, reading=progress.done / max(progress.total, 1))

    def fail(self, number: int) -> None:
        """Turn `number` ended with an error."""
        self.conversation.finish(number, "failed")
        self.numbers = replace(self.numbers, reading=None)

    def is_open(self, number: int) -> bool:
        """Whether turn `number` is being answered; events of any other turn are late and to be ignored."""
        turn = self.conversation.open_turn
        return turn is not None and turn.number == number

    def stop(self) -> bool:
        """Stop the running turn after its cycle; False if none runs."""
        turn = self.conversation.open_turn
        if turn is not None:
            self._engine.cancel(turn.number)
        return turn is not None

    def clear(self) -> None:
        """Stop, and forget what was said. The cache finds out by itself: it keeps what the next prompt shares."""
        self.stop()
        self.conversation.clear()
        self.numbers = Numbers()
