"""Everything the user can do in the chat, as one table: key bindings, the palette, the help page and the slash
commands are made from it, so none of them can know what another does not.

An action is `action_<name>` of the chat screen. A key on a Mac's F row has a slash command and a place in the palette
too: those keys need Fn there.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Action:
    """One thing to do.

    name:     of the method, without `action_`.
    title:    what it does, for help and palette.
    keys:     Textual's names, the first one is shown.
    slash:    names of the slash command, the first one is shown.
    takes:    what may follow the slash command, as it is shown; empty if nothing may.
    priority: the key works before the text box sees it. Not for keys that mean something in text.
    palette:  whether it makes sense away from the key that is under one's finger.
    """

    name: str
    title: str
    keys: tuple[str, ...] = ()
    slash: tuple[str, ...] = ()
    takes: str = ""
    priority: bool = True
    palette: bool = True

    @property
    def key(self) -> str:
        """The first key as it is printed on a keyboard, or nothing."""
        return shown_key(self.keys[0]) if self.keys else ""

    @property
    def command(self) -> str:
        """The slash command with what it takes, or nothing."""
        return f"/{self.slash[0]} {self.takes}".strip() if self.slash else ""


ACTIONS: tuple[Action, ...] = (
    Action("stop", "Stop; what was written stays", ("escape",), priority=False, palette=False),
    Action("interrupt", "Copy the selection, or stop", ("ctrl+c", "super+c"), priority=False, palette=False),
    Action("clear", "New chat", ("ctrl+l",), ("clear", "new", "reset", "r")),
    Action("regenerate", "Answer the last message again", ("ctrl+r",), ("regen", "retry")),
    Action("edit_last", "Edit the last message and send it again", (), ("edit",)),
    Action("undo", "Take back the last message and its answer", (), ("undo",)),
    Action("copy_answer", "Copy the last answer", ("ctrl+y",), ("copy",)),
    Action("copy_code", "Copy the last code block of it", ("ctrl+k",), ("code",)),
    Action("editor", "Write the message in $EDITOR", ("ctrl+g",), ("editor",)),
    Action("fold_thinking", "Fold or unfold the thinking", ("ctrl+t",), ("fold",)),
    Action("origins", "Mark the tokens that were drafted", ("f6",), ("origins",)),
    Action("models", "Models: choose and load", ("f2",), ("models",)),
    Action("load", "Load this repository or folder; the chat stays", (), ("load",), "model", palette=False),
    Action("chats", "Chats: resume, rename, delete, export", ("f3",), ("chats", "resume")),
    Action("rename", "Name this chat", (), ("save", "rename"), "title", palette=False),
    Action("export", "Write this chat to a Markdown file", (), ("export",), "[file]"),
    Action("controls", "Controls: mode, block size, sampling", ("f4",), ("controls", "parameters")),
    Action("system", "System prompt", (), ("system",), "[text]"),
    Action("race", "Race: the last message plainly and with drafts", ("f5",), ("race",)),
    Action("verbose", "All numbers, or few", (), ("verbose",)),
    Action("info", "What is loaded; /show parameters, /show system", (), ("show", "info"), "[what]"),
    Action("theme", "Light or dark", (), ("theme",), "[which]"),
    Action("help", "Keys, commands, and what the numbers mean", ("f1",), ("help", "h", "?")),
    Action("palette", "All of this in a list", ("ctrl+p",), ("palette",), palette=False),
    Action("quit", "Quit", ("ctrl+q",), ("quit", "bye", "exit", "q")),
)

BY_COMMAND: dict[str, Action] = {name: action for action in ACTIONS for name in action.slash}

TYPING: tuple[tuple[str, str], ...] = (
    ("Enter", "Send; while an answer is written the message waits for its end"),
    ("Ctrl+J", "New line; also Shift+Enter and Alt+Enter where the terminal can tell them"),
    ('"""', 'A message of many lines, until the closing """'),
    ("Up Down", "Earlier messages; the last one is edited in place"),
    ("Tab", "Complete a /command"),
    ("PgUp PgDn", "Scroll; Ctrl+End returns to the newest text"),
    ("F keys", "With Fn on a Mac; each is in the list of Ctrl+P and a command, too"),
)
"""Keys of the box and the transcript, which are no actions."""


def shown_key(key: str) -> str:
    """`ctrl+y` as `Ctrl+Y`."""
    return "Esc" if key == "escape" else "+".join(part.capitalize() for part in key.split("+"))


def bindings() -> list[Binding]:
    """The screen's key bindings."""
    return [
        Binding(",".join(action.keys), action.name, action.title, show=False, priority=action.priority)
        for action in ACTIONS
        if action.keys
    ]


def key_rows() -> tuple[tuple[str, str], ...]:
    """(key, what it does), for the help page."""
    return TYPING[:3] + tuple((action.key, action.title) for action in ACTIONS if action.keys) + TYPING[3:]


def command_rows() -> tuple[tuple[str, str], ...]:
    """(slash command, what it does), for the help page and for completion."""
    return tuple((action.command, action.title) for action in ACTIONS if action.slash)
