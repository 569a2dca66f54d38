"""ChatApp: owns the engine's lifetime, the screens, and what is remembered. Everything visible is in `screens/` and
`widgets/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from textual import on
from textual.app import App

from dflash_mlx.app import clipboard
from dflash_mlx.app.discovery import Candidate, candidates
from dflash_mlx.app.endings import Endings
from dflash_mlx.app.engine import EngineFactory, EngineThread
from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.keeper import Keeper
from dflash_mlx.app.lines import StoreError
from dflash_mlx.app.messages import EngineFailed, Event, ModelCard, RaceCancelled, RaceDone, RaceTick
from dflash_mlx.app.palette import ActionProvider
from dflash_mlx.app.places import Places
from dflash_mlx.app.screens.chat import ChatScreen
from dflash_mlx.app.screens.models import Choice, ModelsScreen
from dflash_mlx.app.screens.race import RaceScreen
from dflash_mlx.app.session import NO_ENGINE, Session
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.state import State
from dflash_mlx.app.text import visible
from dflash_mlx.app.theme import DARK, LIGHT

OF_A_RACE = (RaceTick, RaceDone, RaceCancelled, EngineFailed)
"""What the screen of a race is told too."""


class ChatApp(App[None]):
    """The chat. Run it, then `close_engine`.

    Args:
        load: what to load after the first paint; None opens the picker.
        engine: makes the engine; tests put a scripted one here.
        places: where chats, metrics and what is remembered are; None is the user's own folders.
        resume: id of a saved chat to go on with; empty for the last one.
        save, metrics: whether chats, and the numbers of their turns, are written.
        options: how a model that is chosen here is loaded, as the command line says it; its names do not matter.
        find: yields the models that the picker lists, in a thread of its own.
        theme: "dark" or "light" where the user has not chosen one in the app.
    """

    TITLE = "dflash"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar = {ActionProvider}

    def __init__(
        self,
        load: LoadModel | None,
        settings: Settings | None = None,
        engine: EngineFactory = EngineThread,
        places: Places | None = None,
        resume: str | None = None,
        save: bool = True,
        metrics: bool = True,
        options: LoadModel | None = None,
        find: Callable[[], Iterator[Candidate]] = candidates,
        theme: str | None = None,
    ) -> None:
        super().__init__()
        self.tracebacks: list[str] = []
        """Tracebacks of bugs, to print when the terminal is the user's again."""
        self.failure: EngineFailed | None = None
        """Why no question could be asked, to say again then."""
        self.last_words = ""
        """Why the app ended, if nobody asked it to, and what became of the chat; to print then."""
        self.places = places or Places.default()
        self.state = State.load(self.places)
        self.engine = engine(self._post_from_engine)
        keeper = Keeper(self.places, self._notify, save=save, metrics=metrics)
        self.session = Session(self.engine, settings or Settings(), keeper)
        self.chat = ChatScreen(self.session)
        self._load, self._resume = load, resume
        self._loaded: LoadModel | None = None
        """What is loaded, or was the last that was."""
        self._gone = False
        """It had to go for a load that failed."""
        self._doubted: LoadModel | None = None
        """What was refused just now, and will be loaded all the same if it is asked for again."""
        self._options = options or LoadModel()
        self._find = find
        self._endings = Endings(self._ended_by, self.session.close)

        self.register_theme(DARK)
        self.register_theme(LIGHT)
        chosen = self.state.theme or f"dflash-{theme}"
        self.theme = LIGHT.name if chosen == LIGHT.name else DARK.name

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """`$quiet` for themes that do not define it."""
        return {"quiet": DARK.variables["quiet"]}

    def on_mount(self) -> None:
        self._endings.watch()
        self.push_screen(self.chat)

    def on_unmount(self) -> None:
        self._endings.leave()

    # The start --------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """After the first paint: start the engine, go on with a chat, load or ask what to load."""
        self.session.start()
        self.chat.show_state()
        if self.state.note:
            self._notify("The app's memory", self.state.note)
        if self._resume is not None:
            await self.chat.resume(self._resume or self.session.keeper.newest)
        if self._load is not None:
            self._begin_load(self._load)
        else:
            self.chat.show_unloaded()
            self.choose_model()

    def choose_model(self) -> None:
        """Open the picker, if nothing else is open over the chat."""
        if self.screen is self.chat:
            loaded = self.session.card is not None or self.session.loading is not None
            current = self._load.model if self._load is not None and loaded else None
            self.push_screen(ModelsScreen(self._find, current), self._chosen)

    def _chosen(self, choice: Choice | None) -> None:
        if choice is not None:
            self.load_model(choice.model, choice.draft, insist=choice.insist)

    def load_model(self, model: str, draft: str | None = "auto", *, insist: bool = False) -> None:
        """Load another pair, with the options of the command line that are about no one model.

        The pair that had to go for one that failed is loaded as it was.
        """
        job = (self._load or self._options).instead(model, draft)
        if self._gone and self._loaded is not None and (model, draft) == (self._loaded.model, "auto"):
            job = replace(self._loaded, launched_at=None)
        self._begin_load(replace(job, insist=insist or job == self._doubted))

    def _begin_load(self, job: LoadModel) -> None:
        if not self.engine.is_alive():
            self.chat.hint(NO_ENGINE)
            return
        self.failure = None
        self._load, self._doubted = job, None
        self.session.load(job)
        self.chat.show_loading("Loading", None)

    def loaded(self) -> None:
        """A pair is loaded: remember it."""
        self.failure = None
        self._loaded, self._gone = self._load, False
        if self._load is not None:
            self.remember(model=self._load.model, draft=self._load.draft)

    def kept(self, card: ModelCard, *, may_insist: bool) -> None:
        """What was to be loaded is not, and the pair before is still there."""
        if self._loaded is None or self._loaded.model != card.model:  # a load that was overtaken had ended by then
            self._loaded = (self._load or self._options).instead(card.model, card.draft and "auto")
        self._load, self._doubted = self._loaded, self._load if may_insist else None

    def lost(self) -> None:
        """Nothing is loaded."""
        self._gone = True

    def remember(self, **changes: Any) -> State:
        """Change what the next start begins with. A disk that cannot be written costs only that."""
        self.state = replace(self.state, **changes)
        with suppress(StoreError):
            self.state.save(self.places)
        return self.state

    # The engine -------------------------------------------------------------------------------------------

    def _post_from_engine(self, event: Event) -> None:
        """Called in the engine thread."""
        with suppress(RuntimeError):  # the event loop has closed: nobody is left to tell
            self.post_message(EngineMessage(event))

    def on_engine_message(self, message: EngineMessage) -> None:
        """Hand over to the chat's own queue, so that a slow layout there never delays keys here."""
        self.chat.post_message(EngineMessage(message.event))
        if isinstance(message.event, OF_A_RACE) and (race := self._race) is not None:
            race.post_message(EngineMessage(message.event))

    @on(RaceScreen.Stop)
    def _stop_race(self) -> None:
        self.session.stop()

    @property
    def _race(self) -> RaceScreen | None:
        return next((screen for screen in self.screen_stack if isinstance(screen, RaceScreen)), None)

    def copy_to_clipboard(self, text: str) -> None:
        """The terminal's way, and the machine's own."""
        super().copy_to_clipboard(text)
        self.run_worker(lambda: clipboard.fill(text), thread=True, group="clipboard")

    def _notify(self, title: str, body: str) -> None:
        if not self.chat.call_later(self.chat.notice, title, body):  # the window has closed
            self.last_words = "\n".join(filter(None, (self.last_words, visible(f"{title}. {body}"))))

    # The end ----------------------------------------------------------------------------------------------

    def _ended_by(self, name: str, code: int) -> None:
        """A signal: the terminal was closed, or the process is to go. Not if it is going already."""
        if not self.is_running:
            return
        saved = self.session.saved
        kept = f" The chat is saved: --resume {saved} goes on with it." if saved else ""
        self.last_words = f"Ended by {name}.{kept}"
        self.exit(return_code=code)

    def close_engine(self, timeout_s: float) -> bool:
        """Keep the chat as it is and wait for the engine to finish its cycle; False if it is still busy. Call it after
        `run`, however that ended."""
        if self.session.saved is not None:
            self.remember(chat=self.session.saved)
        self.session.close()
        if self.engine.is_alive():
            self.engine.shutdown()
            self.engine.join(timeout_s)
        return not self.engine.is_alive()
