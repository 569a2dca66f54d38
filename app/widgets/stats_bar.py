"""Both clocks side by side, what speculation did, and what fell back. Every number has its name and unit."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_mlx.app.messages import ModelCard, Numbers
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.text import mode_badge, note_line, per_cycle, percent, rate, seconds, visible
from dflash_mlx.app.widgets.cycle_strip import CycleStrip
from dflash_mlx.app.widgets.facts import Fact, Facts


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
    """Shows the numbers of the running or the last turn. Class `-noted` if there are notes to show."""

    def __init__(self) -> None:
        super().__init__()
        self._clocks = Facts(id="clocks")
        self._speculation = Facts(id="speculation")
        self._badge = Static("", markup=False, id="badge")
        self._strip = CycleStrip()
        self._notes = Static("", markup=False, id="notes")

    def compose(self) -> ComposeResult:
        yield self._clocks
        with Horizontal():
            yield self._badge
            yield self._speculation
            yield self._strip
        yield self._notes

    def show(self, numbers: Numbers, card: ModelCard | None, settings: Settings) -> None:
        self._clocks.facts = clocks(numbers)
        self._speculation.facts = speculation(numbers)
        badge = mode_badge(numbers, card, settings)
        self._badge.update(Content(visible(badge)))
        self._badge.set_class(badge.startswith("plain"), "-plain")
        self._strip.cycles = numbers.recent
        self._notes.update(Content(visible(note_line(numbers.notes))))
        self.set_class(bool(numbers.notes), "-noted")
