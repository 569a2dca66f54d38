"""Both clocks side by side, what speculation did, and what fell back. Every number has its name and unit."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_mlx.app.messages import ModelCard, Numbers
from dflash_mlx.app.text import fell_back, fitting_notes, mode_badge, per_cycle, percent, rate, seconds, visible
from dflash_mlx.app.widgets.cycle_strip import CycleStrip
from dflash_mlx.app.widgets.facts import Fact, Facts

NOTE_LINES = 4
"""As `#notes` in the stylesheet."""


def clocks(numbers: Numbers) -> tuple[Fact, ...]:
    """The two clocks, and the wait before them."""
    return (
        Fact("generation only", rate(numbers.decode_tps), "tok/s"),
        Fact("prefill-inclusive", rate(numbers.request_tps), "tok/s"),
        Fact("TTFT", seconds(numbers.ttft_s), "s"),
    )


def speculation(numbers: Numbers) -> tuple[Fact, ...]:
    """What a cycle brought, and how much of the draft survived."""
    return (
        Fact("", per_cycle(numbers.tokens_per_cycle), "tokens/cycle"),
        Fact("acceptance", percent(numbers.acceptance_rate)),
    )


class StatsBar(Vertical):
    """Shows the numbers of the running or the last turn.

    Classes: `-noted` if there are notes to show, `-fallback` if they say why drafts are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clocks = Facts(id="clocks")
        self._speculation = Facts(id="speculation")
        self._badge = Static("", markup=False, id="badge")
        self._strip = CycleStrip()
        self._notes = Static("", markup=False, id="notes")
        self._said: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        yield self._clocks
        with Horizontal():
            yield self._badge
            yield self._speculation
            yield self._strip
        yield self._notes

    def show(self, numbers: Numbers, card: ModelCard | None) -> None:
        self._clocks.facts = clocks(numbers)
        self._speculation.facts = speculation(numbers)
        badge = mode_badge(numbers, card)
        self._badge.update(Content(visible(badge)))
        self._badge.set_class(badge.startswith("plain"), "-plain")
        self._strip.cycles = numbers.recent
        self._said = tuple(visible(note) for note in numbers.notes)
        self._fit_notes()
        self.set_class(bool(numbers.notes), "-noted")
        self.set_class(fell_back(numbers), "-fallback")

    def on_resize(self) -> None:
        self._fit_notes()

    def _fit_notes(self) -> None:
        width = self.content_size.width or self.app.size.width
        self._notes.update(Content(fitting_notes(self._said, width, NOTE_LINES)))
