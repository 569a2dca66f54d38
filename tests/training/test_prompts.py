"""The built-in prompts: many, mixed, and with whole topics held out; and prompts of users."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from dflash_mlx.training.prompts import Prompt, demo, fingerprint, holds_out, tables
from dflash_mlx.training.prompts.code import base_form
from dflash_mlx.training.prompts.sources import PromptsError, read_prompts

ROOT = Path(__file__).parent.parent.parent


@lru_cache(maxsize=1)
def built_in() -> list[Prompt]:
    return read_prompts("demo")


def test_no_topic_is_both_trained_on_and_held_out() -> None:
    """Acceptance on held-out prompts would be measured on what was learned."""
    held = {prompt.topic for prompt in built_in() if prompt.held_out and holds_out(prompt.topic)}
    trained = {prompt.topic for prompt in built_in() if not prompt.held_out}
    assert held and not held & trained
    assert {topic.split(":")[0] for topic in held} == set(demo.SHARES)


def test_a_text_about_two_topics_is_held_out_if_one_is() -> None:
    """A comparison with a held-out topic would teach that topic."""
    held = [topic for topic in tables.entries("topics") if holds_out(f"explain: {topic}")]
    assert held
    trained = [prompt.text for prompt in built_in() if prompt.category == "explain" and not prompt.held_out]
    for topic in held:
        ending = re.compile(rf"(Compare|and|do) {re.escape(topic)}( and|\.| have)")
        assert not [text for text in trained if ending.search(text)], topic


def test_what_the_benchmark_and_the_readme_ask_is_never_trained_on() -> None:
    """Nor anything that has more than three quarters of its content words."""
    asked = [json.loads(line)["prompt"] for line in (ROOT / "bench/prompts/demo.jsonl").read_text().splitlines()]
    readme = (ROOT / "README.md").read_text()
    asked += re.findall(r'--prompt "([^"]+)"', readme) + re.findall(r'"content": "([^"]+)"', readme)
    assert len(asked) >= 26
    trained = [(content(prompt.text), prompt.text) for prompt in built_in() if not prompt.held_out]
    for prompt in asked:
        subject = content(prompt)
        assert subject, prompt
        near = [text for words, text in trained if len(subject & words) > 0.75 * len(subject)]
        assert not near, (prompt, near[0])


PHRASING = frozenset(
    re.findall(
        r"\w+",
        "a an the of in to and or it its is are with for from that this which be by on at as how do does can you i my "
        "me we one two please write function python code explain give make create show was step when what why tell "
        "short about example program implement simple need would could using return returns s",
    )
)


def content(text: str) -> set[str]:
    """Stems of the words that are not phrasing."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {re.sub(r"(es|s|ed|ing)$", "", word) for word in words if word not in PHRASING}


def test_any_beginning_has_the_mixture_of_the_whole() -> None:
    """Generation may be stopped anywhere."""
    whole = Counter(prompt.category for prompt in built_in())
    beginning = Counter(prompt.category for prompt in built_in()[:2000])
    assert whole.keys() == demo.SHARES.keys()
    for category, count in whole.items():
        assert beginning[category] / 2000 == pytest.approx(count / len(built_in()), abs=0.03), category
    assert 0.38 < whole["code"] / len(built_in()) < 0.48


def test_the_prompts_are_many_and_distinct() -> None:
    """More distinct tasks help more than more answers to the same ones."""
    assert len({prompt.text for prompt in built_in()}) == len(built_in()) > 20000
    topics = Counter(prompt.topic.split(":")[0] for prompt in {prompt.topic: prompt for prompt in built_in()}.values())
    assert topics["code"] >= 600 and topics["explain"] >= 600
    assert sum(topics.values()) > 2000
    python = [prompt for prompt in built_in() if prompt.category == "code" and "Python" in prompt.text]
    assert len(python) > 6000


def test_the_prompts_are_the_same_in_every_process() -> None:
    """A data set is continued only with the prompts that it was begun with."""
    assert fingerprint(demo.prompts(300, 4)) == fingerprint(demo.prompts(300, 4)) != fingerprint(demo.prompts(300, 5))


def test_prompts_have_no_holes_and_no_wrong_articles() -> None:
    """A brace that nothing fills, or "a engineer", would be in hundreds of them."""
    for prompt in built_in():
        assert prompt.text.strip() == prompt.text and "None" not in prompt.text.split()
        assert not re.search(r"\{\w+\}", prompt.text), prompt.text
        assert not re.search(r"\b[Aa] (?!one|eu|in\b|or\b|is\b|and\b)[aeio]", prompt.text), prompt.text


@pytest.mark.parametrize(
    ("task", "base"),
    [
        ("reverses a list", "reverse a list"),
        ("searches a list", "search a list"),
        ("copies a file", "copy a file"),
        ("compresses a list", "compress a list"),
        ("truncates a text and adds an ellipsis", "truncate a text and add an ellipsis"),
        ("converts seconds to hours, minutes and seconds", "convert seconds to hours, minutes and seconds"),
    ],
)
def test_a_task_is_turned_into_a_request(task: str, base: str) -> None:
    assert base_form(task) == base


ROWS = [
    ({"prompt": "one"}, "one"),
    ({"instruction": "add", "input": "1 and 2"}, "add\n\n1 and 2"),
    ({"instruction": "sing", "input": ""}, "sing"),
    ({"question": "why?"}, "why?"),
    ({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]}, "hello"),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, "hi"),
    ({"prompt": [{"role": "user", "content": "listed"}]}, "listed"),
]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.json", "prompts.jsonl.gz"])
def test_prompts_are_read_in_the_common_spellings(tmp_path: Path, name: str) -> None:
    """Answers in the file are left: the target gives its own. Rows without a question are left out."""
    rows = [row for row, _ in ROWS] + [{"answer": "no question"}, {"messages": [{"role": "assistant", "content": "x"}]}]
    text = json.dumps(rows) if name.endswith(".json") else "\n".join(json.dumps(row) for row in rows)
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = read_prompts(str(tmp_path / name))
    assert sorted(prompt.text for prompt in found) == sorted(text for _, text in ROWS)
    assert [prompt.system for prompt in found if prompt.text == "hello"] == ["be brief"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "x", "id": 3}, "has only answer, id"),
        ({}, "is empty"),
        ({"prompt": None, "answer": "x"}, "has no text in `prompt`"),
        ({"question": "  "}, "has no text in `question`"),
        (7, "is neither an object nor a text"),
        (" ", "asks nothing: its question is blank"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "has a conversation without a message of the user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message of user whose content is no text",
        ),
        ({"messages": ["hello"]}, "has a message that is no object"),
        ({"messages": [{"role": "user", "content": " "}]}, "asks nothing: its question is blank"),
    ],
)
def test_skipped_rows_are_counted_and_the_first_is_named(tmp_path: Path, row: object, reason: str) -> None:
    """Half a file in a spelling that is not known would be missing in the answers, and nobody would know. The number is
    that of the line, blank ones counted."""
    rows = [{"prompt": "one"}, row, {"prompt": "two"}, {"remark": "later"}]
    (tmp_path / "p.jsonl").write_text("\n\n".join(json.dumps(each) for each in rows))
    said: list[str] = []
    assert sorted(prompt.text for prompt in read_prompts(str(tmp_path / "p.jsonl"), tell=said.append)) == ["one", "two"]
    (line,) = said
    assert line.startswith("note: 2 of 4 rows of p.jsonl were skipped; the first, line 3, ") and line.endswith(reason)


def test_nothing_is_said_of_a_file_whose_rows_are_all_read(tmp_path: Path) -> None:
    """Repeated ones and blank lines are no loss."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": "one"}\n{"prompt": "two"}\n\n')
    said: list[str] = []
    assert len(read_prompts(str(tmp_path / "p.jsonl"), tell=said.append)) == 2 and not said


def test_a_file_without_any_prompt_says_what_is_wrong_with_its_first_row(tmp_path: Path) -> None:
    """And not only what rows need: the user sees which spelling was not known."""
    (tmp_path / "p.jsonl").write_text('\n{"ask": "one"}\n{"ask": "two"}\n')
    with pytest.raises(
        PromptsError, match=r"2 of 2 rows of p\.jsonl were skipped; the first, line 2, has only ask\. Rows"
    ):
        read_prompts(str(tmp_path / "p.jsonl"))
    (tmp_path / "p.json").write_text('[{"ask": "one"}]')
    with pytest.raises(PromptsError, match=r"1 of 1 row of p\.json was skipped; the first, row 1, has only ask"):
        read_prompts(str(tmp_path / "p.json"))


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    """Repeated ones count once; `count` takes some; the order is the seed's."""
    (tmp_path / "p.txt").write_text("".join(f"ask {n % 200}\n\n" for n in range(300)))
    found = read_prompts(str(tmp_path / "p.txt"))
    assert len(found) == 200 and len(read_prompts(str(tmp_path / "p.txt"), 7)) == 7
    assert read_prompts(str(tmp_path / "p.txt"), seed=1) != found
    assert 0 < sum(prompt.held_out for prompt in found) < 30


def test_text_in_any_script_is_one_prompt_and_no_text_is_none(tmp_path: Path) -> None:
    """A line separator within a string, as JSON allows, and a byte order mark; a blank question is not asked."""
    texts = ["one\u2028two \u00e9\U0001f600", "\u65e5\u672c\x85"]
    rows = [{"prompt": text} for text in texts] + [{"messages": [{"role": "user", "content": " "}]}]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (tmp_path / "p.jsonl").write_text(content, encoding="utf-8-sig", newline="")
    assert {prompt.text for prompt in read_prompts(str(tmp_path / "p.jsonl"))} == {text.strip() for text in texts}
    (tmp_path / "p.txt").write_text("\n".join(texts), encoding="utf-8-sig")
    assert {prompt.text for prompt in read_prompts(str(tmp_path / "p.txt"))} == {text.strip() for text in texts}


def test_topics_of_a_file_decide_together(tmp_path: Path) -> None:
    """Prompts on one topic are all held out or none."""
    rows = [{"prompt": f"{n}", "topic": f"topic {n % 60}", "category": "law"} for n in range(600)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = read_prompts(str(tmp_path / "p.jsonl"))
    held, trained = ({p.topic for p in found if p.held_out is value} for value in (True, False))
    assert held and trained and not held & trained and {prompt.category for prompt in found} == {"law"}


def test_prompts_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "empty.jsonl").write_text('{"answer": 1}\n')
    with pytest.raises(PromptsError, match="cannot be read"):
        read_prompts(str(tmp_path / "bad.jsonl"))
    with pytest.raises(PromptsError, match="no prompts"):
        read_prompts(str(tmp_path / "empty.jsonl"))
    with pytest.raises(PromptsError, match="no file with prompts"):
        read_prompts(str(tmp_path / "missing.jsonl"))
    (tmp_path / "late.jsonl").write_text('{"prompt": "fine"}\n\n{"prompt": \n')
    with pytest.raises(PromptsError, match="line 3 is no JSON"):
        read_prompts(str(tmp_path / "late.jsonl"))
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(PromptsError, match="Write one prompt a line"):
        read_prompts(str(tmp_path / "blank.txt"))
    (tmp_path / "old.txt").write_bytes(b"one\ncaf\xe9\n")
    with pytest.raises(PromptsError, match="not UTF-8: line 2 has the byte 0xe9"):
        read_prompts(str(tmp_path / "old.txt"))
    (tmp_path / "table.csv").write_text("prompt,topic\nwhy,what\n")
    with pytest.raises(PromptsError, match="none of the files that are read here"):
        read_prompts(str(tmp_path / "table.csv"))
    with pytest.raises(ValueError, match="`count`"):
        read_prompts("demo", 0)


def test_a_data_set_of_the_hub_is_read_from_its_training_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through huggingface_hub alone; the test split stays unread."""
    asked = []

    def get(name: str, file: str, repo_type: str) -> str:
        asked.append((name, file, repo_type))
        (tmp_path / "train.jsonl").write_text('{"prompt": "from the hub"}\n')
        return str(tmp_path / "train.jsonl")

    files = ["README.md", "data/test.jsonl", "data/train.jsonl"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, repo_type: files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", get)
    assert [prompt.text for prompt in read_prompts("org/data")] == ["from the hub"]
    assert asked == [("org/data", "data/train.jsonl", "dataset")]
