"""The saved chats: search, resume, rename, delete, export."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dflash_mlx.app import export
from dflash_mlx.app.lines import StoreError
from dflash_mlx.app.store import ChatStore, ChatSummary
from dflash_mlx.app.text import count, visible

KEYS = (
    "Enter resume · Ctrl+R rename · Ctrl+D delete · Ctrl+E export · Esc back",
    "Enter resume · ^R rename · ^D delete · ^E export · Esc",
)
"""On the border, by how much room there is."""
NO_CHATS = "No chat is saved yet: the first question of one saves it."

Doing = Literal["search", "rename", "delete"]


def line(chat: ChatSummary, *, current: bool) -> Content:
    """A chat in two lines: its title; when it changed, how long it is and with what."""
    when = chat.changed.astimezone().strftime("%Y-%m-%d %H:%M")
    facts = " · ".join(filter(None, (when, count(chat.turns, "turn"), visible(chat.model), "open" if current else "")))
    return Content.assemble((visible(chat.title), "bold"), "\n", (f"  {facts}", "$quiet"))


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, StoreError) else "Another window has deleted that chat."


class ChatsScreen(ModalScreen[str | None]):
    """Dismissed with the id of the chat to resume, or None.

    The one input searches; while a chat is renamed it holds the title, and while one is deleted Enter confirms that.
    """

    CSS_PATH = "chats.tcss"
    BINDINGS: ClassVar = [
        Binding("escape", "back", "Back", show=False, priority=True),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
        Binding("pageup", "move(-8)", show=False, priority=True),
        Binding("pagedown", "move(8)", show=False, priority=True),
        Binding("ctrl+r", "rename", "Rename", show=False, priority=True),
        Binding("ctrl+d", "delete", "Delete", show=False, priority=True),
        Binding("ctrl+e", "export", "Export", show=False, priority=True),
    ]

    def __init__(self, store: ChatStore, current: str | None) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._chats: list[ChatSummary] = []
        self._doing: Doing = "search"
        self._searched = ""

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet") as sheet:
            sheet.border_title = "Chats"
            sheet.border_subtitle = KEYS[0]
            yield Input(placeholder="Search titles", select_on_focus=False)
            list_ = OptionList()
            list_.can_focus = False
            yield list_
            yield Static("", markup=False, id="said")

    def on_mount(self) -> None:
        self._fill()

    def on_resize(self) -> None:
        sheet = self.query_one("#sheet")
        sheet.border_subtitle = KEYS[0] if len(KEYS[0]) + 4 <= self.size.width else KEYS[1]

    @property
    def _marked(self) -> ChatSummary | None:
        at = self.query_one(OptionList).highlighted
        return None if at is None or at >= len(self._chats) else self._chats[at]

    def _fill(self, said: str = "") -> None:
        """Read the folder again and show what fits the search."""
        list_ = self.query_one(OptionList)
        marked = self._marked
        try:
            chats = self._store.list()
            notes = " ".join(self._store.notes)
        except StoreError as error:
            chats, notes = [], str(error)
        words = self._searched.casefold().split()
        self._chats = [chat for chat in chats if all(word in chat.title.casefold() for word in words)]
        list_.clear_options()
        list_.add_options([Option(line(chat, current=chat.id == self._current)) for chat in self._chats])
        same = [i for i, chat in enumerate(self._chats) if marked is not None and chat.id == marked.id]
        list_.highlighted = same[0] if same else 0 if self._chats else None
        empty = "" if self._chats else "No title has these words." if chats else NO_CHATS
        self._say(said or empty or notes)

    def _say(self, text: str) -> None:
        said = self.query_one("#said", Static)
        said.update(Content(visible(text)))
        said.set_class(bool(text), "-shown")

    def _begin(self, doing: Doing, text: str, said: str) -> None:
        self._doing = doing
        box = self.query_one(Input)
        with self.prevent(Input.Changed):
            box.value = text
        box.cursor_position = len(text)
        box.set_class(doing == "delete", "-confirming")
        self._say(said)

    def _search_again(self, said: str = "") -> None:
        self._begin("search", self._searched, "")
        self._fill(said)

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if self._doing == "search":
            self._searched = event.value
            self._fill()
        elif self._doing == "delete":
            self._search_again("Nothing was deleted.")

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        chat = self._marked
        if chat is None:
            return
        try:
            if self._doing == "search":
                self.dismiss(chat.id)
            elif self._doing == "rename":
                self._store.rename(chat.id, event.value)
                self._search_again("Renamed.")
            else:
                self._store.delete(chat.id)
                self._search_again(f"Deleted: {chat.title}")
        except (StoreError, FileNotFoundError) as error:
            self._search_again(_why(error))

    @on(OptionList.OptionSelected)
    def _clicked(self) -> None:
        if self._marked is not None:
            self.dismiss(self._marked.id)

    def action_move(self, lines: int) -> None:
        list_ = self.query_one(OptionList)
        if self._doing == "search" and self._chats:
            list_.highlighted = min(max((list_.highlighted or 0) + lines, 0), len(self._chats) - 1)
            self._say("")

    def action_rename(self) -> None:
        if self._marked is not None:
            self._begin("rename", self._marked.title, "The title, then Enter; empty is the first question. Esc leaves.")

    def action_delete(self) -> None:
        chat = self._marked
        if chat is not None:
            self._begin("delete", "", f"Delete “{chat.title}” for good? Enter deletes, Esc keeps it.")

    def action_export(self) -> None:
        """To a Markdown file in the folder that the chat was started in."""
        marked = self._marked
        if marked is None:
            return
        path = Path(export.default_name(marked.title))
        try:
            chat = self._store.open(marked.id)
            try:
                text = export.to_markdown(chat.conversation, chat.title, marked.model, chat.settings_system)
            finally:
                if marked.id != self._current:
                    chat.close()
            export.write_markdown(path, text)
        except (StoreError, FileNotFoundError) as error:
            self._say(_why(error))
        else:
            self._say(f"Written to {path.resolve()}")

    def action_back(self) -> None:
        if self._doing == "search":
            self.dismiss(None)
        else:
            self._search_again()
