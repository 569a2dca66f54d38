"""What a training shows while it runs: a panel on a terminal, lines elsewhere. It is given the records of the log, so
that screen and log cannot differ."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live

from dflash_mlx.training.log import History
from dflash_mlx.training.panel import Board, duration, number, percent

STOPPING = "Ctrl-C stops after this step and saves it; --resume goes on from there."
_PAUSE = 0.2  # seconds between two drawings: steps can be faster than eyes


class Progress:
    """Shows a training, on stderr unless told otherwise. Use it as a context manager.

    Args:
        checkpoint: where checkpoints are, as it is shown.
        console: to show it on.
        every: steps from one line to the next where there is no terminal.
        footer: what Ctrl-C does.
    """

    def __init__(
        self, checkpoint: Path | str, *, console: Console | None = None, every: int = 50, footer: str = STOPPING
    ) -> None:
        self._console = console or Console(stderr=True)
        self._every = every
        self._told: int | None = None  # the step of the last line
        self._drawn = 0.0
        self.board = Board(str(checkpoint), footer)
        terminal = self._console.is_terminal and self._console.is_interactive and not self._console.is_dumb_terminal
        self._live = Live(self.board, console=self._console, auto_refresh=False) if terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()  # draws what was not drawn yet

    def show(self, record: Mapping[str, Any]) -> None:
        """Take the next record and show what is new in it."""
        self.board.history.add(dict(record))
        if self._live:
            self.draw(now=record.get("kind") != "step")
        else:
            line = self._line(record)
            if line:
                self.say(line)

    def show_past(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take what was logged earlier, instead of everything until now. Lines are not printed again."""
        self.board.history = History(dict(record) for record in records)
        self.draw()

    def say(self, text: str) -> None:
        """A line of its own, above the panel if there is one."""
        if self._live:
            self._console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._console.file, flush=True)

    def draw(self, *, now: bool = True) -> None:
        """Draw the panel anew; without `now` only if the last time is long enough ago."""
        if self._live and (now or time.monotonic() - self._drawn >= _PAUSE):
            self._live.refresh()
            self._drawn = time.monotonic()

    def _line(self, record: Mapping[str, Any]) -> str | None:
        """None for a record that has no line."""
        step = record.get("step")
        match record.get("kind"):
            case "start":
                self._told = None
                return f"training from step {step} to {number(self.board.history.total, 'd')}"
            case "step":
                if self._told is not None and record["step"] < self._told + self._every:
                    return None
                self._told = record["step"]
                return _step_line(self.board.history)
            case "evaluation":
                return _evaluation_line(record)
            case "end":
                return f"ended at step {step}: {record.get('why') or '?'}"
        return None


def _step_line(history: History) -> str:
    last, left = history.steps[-1], history.seconds_left()
    parts = [
        f"step {history.step}/{number(history.total, 'd')}",
        f"epoch {number(last.get('epoch'), '.2f')}",
        f"loss {number(last.get('loss'), '.3f')}",
        f"accuracy {_percents(last.get('accuracy'))} %",
        f"learning rate {number(last.get('lr'), '.2e')}",
        f"{number(history.rates()[0], '.0f')} blocks/s",
    ]
    return ", ".join(parts + ([] if left is None else [f"{duration(left)} left"]))


def _evaluation_line(record: Mapping[str, Any]) -> str:
    best = ", the best so far" if record.get("best") else ""
    categories = [
        f"{name} {number(each.get('tokens_per_cycle'), '.2f')}"
        for name, each in (record.get("categories") or {}).items()
    ]
    rates = f" ({', '.join(categories)})" if categories else ""
    return (
        f"evaluation at step {record['step']}: {number(record.get('tokens_per_cycle'), '.2f')} tokens per cycle"
        f"{best}{rates}, accuracy {_percents(record.get('accuracy'))} %"
    )


def _percents(shares: Iterable[float | None] | None) -> str:
    return " ".join(percent(share) for share in shares) if shares else "?"
