"""Rows of the model picker: a candidate, and what was typed as a repository or folder."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import ListItem, Static

from dflash_mlx.app import model_text
from dflash_mlx.app.discovery import Candidate
from dflash_mlx.app.text import visible


class ModelRow(ListItem):
    """Two lines: name and place, verdict and draft. Class by its verdict: `-fits`, `-tight`, `-too-large`, ..."""

    def __init__(self, candidate: Candidate, *, loaded: bool) -> None:
        super().__init__(classes=f"-{model_text.state(candidate).replace(' ', '-')}")
        self.candidate = candidate
        self._loaded = loaded

    def compose(self) -> ComposeResult:
        name = f"{self.candidate.name} (loaded)" if self._loaded else self.candidate.name
        with Horizontal():
            yield _line(name, "name")
            yield _line(model_text.place(self.candidate), "place")
        with Horizontal():
            yield _line(model_text.verdict(self.candidate), "verdict")
            yield _line(model_text.draft(self.candidate), "draft")

    def matches(self, wanted: str) -> bool:
        """Whether every word is somewhere in what the row says; upper and lower case are alike."""
        said = f"{self.candidate.name} {self.candidate.path_or_repo} {model_text.place(self.candidate)}".casefold()
        return all(word in said for word in wanted.casefold().split())

    def show(self, shown: bool) -> None:
        """A hidden row is not gone to with the arrow keys."""
        self.display = shown
        self.disabled = not shown


class TypedRow(ListItem):
    """Loads what is in the box. Hidden while that is empty."""

    def __init__(self) -> None:
        super().__init__(classes="-typed", disabled=True)
        self.display = False
        self._said = _line("", "name")

    def compose(self) -> ComposeResult:
        yield self._said

    def show(self, text: str) -> None:
        self.display = bool(text)
        self.disabled = not text
        self._said.update(Content(visible(f"load {text} (a repository or a folder)")))


def _line(text: str, kind: str) -> Static:
    return Static(Content(visible(text)), markup=False, classes=kind)
