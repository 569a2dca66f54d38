"""The model picker: what is on this machine, as it is found, and a box to filter it or to type any other model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, ListView, Static

from dflash_mlx.app import model_text
from dflash_mlx.app.discovery import Candidate
from dflash_mlx.app.text import visible
from dflash_mlx.app.widgets.model_row import ModelRow, TypedRow

Find = Callable[[], Iterator[Candidate]]
NO_WAY_BACK = "No model is loaded yet. Choose one, or Ctrl+Q quits."


@dataclass(frozen=True)
class Choice:
    """What to load. draft: "auto", or what was typed behind a plus."""

    model: str
    draft: str | None = "auto"
    insist: bool = field(default=False, compare=False)
    """It was said that it is too large."""

    @classmethod
    def typed(cls, text: str) -> Choice:
        """`TARGET`, `TARGET + DRAFT`, or `TARGET + none`."""
        target, _, draft = (each.strip() for each in text.partition(" + "))
        return cls(target, None if draft == "none" else draft or "auto")


class ModelsScreen(ModalScreen[Choice | None]):
    """Dismisses with a choice, or with None if there is a model to go back to.

    Args:
        find: yields the candidates; called in a thread of its own.
        current: the model that is loaded, as it was asked for.
    """

    CSS_PATH = "models.tcss"
    AUTO_FOCUS = "Input"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]  # noqa: RUF012 (the base declares it unannotated)
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (64, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar = [
        Binding("escape", "back", "Back", show=False),
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(-5)", show=False),
        Binding("pagedown", "move(5)", show=False),
        Binding("ctrl+c,super+c", "interrupt", show=False),
    ]

    @dataclass
    class Found(Message):
        """A candidate; None at the end."""

        candidate: Candidate | None
        problem: str = ""

    def __init__(self, find: Find, current: str | None = None) -> None:
        super().__init__()
        self._find = find
        self._current = current
        self._candidates: list[Candidate] = []
        self._looking = True
        self._warned: Candidate | None = None
        self._left = threading.Event()

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet") as sheet:
            sheet.border_title = "Models"
            sheet.border_subtitle = "Enter load · Esc back" if self._current else "Enter load · Ctrl+Q quit"
            yield Input(placeholder="Filter, or type a repository or a folder", id="wanted")
            yield ListView(TypedRow(), initial_index=None, id="models")
            yield Static("", markup=False, id="details")
            yield Static("", markup=False, id="found")

    def on_mount(self) -> None:
        self.query_one(ListView).can_focus = False
        self._say_found()
        # Not a worker of Textual's, which quitting waits for: a disk that does not answer would keep the app open.
        threading.Thread(target=self._search, name="models", daemon=True).start()

    def on_unmount(self) -> None:
        self._left.set()

    def _search(self) -> None:
        """In a thread: hand on what is found."""
        problem = ""
        try:
            for candidate in self._find():
                if self._left.is_set():
                    return
                self._hand_over(self.Found(candidate))
        except Exception as error:  # a list is no reason to end the app; the demo and the box still work
            problem = f"Looking for models ended early: {error}"
        self._hand_over(self.Found(None, problem))

    def _hand_over(self, message: Found) -> None:
        with suppress(RuntimeError):  # the event loop has closed
            self.post_message(message)

    # What is found ----------------------------------------------------------------------------------------

    @on(Found)
    async def _found(self, event: Found) -> None:
        models = self.query_one(ListView)
        if event.candidate is None:
            self._looking = False
        else:
            self._candidates.append(event.candidate)
            row = ModelRow(event.candidate, loaded=event.candidate.path_or_repo == self._current)
            row.show(row.matches(self._wanted))
            kept = self._highlighted
            await models.insert(len(models) - 1, [row])  # what is typed stays last
            if kept is not None:
                models.index = models.children.index(kept)
        self._say_found(event.problem)
        if self._highlighted is None:
            self._highlight_first()
        self._say_details()

    @property
    def _wanted(self) -> str:
        return self.query_one(Input).value.strip()

    @property
    def _highlighted(self) -> ModelRow | TypedRow | None:
        row = self.query_one(ListView).highlighted_child
        return row if isinstance(row, ModelRow | TypedRow) and row.display else None

    def _highlight_first(self) -> None:
        models = self.query_one(ListView)
        shown = [index for index, row in enumerate(models.children) if row.display]
        models.index = None  # else a row that takes the place of another one would not be marked
        models.index = shown[0] if shown else None

    def _say_found(self, problem: str = "") -> None:
        self._say(problem or model_text.found(self._candidates, looking=self._looking), warn=bool(problem))

    def _say(self, text: str, *, warn: bool = True) -> None:
        said = self.query_one("#found", Static)
        said.update(Content(visible(text)))
        said.set_class(warn, "-warned")

    def _say_details(self) -> None:
        row = self._highlighted
        said = model_text.details(row.candidate) if isinstance(row, ModelRow) else ""
        if isinstance(row, TypedRow):
            said = "What is not on this machine is fetched; a draft can be named too: TARGET + DRAFT."
        self.query_one("#details", Static).update(Content(visible(said)))

    # What the user does -----------------------------------------------------------------------------------

    @on(Input.Changed)
    def _filter(self) -> None:
        wanted = self._wanted
        for row in self.query(ModelRow):
            row.show(row.matches(wanted))
        self.query_one(TypedRow).show(wanted)
        self._highlight_first()
        self._say_found()
        self._say_details()

    @on(ListView.Highlighted)
    def _moved(self) -> None:
        self._warned = None
        self._say_details()

    def action_move(self, rows: int) -> None:
        models = self.query_one(ListView)
        for _ in range(abs(rows)):
            if rows < 0:
                models.action_cursor_up()
            else:
                models.action_cursor_down()

    @on(Input.Submitted)
    def _enter(self, event: Input.Submitted) -> None:
        event.stop()
        self._choose(self._highlighted)

    @on(ListView.Selected)
    def _clicked(self, event: ListView.Selected) -> None:
        event.stop()
        self._choose(self._highlighted)

    def _choose(self, row: ModelRow | TypedRow | None) -> None:
        if isinstance(row, TypedRow):
            self.dismiss(Choice.typed(self._wanted))
        elif row is not None and self._may_load(row.candidate):
            self.dismiss(Choice(row.candidate.path_or_repo, insist=self._warned is row.candidate))

    def _may_load(self, candidate: Candidate) -> bool:
        """Not what cannot run; what is too large after a second Enter."""
        state = model_text.state(candidate)
        if state == "cannot run":
            self._say(f"Not loaded, it cannot run here: {candidate.why}.")
            return False
        if state == "too large" and self._warned is not candidate:
            self._warned = candidate
            self._say("More than this machine can hold: it would swap or be ended. Enter again loads it all the same.")
            return False
        return True

    def action_interrupt(self) -> None:
        """Ctrl+C has nothing to stop here: say which keys do something."""
        self._say(NO_WAY_BACK if self._current is None else "Nothing to stop. Esc goes back, Ctrl+Q quits.")

    def action_back(self) -> None:
        """First the filter goes, then the screen."""
        if self._wanted:
            self.query_one(Input).value = ""
        elif self._current is not None:
            self.dismiss(None)
        else:
            self._say(NO_WAY_BACK)
