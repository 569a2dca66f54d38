"""Does the chat's window keep up with DFlash, and does it cost the engine anything?

    python -m bench.chat_pace

The engine thread of the chat runs a scripted model (the tests') that gives 300 blocks a second of 16 letters, each of
them a token, and sleeps in between as if it waited for a GPU. That is far above what any model here gives;
`--blocks-per-s 40` is a target of 25 ms a cycle. In one process, in the order A B B A:

    off    nobody listens: events are counted
    on     the whole app with all its widgets, drawn into a terminal of 120 x 40 that is not there; a thread presses a
           key 20 times a second, and the time until the box has it is taken

Overhead is the blocks per second of `on` against those of `off`, by the engine thread's clock. What an actual terminal
needs to draw is not in it. The answer is prose, lists, code and a table; all of it has to be on the screen at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LETTERS = 16
"""Of a block: four tokens of four letters."""
SIZE = (120, 40)
SECTION = """## Part {n}

Speculative decoding lets a *small* draft propose and the **target** verify, in one pass over `K + 1` positions.
What agrees is kept; the first token that does not is replaced by the target's own, and the rest is forgotten.

- the draft proposes a block, with **one** forward
- the target checks it
  - greedy: equal tokens
  - sampled: by rejection
- the cache forgets what was rejected

```python
def accept(draft: list[int], target: list[int]) -> int:
    for index, (ours, theirs) in enumerate(zip(draft, target)):
        if ours != theirs:
            return index  # the first mismatch
    return len(draft)
```

| block | tokens per cycle | of them accepted |
|-------|------------------|------------------|
| 4     | 2.31             | 44%              |
| 8     | 2.87             | 27%              |

"""


@dataclass
class Arm:
    """One run. Seconds."""

    name: str
    blocks_per_s: float
    keys: list[float] = field(default_factory=list)
    chunks: int = 0
    complete: bool = True


@dataclass
class Watched:
    """Takes the time of the first and the last chunk in the engine's thread, and counts them."""

    deliver: Any
    began: float = 0.0
    ended: float = 0.0
    chunks: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    ready: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Any) -> None:
        name = type(event).__name__
        if name == "Chunk":
            self.began = self.began or time.perf_counter()
            self.chunks += 1
        elif name == "TurnDone":
            self.ended = time.perf_counter()
            self.done.set()
        elif name == "ModelReady":
            self.ready.set()
        self.deliver(event)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1500, help="blocks of one answer (default 1500, 5 s)")
    parser.add_argument("--blocks-per-s", type=float, default=300.0, help="default 300")
    parser.add_argument("--rounds", type=int, default=1, help="A B B A each (default 1)")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args(argv)
    if args.blocks < 30 or args.rounds < 1 or not 0 < args.blocks_per_s <= 1000:
        parser.error("--blocks has to be 30 or more, --rounds 1 or more, and --blocks-per-s in 0..1000")
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "app"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_DATA_HOME": folder, "XDG_CONFIG_HOME": folder}
        pace = 1 / args.blocks_per_s
        arms = [run(name, args.blocks, pace) for _ in range(args.rounds) for name in ("off", "on", "on", "off")]
    from . import machine

    result: dict[str, Any] = {
        "schema": "dflash-chat-pace-1",
        "command": f"python -m bench.chat_pace --blocks {args.blocks} --blocks-per-s {args.blocks_per_s:g}",
        "machine": machine.card(),
    }
    result |= {"blocks": args.blocks, "letters": LETTERS, "asked_blocks_per_s": args.blocks_per_s, **summary(arms)}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return 0 if result["complete"] else 1


def text_of(blocks: int) -> str:
    letters = blocks * LETTERS
    sections = "".join(SECTION.format(n=n) for n in range(1, letters // len(SECTION) + 2))
    return sections[:letters]


def run(name: str, blocks: int, pace: float) -> Arm:
    """One arm, after the garbage of the ones before it was taken away. pace: seconds between two blocks."""
    gc.collect()
    return run_off(blocks, pace) if name == "off" else asyncio.run(run_on(blocks, pace))


def script(text: str, pace: float) -> Any:
    from scripted import Answer, Script

    return Script([Answer(text, depths=(LETTERS - 1,), cycle_s=pace)])


def run_off(blocks: int, pace: float) -> Arm:
    from scripted import FakeEngine

    from dflash_mlx.app.jobs import Ask, LoadModel
    from dflash_mlx.app.settings import Settings

    watched = Watched(lambda event: None)
    engine = FakeEngine(watched, script(text_of(blocks), pace))
    engine.start()
    engine.submit(LoadModel())
    watched.ready.wait(30)
    engine.submit(Ask(1, (("user", "go"),), Settings(max_tokens=-1)))
    watched.done.wait(60 + 3 * blocks * pace)
    engine.shutdown()
    engine.join(10)
    return Arm("off", blocks / (watched.ended - watched.began), chunks=watched.chunks)


async def run_on(blocks: int, pace: float) -> Arm:
    from scripted import FakeEngine

    from dflash_mlx.app.app import ChatApp
    from dflash_mlx.app.jobs import LoadModel
    from dflash_mlx.app.settings import Settings
    from dflash_mlx.app.widgets.prompt import Prompt
    from dflash_mlx.app.widgets.turn import AnswerTurn

    text = text_of(blocks)
    watches: list[Watched] = []

    def make(post: Any) -> Any:
        watches.append(Watched(post))
        return FakeEngine(watches[0], script(text, pace))

    app = ChatApp(LoadModel(), Settings(max_tokens=-1), engine=make)
    async with app.run_test(size=SIZE) as pilot:
        watched, prompt = watches[0], app.chat.query_one(Prompt)
        while not watched.ready.is_set():
            await pilot.pause(0.01)
        await pilot.pause()
        prompt.insert("go")
        await pilot.press("enter")
        typist = Typist(app, prompt, asyncio.get_running_loop(), watched.done)
        typist.start()
        while not watched.done.is_set():
            await asyncio.sleep(0.05)
        while app.chat.query_one(AnswerTurn).has_class("-running"):
            await asyncio.sleep(0.01)
        await pilot.pause()
        complete = app.chat.query_one(AnswerTurn).source == text and prompt.text == "x" * typist.pressed
        keys = typist.latencies
    app.close_engine(10)
    return Arm("on", blocks / (watched.ended - watched.began), keys, watched.chunks, complete)


class Typist(threading.Thread):
    """Presses a key every 50 ms, from outside of the event loop: one that is blocked cannot hide it."""

    def __init__(self, app: Any, prompt: Any, loop: asyncio.AbstractEventLoop, done: threading.Event) -> None:
        super().__init__(daemon=True)
        self._app, self._loop, self._done = app, loop, done
        self._seen = threading.Event()
        self._seen_at = 0.0
        self.latencies: list[float] = []
        self.pressed = 0
        prompt.watch(prompt, "selection", self._handled, init=False)

    def _handled(self) -> None:
        self._seen_at = time.perf_counter()
        self._seen.set()

    def run(self) -> None:
        while not self._done.wait(0.05):
            self._seen.clear()
            pressed_at = time.perf_counter()
            self._loop.call_soon_threadsafe(self._app.simulate_key, "x")
            self.pressed += 1
            if self._seen.wait(10):
                self.latencies.append(self._seen_at - pressed_at)


def summary(arms: Sequence[Arm]) -> dict[str, Any]:
    off = [arm.blocks_per_s for arm in arms if arm.name == "off"]
    on = [arm.blocks_per_s for arm in arms if arm.name == "on"]
    keys = sorted(latency for arm in arms for latency in arm.keys)
    return {
        "blocks_per_s": {"off": [round(rate, 1) for rate in off], "on": [round(rate, 1) for rate in on]},
        "overhead": round(1 - statistics.median(on) / statistics.median(off), 4),
        "key_s": {
            "n": len(keys),
            "p50": round(statistics.median(keys), 4),
            "p95": round(keys[int(0.95 * len(keys))], 4),
            "max": round(keys[-1], 4),
        },
        "chunks": [arm.chunks for arm in arms if arm.name == "on"],
        "complete": all(arm.complete for arm in arms),
    }


def show(result: dict[str, Any]) -> None:
    keys = result["key_s"]
    print(f"blocks per second   off {result['blocks_per_s']['off']}   on {result['blocks_per_s']['on']}")
    print(f"overhead            {result['overhead']:.1%}")
    print(
        f"key to box, ms      p50 {1e3 * keys['p50']:.0f}   p95 {1e3 * keys['p95']:.0f}   max {1e3 * keys['max']:.0f}"
    )
    print(f"chunks              {result['chunks']}   all text on the screen: {'yes' if result['complete'] else 'NO'}")


if __name__ == "__main__":
    raise SystemExit(main())
