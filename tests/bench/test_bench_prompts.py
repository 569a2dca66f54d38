"""What is asked: our own prompts and their answers, public sets, contexts, and how a model is given them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.bench import public_sets
from dflash_mlx.bench.answers import extract, is_right, verdict
from dflash_mlx.bench.form import BenchError
from dflash_mlx.bench.items import Item
from dflash_mlx.bench.prompt_sets import OFFLINE, Rendering, as_prompts, read_set
from dflash_mlx.bench.record import Prompt
from dflash_mlx.errors import DFlashError, FetchError
from dflash_mlx.training.prompts import demo as trained
from tests.conftest import byte_tokenizer
from tests.training.test_prompts import content


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rendered(items: list[Item], *, raw: bool = False, answer: Callable[[Prompt], str] = str) -> list[Prompt]:
    return as_prompts(items, byte_tokenizer(), Rendering(raw), answer)


def bare(item: Item) -> Prompt:
    return Prompt(item.name, item.category, (1,), "", item.task, item.expected, item.tests)


# Our own.

SOLUTIONS = {
    "code-1": "import itertools\ndef runs(text): return [(c, len(list(g))) for c, g in itertools.groupby(text)]",
    "code-2": "def clockwise(rows): return [list(row) for row in zip(*rows[::-1])]",
    "code-3": "def seconds(text): return sum(int(p[:-1]) * {'h': 3600, 'm': 60, 's': 1}[p[-1]] for p in text.split())",
    "code-4": "def covered(spans): return len({n for start, end in spans for n in range(start, end)})",
    "code-5": """
def order(needs):
    left = {t: set(n) for t, n in needs.items()}
    for names in needs.values():
        for name in names:
            left.setdefault(name, set())
    done = []
    while left:
        ready = [t for t, n in left.items() if n <= set(done)]
        if not ready:
            raise ValueError
        done += ready
        left = {t: n for t, n in left.items() if t not in ready}
    return done""",
    "code-6": """
class Tank:
    def __init__(self, capacity): self.capacity, self.level = capacity, 0
    def fill(self, litres):
        over = max(0, self.level + litres - self.capacity)
        self.level += litres - over
        return over
    def drain(self, litres):
        out = min(self.level, litres)
        self.level -= out
        return out""",
    "code-7": """
def nearest(words, wanted):
    def away(a, b):
        if not a or not b: return len(a or b)
        return min(away(a[1:], b) + 1, away(a, b[1:]) + 1, away(a[1:], b[1:]) + (a[0] != b[0]))
    return min(words, key=lambda word: away(word, wanted))""",
    "code-8": """
def sliding(values, size):
    held = []
    for value in values:
        held = [*held, value][-size:]
        if len(held) == size:
            yield sum(held) / size""",
}


def test_the_set_that_comes_along_has_eight_prompts_of_each_kind() -> None:
    """48 that need no network; long ones among them, since prefill is a part of what a user waits for."""
    items = read_set("offline")
    assert [item.category for item in items] == [name for name in OFFLINE for _ in range(8)]
    assert len({item.name for item in items}) == 48 and len({item.turns for item in items}) == 48
    for item in read_set("summarise"):
        words = len(item.turns[0].split())
        assert 500 < words < 1300, (item.name, words)  # 600 to 1,500 tokens of the demo's
    assert [item.name for item in read_set("offline", 1)] == [f"{name}-1" for name in OFFLINE]


def test_no_prompt_of_the_set_is_trained_on_or_stands_in_the_demo() -> None:
    """The draft would be tested on what it learned: nothing that has more than three quarters of its content words."""
    demo = {item.turns[0] for item in read_set("demo")}
    texts = [content(each.text) for each in trained.prompts(24000) if not each.held_out]
    for item in read_set("offline"):
        assert item.turns[0] not in demo
        subject = content(item.turns[0])
        assert all(len(subject & words) <= 0.75 * len(subject) for words in texts), item.name


def test_every_right_answer_is_reached_by_what_a_model_would_write() -> None:
    """An answer that the extraction spells otherwise would count every model as wrong."""
    checked = 0
    for item in read_set("offline"):
        if item.task == "exec" or item.expected is None:
            continue
        written = {"boxed": f"So it is $\\boxed{{{item.expected}}}$.", "number": f"4 and 5, hence {item.expected}."}
        said = written.get(
            item.task, f"\n{item.expected}\n" if item.task == "text" else f"```json\n{item.expected}\n```"
        )
        assert is_right(bare(item), extract(bare(item), said)), item.name
        assert not is_right(bare(item), extract(bare(item), "7531 {}")), item.name
        checked += 1
    assert checked == 24


WORKED_OUT = {
    "math-1": 1260 / (1260 / 7 - 1260 / 21),
    "math-2": next(n for n in range(54) if n + 2 * n + (2 * n + 6) + 8 == 54),
    "math-3": sum((n % 6 == 0) != (n % 8 == 0) for n in range(1, 200)),
    "math-4": next(n for n in range(2, 99, 2) if n * (n - 2) == 1088),
    "math-5": (240 + 560) * 18 / 240,
    "math-6": sum(24 + 5 * day for day in range(5)),
    "math-7": 85 * 80 * 90 / 10000,
    "math-8": 900 % 35,
}


def test_the_answers_of_the_problems_are_right() -> None:
    """Each again, by other means than by hand."""
    assert {item.name: float(item.expected or "nan") for item in read_set("math")} == WORKED_OUT


@pytest.mark.parametrize("item", read_set("code"), ids=lambda item: item.name)
def test_the_tests_of_code_pass_for_a_right_function_and_fail_for_none(item: Item) -> None:
    """Wrong tests would say that every model fails; too weak ones that every model passes."""
    assert item.tests is not None and verdict(SOLUTIONS[item.name], item.tests) == "pass"
    name = re.search(r"`(\w+)", item.turns[0])
    assert name and verdict(f"def {name[1]}(*_):\n    return None\n", item.tests) == "fail"


def test_edits_change_what_they_say_and_nothing_else() -> None:
    """The answer of a copy-edit has to be long and near its text: that is where drafts copy."""
    for item in read_set("edit"):
        assert item.expected is not None
        document = item.turns[0].partition("\n\n")[2]
        assert item.expected != document and len(item.expected) > 200
        words, said = set(re.findall(r"\w+", document)), re.findall(r"\w+", item.expected)
        assert sum(word in words for word in said) > 0.7 * len(said), item.name


# Public sets.

ROWS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "gsm8k": (
        {"question": "How many?", "answer": "She has 3+4=<<3+4=7>>7.\n#### 1,007"},
        "How many?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "1,007",
    ),
    "math500": (
        {"problem": "Find x.", "solution": "...", "answer": "\\frac{1}{2}"},
        "Find x.\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "\\frac{1}{2}",
    ),
    "aime24": (
        {"problem": "Find n.", "answer": 204},
        "Find n.\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "204",
    ),
    "aime25": (
        {"problem": "Find n.", "answer": "70"},
        "Find n.\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "70",
    ),
    "humaneval": (
        {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(1) == 2", "entry_point": "f"},
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f(x):\n\n```",
        None,
    ),
    "mbpp": (
        {"prompt": "Write g.", "test_imports": ["import math"], "test_list": ["assert g(2) == 4"]},
        "Write g.",
        None,
    ),
    "alpaca": ({"instruction": "Sort.", "input": "b a", "output": "a b"}, "Sort.\n\nInput:\nb a", None),
    "swe-bench-lite": (
        {"problem_statement": "It crashes."},
        "Problem Statement:\nIt crashes.\nPlease fix the issue described above.",
        None,
    ),
    "humaneval-raw": ({"prompt": "def f(x):\n"}, "def f(x):\n", None),
    "gsm8k-raw": ({"question": "How many?", "answer": "#### 7"}, "Question: How many?\nAnswer: ", "7"),
    "math500-raw": ({"problem": "Find x.", "answer": "2"}, "Problem: Find x.\nSolution: ", "2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_public_sets_are_asked_in_the_words_of_those_who_published_numbers(name: str, tmp_path: Path) -> None:
    """Acceptance depends on the wording: another one, and it cannot be compared."""
    row, text, answer = ROWS[name]
    (item,) = read_set(f"{name}:{write(tmp_path / 'rows.jsonl', [row])}")
    assert item.turns == (text,) and item.expected == answer and item.category == name


def test_tests_of_public_code_run_behind_an_answer(tmp_path: Path) -> None:
    """The function's name and the imports have to be in them."""
    for name, code in (("humaneval", "def f(x): return x + 1"), ("mbpp", "def g(x): return math.pow(x, 2)")):
        (item,) = read_set(f"{name}:{write(tmp_path / 'rows.jsonl', [ROWS[name][0]])}")
        assert verdict(code, item.tests or "") == "pass" and verdict("", item.tests or "") == "fail"


def test_livecodebench_is_asked_in_the_words_of_z_labs_benchmark(tmp_path: Path) -> None:
    """LiveCodeBench's own words are others, and acceptance by them would stand beside the paper's."""
    rows = [{"question_content": "Add.", "starter_code": ""}, {"question_content": "Add.", "starter_code": "class S:"}]
    stream, starter = read_set(f"livecodebench:{write(tmp_path / 'rows.jsonl', rows)}")
    asked = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program\n\n### Question:\nAdd.\n\n### Format: {}\n```python\n{}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )
    assert stream.turns == (asked.format("Write your code in the following format:", "# YOUR CODE HERE"),)
    assert starter.turns == (asked.format("Use the following code structure:", "class S:"),)


def test_of_a_larger_set_those_prompts_are_taken_that_the_seed_42_draws(tmp_path: Path) -> None:
    """As z-lab's benchmark does; of a set that is small enough all are asked in their order."""
    file = write(tmp_path / "rows.jsonl", [{"question": f"Q{n}", "answer": f"#### {n}"} for n in range(20)])
    order = list(range(20))
    random.Random(42).shuffle(order)
    assert [item.expected for item in read_set(f"gsm8k:{file}", 5)] == [str(n) for n in order[:5]]
    assert [item.expected for item in read_set(f"gsm8k:{file}", 20)] == [str(n) for n in range(20)]


def test_categories_of_a_set_are_limited_each(tmp_path: Path) -> None:
    """Spec-Bench has six kinds of tasks: eighty of them must not all be of one."""
    rows = [{"category": kind, "turns": [f"{kind} {n}"]} for kind in ("qa", "rag") for n in range(3)]
    found = read_set(f"spec-bench:{write(tmp_path / 'question.jsonl', rows)}", 2)
    assert [item.category for item in found] == ["qa", "qa", "rag", "rag"]
    own = [item.category for item in read_set("demo", 1)]
    assert len(own) == len(set(own)) == len({item.category for item in read_set("demo")}) > 4


def test_a_set_that_cannot_be_fetched_names_the_command_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no network here may have one elsewhere."""

    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no network in this test")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    command = 'hf download openai/gsm8k --repo-type dataset --include "main/test-\\*.parquet"'
    with pytest.raises(FetchError, match=rf"{command}. Or give a file with its rows: --prompts gsm8k:FILE"):
        read_set("gsm8k")
    with pytest.raises(FetchError, match=r"spec-bench is not on the hub. To use it, download data/spec_bench/question"):
        read_set("spec-bench")


def test_a_set_in_the_hubs_cache_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the files of the split, though more may lie there."""
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS["math500"][0]) + "\n")
    (tmp_path / "train.jsonl").write_text("no json\n")
    asked = []

    def held(name: str, *, repo_type: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append((name, repo_type, tuple(allow_patterns), local_files_only))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", held)
    assert [item.expected for item in read_set("math500")] == ["\\frac{1}{2}"]
    assert asked == [("HuggingFaceH4/MATH-500", "dataset", ("test.jsonl",), True)]
    assert public_sets.missing("math500") is None


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("gsm8k", '{"prompt": "x"}', r"Row 1 of rows.jsonl is none of gsm8k \(KeyError: 'answer'\)"),
        ("mt-bench", '{"prompt": "x"}', "`prompt` holds no list of turns"),
        ("", '{"text": "x"}', "prompt 1 of rows.jsonl has no `prompt`"),
        ("", '{"prompt": "x", "task": "essay"}', "prompt 1 of rows.jsonl has the task 'essay'"),
        ("", '"x"', "prompt 1 of rows.jsonl is 'x' and no object"),
        ("", "", "holds no prompts"),
        ("", "{", "line 1 is no JSON"),
    ],
)
def test_a_row_that_says_nothing_to_ask_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    """Leaving it out would change the set that numbers are compared on."""
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(DFlashError, match=message):
        read_set(f"{name}:{file}" if name else str(file))


def test_an_unknown_set_lists_those_there_are() -> None:
    """A typo is not a file that nobody has."""
    with pytest.raises(BenchError, match=r"no set of prompts 'gsm8'.*offline, demo, chat.*gsm8k.*context:N"):
        read_set("gsm8")


# Contexts, conversations, and ids.


@pytest.mark.parametrize("raw", [False, True], ids=["chat", "raw"])
def test_a_context_is_as_long_as_it_says(raw: bool) -> None:
    """A curve over the context needs its points where they are said to be."""
    for item in read_set("context:6000", 2):
        (prompt,) = rendered([item], raw=raw)
        assert len(prompt.ids) == 6000 and prompt.category == "context-6000"
        assert prompt.text.endswith("Summarise that last text in about 200 words.")
        ending = [line for line in read_set("summarise") if line.turns[0][-200:] in prompt.text]
        assert len(ending) == 1


def test_documents_of_a_file_are_cut_and_their_own_question_asked(tmp_path: Path) -> None:
    """LongBench's rows: shorter ones cannot fill the context and are left out."""
    words = " ".join(f"word{n}" for n in range(900))
    rows = [{"context": words, "input": "Which word is first?"}, {"context": "short"}, {"report": words[::-1]}]
    items = read_set(f"context:1024:{write(tmp_path / 'rows.jsonl', rows)}")
    first, second = rendered(items)
    assert len(first.ids) == len(second.ids) == 1024
    assert first.text.startswith("word0 word1") and first.text.endswith("Which word is first?")
    assert second.text.endswith("Write a summary of the text above in about 200 words.")


def test_text_is_never_repeated_to_fill_a_context(tmp_path: Path) -> None:
    """Filler that repeats is guessed by any draft: numbers made with it have misled people."""
    item = Item("x", "c", ("?",), document="too short", tokens=1024)
    with pytest.raises(BenchError, match=r"The document of x has 9 tokens, and \d+ are needed: text that repeats"):
        rendered([item])
    with pytest.raises(BenchError, match="has no document of 4096 tokens"):
        read_set(f"context:4096:{write(tmp_path / 'rows.jsonl', [{'text': 'short'}])}")
    with pytest.raises(BenchError, match="`context:` needs a number of tokens of 1024 or more"):
        read_set("context:12")


def test_the_next_turn_of_a_conversation_follows_the_models_own_answer() -> None:
    """Both arms are given the same ids, so the answer is asked for once; an answer of another's would be easier."""
    asked: list[str] = []

    def answer(prompt: Prompt) -> str:
        asked.append(prompt.name)
        return "Forty."

    item = Item("talk", "c", ("How many?", "And now?"), "number", "2")
    first, second = rendered([item], answer=answer)
    assert asked == ["talk"] and (first.name, second.name) == ("talk", "talk/2")
    text = byte_tokenizer().decode(list(second.ids))
    assert text == "user: How many?\nassistant: Forty.\nuser: And now?\nassistant: "
    assert (first.task, first.expected, second.task, second.expected) == ("text", None, "number", "2")
    with pytest.raises(BenchError, match="A conversation needs a chat template"):
        rendered([item], raw=True, answer=answer)


def test_two_prompts_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their numbers would mix."""
    rows = [{"prompt": "a", "name": "x"}, {"prompt": "b", "name": "x"}]
    with pytest.raises(BenchError, match="Two prompts are called 'x'"):
        rendered(read_set(str(write(tmp_path / "rows.jsonl", rows))))
