"""Reasoning, answer and tool calls over any borders: the reader sees each in its place, and nothing is lost."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import TextStateMachine, make_text_state_machine

from dflash_mlx.segments import Markers, Segment, Segments, opens_reasoning, read_tool_call
from tests.conftest import byte_tokenizer
from tests.generating import PROMPT, paying, scripted, speak, stream, text_ids
from tests.thinking import MARKERS, SPECIAL, TEMPLATE, thinking_tokenizer

__all__ = ["paying", "scripted"]  # fixtures

QWEN = Markers("<think>", "</think>", "<tool_call>", "</tool_call>")
PLAIN = Markers()


def reasoning(text: str) -> Segment:
    return Segment("reasoning", text)


def answer(text: str) -> Segment:
    return Segment("answer", text)


def call(text: str, start: str = "<tool_call>", end: str = "</tool_call>") -> tuple[Segment, ...]:
    return Segment("marker", start), Segment("tool_call", text), Segment("marker", end)


BEGIN, END = Segment("marker", "<think>"), Segment("marker", "</think>")


class Transcript:
    """What a model writes, as the segments the reader is to see.

    as_mlx_lm: mlx_lm's server files it in the same way.
    """

    def __init__(
        self, *parts: Segment, opened: bool = False, markers: Markers = QWEN, unfinished="", as_mlx_lm=True
    ) -> None:
        self.parts, self.opened, self.markers, self.as_mlx_lm = parts, opened, markers, as_mlx_lm
        self.unfinished = unfinished or None
        self.text = "".join(part.text for part in parts)


JSON = '\n{"name": "now"}\n'
TRANSCRIPTS = {
    "a model that cannot think": Transcript(answer("<think> is Dobrý </think> <tool_call>"), markers=PLAIN),
    "no thinking": Transcript(answer("Řeka < most\n\n<b>")),
    "opened in the output": Transcript(BEGIN, reasoning("\nDva a dva?\n"), END, answer("\n\nJsou 4.")),
    "opened after a newline": Transcript(answer("\n"), BEGIN, reasoning("Hm."), END, answer("4")),
    "opened in the prompt": Transcript(reasoning("Dva <b> 🦊 </thin\n"), END, answer("\n\n4."), opened=True),
    "unclosed": Transcript(BEGIN, reasoning("\nBez konce 思考 </thi"), unfinished="reasoning"),
    "unclosed, opened in the prompt": Transcript(reasoning("Bez <"), opened=True, unfinished="reasoning"),
    "closed at the very end": Transcript(reasoning("Just thought.\n"), END, opened=True),
    "closed at once": Transcript(END, answer("Yes."), opened=True),
    "a tool call": Transcript(*call(JSON)),
    "several tool calls": Transcript(
        answer("First.\n"), *call(JSON), answer("\n"), *call("2"), *call(""), answer(" Done.")
    ),
    "an unfinished tool call": Transcript(answer("Look: "), *call('\n{"name": "no</tool_')[:2], unfinished="tool_call"),
    "think, then tool, then answer": Transcript(
        BEGIN, reasoning("Call it."), END, answer("\n\n"), *call(JSON), answer("\nIt is 5.")
    ),
    "reasoning again after a tool call": Transcript(
        reasoning("A"), END, *call("1"), answer("\n"), BEGIN, reasoning("B"), END, answer("C"), opened=True
    ),
    "a call that ends the reasoning": Transcript(reasoning("I call."), *call("1"), answer("Done."), opened=True),
    "the answer is about the marker": Transcript(
        reasoning("Hm."), END, answer("A <think> opens, </think> closes: <think>"), opened=True, as_mlx_lm=False
    ),
    "an answer without reasoning is about the marker": Transcript(answer("The <think> tag."), as_mlx_lm=False),
    "the reasoning is about the call": Transcript(
        reasoning("Use <tool_call> here?"), END, answer("No."), opened=True, as_mlx_lm=False
    ),
    "cut while the reasoning is about the call": Transcript(
        reasoning("Use <tool_call> he"), opened=True, unfinished="reasoning", as_mlx_lm=False
    ),
    "markers of several tokens": Transcript(
        Segment("marker", "<|channel>thought"),
        reasoning("\nA"),
        Segment("marker", "<channel|>"),
        answer("B"),
        *call("1", "<|tool_call>", "<tool_call|>"),
        markers=Markers("<|channel>thought", "<channel|>", "<|tool_call>", "<tool_call|>"),
    ),
    "calls without an end marker": Transcript(
        *call('a[ARGS]{"x": 1}', "[TOOL_CALLS]")[:2], markers=Markers(call_start="[TOOL_CALLS]", call_end="")
    ),
    "hidden markers": Transcript(
        Segment("marker", "<r>"), answer("Hi"), Segment("marker", "</r>"), markers=Markers(hidden=("<r>", "</r>"))
    ),
}
each = pytest.mark.parametrize("transcript", [pytest.param(t, id=name) for name, t in TRANSCRIPTS.items()])


def split(pieces: list[str], segments: Segments) -> list[Segment]:
    """Pieces of reasoning and answer put together; each call and marker for itself."""
    found = [segment for piece in pieces for segment in segments.feed(piece)] + segments.finish()
    assert segments.finish() == []
    together = itertools.groupby(found, key=lambda s: (s.kind, id(s) if s.kind in ("tool_call", "marker") else 0))
    return [Segment(kind, "".join(s.text for s in group)) for (kind, _), group in together]


def check(transcript: Transcript, pieces: list[str], segments: Segments | None = None) -> None:
    segments = segments or Segments(transcript.markers, opened=transcript.opened)
    assert split(pieces, segments) == list(transcript.parts)
    assert segments.unfinished == transcript.unfinished


def cuts(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@each
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_files_the_text_in_the_same_way(transcript: Transcript, data: st.DataObject) -> None:
    """Wherever the pieces end, also in the middle of a marker."""
    borders = data.draw(st.lists(st.integers(0, len(transcript.text)), max_size=12).map(sorted))
    edges = [0, *borders, len(transcript.text)]
    check(transcript, [transcript.text[a:b] for a, b in itertools.pairwise(edges)])


@each
def test_pieces_of_every_length_file_the_text_in_the_same_way(transcript: Transcript) -> None:
    for size in range(1, len(transcript.text) + 1):
        check(transcript, cuts(transcript.text, size))


FRAGMENTS = st.sampled_from([*MARKERS, "<", "<th", "</", "</think", "<tool_", "a", " ", "\n", ">", "{}", "é"])


@settings(max_examples=400, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map("".join), st.booleans(), st.integers(1, 9))
def test_text_of_any_shape_is_filed_by_what_it_is_and_not_by_its_cuts(text: str, opened: bool, size: int) -> None:
    """Nested, doubled, broken and stray markers: nothing lost, and the blocks do not show."""

    def parts(pieces: list[str]) -> tuple[list[Segment], str | None]:
        segments = Segments(QWEN, opened=opened)
        return split(pieces, segments), segments.unfinished

    assert "".join(segment.text for segment in parts([text])[0]) == text, "nothing is lost"
    assert parts(cuts(text, size)) == parts([text])


@each
def test_it_is_filed_as_mlx_lms_server_files_it(transcript: Transcript) -> None:
    """Whitespace and all, except where a marker is ordinary text, which mlx_lm takes for a marker."""
    machine = make_text_state_machine(_Tokenizer(transcript.markers))
    state = machine.make_state("reasoning" if transcript.opened else "normal")
    state, parts = TextStateMachine.split(state, transcript.text)
    state, rest, last = TextStateMachine.flush(state)
    parts.append((last, rest))
    for theirs, ours in (("reasoning", "reasoning"), ("normal", "answer"), ("tool", "tool_call")):
        text = "".join(part.text for part in transcript.parts if part.kind == ours)
        if "".join(text for state, text in parts if state == theirs) != text:
            assert not transcript.as_mlx_lm
            return
    assert transcript.as_mlx_lm


class _Tokenizer:
    """Markers as TokenizerWrapper has them."""

    def __init__(self, markers: Markers) -> None:
        self.has_thinking = markers.think_start is not None
        self.think_start, self.think_end = markers.think_start, markers.think_end
        self.has_tool_calling = markers.call_start is not None
        self.tool_call_start, self.tool_call_end = markers.call_start, markers.call_end
        self.structural_markers, self.response_transitions = markers.hidden, {}


def test_only_what_may_become_a_marker_is_held_back() -> None:
    """A reader waits for a tool call, and for no more of the rest than a marker's length."""
    segments = Segments(QWEN)
    assert segments.feed("<think>so ") == [Segment("marker", "<think>"), Segment("reasoning", "so ")]
    assert segments.feed("it is </th") == [Segment("reasoning", "it is ")]
    assert segments.feed("e") == [Segment("reasoning", "</the")]
    assert segments.feed("</think>A<") == [Segment("marker", "</think>"), Segment("answer", "A")]
    assert segments.feed("tool_call>{") == []
    assert segments.unfinished == "tool_call"
    assert segments.feed("}</tool_call>") == list(call("{}"))
    assert segments.unfinished is None


# With the real generator. ------------------------------------------------------------------------------------------

SPOKEN = [
    "a model that cannot think",
    "opened in the output",
    "opened in the prompt",
    "unclosed",
    "closed at the very end",
    "several tool calls",
    "think, then tool, then answer",
    "the answer is about the marker",
]


@pytest.mark.parametrize("as_tokens", [True, False], ids=["markers-as-tokens", "markers-as-bytes"])
@pytest.mark.parametrize("name", SPOKEN)
def test_blocks_of_every_size_file_the_answer_in_the_same_way(
    name: str, as_tokens: bool, scripted, monkeypatch
) -> None:
    """Fed with every response, or with the text of a whole block, at blocks of 1 to 16."""
    transcript = TRANSCRIPTS[name]
    tokenizer = byte_tokenizer() if transcript.markers == PLAIN else thinking_tokenizer()
    ids = text_ids(tokenizer if as_tokens else byte_tokenizer(), transcript.text, 0)
    opening = [*text_ids(tokenizer, SPECIAL[0], 0), *text_ids(tokenizer, "<think>\n" if transcript.opened else "x", 0)]
    prompt = [*PROMPT, *opening]
    speak(monkeypatch, scripted, ids, len(prompt), "wide")
    for block in range(1, 17):
        mode = "dflash" if block > 1 else "plain"
        responses = list(stream("llama", tokenizer, prompt, max_tokens=len(ids), block_size=block, mode=mode))
        blocks = ["".join(r.text for r in group) for _, group in itertools.groupby(responses, lambda r: r.cycle)]
        assert block == 1 or len(blocks) < len(responses)
        for pieces in ([r.text for r in responses], blocks):
            check(transcript, pieces, Segments.for_prompt(tokenizer, prompt))


# What the prompt says. ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nA beginning of", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nWhat is </think>?<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("", False),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(prompt: str, opened: bool) -> None:
    """The opening marker is often in the prompt, so never in the output; a user's question about it opens nothing."""
    tokenizer = thinking_tokenizer()
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert opens_reasoning(tokenizer, ids) == opened
    assert Segments.for_prompt(tokenizer, ids).unfinished == ("reasoning" if opened else None)


def test_a_model_that_cannot_think_or_call_gets_one_answer() -> None:
    tokenizer = byte_tokenizer()
    segments = Segments.for_prompt(tokenizer, PROMPT)
    text = "<think>a</think><tool_call>b</tool_call>"
    assert split([text], segments) == [Segment("answer", text)]


# Tool calls. -------------------------------------------------------------------------------------------------------


ZONE = '\n{"name": "now", "arguments": {"zone": "Europe/Praha"}}\n'


def test_a_tool_call_is_read_by_mlx_lms_parser() -> None:
    tokenizer = thinking_tokenizer()
    read = read_tool_call(tokenizer, ZONE)
    assert read.error is None and read.text == ZONE
    assert read.calls == [{"name": "now", "arguments": {"zone": "Europe/Praha"}}]
    assert read_tool_call(tokenizer, '{"name": "now"}').calls == [{"name": "now", "arguments": {}}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "now", "argum', r"could not be read \(JSONDecodeError"),
        ("", "could not be read"),
        ("[1, 2]", "does not name a function"),
        ("[]", "does not name a function"),
        ("7", "does not name a function"),
        ('{"name": 7}', "does not name a function"),
        ("[" * 100_000, r"could not be read \(RecursionError"),
    ],
)
def test_a_broken_tool_call_is_kept_as_text_and_says_why(text: str, message: str) -> None:
    """The text is the model's: it must not raise through the stream."""
    read = read_tool_call(thinking_tokenizer(), text)
    assert read.text == text and read.calls == [] and re.search(message, read.error or "")


def test_without_a_parser_the_call_says_so() -> None:
    assert "knows no tool-call format" in (read_tool_call(byte_tokenizer(), "x").error or "")


PARSERS = {
    "pythonic": ("<|tool_call_start|>", '[now(zone="Praha")]'),
    "mistral": ("[TOOL_CALLS]", 'now[ARGS]{"zone": "Praha"}'),
    "qwen3_coder": (
        "<tool_call>\n<function=",
        "\n<function=now>\n<parameter=zone>\nPraha\n</parameter>\n</function>\n",
    ),
}


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=50, deadline=None)
@given(text=st.text('[]{}()<>=/"\\,:function_parameterARGS01 \n', max_size=40))
def test_other_formats_are_read_too_and_no_text_breaks_them(name: str, text: str) -> None:
    sign, good = PARSERS[name]
    tokenizer = thinking_tokenizer(MARKERS, TEMPLATE.split("{#")[0] + "{# " + sign + " #}")
    read = read_tool_call(tokenizer, good)
    assert [(c["name"], c["arguments"]) for c in read.calls] == [("now", {"zone": "Praha"})], read.error
    broken = read_tool_call(tokenizer, text)
    assert broken.text == text and (broken.error is None) == bool(broken.calls)
