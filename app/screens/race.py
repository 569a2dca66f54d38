"""The race: one question, plainly and with drafts, one after the other; then both again, side by side, in real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, Literal, TypeAlias

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static

from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.messages import EngineFailed, RaceCancelled, RaceDone, RaceTick
from dflash_mlx.app.outcome import comparison, first_difference, headline, lasted, verdict
from dflash_mlx.app.text import visible
from dflash_mlx.app.widgets.lane import Lane

State: TypeAlias = Literal["running", "stopping", "replay", "done", "failed"]

FRAME_S = 0.1
"""Between two pictures of the replay."""

KEYS: dict[State, str] = {
    "running": "Esc stop",
    "stopping": "stopping after this cycle · Esc close now",
    "replay": "replay in real time · Space skip · Esc close",
    "done": "R replay · Esc close",
    "failed": "Esc close",
}


class RaceScreen(Screen[RaceDone | None]):
    """Shows race `number`. Gets the engine's events forwarded; dismisses with the race, or None if it did not finish.

    Classes: `-running`, `-stopping`, `-replay`, `-done`, `-failed`.
    """

    CSS_PATH = "race.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (64, "-wide")]  # noqa: RUF012 (the base declares it unannotated)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar = [
        Binding("escape", "stop", "Stop or close", show=False),
        Binding("ctrl+c,super+c", "interrupt", "Copy or stop", show=False),
        Binding("r", "replay", "Replay", show=False),
        Binding("space", "skip", "Skip the replay", show=False),
        Binding("up,pageup", "page(-1)", show=False),
        Binding("down,pagedown", "page(1)", show=False),
    ]

    class Stop(Message):
        """The user wants race `number` to end."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    def __init__(self, number: int, question: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.number = number
        self.race: RaceDone | None = None
        self._question = question
        self._clock = clock
        self._started = 0.0
        self._state: State = "running"

    def compose(self) -> ComposeResult:
        yield Static("", id="question", markup=False)
        yield Static("", id="outcome", markup=False)
        with Container(id="lanes"):
            yield Lane("plain")
            yield Lane("dflash")
        yield Static("", id="keys", markup=False)

    def on_mount(self) -> None:
        question = " ".join(visible(self._question).split())
        self.query_one("#question", Static).update(Content.assemble(("race", "bold $accent"), "  ", question))
        self._enter("running")
        self.set_interval(FRAME_S, self.draw)

    # What the user does -----------------------------------------------------------------------------------

    def action_stop(self) -> None:
        """Esc: stop the race; when nothing runs, or it does not stop, close."""
        if self._state == "running":
            self._enter("stopping")
            self.post_message(self.Stop(self.number))
        else:
            self.dismiss(self.race)

    def action_interrupt(self) -> None:
        """Ctrl+C: copy what is selected, else stop."""
        selected = self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
            self.clear_selection()
        elif self._state == "running":
            self.action_stop()

    def action_replay(self) -> None:
        if self.race is not None:
            self._started = self._clock()
            self._enter("replay")
            self.draw()

    def action_skip(self) -> None:
        if self._state == "replay":
            self._finish()

    def action_page(self, direction: int) -> None:
        for lane in self.query(Lane):
            lane.scroll_text(0.5 * direction)

    # What the engine does ---------------------------------------------------------------------------------

    def on_engine_message(self, message: EngineMessage) -> None:
        if self._state not in ("running", "stopping"):
            return
        match message.event:
            case RaceTick(number=number, arm=arm, numbers=numbers, text=text) if number == self.number:
                for lane in self.query(Lane):
                    if lane.arm == arm:
                        lane.show_running(numbers, text)
                    else:
                        lane.end()
            case RaceDone(number=number) as race if number == self.number:
                self.race = race
                self._show_outcome(race)
                self.action_replay()
            case RaceCancelled(number=number) if number == self.number:
                self.dismiss(None)
            case EngineFailed(title=title, body=body, turn=turn) if turn in (None, self.number):
                self._enter("failed")
                self._outcome(Content.assemble((visible(title), "bold"), "\n", visible(body)))

    # What is shown ----------------------------------------------------------------------------------------

    def draw(self) -> None:
        """One picture of the replay: both arms as long after their start as it has run."""
        if self._state != "replay" or self.race is None:
            return
        at_s = self._clock() - self._started
        if at_s >= max(lasted(self.race.plain), lasted(self.race.dflash)):
            self._finish()
        else:
            self._show_arms(self.race, at_s)

    def _finish(self) -> None:
        race = self.race
        assert race is not None, "only a finished race is replayed"
        self._enter("done")
        self._show_arms(race, None)
        difference = first_difference(race)
        if difference is not None:
            self.call_after_refresh(self._reveal, difference)

    def _reveal(self, difference: int) -> None:
        for lane in self.query(Lane):
            lane.reveal(difference)

    def _show_arms(self, race: RaceDone, at_s: float | None) -> None:
        difference = first_difference(race)
        for arm in (race.plain, race.dflash):
            self.query_one(f"#{arm.name}", Lane).show_finished(arm, difference, at_s)

    def _show_outcome(self, race: RaceDone) -> None:
        """Who was faster, and whether the answers are the same, in words."""
        self.query_one("#outcome").set_class(race.verdict != "identical", "-differs")
        self._outcome(
            Content.assemble(
                (headline(race), "bold $accent"),
                (", one run each\n", "$quiet"),
                "\n".join(visible(line) for line in comparison(race)),
                "\n",
                (visible(verdict(race)), "bold"),
                f". {visible(race.explanation)}",
            )
        )

    def _outcome(self, text: Content) -> None:
        self.query_one("#outcome", Static).update(text)

    def _enter(self, state: State) -> None:
        self.remove_class(f"-{self._state}")
        self._state = state
        self.add_class(f"-{state}")
        self.query_one("#keys", Static).update(Content(KEYS[state]))
