"""One message of the transcript: the user's, the model's, or the chat's own notice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_mlx.app.messages import Kind, Part
from dflash_mlx.app.text import visible
from dflash_mlx.app.widgets.answer_markdown import AnswerMarkdown
from dflash_mlx.app.widgets.origin_text import OriginText
from dflash_mlx.app.widgets.pen import Pen
from dflash_mlx.app.widgets.thinking import Thinking

if TYPE_CHECKING:
    from dflash_mlx.app.conversation import Turn

UNDECIDED = re.compile(r"[ ]*(\d{0,9}[.)]?|[-+*_`~|>#=:]*)[ ]*")
"""Beginnings of lines that are held back. `9` would be a paragraph and end the list that `9. x` goes on with."""
CUT_OFF = "cut off: the chat ended while this was written"


class UserTurn(Static):
    """What the user said, letter by letter."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(visible(text)), markup=False)


class Prose(Vertical):
    """A stretch of the answer, as Markdown or by origin. A view is brought up to date when it is shown."""

    def __init__(self, *, origins: bool) -> None:
        super().__init__()
        self._origins = origins
        self._markdown = AnswerMarkdown()
        self._by_origin = OriginText()
        self._for_markdown = ""
        self._for_origins: list[Part] = []
        self._complete = False
        self._writing = asyncio.Lock()

    def compose(self) -> ComposeResult:
        yield self._markdown
        yield self._by_origin

    @property
    def source(self) -> str:
        """What the shown view shows, as Markdown."""
        return self._by_origin.text if self._origins else self._markdown.source

    async def append(self, parts: list[Part]) -> None:
        self._for_markdown += visible("".join(part.text for part in parts))
        self._for_origins += parts
        await self.show_origins(self._origins)

    async def close(self) -> None:
        """Nothing comes any more."""
        self._complete = True
        await self.show_origins(self._origins)

    async def show_origins(self, on: bool) -> None:
        self._origins = on
        async with self._writing:  # Markdown repeats text if it is appended to before the last text has been parsed
            if on:
                parts, self._for_origins = self._for_origins, []
                await self._by_origin.append(parts)
            elif text := self._decided():
                self._for_markdown = self._for_markdown[len(text) :]
                await self._markdown.append(text)

    def _decided(self) -> str:
        """What is to be written, without the beginning of a line that could still become anything."""
        text = self._for_markdown
        before, newline, line = text.rpartition("\n")
        begins = bool(newline) or not self._markdown.source or self._markdown.source.endswith("\n")
        return before + newline if begins and not self._complete and UNDECIDED.fullmatch(line) else text


class ToolCall(Vertical):
    """A call as the model wrote it. This chat has no tools, so nothing is called."""

    def __init__(self) -> None:
        super().__init__()
        self._text = OriginText()

    def compose(self) -> ComposeResult:
        yield Static("tool call, not run: this chat has no tools", markup=False, classes="title")
        yield self._text

    async def append(self, parts: list[Part]) -> None:
        await self._text.append(parts)

    async def close(self) -> None:
        """Nothing comes any more."""


Section: TypeAlias = Prose | Thinking | ToolCall


class AnswerTurn(Vertical):
    """An answer that grows, with one quiet line under it for its state and, later, its cost.

    Classes: `-running` while the engine works on it.
    """

    def __init__(self, number: int, *, folded: bool = True, origins: bool = False) -> None:
        super().__init__(classes="-running")
        self.number = number
        self._folded, self._origins = folded, origins
        self._blank: list[Part] = []
        self._section: Section | None = None
        self._kind: Kind | None = None
        self._status = Static("", markup=False, classes="status")
        self._said = ""
        self._pen: Pen | None = None

    def compose(self) -> ComposeResult:
        yield self._status

    @property
    def source(self) -> str:
        """All of the answer that is on the screen, as Markdown; without reasoning and tool calls."""
        return "".join(prose.source for prose in self.query(Prose))

    def on_unmount(self) -> None:
        if self._pen is not None:
            self._pen.drop()
            self._pen = None

    def say(self, status: str) -> None:
        """Set the line under the answer."""
        if status != self._said:  # every update costs a layout
            self._said = status
            self._status.update(Content(visible(status)))

    async def write(self, parts: Iterable[Part]) -> None:
        """Append text. What comes faster than it can be shown is merged."""
        if self._pen is None:
            if not self.is_attached:  # the conversation was cleared
                return
            self._pen = Pen(self._put)
        self._pen.write(parts)

    async def finish(self, status: str) -> None:
        """Show all text that is left, and the closing line."""
        if self._pen is not None:
            await self._pen.stop()
            self._pen = None
        await self._close_section()
        self.remove_class("-running")
        self.say(status)

    async def show_saved(self, turn: Turn) -> None:
        """Show a turn of a saved chat."""
        await self._put(turn.parts)
        await self.finish(turn.closing or (CUT_OFF if turn.state == "open" else ""))

    async def show_as(self, *, folded: bool, origins: bool) -> None:
        """Change views. What was thought keeps its own state if only the other one changes."""
        for thinking in self.query(Thinking) if folded != self._folded else ():
            await thinking.fold(folded)
        self._folded, self._origins = folded, origins
        for prose in self.query(Prose):
            await prose.show_origins(origins)

    async def _put(self, parts: Iterable[Part]) -> None:
        run: list[Part] = []
        for part in parts:
            if run and part.kind != run[-1].kind:
                await self._put_run(run)
                run = []
            run.append(part)
        if run:
            await self._put_run(run)

    async def _put_run(self, run: list[Part]) -> None:
        """Show parts of one kind. White space between two kinds opens no section; it waits for its text."""
        kind = run[0].kind
        if kind == "marker":
            if self._kind == "tool_call":
                await self._close_section()
            return
        if kind != self._kind:
            if self._blank and self._blank[-1].kind == kind:
                run = [*self._blank, *run]
            if not "".join(part.text for part in run).strip():
                self._blank = run
                return
            self._blank = []
            await self._close_section()
            self._section, self._kind = self._new_section(kind), kind
            await self.mount_all([self._section], before=self._status)
        if self._section is not None and self._section.is_attached:
            await self._section.append(run)

    def _new_section(self, kind: Kind) -> Section:
        if kind == "reasoning":
            return Thinking(folded=self._folded)
        return ToolCall() if kind == "tool_call" else Prose(origins=self._origins)

    async def _close_section(self) -> None:
        if self._section is not None:
            await self._section.close()
        self._section = self._kind = None


class Notice(Static):
    """Something the chat itself has to say. Class `-error` if it is bad news."""

    def __init__(self, title: str, body: str, *, error: bool = False) -> None:
        text = Content.assemble((visible(title), "bold"), "\n", visible(body))
        super().__init__(text, markup=False, classes="-error" if error else "")
