"""Both clocks side by side, what speculation did, and what fell back. Every number has its name and unit.

What stays where there is little room, in this order: both clocks; warnings and the reason why drafts are not used; what
runs; what a cycle brings; the strip. `density` "calm" is two lines, "full" has the speed-up, the course of the rate,
memory and context too. The engine sends numbers at most ten times a second, and a widget whose value did not change
draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Static

from dflash_mlx.app.baseline import Baseline, context_tokens, speedup
from dflash_mlx.app.messages import ModelCard, Numbers
from dflash_mlx.app.text import fell_back, fitting_notes, mode_badge, per_cycle, percent, rate, seconds, visible
from dflash_mlx.app.widgets import gauges
from dflash_mlx.app.widgets.cycle_strip import CycleStrip
from dflash_mlx.app.widgets.facts import Fact, Facts, fitting, line
from dflash_mlx.app.widgets.sparkline import rate_history

Density: TypeAlias = Literal["calm", "full"]

NOTE_LINES = 4
"""As `#notes` in the stylesheet."""
NARROW, WIDE, SHORT = 64, 120, 20
"""Columns of the window below which there is one fact a line, from which all is on few lines; rows of a low one."""
STRIP_CELLS = 9
"""The least that the strip needs: two cycles of four."""
GAP = 2
"""Between the badge, the facts and the strip, as in the stylesheet."""
RATE_CELLS, NARROW_CELLS = 16, 4
"""Of the sparkline."""
ROOMY_STRIP = 35
"""With less for the strip, five cycles of a block of six, the sparkline is not beside it."""


def clocks(numbers: Numbers) -> tuple[Fact, ...]:
    """The two clocks, and the wait before them."""
    return (
        Fact("generation only", rate(numbers.decode_tps), "tok/s"),
        Fact("prefill-inclusive", rate(numbers.request_tps), "tok/s"),
        Fact("TTFT", seconds(numbers.ttft_s), "s"),
    )


def speculation(numbers: Numbers) -> tuple[Fact, ...]:
    """What a cycle brought, and how much of the draft survived."""
    if numbers.mode == "plain":
        return (Fact("", "1", "token/cycle"),)
    return (
        Fact("", per_cycle(numbers.tokens_per_cycle), "tokens/cycle"),
        Fact("acceptance", percent(numbers.acceptance_rate)),
    )


@dataclass(frozen=True)
class Readings:
    """All that the bar shows."""

    numbers: Numbers = field(default_factory=Numbers)
    card: ModelCard | None = None
    baseline: Baseline | None = None
    used: int = 0
    """Positions of the context that the conversation takes."""
    known: frozenset[str] = frozenset()
    """Notes that stood here in earlier turns: not repeated, unless all is shown or drafts are not used."""

    @property
    def badge(self) -> str:
        return mode_badge(self.numbers, self.card)

    def first(self, *, wide: bool) -> tuple[Fact, ...]:
        """The clocks; where there is room, what they are a multiple of."""
        return (*clocks(self.numbers), *self._speed_up()) if wide else clocks(self.numbers)

    def second(self, room: int, density: Density, *, wide: bool) -> tuple[Fact, ...]:
        """What runs, in `room` cells: the prompt while it is read, then what a cycle brings."""
        numbers = self.numbers
        if numbers.reading is not None:
            facts = gauges.prefill(numbers)
            facts = facts if density == "full" else fitting(facts, room)
            return gauges.with_bar(facts, numbers.reading, room) if len(facts) > 1 else facts
        facts = speculation(numbers)
        if wide:
            more = (*facts, *rate_history(numbers.rates, RATE_CELLS))
            strip = ROOMY_STRIP if numbers.mode == "dflash" else 0
            return more if line(more).cell_length + GAP + strip <= room else facts
        measured = speedup(numbers, self.baseline)
        if density == "full" or measured is None:
            return facts
        more = (*facts, Fact("", f"{measured:.2f}x", "plain", measured < 1))
        return more if line(more).cell_length + GAP + STRIP_CELLS <= room else facts

    def third(self, *, wide: bool, narrow: bool, beside: bool) -> tuple[Fact, ...]:
        """What is not needed all the time; `beside`: the course of the rate is shown above already."""
        cells = 0 if narrow else gauges.GAUGE_CELLS
        room = (gauges.context(self.used, self.card, cells),) if self.card is not None else ()
        machine = (*gauges.memory(self.numbers, self.card, cells), *room)
        course = rate_history(self.numbers.rates, NARROW_CELLS if narrow else RATE_CELLS)
        return (*(() if wide else self._speed_up()), *(() if beside else course), *machine)

    def said(self, density: Density, *, short: bool) -> tuple[str, ...]:
        """Warnings, then the notes; in a low window only what explains why it is slow or about to fail."""
        notes = self.numbers.notes
        if not fell_back(self.numbers):
            known = self.known if density == "calm" else ()
            notes = () if short else tuple(note for note in notes if note not in known)
        return tuple(visible(text) for text in (*gauges.warnings(self.numbers, self.card, self.used), *notes))

    def _speed_up(self) -> tuple[Fact, ...]:
        fact = gauges.speed_up(self.numbers, self.card, self.baseline)
        return () if fact is None else (fact,)


class StatsBar(Vertical):
    """Shows the numbers of the running or the last turn.

    Classes: `-noted` if there is something to say, `-fallback` if it says why drafts are not used or what is about to
    run out.
    """

    density: reactive[Density] = reactive[Density]("calm")

    def __init__(self) -> None:
        super().__init__()
        self._clocks = Facts(id="clocks")
        self._speculation = Facts(id="speculation")
        self._badge = Static("", markup=False, id="badge")
        self._strip = CycleStrip()
        self._machine = Facts(id="machine")
        self._notes = Static("", markup=False, id="notes")
        self._readings = Readings()
        self._shown = ("", "")
        # What the very first picture shows, before the bar knows the window.
        self._clocks.set_reactive(Facts.facts, clocks(Numbers()))
        self._speculation.set_reactive(Facts.facts, speculation(Numbers()))
        self._window = Size(0, 0)

    def compose(self) -> ComposeResult:
        yield self._clocks
        with Horizontal():
            yield self._badge
            yield self._speculation
            yield self._strip
        yield self._machine
        yield self._notes

    def show(
        self,
        numbers: Numbers,
        card: ModelCard | None,
        baseline: Baseline | None = None,
        context_used: int | None = None,
        known: frozenset[str] = frozenset(),
    ) -> None:
        """Show these numbers.

        Args:
            context_used: positions that the whole conversation takes; None: those of the turn.
            known: notes that earlier turns had too.
        """
        used = context_tokens(numbers) if context_used is None else context_used
        readings = Readings(numbers, card, baseline, used, known)
        if readings != self._readings:
            self._readings = readings
            self._arrange()

    def on_mount(self) -> None:
        # A window that only gets lower does not resize the bar, so its own `Resize` is not enough.
        self.screen.screen_layout_refresh_signal.subscribe(self, self._follow_window)
        self._arrange()

    def _follow_window(self, screen: Screen[Any]) -> None:
        if self.app.size != self._window:
            self._arrange()

    def on_resize(self) -> None:
        self._arrange()

    def watch_density(self) -> None:
        self._arrange()

    def _arrange(self) -> None:
        """Lay out what is known for the window as it is. Not before there is one."""
        if not self.is_mounted:
            return
        window = self._window = self.app.size
        narrow, wide, short = window.width < NARROW, window.width >= WIDE, window.height < SHORT
        density: Density = "calm" if short else self.density
        width = self.content_size.width or window.width
        readings = self._readings

        badge = visible(readings.badge)
        room = max(width - len(badge) - GAP, 1)
        facts = readings.second(room, density, wide=wide)
        one_line = line(facts).cell_length
        strip = not narrow and readings.numbers.reading is None and room - one_line - GAP >= STRIP_CELLS
        self._clocks.facts = readings.first(wide=wide)
        self._speculation.facts = facts
        self._speculation.styles.width = min(one_line, room)
        self._strip.display = strip
        self._strip.cycles = readings.numbers.recent if strip else ()
        beside = any(fact in facts for fact in rate_history(readings.numbers.rates, RATE_CELLS))
        self._machine.facts = readings.third(wide=wide, narrow=narrow, beside=beside) if density == "full" else ()
        self._machine.display = bool(self._machine.facts)

        said = readings.said(density, short=short)
        self._say(badge, fitting_notes(said, width, NOTE_LINES))
        self._badge.set_class(badge.startswith("plain"), "-plain")
        self.set_class(bool(said), "-noted")
        warned = bool(gauges.warnings(readings.numbers, readings.card, readings.used))
        self.set_class(fell_back(readings.numbers) or warned, "-fallback")

    def _say(self, badge: str, notes: str) -> None:
        """Static lays itself out anew at every update, so only where the text changed."""
        shown_badge, shown_notes = self._shown
        if badge != shown_badge:
            self._badge.update(Content(badge))
        if notes != shown_notes:
            self._notes.update(Content(notes))
        self._shown = (badge, notes)
