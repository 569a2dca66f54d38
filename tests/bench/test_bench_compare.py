"""Whether two answers are the same: by tokens, and by what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.bench.answers import boxed, code, extract, is_right, last_json, number
from dflash_mlx.bench.compare import common_prefix, compared, model_judge
from dflash_mlx.bench.measured import Measured, ids_sha256
from dflash_mlx.bench.record import Limits, Prompt
from dflash_mlx.divergence import Divergence
from tests.families import tiny


def said(text: str = "", tokens: tuple[int, ...] = (1, 2, 3), arm: str = "dflash") -> Measured:
    return Measured("p", arm, 3, "", len(tokens), ids_sha256(tokens), 1.0, 2.0, tokens=tokens, text=text)


def asked(task: Any = "text", expected: str | None = None, tests: str | None = None) -> Prompt:
    return Prompt("p", "c", (1, 2, 3), task=task, expected=expected, tests=tests)


@pytest.mark.parametrize(
    "expected, got, length",
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 5, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0)],
)
def test_the_common_prefix_ends_at_the_first_difference(expected: Any, got: Any, length: int) -> None:
    """Tokens that agree behind it do so by chance."""
    assert common_prefix(expected, got) == length


def test_of_several_differences_the_worst_is_reported() -> None:
    """A near-tie in one trial must not hide a bug in the other."""

    def judge(ids: Any, expected: Any, got: Any) -> Divergence:
        kind: Any = "bug" if got[1] == 9 else "near-tie"
        return Divergence(kind, 0 if kind == "near-tie" else 1, 0.5, 0.1, 1, 2, kind)

    trials = [said(tokens=(8, 2, 3)), said(tokens=(1, 9, 3)), said()]
    row = compared(asked(), [said(arm="stock")], trials, judge)
    assert (row.tokens_match, row.divergence, row.index, row.answers) == (False, "bug", 1, 3)
    assert (row.common_prefix, row.common_share) == (1, 1 / 3)


def test_without_a_judge_a_difference_has_no_class() -> None:
    """Text of a server, or drawn at a temperature: where it differs is known, why is not."""
    row = compared(asked(), [said()], [said(tokens=(1, 2, 9, 4))])
    assert (row.tokens_match, row.divergence, row.index, row.gap, row.common_share) == (False, None, 2, None, 0.5)
    assert model_judge(tiny("llama"), Limits(temperature=1.0, seed=1)) is None


def test_texts_without_ids_are_compared_by_their_hash() -> None:
    """A server gives no ids: no common prefix is made up, and same is same."""
    one, other = (replace(said(), tokens=(), output_sha256=each) for each in ("x", "y"))
    assert compared(asked(), [one], [one]).tokens_match
    row = compared(asked(), [one], [other], judge=lambda *_: pytest.fail("no ids to judge"))  # type: ignore[arg-type, return-value]
    assert (row.tokens_match, row.divergence, row.index, row.common_share) == (False, None, None, 0.0)


def test_other_words_with_the_same_result_are_the_same_answer() -> None:
    """What an answer is right or wrong by, beside its tokens."""
    base, other = said("So it is 1,250."), said("The result is\n1250.00", (4, 5))
    row = compared(asked("number", "1250"), [base], [other])
    assert (row.tokens_match, row.answer_match, row.answer, row.right) == (False, True, "1250", True)
    row = compared(asked("number", "7"), [base], [said("It is 8.", (4, 5))])
    assert (row.answer_match, row.right) == (False, False)
    row = compared(asked("number"), [said("I do not know")], [said("Nor do I", (4, 5))])
    assert (row.answer, row.answer_match, row.right) == (None, None, None)


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        (r"$\boxed{ 1{,}000 }$", "1{,}000"),
        (r"\boxed{12,000.0}", "12000"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        (r"\boxed{90^\circ}", "90"),
        (r"\fbox{x = {y}} and \boxed{cut", "x={y}"),
        ("no box", None),
    ],
)
def test_the_last_box_that_closes_is_the_answer(text: str, answer: str | None) -> None:
    """Reasoning shows boxes on the way, and a budget cuts the last one."""
    assert boxed(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("18 - 7 = 11, so she pays $1,234.50.", "1234.5"),
        ("It is -3", "-3"),
        ("in 2 of 10", "10"),
        ("100", "100"),
        ("0.0", "0"),
        ("-0.00", "0"),
        ("no digit", None),
    ],
)
def test_the_last_number_is_the_answer(text: str, answer: str | None) -> None:
    """In the spelling of people and of programs."""
    assert number(text) == answer


def test_a_number_without_its_box_still_counts() -> None:
    """Models forget the box more often than the result."""
    assert extract(asked("boxed"), "The result is 12.") == "12"
    assert is_right(asked("boxed", r"\frac{1}{2}"), extract(asked("boxed"), r"\boxed{\tfrac12}"))


def test_json_is_compared_as_a_value() -> None:
    """The order of keys and white space say nothing."""
    text = 'Here: [1]\n```json\n{"b": [1, 2],\n "a": "x"}\n```\nDone {not json}.'
    assert last_json(text) == ({"b": [1, 2], "a": "x"},)
    assert extract(asked("json"), text) == extract(asked("json"), '{"a":"x","b":[1,2]}')
    assert is_right(asked("json", '{"a": "x", "b": [1, 2]}'), extract(asked("json"), text))
    assert extract(asked("json"), "none { here") is None
    assert extract(asked("json"), "[" * 100_000) is None


SOLUTION = "Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nThat is all."
TESTS = "assert double(4) == 8"


def test_code_runs_only_if_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a program by a language model."""
    import subprocess

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    assert extract(asked("exec", tests=TESTS), SOLUTION) is None


@pytest.mark.parametrize(
    "text, verdict",
    [
        (SOLUTION, "pass"),
        (SOLUTION.replace("2 * x", "3 * x"), "fail"),
        ("```python\nimport sys; sys.exit(0)\n```", "fail"),
        ("```python\nimport os\ndouble = lambda x: 8\nopen('big', 'w').write('x' * 10**7)\n```", "fail"),
        ("not python at all", "fail"),
    ],
    ids=["right", "wrong", "leaves", "writes", "text"],
)
def test_tests_decide_about_code(text: str, verdict: str) -> None:
    """An answer that ends the process before the tests has not passed them."""
    prompt = asked("exec", tests=TESTS)
    found = extract(prompt, text, run_code=True)
    assert found == verdict and is_right(prompt, found) is (verdict == "pass")


def test_code_that_never_ends_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark does not wait for it."""
    from dflash_mlx.bench import answers

    monkeypatch.setattr(answers, "SECONDS", 1)
    assert extract(asked("exec", tests=TESTS), "```\nwhile True: pass\n```", run_code=True) == "fail"


def test_code_sees_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the user's are in there."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    look = "```python\nimport os\ndef double(x):\n    return 8 if 'HF_TOKEN' not in os.environ else 0\n```"
    assert extract(asked("exec", tests=TESTS), look, run_code=True) == "pass"


def test_the_last_block_of_code_is_taken() -> None:
    """Usage examples in another language stand beside it."""
    assert code("```python\na\n```\n```bash\nb\n```") == "a\n"
    assert code("```\na\n```\n```py\nb") == "b"
    assert code("plain") == "plain"
