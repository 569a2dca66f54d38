"""One message of the transcript: the user's, the model's, or the chat's own notice."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownStream

from dflash_mlx.app.text import visible
from dflash_mlx.app.widgets.answer_markdown import AnswerMarkdown


class UserTurn(Static):
    """What the user said, letter by letter."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(visible(text)), markup=False)


class AnswerTurn(Vertical):
    """An answer that grows, with one quiet line under it for its state and, later, its cost.

    Classes: `-running` while the engine works on it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(classes="-running")
        self.number = number
        self._markdown = AnswerMarkdown()
        self._status = Static("", markup=False, classes="status")
        self._stream: MarkdownStream | None = None

    def compose(self) -> ComposeResult:
        yield self._markdown
        yield self._status

    @property
    def source(self) -> str:
        """All text so far, as Markdown."""
        return self._markdown.source

    def say(self, status: str) -> None:
        """Set the line under the answer."""
        self._status.update(Content(visible(status)))

    async def write(self, text: str) -> None:
        """Append text. Fragments that come faster than they can be shown are merged by the stream."""
        if self._stream is None:
            self._stream = Markdown.get_stream(self._markdown)
        await self._stream.write(visible(text))

    async def finish(self, status: str) -> None:
        """Show all text that is left, and the closing line."""
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        self.remove_class("-running")
        self.say(status)


class Notice(Static):
    """Something the chat itself has to say. Class `-error` if it is bad news."""

    def __init__(self, title: str, body: str, *, error: bool = False) -> None:
        text = Content.assemble((visible(title), "bold"), "\n", visible(body))
        super().__init__(text, markup=False, classes="-error" if error else "")
