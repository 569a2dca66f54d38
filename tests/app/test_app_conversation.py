"""Conversation and settings: no Textual, no MLX, no thread."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.app.conversation import Conversation, End
from dflash_mlx.app.messages import Kind, Numbers, Origin, Part
from dflash_mlx.app.settings import Settings


def said(text: str, kind: Kind = "answer", origin: Origin = "target") -> list[Part]:
    return [Part(kind, origin, text)]


def test_history_keeps_roles_and_order() -> None:
    """Otherwise the model reads a play script instead of a conversation."""
    talk = Conversation()
    talk.ask("one", 1)
    talk.append(1, said("first"))
    talk.finish(1, "stop")
    talk.ask("two", 2)
    assert talk.messages("be kind") == (
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
    )


@pytest.mark.parametrize("state", ["cancelled", "failed", "stop"])
def test_a_turn_without_an_answer_is_not_history(state: End) -> None:
    """Two user messages in a row break templates, and the cache never saw an answer."""
    talk = Conversation()
    talk.ask("lost", 1)
    talk.finish(1, state)
    talk.ask("two", 2)
    assert talk.messages() == (("user", "two"),)


def test_a_stopped_answer_stays_in_history() -> None:
    talk = Conversation()
    talk.ask("one", 1)
    talk.append(1, said("par"))
    talk.finish(1, "cancelled")
    talk.ask("two", 2)
    assert ("assistant", "par") in talk.messages()


def test_the_model_reads_its_reasoning_and_markers_again_and_the_user_copies_neither() -> None:
    """Without the markers the cache would not match the history; with them a copied answer would begin <think>."""
    talk = Conversation()
    turn = talk.ask("one", 1)
    talk.append(1, [Part("marker", "target", "<think>"), Part("reasoning", "draft", "hm")])
    talk.append(1, [Part("marker", "target", "</think>"), Part("answer", "target", "4"), Part("answer", "draft", "2")])
    assert turn.answer == "<think>hm</think>42"
    assert (turn.shown, turn.reasoning) == ("42", "hm")
    assert talk.finish(1, "stop", "2 tokens", Numbers(generation_tokens=2)) is turn
    assert (turn.state, turn.closing, turn.numbers) == ("stop", "2 tokens", Numbers(generation_tokens=2))
    talk.ask("two", 2)
    assert talk.messages()[1] == ("assistant", "<think>hm</think>42")


@given(
    st.lists(
        st.builds(
            Part, st.sampled_from(["reasoning", "answer"]), st.sampled_from(["draft", "target"]), st.text(max_size=3)
        )
    ),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_however_an_answer_is_cut_into_chunks_it_has_the_same_parts(parts: list[Part], size: int) -> None:
    """Otherwise a chat would look different after it was saved, where chunks are longer."""
    at_once, in_chunks = Conversation(), Conversation()
    for talk in (at_once, in_chunks):
        talk.ask("one", 1)
    at_once.append(1, parts)
    for start in range(0, len(parts), size):
        in_chunks.append(1, parts[start : start + size])
    kept = at_once.turns[0].parts
    assert kept == in_chunks.turns[0].parts
    assert at_once.turns[0].answer == "".join(part.text for part in parts)
    runs = groupby((part for part in parts if part.text), lambda part: (part.kind, part.origin))
    assert kept == [Part(*key, "".join(part.text for part in run)) for key, run in runs]


def test_text_of_a_cleared_turn_is_refused() -> None:
    """The engine may still send a chunk after /clear."""
    talk = Conversation()
    talk.ask("one", 1)
    talk.clear()
    talk.ask("two", 2)
    assert not talk.append(1, said("ghost"))
    assert talk.finish(1, "cancelled") is None
    assert talk.open_turn is not None and talk.open_turn.answer == ""


def test_only_a_finished_question_can_be_asked_again() -> None:
    talk = Conversation()
    turn = talk.ask("one", 1)
    assert talk.take_last_question() is None and talk.undo() is None
    with pytest.raises(ValueError, match="still being answered"):
        talk.ask("at the same time", 2)
    talk.finish(1, "stop")
    with pytest.raises(ValueError, match="`number` has to be above 1, the turn before, got 1"):
        talk.ask("with a number that was used", 1)
    assert talk.turns == [turn]
    assert talk.take_last_question() == "one"
    assert talk.turns == [] and talk.undo() is None and talk.take_last_question() is None


def test_undo_drops_the_last_turn_and_says_which() -> None:
    talk = Conversation()
    for number in (1, 2):
        talk.ask(f"question {number}", number)
        talk.append(number, said("yes"))
        talk.finish(number, "stop")
    dropped = talk.undo()
    assert dropped is not None and dropped.number == 2
    assert talk.messages() == (("user", "question 1"), ("assistant", "yes"))


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


def test_importing_the_app_imports_no_mlx() -> None:
    """The first paint would wait for seconds, and arrays could end up in the wrong thread (D7, D9)."""
    code = (
        "import sys, dflash_mlx.chat, dflash_mlx.app.app, dflash_mlx.app.plain\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
