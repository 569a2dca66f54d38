"""What fills the window before the first message: the name, what is being loaded, then what was loaded."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Center, VerticalScroll
from textual.content import Content
from textual.widgets import ProgressBar, Static

from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.text import pair_name, seconds, visible

WORDMARK = Content.assemble(("■■■", "$accent"), ("+", "$primary"), "  ", ("dflash", "bold"))


class Welcome(VerticalScroll, can_focus=False):
    """Scrolls where it does not fit. Classes: `-loading` (with a bar), `-ready`, `-error`, `-idle`."""

    def __init__(self) -> None:
        super().__init__(classes="-loading")
        self._title = Static(WORDMARK, id="wordmark")
        self._line = Static("Starting", markup=False, id="doing")
        self._bar = ProgressBar(total=None, show_eta=False, show_percentage=False)
        self._more = Static("", markup=False, id="more")

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._line
        with Center():
            yield self._bar
        yield self._more

    def show_loading(self, text: str, fraction: float | None) -> None:
        """Say what is being done; `fraction` 0..1, or None for a bar that only shows life."""
        self._state("-loading")
        share = "" if fraction is None else f" · {fraction:.0%}"
        self._line.update(Content(visible(text) + share))
        self._more.update(Content("Esc cancels"))
        if fraction is None:
            self._bar.update(total=None)
        else:
            self._bar.update(total=100, progress=100 * min(max(fraction, 0.0), 1.0))

    def show_ready(self, card: ModelCard) -> None:
        self._state("-ready")
        how = "no draft: plain decoding" if card.draft is None else f"block size {card.block_size}"
        self._line.update(Content(visible(f"{pair_name(card)} · {how}")))
        took = f"{seconds(card.ready_s)} s"
        loaded = f"ready {took} after the launch" if card.from_launch else f"loaded in {took}"
        ready = f"{loaded} · ask anything, F1 shows the keys"
        self._more.update(Content(visible("\n\n".join([ready, *card.notes]))))

    def show_idle(self) -> None:
        """Nothing is loaded, and nothing is being loaded."""
        self._state("-idle")
        self._line.update(Content("No model is loaded"))
        self._more.update(Content("F2 or /models chooses one"))

    def show_failure(self, title: str, body: str) -> None:
        self._state("-error")
        self._line.update(Content(visible(title)))
        self._more.update(Content(visible(f"{body}\n\nF2 or /models chooses another model.")))

    def _state(self, state: str) -> None:
        self.remove_class("-loading", "-ready", "-error", "-idle")
        self.add_class(state)
