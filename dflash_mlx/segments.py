"""The parts of an answer: reasoning, answer, tool calls. Text goes in as it is decoded, cut anywhere.

The markers are the tokenizer's (mlx_lm knows them), matched on text, so that one may span tokens and blocks. Nothing is
lost: the texts of all segments, markers among them, are the text that was fed; whitespace behind a marker stays, as in
mlx_lm's server. Where the same characters could also be ordinary text:

- Reasoning is open from the start if the prompt opened it. Else it opens only as the first thing of the answer, or
  after a tool call; later `<think>` is text, so an answer about the marker is not swallowed.
- A tool call comes out whole, when its end marker has come. In the middle of reasoning it ends the reasoning, as in
  mlx_lm; but if the reasoning closes first, or the text ends, the call's marker was only mentioned and stays reasoning.
- Unclosed at the end: reasoning stays reasoning, a call stays a call, and `unfinished` names it.

mlx_lm's own machine (`TextStateMachine`) lets reasoning open anywhere in the answer. Formats for which mlx_lm knows no
markers, such as gpt-oss' channels, are one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dflash_mlx.stops import StopStrings

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Kind = Literal["reasoning", "answer", "tool_call", "marker"]
_State = Literal["start", "reasoning", "answer", "call", "call in reasoning"]


@dataclass(frozen=True)
class Segment:
    """Text of one kind. Reasoning and answer come in pieces, a tool call in one; a marker is not for the reader."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Markers:
    """What a model writes around reasoning and tool calls; None or "" where it has no such marker.

    hidden: markers without a meaning here, around the answer say.
    """

    think_start: str | None = None
    think_end: str | None = None
    call_start: str | None = None
    call_end: str | None = None
    hidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> Markers:
        return cls(
            tokenizer.think_start,
            tokenizer.think_end,
            tokenizer.tool_call_start,
            tokenizer.tool_call_end,
            tuple(tokenizer.structural_markers),
        )

    def seen_in(self, state: _State) -> list[str]:
        """The markers that mean something in this state."""
        found: dict[_State, tuple[str | None, ...]] = {
            "start": (self.think_start, self.call_start, *self.hidden),
            "reasoning": (self.think_end, self.call_start),
            "answer": (self.call_start, *self.hidden),
            "call": (self.call_end,),
            "call in reasoning": (self.call_end, self.think_end),
        }
        return [marker for marker in found[state] if marker]


class Segments:
    """Feed text as it is decoded; get back segments, in order. Of plain strings: it may cross threads.

        segments = Segments.for_prompt(tokenizer, prompt_ids)
        for response in stream_generate(model, tokenizer, prompt_ids, ...):
            show(segments.feed(response.text))
        show(segments.finish())

    Args:
        opened: the prompt opened a reasoning block, so its marker will not be in the text.
    """

    def __init__(self, markers: Markers, *, opened: bool = False) -> None:
        if not isinstance(markers, Markers):
            raise ValueError(
                f"`markers` has to be Markers, got {type(markers).__name__}. Take Segments.for_prompt(tokenizer, "
                "prompt_ids)."
            )
        self._markers = markers
        self._call = ""  # its marker and what came of it so far
        self._enter("reasoning" if opened else "start")

    @classmethod
    def for_prompt(cls, tokenizer: TokenizerWrapper, prompt_ids: Sequence[int]) -> Segments:
        """For the answer to this prompt: all of its ids, also what a cache holds already."""
        if isinstance(prompt_ids, str):
            prompt_ids = tokenizer.encode(prompt_ids, add_special_tokens=False)
        return cls(Markers.of(tokenizer), opened=opens_reasoning(tokenizer, prompt_ids))

    @property
    def unfinished(self) -> Literal["reasoning", "tool_call"] | None:
        """What is open: after the last text, what was cut off. A format without an end marker leaves nothing open."""
        if self._state in ("reasoning", "call in reasoning"):
            return "reasoning"
        return "tool_call" if self._state == "call" and self._markers.call_end else None

    def feed(self, text: str) -> list[Segment]:
        """What is certain by now; the tail that may become a marker is held back, and so is a call."""
        found: list[Segment] = []
        while text:
            shown = self._scanner.feed(text)
            marker, text = self._scanner.matched, self._scanner.rest
            if self._state == "start" and shown.strip():
                text = shown + (marker or self._scanner.flush()) + text
                self._enter("answer")
                continue
            self._put(found, shown)
            if marker is not None:
                self._cross(found, marker)
        return found

    def finish(self) -> list[Segment]:
        """What was held back, at the end of the answer."""
        found: list[Segment] = []
        self._put(found, self._scanner.flush())
        call, self._call = self._call, ""
        if call and self._state == "call":
            found += self._called(call)
        elif call:
            found.append(Segment("reasoning", call))
        return found

    def _enter(self, state: _State) -> None:
        self._state: _State = state
        self._scanner = StopStrings(self._markers.seen_in(state))

    def _put(self, found: list[Segment], text: str) -> None:
        if self._call:
            self._call += text
        elif text:
            found.append(Segment("reasoning" if self._state == "reasoning" else "answer", text))

    def _cross(self, found: list[Segment], marker: str) -> None:
        """Past `marker`, which ended the text of the current state."""
        markers = self._markers
        if not self._call and marker == markers.call_start:
            self._call = marker
            self._enter("call in reasoning" if self._state == "reasoning" else "call")
            return
        if self._call:
            done = marker == markers.call_end
            found += self._called(self._call) if done else [Segment("reasoning", self._call)]
            self._call = ""
            self._enter("start" if done else "answer")
        elif marker == markers.think_start:
            self._enter("reasoning")
        elif marker == markers.think_end:
            self._enter("answer")
        else:
            self._enter(self._state)
        found.append(Segment("marker", marker))

    def _called(self, call: str) -> list[Segment]:
        start = self._markers.call_start or ""
        return [Segment("marker", start), Segment("tool_call", call.removeprefix(start))]


def opens_reasoning(tokenizer: TokenizerWrapper, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside a reasoning block.

    As in mlx_lm's server, the last opening marker stands behind the last closing one; and no special token follows it,
    which tells the template's own marker (or a begun answer) from one that a user wrote about.
    """
    if not tokenizer.has_thinking:
        return False
    ids = list(prompt_ids)
    start = tokenizer.rfind_think_start(ids)
    if start < 0 or start < tokenizer.rfind_think_end(ids):
        return False
    ends = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special} | tokenizer.eos_token_ids
    return ends.isdisjoint(ids[start + len(tokenizer.think_start_tokens) :])


@dataclass(frozen=True)
class ToolCall:
    """What a tool-call segment asks for.

    text:  as the model wrote it.
    calls: each {"name": str, "arguments": ...}; some formats put several between one pair of markers.
    error: why nothing could be read from it, for the user or for the model to try again; else None.
    """

    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def read_tool_call(tokenizer: TokenizerWrapper, text: str, tools: list[dict[str, Any]] | None = None) -> ToolCall:
    """Read a tool-call segment with mlx_lm's parser for this model. Never raises: the text is the model's.

    Args:
        text: of a segment of kind "tool_call".
        tools: as given to the chat template; some parsers take the arguments' types from them.
    """
    parse: Callable[..., Any] | None = tokenizer.tool_parser
    if parse is None:
        return ToolCall(text, error="mlx_lm knows no tool-call format for this model's chat template.")
    try:
        parsed = parse(text, tools)
    except Exception as error:  # third-party parsers on text of any shape: KeyError, SyntaxError, RecursionError, ...
        return ToolCall(text, error=f"The tool call could not be read ({type(error).__name__}: {error}).")
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return ToolCall(text, error="The tool call does not name a function.")
    return ToolCall(text, [{"arguments": {}, **call} for call in calls])
