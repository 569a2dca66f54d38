"""The pictures of the chat in README and docs, taken of a real run: the app, its engine thread, the demo pair.

    python -m bench.tour

Textual's pilot presses the keys in a terminal that is not there; what the models write and how long they take is what
happened. docs/tour gets an SVG for every step and tour.json: the machine, the versions, the engine's records of the
turns, and for every picture its digest and the numbers that stand on it. A picture on which one of them cannot be read
is taken again; one with a path or a name of this machine ends the run. Greedy, in 100 x 30. Nothing is chosen: one
run, whatever it shows; but where a run of the race had less than a core on a CPU (`cpu_share`), other programs had it,
the ratio means nothing, and the exit status is 1: run it again when they do not. It takes a minute and 1 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import importlib.metadata
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import machine
from .chat_page import on_cpu
from .tour_steps import QUESTIONS, STEPS, WAIT_S, Tour

if TYPE_CHECKING:
    from dflash_mlx.app.discovery import Candidate
    from dflash_mlx.app.messages import Arm, RaceDone

PLACE = Path(__file__).parent.parent / "docs" / "tour"
SCHEMA = "dflash-tour-1"
SIZE = (100, 30)
MAX_TOKENS = 200
ENOUGH_CPU = 1.0
"""CPU time over time, at least, of a run that nothing disturbs: a core for the engine, and some 5% for the window."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        # Before Textual is imported: the same colours and no animation, whatever this terminal is.
        os.environ |= {"COLORTERM": "truecolor", "TEXTUAL_ANIMATIONS": "none"}
        os.environ.pop("NO_COLOR", None)
        found = asyncio.run(run(args.out, Path(folder)))
    card = {**machine.card(), "load_average_before": round(load_average, 2)}
    card |= {"textual": importlib.metadata.version("textual"), "niceness": os.nice(0)}
    head = {"schema": SCHEMA, "command": "python -m bench.tour", "machine": card, "size": list(SIZE)}
    result = {**head, "settings": {"temperature": 0.0, "max_tokens": MAX_TOKENS}, "questions": list(QUESTIONS), **found}
    (args.out / "tour.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shares = found["race"]["cpu_share"]
    if on_cpu(card) and min(shares.values()) < ENOUGH_CPU:
        sys.stderr.write(f"The runs of the race had {shares} of a core: other programs ran. Run it again.\n")
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.tour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    place = PLACE if PLACE.parent.is_dir() else Path("tour")  # an installed package has no docs beside it
    made.add_argument("--out", type=Path, default=place, help="folder for the pictures and tour.json (docs/tour)")
    return made


async def run(out: Path, folder: Path) -> dict[str, Any]:
    """Take all pictures; the chat's files go to `folder`. Returns what tour.json says of the run."""
    from dflash_mlx.app.app import ChatApp
    from dflash_mlx.app.places import Places
    from dflash_mlx.app.settings import Settings

    places = Places(folder / "data", folder / "config")
    app = ChatApp(None, Settings(temperature=0.0, max_tokens=MAX_TOKENS), places=places, find=only_the_demo)
    app.animation_level = "none"
    try:
        async with app.run_test(size=SIZE) as pilot:
            tour = Tour(app, pilot, out, private_words(folder))
            await tour.still()
            for step in STEPS:
                await step(tour)
    finally:
        app.close_engine(WAIT_S)
    turns = [json.loads(line) for line in places.metrics.read_text(encoding="utf-8").splitlines()]
    raced = tour.race
    assert raced is not None, "a step sets it"
    return {"pictures": tour.pictures, "turns": turns, "race": {**race_record(raced), "cpu_share": tour.cpu_share}}


def only_the_demo() -> Iterator[Candidate]:
    """Nobody's pictures show which other models are on the machine."""
    from dflash_mlx.app.discovery import demo_candidate

    yield demo_candidate()


def private_words(folder: Path) -> list[str]:
    """Paths and names of this machine and its user."""
    words = (str(Path.home()), str(folder), tempfile.gettempdir(), socket.gethostname(), f"{getpass.getuser()}@")
    return [word for word in words if len(word) > 3]


def race_record(raced: RaceDone) -> dict[str, Any]:
    """What the race showed, without its text."""

    def arm(run: Arm) -> dict[str, Any]:
        return {name: value for name, value in asdict(run.numbers).items() if name not in ("recent", "rates", "notes")}

    said = {"verdict": raced.verdict, "index": raced.index, "explanation": raced.explanation}
    return {"question": QUESTIONS[0], **said, "plain": arm(raced.plain), "dflash": arm(raced.dflash)}


if __name__ == "__main__":
    raise SystemExit(main())
