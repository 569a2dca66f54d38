"""One arm of a race: its name and state, its clocks, and what it writes. The text is shown letter by letter."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from dflash_mlx.app.messages import Arm, ArmName, Numbers
from dflash_mlx.app.outcome import lasted, said_after
from dflash_mlx.app.text import count, percent, seconds, visible
from dflash_mlx.app.widgets.facts import Facts
from dflash_mlx.app.widgets.stats_bar import clocks, speculation

HERE = "▶"
"""In front of the first difference."""


def marked(text: str, difference: int | None) -> Content:
    """`text` with everything from character `difference` on underlined, behind a mark."""
    if difference is None or difference >= len(text):
        return Content(visible(text))
    rest = (visible(text[difference:]), "underline")
    return Content.assemble(visible(text[:difference]), (HERE, "bold $warning"), rest)


class Lane(Vertical):
    """Class `-running` while its arm runs."""

    def __init__(self, arm: ArmName) -> None:
        super().__init__(id=arm)
        self.arm: ArmName = arm
        self._title = Static("", markup=False, classes="title")
        self._facts = Facts()
        self._said = Static("", markup=False, classes="said")
        self._scroll = VerticalScroll(self._said, can_focus=False)
        self._shown: tuple[str, int | None] = ("", None)

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._facts
        yield self._scroll

    def on_mount(self) -> None:
        self._head("waits", Numbers())

    def show_running(self, numbers: Numbers, text: str) -> None:
        """The arm has written `text` so far."""
        self.add_class("-running")
        reads = numbers.reading is not None
        self._head(f"reads the prompt, {percent(numbers.reading)}" if reads else "runs", numbers)
        self._say(text, None)

    def show_finished(self, arm: Arm, difference: int | None, at_s: float | None = None) -> None:
        """The whole run, or what had been written `at_s` seconds after its start."""
        self.remove_class("-running")
        end = lasted(arm)
        if at_s is None or at_s >= end:
            self._head(f"{count(arm.numbers.generation_tokens, 'token')} in {seconds(end)} s", arm.numbers)
            self._say(arm.text, difference, follow=difference is None)  # else the difference is what to look at
        else:
            self._head(f"{at_s:.1f} of {end:.1f} s", arm.numbers)
            self._say(said_after(arm, at_s), difference)

    def end(self) -> None:
        """The other arm runs now."""
        if self.has_class("-running"):
            self.remove_class("-running")
            self._title.update(self._titled("done"))

    def reveal(self, difference: int) -> None:
        """Scroll so that character `difference` can be seen."""
        before = Content(visible(self._shown[0][:difference])).get_height({}, max(self._said.size.width, 1))
        self._scroll.scroll_to(y=max(before - 3, 0), animate=False)

    def scroll_text(self, pages: float) -> None:
        """Up for negative numbers."""
        self._scroll.scroll_relative(y=round(pages * max(self._scroll.size.height, 1)), animate=False)

    def _head(self, state: str, numbers: Numbers) -> None:
        self._title.update(self._titled(state))
        if self.arm == "plain" or numbers.mode == "plain":
            self._facts.facts = clocks(numbers)
        else:
            self._facts.facts = (*clocks(numbers), *speculation(numbers))

    def _titled(self, state: str) -> Content:
        return Content.assemble((self.arm, "bold"), (f" · {state}", "$quiet"))

    def _say(self, text: str, difference: int | None, *, follow: bool = True) -> None:
        if (text, difference) == self._shown:
            return
        self._shown = (text, difference)
        at_end = self._scroll.scroll_y >= self._scroll.max_scroll_y  # else the reader looks at something
        self._said.update(marked(text, difference))
        if follow and at_end:
            self._scroll.scroll_end(animate=False)
