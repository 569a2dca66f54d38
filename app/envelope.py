"""The Textual message that carries an engine event into the app's queue."""

from __future__ import annotations

from textual.message import Message

from dflash_mlx.app.messages import REPLACEABLE, Event


class EngineMessage(Message, bubble=False):
    """Sent by the engine thread through `App.post_message`, which is thread-safe and never blocks."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event

    def can_replace(self, message: Message) -> bool:
        """A newer state replaces an older one that still waits; text never does."""
        return (
            isinstance(message, EngineMessage)
            and isinstance(self.event, REPLACEABLE)
            and type(message.event) is type(self.event)
        )
