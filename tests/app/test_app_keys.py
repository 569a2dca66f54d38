"""Keys as a real terminal sends them: bracketed paste, Ctrl+J, an editor that borrows the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import SCRIPTED
from terminal import Terminal

# Looks at the terminal it was lent, and appends a line.
EDITOR = """
import os, sys
path = sys.argv[-1]
assert os.isatty(0) and os.isatty(1)
sys.stdout.write("the editor has the terminal\\n")
with open(path, "a") as file:
    file.write(" and edited\\nin two lines\\n")
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    editor = tmp_path / "editor.py"
    editor.write_text(EDITOR)
    env = {"XDG_DATA_HOME": str(tmp_path), "EDITOR": f"{sys.executable} {editor}", "VISUAL": ""}
    with Terminal([sys.executable, "-c", SCRIPTED], env=env, cwd=tmp_path) as made:
        made.until("ready")
        yield made


def test_a_paste_of_many_lines_stays_in_the_box_until_enter(terminal: Terminal) -> None:
    """Terminals send the line breaks of a paste as carriage returns, which is what Enter sends."""
    terminal.paste("one\rtwo\rthree")
    terminal.until("three")
    terminal.press("ctrl+j")
    terminal.type("four")
    terminal.until("four")
    assert "Ask anything" not in terminal.text and "▌" not in terminal.text, "nothing was sent"
    terminal.press("enter")
    terminal.until("Short.")
    assert all(f"{line}" in terminal.text for line in ("▌ one", "▌ two", "▌ three", "▌ four"))
    terminal.press("ctrl+q")
    assert terminal.end() == 0


def test_keys_that_come_at_once_are_done_in_their_order(terminal: Terminal) -> None:
    """A quick correction, or one typed while the window was being laid out. Textual does letters first, and the keys
    that delete when they have been to the app and back: `teh` would become `t`."""
    terminal.type("gone\x15teh\x7f\x7fhe end\x1b[D\x1b[D\x1b[Dvery ")
    terminal.until("the very end")
    terminal.press("ctrl+u", "ctrl+q")
    assert terminal.end() == 0


def test_what_is_typed_right_after_enter_is_not_lost(terminal: Terminal) -> None:
    """The box is emptied when Enter is pressed, not when the question has been shown."""
    terminal.type("first\rsecond")
    shown = terminal.until("Short.")
    assert "▌ first" in shown
    terminal.until("│ second")
    terminal.press("ctrl+q")
    assert terminal.end() == 0


@pytest.mark.parametrize("keys", [("ctrl+g",), ("ctrl+x", "ctrl+e")])
def test_the_message_is_written_in_the_users_editor(terminal: Terminal, keys: tuple[str, ...]) -> None:
    terminal.type("begun")
    terminal.until("begun")
    terminal.press(*keys)
    terminal.until("in two lines")
    assert b"the editor has the terminal" in terminal.raw
    assert "begun and edited" in terminal.text
    terminal.press("enter")
    terminal.until("Short.")
    assert "▌ begun and edited" in terminal.text and "▌ in two lines" in terminal.text
    terminal.press("ctrl+q")
    assert terminal.end() == 0
    assert terminal.left_behind() == []
