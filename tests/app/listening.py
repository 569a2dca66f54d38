"""Two ways to run the engine over a script without an app: in its thread, or here, over a clock that tests move."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from datetime import UTC, datetime

from scripted import FakeEngine, Script

from dflash_mlx.app.chat_engine import ChatEngine
from dflash_mlx.app.jobs import Ask, LoadModel
from dflash_mlx.app.messages import Chunk, EngineFailed, Event, ModelReady, Part, TurnDone
from dflash_mlx.app.settings import Settings

WAIT_S = 5.0
ENDED = datetime(2026, 11, 30, 12, 0, 5, tzinfo=UTC)


class Listener:
    """Collects what the thread posts."""

    def __init__(self, script: Script) -> None:
        self.queue: queue.Queue[Event] = queue.Queue()
        self.seen: list[Event] = []
        self.engine = FakeEngine(self.queue.put, script)

    def until(self, *kinds: type) -> Event:
        while True:
            event = self.queue.get(timeout=WAIT_S)
            self.seen.append(event)
            if isinstance(event, kinds):
                return event

    def start(self) -> ModelReady:
        self.engine.start()
        self.engine.submit(LoadModel())
        ready = self.until(ModelReady)
        assert isinstance(ready, ModelReady)
        return ready

    def ask(self, turn: int, *texts: str, settings: Settings | None = None) -> None:
        roles = ("user", "assistant")
        messages = tuple((roles[i % 2], text) for i, text in enumerate(texts))
        self.engine.submit(Ask(turn, messages, settings or Settings()))

    def answer(self, turn: int, *texts: str, settings: Settings | None = None) -> TurnDone:
        self.ask(turn, *texts, settings=settings)
        done = self.until(TurnDone, EngineFailed)
        assert isinstance(done, TurnDone), done
        return done

    def text(self, turn: int) -> str:
        return "".join(event.text for event in self.seen if isinstance(event, Chunk) and event.turn == turn)

    def close(self) -> None:
        self.engine.shutdown()
        self.engine.join(WAIT_S)
        assert not self.engine.is_alive()


def engine_with_clock(script: Script, step_s: float) -> tuple[ChatEngine, list[Event]]:
    """An engine in this thread whose clock moves `step_s` at every reading."""
    now = [0.0]

    def clock() -> float:
        now[0] += step_s
        return now[0]

    events: list[Event] = []
    engine = ChatEngine(script.backend(), events.append, clock=clock, now=lambda: ENDED)
    engine.load(LoadModel())
    return engine, events


def parts_of(events: Iterable[Event], turn: int = 1) -> list[Part]:
    """All parts of a turn, in order."""
    return [part for event in events if isinstance(event, Chunk) and event.turn == turn for part in event.parts]
