"""How the next answers are made: every setting of a turn on one page, changed without reloading anything."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from dflash_mlx.app.control_fields import FIELDS, Field, build, meaning, problem
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.text import visible
from dflash_mlx.app.widgets.choice import Choice

WRONG = "✗"


class FieldRow(Horizontal):
    """A label, the control, and what it means or what is wrong with it. Class `-wrong` in the second case."""

    def __init__(self, field: Field, settings: Settings, card: ModelCard | None) -> None:
        super().__init__()
        self.field = field
        self._card = card
        text = field.show(settings)
        self.control: Choice | Input = (
            Choice(field.words, text, id=field.name)
            if field.words
            else Input(text, placeholder=field.none, compact=True, select_on_focus=True, id=field.name)
        )
        self._note = Static("", markup=False, classes="note")

    def compose(self) -> ComposeResult:
        yield Static(self.field.label, classes="label")
        yield self.control
        yield self._note

    def on_mount(self) -> None:
        self.complain("")

    @on(Input.Changed)
    @on(Choice.Changed)
    def check(self) -> None:
        """Say at once what is wrong with this field."""
        self.complain(problem(self.field, self.control.value, self._card))

    def complain(self, why: str) -> None:
        """Show what is wrong; "" is nothing."""
        self.set_class(bool(why), "-wrong")
        self._note.update(Content(f"{WRONG} {visible(why)}" if why else meaning(self.field, self._card)))


class ControlsScreen(ModalScreen[Settings | None]):
    """Dismisses with the new settings, or None if they stay as they are."""

    CSS_PATH = "controls.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (64, "-wide")]  # noqa: RUF012 (the base declares it unannotated)
    AUTO_FOCUS = "#mode"
    BINDINGS: ClassVar = [
        Binding("escape", "leave", "Close", show=False),
        Binding("enter", "apply", "Apply", show=False),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(self, settings: Settings, card: ModelCard | None) -> None:
        super().__init__()
        self._settings = settings
        self._card = card

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="fields", can_focus=False) as fields:
            fields.border_title = "Controls"
            fields.border_subtitle = "Enter apply · Esc leave as is · ↑↓ field · ←→ choose"
            for field in FIELDS:
                yield FieldRow(field, self._settings, self._card)
            yield Static("From the next message on; nothing is loaded again.", classes="when")

    @on(Input.Submitted)
    def action_apply(self) -> None:
        """Enter: hand the settings over, or go to the first field that is wrong."""
        rows = {row.field.name: row for row in self.query(FieldRow)}
        built = build(self._settings, {name: row.control.value for name, row in rows.items()}, self._card)
        if isinstance(built, Settings):
            self.dismiss(built)
            return
        for name, row in rows.items():
            row.complain(built.get(name, ""))
        rows[next(iter(built))].control.focus()

    def action_leave(self) -> None:
        self.dismiss(None)
