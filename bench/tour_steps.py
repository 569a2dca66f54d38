"""The steps of the tour (`bench.tour`): a chat that runs, what is pressed in it, and what is pictured."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .picture import lines_of, missing

if TYPE_CHECKING:
    from textual.pilot import Pilot
    from textual.screen import Screen

    from dflash_mlx.app.app import ChatApp
    from dflash_mlx.app.messages import RaceDone

QUESTIONS = (
    "Write a Python function that counts the vowels in a string.",
    "Explain in two sentences why the sky is blue.",
)
MIDWAY = 60
"""Tokens of the first answer when it is pictured."""
WAIT_S = 300.0
"""For anything: the demo pair answers within a minute on one slow core."""
TRIES = 50
"""To take a picture on which all of its numbers can be read. While an answer grows they change ten times a second."""


@dataclass
class Tour:
    """A chat that runs, and the pictures taken so far.

    folder: where the pictures go. private: what must not stand on one.
    """

    app: ChatApp
    pilot: Pilot[None]
    folder: Path
    private: Sequence[str]
    pictures: list[dict[str, Any]] = field(default_factory=list)
    race: RaceDone | None = None
    cpu_share: dict[str, float] = field(default_factory=dict)
    """CPU time over time of each run of the race: on a CPU, below 1 where other programs took some of it."""

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something.

        Raises:
            TimeoutError: it did not come.
        """
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"Waited {WAIT_S:.0f} s in vain until {what}. Is the machine busy? Run it again.")
            await asyncio.sleep(0.02)
        await self.pilot.pause()

    async def ask(self, question: str) -> None:
        from dflash_mlx.app.widgets.prompt import Prompt

        self.app.chat.query_one(Prompt).insert(question)
        await self.pilot.press("enter")
        await self.until(lambda: self.answering, "the question is sent")

    @property
    def answering(self) -> bool:
        return self.app.session.conversation.open_turn is not None

    async def take(self, name: str, shows: str, *said: str) -> None:
        """Picture what is on the screen, with its facts and the texts `said`.

        Raises:
            RuntimeError: a number could not be read on it, or something private can.
        """
        for _ in range(TRIES):
            await self.pilot.pause()
            needed = [*self.facts(self.app.screen), *said]
            svg = self.app.export_screenshot(title="dflash", simplify=True)
            if not (unread := missing(svg, needed)):
                break
            await asyncio.sleep(0.05)
        else:
            raise RuntimeError(f"{name}: {unread} cannot be read on the picture, which was not written.")
        behind = self.facts(self.app.chat) if self.app.screen.is_modal else []
        covered = missing(svg, behind)
        numbers = [*needed, *(fact for fact in behind if fact not in covered)]
        text = "\n".join([*lines_of(svg), svg])
        for word in self.private:
            if word in text:
                raise RuntimeError(f"{name}: the picture shows {word!r}, which is this machine's own; not written.")
        svg += "\n" * (not svg.endswith("\n"))
        (self.folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        digest = hashlib.sha256(svg.encode()).hexdigest()
        self.pictures.append({"file": f"{name}.svg", "shows": shows, "numbers": numbers, "sha256": digest})
        sys.stderr.write(f"{name}: {', '.join(numbers) or 'no numbers'}\n")

    def facts(self, screen: Screen[Any]) -> list[str]:
        """The named numbers that the instruments of a screen show."""
        from dflash_mlx.app.widgets.facts import Facts

        shown = (fact.content().plain for facts in screen.query(Facts) if facts.region.area for fact in facts.facts)
        return [text for text in shown if any(map(str.isdigit, text))]

    async def open(self, key: str, screen: type) -> None:
        await self.pilot.press(key)
        await self.until(lambda: isinstance(self.app.screen, screen), f"{key} opens its window")
        await self.still()

    async def still(self) -> None:
        """Stop the cursors, which would be there in one picture and not in the next."""
        from textual.widgets import Input, TextArea

        for box in (*self.app.screen.query(Input), *self.app.screen.query(TextArea)):
            box.cursor_blink = False
        await self.pilot.pause()


async def choose(tour: Tour) -> None:
    from dflash_mlx.app import model_text
    from dflash_mlx.app.screens.models import ModelsScreen
    from dflash_mlx.app.text import seconds
    from dflash_mlx.app.widgets.model_row import ModelRow

    await tour.until(lambda: isinstance(tour.app.screen, ModelsScreen), "the models are listed")
    await tour.until(lambda: len(tour.app.screen.query(ModelRow)) == 1, "the demo pair is found")
    await tour.still()
    demo = tour.app.screen.query_one(ModelRow).candidate
    await tour.take(
        "models", "The start: which models are here, the draft that each would get, and whether it fits. Enter loads.",
        model_text.verdict(demo), model_text.place(demo),
    )  # fmt: skip
    await tour.pilot.press("enter")
    await tour.until(lambda: tour.app.session.card is not None, "the demo pair is loaded")
    await tour.still()
    card = tour.app.session.card
    assert card is not None, "until waited for it"
    await tour.take(
        "ready", "Loaded: the pair and its block.", f"block size {card.block_size}", f"{seconds(card.ready_s)} s"
    )


async def answer(tour: Tour) -> None:
    from dflash_mlx.app.text import turn_line

    await tour.ask(QUESTIONS[0])
    await tour.until(
        lambda: tour.app.session.numbers.generation_tokens >= MIDWAY or not tour.answering, "the answer is half written"
    )
    await tour.take(
        "streaming",
        "An answer while it is written. Below it both clocks, what runs, tokens per cycle, and the last cycles: "
        "■ accepted, □ rejected, + the target's own token.",
    )
    await tour.until(lambda: not tour.answering, "the answer is finished")
    await tour.pilot.press(*"/verbose", "enter")
    await tour.until(lambda: tour.app.state.verbose, "all numbers are shown")
    cost = turn_line(tour.app.session.numbers)
    await tour.take("answer", "The finished answer with all numbers (`/verbose`).", cost)
    await tour.pilot.press("f6")
    await tour.take("origins", "The same answer with what the draft wrote underlined (F6 or `/origins`).", cost)
    await tour.pilot.press("f6")


async def race(tour: Tour) -> None:
    from dflash_mlx.app.outcome import comparison, verdict
    from dflash_mlx.app.screens.race import RaceScreen
    from dflash_mlx.app.text import count, seconds
    from dflash_mlx.app.widgets.lane import Lane

    await tour.open("f5", RaceScreen)
    screen = tour.app.screen
    assert isinstance(screen, RaceScreen), "until waited for it"
    lanes = {lane.arm: lane for lane in screen.query(Lane)}
    await tour.until(lambda: lanes["plain"].has_class("-running"), "the plain run has begun")
    started = time.process_time(), time.monotonic()
    await tour.until(
        lambda: lanes["dflash"].has_class("-running") or screen.race is not None, "the other run has begun"
    )
    between = time.process_time(), time.monotonic()
    await tour.until(lambda: screen.race is not None, "both runs are done")
    ended = time.process_time(), time.monotonic()
    tour.cpu_share = {"plain": share(started, between), "dflash": share(between, ended)}
    await tour.pilot.press("space")
    await tour.until(lambda: screen.has_class("-done"), "the replay is skipped")
    raced = tour.race = screen.race
    assert raced is not None, "until waited for it"
    titles = (
        f"{count(arm.numbers.generation_tokens, 'token')} in {seconds(arm.numbers.total_s)} s"
        for arm in (raced.plain, raced.dflash)
    )
    await tour.take(
        "race", "The same question plainly and with drafts (F5 or `/race`), each from an empty cache, and whether the "
        "answers are the same.", *comparison(raced), verdict(raced), *titles,
    )  # fmt: skip
    await tour.pilot.press("escape")
    await tour.until(lambda: tour.app.screen is tour.app.chat, "the race is closed")


def share(since: tuple[float, float], until: tuple[float, float]) -> float:
    """CPU time over time between two (CPU time, time)."""
    return round((until[0] - since[0]) / (until[1] - since[1]), 2)


async def look_around(tour: Tour) -> None:
    from textual.command import CommandPalette

    from dflash_mlx.app.screens.chats import ChatsScreen
    from dflash_mlx.app.screens.controls import ControlsScreen

    await tour.open("f4", ControlsScreen)
    await tour.take("controls", "How the next answers are made (F4 or `/controls`); nothing is loaded anew.")
    await tour.pilot.press("escape", "ctrl+l")
    await tour.ask(QUESTIONS[1])
    await tour.until(lambda: not tour.answering, "the second answer is finished")
    await tour.open("f3", ChatsScreen)
    await tour.take("chats", "The saved chats (F3 or `/chats`).", "1 turn")
    await tour.pilot.press("escape")
    await tour.open("ctrl+p", CommandPalette)
    await tour.until(lambda: not missing(tour.app.export_screenshot(), ["Ctrl+L · /clear"]), "the palette is filled")
    await tour.still()
    await tour.take("palette", "Everything that can be done, with its key and its command (Ctrl+P).")
    await tour.pilot.press("escape")


STEPS: tuple[Callable[[Tour], Awaitable[None]], ...] = (choose, answer, race, look_around)
