"""An exported chat is a file that every Markdown reader shows as the chat was, and that overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dflash_mlx.app.conversation import Conversation
from dflash_mlx.app.export import default_name, to_markdown, write_markdown
from dflash_mlx.app.messages import Part
from dflash_mlx.app.store import StoreError

CODE = "Look:\n\n```python\ndef f():\n\treturn '</details>'\n```\n\nDone."
PIECES = ["text", "```", "````python", "~~~", "> quote", "- item", "  ", "    code", "<details>", "<!-- note", "-->",
          "<pre>", "<script>", "<?php", "<![CDATA[", "<!X", "\t", "", "1. one\n   ```", "[link]: x", "---", "|a|b|",
          "<div>", "**bold", "</details>", "\r", "<style>", "<textarea>"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("\n".join)


def talk_of(*turns: tuple[str, str, str]) -> Conversation:
    """Turns of (question, reasoning, answer)."""
    talk = Conversation()
    for number, (question, reasoning, answer) in enumerate(turns, 1):
        talk.ask(question, number)
        talk.append(number, [Part("marker", "target", "<think>"), Part("reasoning", "draft", reasoning)])
        talk.append(number, [Part("answer", "draft", answer[:3]), Part("answer", "target", answer[3:])])
        talk.finish(number, "stop")
    return talk


def test_an_export_says_what_was_asked_answered_and_by_whom() -> None:
    talk = talk_of(("Sort *this*\nplease", "hm, a list", CODE))
    talk.ask("And now?", 2)
    talk.finish(2, "cancelled")
    assert to_markdown(talk, "Sort *this*", "org/some_model", "Be brief.\nBe kind.") == "\n\n".join(
        [
            "# Sort \\*this\\*",
            "- Model: org/some\\_model\n- Turns: 2",
            "**System prompt**",
            "> Be brief.\n> Be kind.",
            "## Question",
            "> Sort *this*\n> please",
            "## Answer",
            "<details>\n<summary>Reasoning</summary>",
            "> hm, a list",
            "</details>",
            CODE,
            "## Question",
            "> And now?",
            "## Answer",
            "*(stopped)*\n",
        ]
    )


def shape(markdown: str) -> list[str]:
    """The headings that the export itself makes, as a reader sees them."""
    tokens = MarkdownIt("commonmark").parse(markdown)
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    folds = [token.content.strip() for token in tokens if token.type == "html_block" and token.level == 0]
    return [text for text in headings if text in ("Question", "Answer")] + [text for text in folds if "summary" in text]


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=3))
@settings(deadline=None, max_examples=200)
def test_whatever_a_text_leaves_open_ends_with_it(turns: list[tuple[str, str, str]]) -> None:
    """An answer that was cut inside a code block would turn the rest of the conversation into code."""
    thought = sum(1 for _, reasoning, _ in turns if reasoning.strip())
    wanted = ["Question", "Answer"] * len(turns) + ["<details>\n<summary>Reasoning</summary>"] * thought
    assert shape(to_markdown(talk_of(*turns), "title", "model")) == wanted


def test_a_bare_carriage_return_does_not_end_a_quote() -> None:
    """It is a line end for Markdown, so the rest of a question would stand there as if the model had said it."""
    exported = to_markdown(talk_of(("one\rtwo\r\n# Answer", "hm\r# Answer", "yes")), "t", "m")
    assert "> one\n> two\n> # Answer\n" in exported and "> hm\n> # Answer\n" in exported


@given(TEXTS)
@settings(deadline=None)
def test_code_in_an_answer_survives_letter_by_letter(answer: str) -> None:
    parse = MarkdownIt("commonmark").parse
    alone = [token.content for token in parse(answer.strip("\n")) if token.type == "fence"]
    exported = to_markdown(talk_of(("q", "", answer)), "t", "m")
    found = [token.content for token in parse(exported) if token.type == "fence"]
    assert [text.strip() for text in found] == [text.strip() for text in alone]
    if answer.strip():
        assert answer.strip("\n") in exported


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("How do I sort?", "How-do-I-sort.md"),
        ("../../etc/passwd", "etc-passwd.md"),
        (".hidden", "hidden.md"),
        ("řeč a 語", "řeč-a-語.md"),
        ("x" * 200, "x" * 60 + ".md"),
        ("…", "chat.md"),
    ],
)
def test_the_proposed_name_is_a_file_name_everywhere(title: str, name: str) -> None:
    assert default_name(title) == name


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chat.md"
    write_markdown(path, "first \ud800\n")
    assert path.read_text() == "first ?\n"
    with pytest.raises(StoreError, match="exists already, and nothing is overwritten"):
        write_markdown(path, "second\n")
    with pytest.raises(StoreError, match="cannot be written"):
        write_markdown(tmp_path / "no folder" / "chat.md", "third\n")
    assert path.read_text() == "first ?\n" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "chat.md", Path.write_text

    def late(self: Path, *args: str, **options: str) -> int:
        write(path, "from another window")
        return write(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", late)
    with pytest.raises(StoreError, match="exists already"):
        write_markdown(path, "mine")
    assert path.read_text() == "from another window" and list(tmp_path.iterdir()) == [path]
