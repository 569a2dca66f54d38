"""Conversation, settings and slash commands: no Textual, no MLX, no thread."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from dflash_mlx.app.commands import Change, Do, Hint, Say, parse
from dflash_mlx.app.conversation import Conversation
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.settings import Settings


def test_history_keeps_roles_and_order() -> None:
    """Otherwise the model reads a play script instead of a conversation."""
    talk = Conversation()
    turn = talk.ask("one")
    talk.append(turn.number, "first")
    talk.finish(turn.number, "stop")
    talk.ask("two")
    assert talk.messages("be kind") == (
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
    )


@pytest.mark.parametrize("state", ["cancelled", "failed", "stop"])
def test_a_turn_without_an_answer_is_not_history(state: str) -> None:
    """Two user messages in a row break templates, and the cache never saw an answer."""
    talk = Conversation()
    talk.finish(talk.ask("lost").number, state)  # type: ignore[arg-type]
    talk.ask("two")
    assert talk.messages() == (("user", "two"),)


def test_a_stopped_answer_stays_in_history() -> None:
    talk = Conversation()
    turn = talk.ask("one")
    talk.append(turn.number, "par")
    talk.finish(turn.number, "cancelled")
    talk.ask("two")
    assert ("assistant", "par") in talk.messages()


def test_text_of_a_cleared_turn_is_refused() -> None:
    """The engine may still send a chunk after /clear."""
    talk = Conversation()
    old = talk.ask("one").number
    talk.clear()
    new = talk.ask("two").number
    assert new != old
    assert not talk.append(old, "ghost")
    assert talk.finish(old, "cancelled") is None
    assert talk.open_turn is not None and talk.open_turn.answer == ""


def test_only_a_finished_question_can_be_asked_again() -> None:
    talk = Conversation()
    turn = talk.ask("one")
    assert talk.take_last_question() is None
    with pytest.raises(ValueError):
        talk.ask("at the same time")
    talk.finish(turn.number, "stop")
    assert talk.take_last_question() == "one"
    assert talk.turns == []


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        ("/temp 0.7", "temperature", 0.7),
        ("/top_p 0.9", "top_p", 0.9),
        ("/max 512", "max_tokens", 512),
        ("/mode plain", "mode", "plain"),
        ("/block 4", "block_size", 4),
        ("/seed 7", "seed", 7),
        ("/system Answer in Czech.", "system", "Answer in Czech."),
    ],
)
def test_commands_change_one_setting(typed: str, field: str, value: object) -> None:
    command = parse(typed, Settings())
    assert isinstance(command, Change)
    changed = {name for name in vars(Settings()) if vars(command.settings)[name] != vars(Settings())[name]}
    assert changed == {field}
    assert vars(command.settings)[field] == value


def test_auto_and_off_give_the_choice_back() -> None:
    command = parse("/block auto", Settings(block_size=4))
    assert isinstance(command, Change) and command.settings.block_size is None
    command = parse("/seed off", Settings(seed=3))
    assert isinstance(command, Change) and command.settings.seed is None
    command = parse("/system", Settings(system="x"))
    assert isinstance(command, Change) and command.settings.system == ""


@pytest.mark.parametrize(
    "typed",
    ["/tmep 0.7", "/usr/bin/env", "/", "/temp", "/temp hot", "/temp -1", "/temp inf", "/temp nan", "/max 0", "/max 1.5",
     "/mode fast", "/block 0", "/top_p -1", "/seed -1", "/seed 18446744073709551616", "/clear all", "/theme blue", "q"],
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
    ("field", "values"),
    [
        ("temperature", [-1.0, 0.0, 9.0, math.inf, math.nan]),
        ("top_p", [-0.1, 0.0, 1.0, 2.0, math.nan]),
        ("min_p", [-0.1, 0.0, 1.0, 1.1, math.nan]),
        ("top_k", [-1, 0, 2_000_000]),
        ("seed", [-1, 0, 2**64 - 1, 2**64]),
    ],
)
def test_the_chat_takes_the_sampling_settings_that_the_library_takes(field: str, values: list[float]) -> None:
    """Two validations with two ranges: generate took what the chat refused, or every message failed."""
    policy = pytest.importorskip("dflash_mlx.sampling").SamplingPolicy

    def takes(made: Callable[..., object], value: float) -> bool:
        try:
            made(**{field: value})
        except ValueError:
            return False
        return True

    assert [takes(Settings, value) for value in values] == [takes(policy, value) for value in values]


@pytest.mark.parametrize(("typed", "what"), [("/clear", "clear"), ("/bye", "quit"), ("/regen", "regenerate")])
def test_familiar_command_names_work(typed: str, what: str) -> None:
    command = parse(typed, Settings())
    assert isinstance(command, Do) and command.what == what


def test_a_space_sends_a_line_that_begins_with_a_slash() -> None:
    assert parse(" /usr/bin/env python?", Settings()) == Say("/usr/bin/env python?")


def test_importing_the_app_imports_no_mlx() -> None:
    """The first paint would wait for seconds, and arrays could end up in the wrong thread (D7, D9)."""
    code = (
        "import sys, dflash_mlx.chat, dflash_mlx.app.app, dflash_mlx.app.plain\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
