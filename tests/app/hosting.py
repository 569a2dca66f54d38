"""A transcript alone in a small app, for tests of what it shows and how it scrolls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.color import Color
from textual.pilot import Pilot

import dflash_mlx.app.widgets
from dflash_mlx.app.messages import Kind, Part
from dflash_mlx.app.theme import DARK
from dflash_mlx.app.widgets.transcript import Transcript
from dflash_mlx.app.widgets.turn import AnswerTurn

WIDGETS = Path(dflash_mlx.app.widgets.__path__[0])


class Host(App[None]):
    CSS_PATH: ClassVar = [WIDGETS / "transcript.tcss", WIDGETS / "turn.tcss"]

    def __init__(self) -> None:
        super().__init__()
        self.animation_level = "none"
        self.register_theme(DARK)
        self.theme = DARK.name

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {name: DARK.variables[name] for name in ("quiet", "border")}

    def compose(self) -> ComposeResult:
        yield Transcript()


@dataclass
class Hosted:
    app: Host
    pilot: Pilot[None]

    @property
    def transcript(self) -> Transcript:
        return self.app.query_one(Transcript)

    @property
    def answers(self) -> list[AnswerTurn]:
        return list(self.transcript.query(AnswerTurn))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "gave up waiting"
            await asyncio.sleep(0.01)
        await self.pilot.pause()

    async def settled(self) -> None:
        """All workers are done and all is drawn."""
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()

    async def answer(self, *parts: Part, question: str = "question", number: int = 1) -> AnswerTurn:
        """A finished turn."""
        turn = await self.transcript.add_turn(number, question)
        await turn.write(parts)
        await turn.finish("closing line")
        await self.pilot.pause()
        return turn

    def lines(self) -> list[str]:
        """What a reader sees."""
        return [strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()]

    def text(self) -> str:
        return "\n".join(self.lines())

    def underlined(self) -> str:
        return "".join(text for text, underline, _ in self._segments() if underline)

    def colours(self) -> set[Color | None]:
        """The colours of what can be read."""
        return {colour for text, _, colour in self._segments() if text.strip()}

    def _segments(self) -> Iterable[tuple[str, bool, Color | None]]:
        for strip in self.app.screen._compositor.render_strips():
            for segment in strip:
                style = segment.style
                colour = Color.from_rich_color(style.color) if style and style.color else None
                yield segment.text, bool(style and style.underline), colour


@asynccontextmanager
async def hosted(size: tuple[int, int] = (80, 24)) -> AsyncIterator[Hosted]:
    app = Host()
    async with app.run_test(size=size) as pilot:
        yield Hosted(app, pilot)


def parts(kind: Kind, *texts: str) -> list[Part]:
    """Texts whose origins take turns, the target's first."""
    return [Part(kind, "draft" if index % 2 else "target", text) for index, text in enumerate(texts)]
