"""Slash commands, the table of actions, history, editor and clipboard: no window, no thread."""

from __future__ import annotations

import signal
import stat
import sys
from pathlib import Path

import pytest

from dflash_mlx.app import clipboard, editor
from dflash_mlx.app.actions import ACTIONS, command_rows, key_rows
from dflash_mlx.app.commands import (
    SETTINGS,
    Change,
    Hint,
    Run,
    Say,
    completions,
    parse,
    setting_rows,
    unfinished,
)
from dflash_mlx.app.history import History
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.screens.chat import ChatScreen
from dflash_mlx.app.settings import Settings


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        ("/temp 0.7", "temperature", 0.7),
        ("/top_p 0.9", "top_p", 0.9),
        ("/top_k 40", "top_k", 40),
        ("/min_p 0.05", "min_p", 0.05),
        ("/max 512", "max_tokens", 512),
        ("/mode plain", "mode", "plain"),
        ("/block 4", "block_size", 4),
        ("/seed 7", "seed", 7),
        ("/think off", "thinking", False),
        ("/system Answer in Czech.", "system", "Answer in Czech."),
        ('/system """Answer\nin Czech."""', "system", "Answer\nin Czech."),
        ("/set parameter temperature 0.7", "temperature", 0.7),
        ("/set parameter num_predict 99", "max_tokens", 99),
        ("/set parameter top_k 40", "top_k", 40),
        ("/set system Be brief.", "system", "Be brief."),
        ("/set think", "thinking", True),
        ("/set nothink", "thinking", False),
    ],
)
def test_commands_change_one_setting(typed: str, field: str, value: object) -> None:
    """Ours and ollama's spelling."""
    command = parse(typed, Settings())
    assert isinstance(command, Change)
    changed = {name for name in vars(Settings()) if vars(command.settings)[name] != vars(Settings())[name]}
    assert changed == {field}
    assert vars(command.settings)[field] == value


def test_auto_and_off_give_the_choice_back() -> None:
    for typed, given, field, wanted in (
        ("/block auto", Settings(block_size=4), "block_size", None),
        ("/seed off", Settings(seed=3), "seed", None),
        ("/max off", Settings(), "max_tokens", -1),
        ("/think auto", Settings(thinking=True), "thinking", None),
    ):
        command = parse(typed, given)
        assert isinstance(command, Change) and getattr(command.settings, field) == wanted, typed


@pytest.mark.parametrize(
    "typed",
    ["/tmep 0.7", "/usr/bin/env", "/", "/temp", "/temp hot", "/temp -1", "/temp inf", "/temp nan", "/max 0", "/max 1.5",
     "/mode fast", "/block 0", "/top_p -1", "/top_k x", "/seed -1", "/seed 18446744073709551616", "/clear all",
     "/theme blue", "q", "/load", "/save", "/set", "/set parameter num_ctx 4096", "/set parameter temperature",
     "/set format json", "/show license", "/think maybe"],
)  # fmt: skip
def test_what_is_not_a_good_command_gives_a_hint_and_never_reaches_the_model(typed: str) -> None:
    command = parse(typed, Settings())
    assert isinstance(command, Hint)
    assert len(command.text) > 10


def test_a_bad_value_is_named_with_its_range() -> None:
    for typed, wanted in (("/temp -9", "0 or more"), ("/seed -9", "0..2**64-1"), ("/max -9", "1 or more, or -1")):
        command = parse(typed, Settings())
        assert isinstance(command, Hint)
        assert wanted in command.text and "-9" in command.text and "1e+" not in command.text


def test_a_block_that_the_draft_cannot_draw_is_refused_at_the_command() -> None:
    """The badge would promise it and every message after it would fail."""
    card = ModelCard("t", "d", 4, 1.0, largest_block=16)
    refused = parse("/block 64", Settings(), card)
    assert isinstance(refused, Hint)
    assert "1..16" in refused.text and "64" in refused.text and "/block auto" in refused.text
    assert isinstance(parse("/block 16", Settings(), card), Change)
    assert isinstance(parse("/temp 1", Settings(block_size=64), card), Change), "it is not what is wrong here"
    assert isinstance(parse("/block 64", Settings()), Change), "no draft is known yet"


def test_mode_dflash_is_refused_where_nothing_can_draft() -> None:
    assert isinstance(parse("/mode dflash", Settings(), ModelCard("t", None, None, 1.0)), Hint)
    assert isinstance(parse("/mode dflash", Settings(block_size=1)), Hint)
    assert isinstance(parse("/block 1", Settings(mode="dflash")), Hint)


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("/clear", "clear", ""), ("/bye", "quit", ""), ("/q", "quit", ""), ("/r", "clear", ""), ("/h", "help", ""),
        ("/?", "help", ""), ("/? shortcuts", "help", "shortcuts"), ("/regen", "regenerate", ""),
        ("/load a/b", "load", "a/b"),
        ("/save my talk", "rename", "my talk"), ("/show info", "info", "info"), ("/show", "info", ""),
        ("/set verbose", "verbose", "on"), ("/set quiet", "verbose", "off"), ("/export a b.md", "export", "a b.md"),
        ("/system", "system", ""), ("/theme", "theme", ""), ("/theme light", "theme", "light"),
    ],
)  # fmt: skip
def test_familiar_command_names_work(typed: str, name: str, value: str) -> None:
    """Those of ollama, and mlx_lm's letters q, r and h."""
    assert parse(typed, Settings()) == Run(name, value)


def test_a_space_sends_a_line_that_begins_with_a_slash() -> None:
    assert parse(" /usr/bin/env python?", Settings()) == Say("/usr/bin/env python?")


def test_three_quotes_hold_a_message_of_many_lines_and_are_not_sent() -> None:
    for text in ('"""', '"""one', '"""one\ntwo', '"""def f():\n  """doc"""\n', '/system """Be', '/set system """Be'):
        assert unfinished(text), text
    for text in ("", "one", 'she said """', '"""one"""', '"""\none\ntwo\n"""', '/system """Be"""', "/system Be"):
        assert not unfinished(text), text
    assert parse('"""\none\n\ntwo\n"""', Settings()) == Say("one\n\ntwo")
    assert parse('"""def f():\n  """doc"""\n"""', Settings()) == Say('def f():\n  """doc"""')


def test_a_command_is_completed_by_its_name_and_no_message_is() -> None:
    assert [row[0] for row in completions("/te")] == ["/temp 0.7"]
    assert {row[0].split()[0] for row in completions("/the")} == {"/theme"}
    assert completions("/") and not completions("/temp 0") and not completions("te") and not completions("/te\n")


def test_every_action_has_a_method_and_a_way_to_it_that_needs_no_f_key() -> None:
    """A Mac's F keys change the volume, and a binding without a method does nothing and says nothing."""
    names = [name for action in ACTIONS for name in action.slash]
    keys = [key for action in ACTIONS for key in action.keys]
    assert len(set(names)) == len(names) and len(set(keys)) == len(keys) and not set(names) & set(SETTINGS)
    for action in ACTIONS:
        wanted = "command_" if action.takes and not action.takes.startswith("[") else "action_"
        assert hasattr(ChatScreen, wanted + action.name), action.name
        if action.takes:
            assert hasattr(ChatScreen, f"command_{action.name}") or action.name in ("system",), action.name
        if action.keys and action.keys[0].startswith("f"):
            assert action.slash and (action.palette or action.name == "help"), action.name
        assert action.title and (action.keys or action.slash)


def test_the_help_page_lists_every_key_and_every_command() -> None:
    shown = str(key_rows()) + str(command_rows()) + str(setting_rows())
    for action in ACTIONS:
        assert action.key in shown and action.command in shown
    assert all(f"/{name}" in shown for name in SETTINGS)
    assert "Ctrl+J" in shown and "Esc" in shown and "F5" in shown


def test_history_walks_back_and_forth_and_ends_in_the_empty_box() -> None:
    past = History()
    assert past.back() is None and past.forward() is None
    for text in ("one", "two", "two", " "):
        past.add(text)
    assert [past.back(), past.at_newest, past.back(), past.at_newest] == ["two", True, "one", False]
    assert past.back() is None
    assert [past.forward(), past.forward(), past.forward()] == ["two", "", None]
    past.back()
    past.add("three")
    assert past.back() == "three"


def _program(folder: Path, text: str) -> str:
    """A program that is run with one argument."""
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\nimport sys\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_editor_gets_the_text_and_gives_the_new_one(tmp_path: Path) -> None:
    program = _program(
        tmp_path, "p = sys.argv[-1]; t = open(p).read(); open(p, 'w').write(t.upper() + sys.argv[1] + '\\n')"
    )
    assert editor.edit("zwölf\nlines", {"EDITOR": f"{program} --wait"}) == "ZWÖLF\nLINES--wait"
    assert editor.edit("x", {"EDITOR": "nothing", "VISUAL": f"{program} !"}) == "X!"


def test_ctrl_c_in_the_editor_is_not_meant_for_the_chat(tmp_path: Path) -> None:
    """It ended both."""
    program = _program(
        tmp_path,
        "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\n"
        "open(sys.argv[1], 'w').write(str(signal.getsignal(signal.SIGINT) is signal.default_int_handler))",
    )
    former = signal.getsignal(signal.SIGINT)
    assert editor.edit("x", {"EDITOR": program}) == "True"
    assert signal.getsignal(signal.SIGINT) is former


@pytest.mark.parametrize(
    ("command", "wanted"),
    [("/nowhere/edit", "cannot be run"), ("unbalanced '", "no command"), (None, "ended with 3")],
)
def test_an_editor_that_fails_says_so_in_words(tmp_path: Path, command: str | None, wanted: str) -> None:
    with pytest.raises(editor.EditorError, match=wanted):
        editor.edit("x", {"EDITOR": command or _program(tmp_path, "sys.exit(3)")})


def test_the_machines_clipboard_is_left_alone_over_ssh(tmp_path: Path) -> None:
    """The clipboard there is not the one of the person who copies."""
    for name in ("pbcopy", "wl-copy", "xclip"):
        _program(tmp_path, "")
        (tmp_path / "program").rename(tmp_path / name)
    path = {"PATH": str(tmp_path)}
    assert clipboard.command(path, "darwin") == ["pbcopy"]
    assert clipboard.command({**path, "WAYLAND_DISPLAY": "wayland-0", "DISPLAY": ":0"}, "linux") == ["wl-copy"]
    assert clipboard.command({**path, "DISPLAY": ":0"}, "linux") == ["xclip", "-selection", "clipboard"]
    assert clipboard.command(path, "linux") is None
    assert clipboard.command({**path, "SSH_CONNECTION": "1 2"}, "darwin") is None
    assert clipboard.command({"PATH": "/nowhere"}, "darwin") is None
