"""However the app ends, in a real terminal: its exit status, what the terminal gets back, and what is saved."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import SCRIPTED
from terminal import Terminal

from dflash_mlx.app.chat_file import Unsent
from dflash_mlx.app.conversation import Turn
from dflash_mlx.app.store import Chat, ChatStore

LONG = "many words " * 9000


class Lost(Terminal):
    """A terminal whose window can be closed."""

    def hang_up(self) -> None:
        os.close(self._ours)
        self._ours = os.open(os.devnull, os.O_RDWR)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float = 20.0) -> int:
        return self._process.wait(timeout_s)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Lost]:
    with Lost([sys.executable, "-c", SCRIPTED], env={"XDG_DATA_HOME": str(tmp_path)}, cwd=tmp_path) as made:
        made.until("Ask anything")
        made.until("ready")
        yield made


def _in_a_long_answer(terminal: Terminal) -> None:
    terminal.type("first")
    terminal.press("enter")
    terminal.until("Short.")
    terminal.type("second")
    terminal.press("enter")
    terminal.until("many words many words")
    time.sleep(1.2)  # the answer is saved about once a second


def _opened(folder: Path) -> Chat:
    store = ChatStore(folder / "dflash-metal" / "chats")
    [summary] = store.list()
    return store.open(summary.id)


def _saved(folder: Path) -> list[Turn]:
    return _opened(folder).conversation.turns


def _kept(folder: Path) -> None:
    first, second = _saved(folder)
    assert (first.user, first.answer, second.user) == ("first", "Short.", "second")
    assert second.answer and LONG.startswith(second.answer)


def test_quitting_gives_the_terminal_back_and_ends_with_zero(terminal: Lost, tmp_path: Path) -> None:
    _in_a_long_answer(terminal)
    terminal.press("ctrl+q")
    assert terminal.end() == 0
    assert terminal.left_behind() == []
    _kept(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_in_a_message_with_the_conversation_saved(
    terminal: Lost, tmp_path: Path, number: signal.Signals
) -> None:
    _in_a_long_answer(terminal)
    terminal.signal(number)
    assert terminal.end() == 128 + number
    assert terminal.left_behind() == []
    assert f"Ended by {number.name}" in terminal.text and "--resume" in terminal.text
    _kept(tmp_path)


def test_ctrl_c_while_the_window_waits_for_the_engine_ends_at_once_and_with_zero(
    terminal: Lost, tmp_path: Path
) -> None:
    """With the engine's thread still at work the interpreter must not be run down: MLX would abort the process."""
    _in_a_long_answer(terminal)
    terminal.press("escape")
    terminal.until("stopped, this much is kept")
    terminal.type("third")  # takes ten seconds until its first word
    terminal.press("enter")
    terminal.until(lambda text: "third" in text and "Esc stop" in text)
    terminal.press("ctrl+q")
    terminal.until(lambda text: b"\x1b[?1049l" in terminal.raw)
    started = time.monotonic()
    while terminal.runs:
        assert time.monotonic() - started < 4.0
        terminal.press("ctrl+c")
        time.sleep(0.2)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert [turn.user for turn in _saved(tmp_path)] == ["first", "second", "third"]


def test_a_closed_window_ends_the_process_with_the_conversation_saved(terminal: Lost, tmp_path: Path) -> None:
    """Otherwise the model stays in memory, and a reader of a dead terminal keeps a core busy."""
    _in_a_long_answer(terminal)
    terminal.hang_up()
    assert terminal.wait() == 128 + signal.SIGHUP
    _kept(tmp_path)


@pytest.mark.parametrize("how", ["ctrl+q", "SIGTERM", "hang-up", "SIGKILL", "SIGTERM while the window hangs"])
def test_a_message_that_waits_is_saved_however_the_chat_ends(terminal: Lost, tmp_path: Path, how: str) -> None:
    """Enter was pressed on it, and it is nowhere else. What is in the box is saved by all that can be noticed."""
    _in_a_long_answer(terminal)
    terminal.type("third")
    terminal.press("enter")
    terminal.until("1 waiting")
    terminal.type("a fourth")
    terminal.until("a fourth")
    match how:
        case "ctrl+q":
            terminal.press("ctrl+q")
        case "hang-up":
            terminal.hang_up()
        case "SIGTERM" | "SIGKILL":
            terminal.signal(signal.Signals[how])
        case _:
            terminal.press("f5")
            time.sleep(0.5)
            terminal.signal(signal.SIGTERM)
    terminal.wait()
    _kept(tmp_path)
    assert _opened(tmp_path).unsent == Unsent(("third",), "" if how == "SIGKILL" else "a fourth")


def test_a_bug_in_the_window_gives_the_terminal_back_first_and_keeps_the_conversation(
    terminal: Lost, tmp_path: Path
) -> None:
    _in_a_long_answer(terminal)
    terminal.type("/undo")
    terminal.press("enter")
    assert terminal.end() == 1
    assert terminal.left_behind() == []
    assert "a bug in the window" in terminal.text
    assert terminal.raw.rfind(b"a bug in the window") > terminal.raw.rfind(b"\x1b[?1049l")
    _kept(tmp_path)


def test_a_window_that_hangs_is_ended_by_a_signal_all_the_same(terminal: Lost, tmp_path: Path) -> None:
    """Only kill -9 would be left, and with it goes what was said."""
    _in_a_long_answer(terminal)
    terminal.type("/race")
    terminal.press("enter")
    time.sleep(0.5)
    terminal.signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    _kept(tmp_path)
