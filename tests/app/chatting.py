"""A running chat over a script, for pilots: no animation, no blinking, and no wait without an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from scripted import FakeEngine, Script
from textual.pilot import Pilot

from dflash_mlx.app.app import ChatApp
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.widgets.prompt import Prompt
from dflash_mlx.app.widgets.transcript import Transcript
from dflash_mlx.app.widgets.turn import AnswerTurn, Notice, UserTurn

LOAD = LoadModel()


def make_app(
    script: Script, settings: Settings | None = None, load: LoadModel | None = LOAD, **options: Any
) -> ChatApp:
    """An app over `script`. Its files are where the XDG variables say: conftest sends them to a folder of the test."""
    settings = settings or Settings(max_tokens=100_000)
    app = ChatApp(load, settings, engine=lambda post: FakeEngine(post, script), **options)
    app.animation_level = "none"
    return app


@dataclass
class Chat:
    """A running app and the few questions tests ask it."""

    app: ChatApp
    pilot: Pilot[None]
    script: Script

    @property
    def engine(self) -> FakeEngine:
        assert isinstance(self.app.engine, FakeEngine)
        return self.app.engine

    @property
    def prompt(self) -> Prompt:
        return self.app.chat.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        return self.app.chat.query_one(Transcript)

    @property
    def answers(self) -> list[AnswerTurn]:
        return list(self.transcript.query(AnswerTurn))

    @property
    def questions(self) -> list[UserTurn]:
        return list(self.transcript.query(UserTurn))

    @property
    def notices(self) -> list[Notice]:
        return list(self.transcript.query(Notice))

    @property
    def busy(self) -> bool:
        return self.app.chat.session.conversation.open_turn is not None

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait for `condition`; a test that never gets there fails here instead of hanging."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "gave up waiting"
            await asyncio.sleep(0.01)
        await self.pilot.pause()

    async def ready(self) -> None:
        await self.until(lambda: self.script.load_gate is None and "-ready" in self.welcome_classes)

    @property
    def welcome_classes(self) -> frozenset[str]:
        return self.app.chat.query_one("Welcome").classes

    async def type(self, text: str) -> None:
        self.prompt.insert(text)
        await self.pilot.pause()

    async def send(self, text: str, *, wait: bool = True) -> None:
        """Type and press Enter; `wait` for the end of the answer."""
        await self.type(text)
        await self.pilot.press("enter")
        await self.pilot.pause()
        if wait:
            await self.until(lambda: not self.busy)

    def screen_text(self) -> str:
        """What a reader sees, line by line."""
        width = self.app.size.width
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.ljust(width) for strip in strips)

    def line(self, selector: str) -> str:
        """The text of one widget."""
        return str(self.app.chat.query_one(selector).render())


@asynccontextmanager
async def running(
    script: Script,
    size: tuple[int, int] = (80, 24),
    settings: Settings | None = None,
    *,
    ready: bool = True,
    **options: Any,
) -> AsyncIterator[Chat]:
    app = make_app(script, settings, **options)
    async with app.run_test(size=size) as pilot:
        chat = Chat(app, pilot, script)
        chat.prompt.cursor_blink = False
        if ready:
            await chat.ready()
        yield chat
    assert app.close_engine(5.0), "the engine thread did not end"
