"""ChatApp: owns the engine's lifetime and the screens. Everything visible is in `screens/` and `widgets/`."""

from __future__ import annotations

from contextlib import suppress

from textual.app import App

from dflash_mlx.app.engine import EngineFactory, EngineThread
from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.messages import EngineFailed, Event
from dflash_mlx.app.screens.chat import ChatScreen
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.theme import DARK, LIGHT


class ChatApp(App[None]):
    """The chat. Run it, then `close_engine`.

    Args:
        load: what to load after the first paint.
        engine: makes the engine; tests put a scripted one here.
    """

    TITLE = "dflash"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, load: LoadModel, settings: Settings | None = None, engine: EngineFactory = EngineThread) -> None:
        super().__init__()
        self.tracebacks: list[str] = []
        """Tracebacks of bugs, to print when the terminal is the user's again."""
        self.failure: EngineFailed | None = None
        """Why no question could be asked, to say again then."""
        self.engine = engine(self._post_from_engine)
        self.chat = ChatScreen(self.engine, load, settings or Settings())

        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """`$quiet` for themes that do not define it."""
        return {"quiet": DARK.variables["quiet"]}

    def on_mount(self) -> None:
        self.push_screen(self.chat)

    def _post_from_engine(self, event: Event) -> None:
        """Called in the engine thread."""
        with suppress(RuntimeError):  # the event loop has closed: nobody is left to tell
            self.post_message(EngineMessage(event))

    def on_engine_message(self, message: EngineMessage) -> None:
        """Hand over to the chat's own queue, so that a slow layout there never delays keys here."""
        self.chat.post_message(message)

    def close_engine(self, timeout_s: float) -> bool:
        """Wait for the engine to finish its cycle; False if it is still busy. Call it after `run`."""
        if self.engine.is_alive():
            self.engine.shutdown()
            self.engine.join(timeout_s)
        return not self.engine.is_alive()
