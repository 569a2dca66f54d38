"""The chat without a screen: answer text on stdout as it comes, everything else on stderr.

For pipes and scripts (`--print`, piped stdin, `--json`), and line by line where Textual is missing. It runs the same
`ChatEngine` as the app, in the calling thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from dflash_mlx.app.backend import Backend
from dflash_mlx.app.chat_engine import ChatEngine
from dflash_mlx.app.conversation import Conversation
from dflash_mlx.app.failures import failure
from dflash_mlx.app.jobs import Ask, LoadModel
from dflash_mlx.app.library import mlx_backend
from dflash_mlx.app.lines import StoreError
from dflash_mlx.app.messages import Chunk, Event, ModelLoading, ModelReady, Part, TurnDone
from dflash_mlx.app.metrics import MetricsLog
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.text import statistics_line, visible

INTERRUPTED = 130


class OutputLost(Exception):
    """The answer cannot be written where it was sent, a full disk say."""


class PlainPrinter:
    """Prints events. Progress is one line that overwrites itself; off a terminal, a line for each step.

    Args:
        silent: the answer is not printed, since it follows as JSON.
        metrics: where the numbers of every turn go.
    """

    def __init__(self, out: TextIO, err: TextIO, *, silent: bool = False, metrics: MetricsLog | None = None) -> None:
        self._out = out
        self._err = err
        self._silent = silent
        self._metrics = metrics
        self._progress = 0
        self._step = ""
        self.parts: list[Part] = []
        """Of the answer so far."""
        self.done: TurnDone | None = None

    def begin(self) -> None:
        """Another turn."""
        self.parts, self.done = [], None

    def __call__(self, event: Event) -> None:
        if isinstance(event, ModelLoading):
            self._loading(event)
        elif isinstance(event, ModelReady):
            self._show("")
            for note in event.card.notes:
                self._err.write(f"note: {note}\n")
        elif isinstance(event, Chunk):
            self.parts += event.parts
            # A terminal obeys control characters, so a model does not get to send it any; a file gets the text.
            self._answer(visible(event.text) if self._out.isatty() else event.text)
        elif isinstance(event, TurnDone):
            self.done = event
            if event.reason == "cancelled" and not event.numbers.generation_tokens:
                return
            self._answer("" if self.parts and self.parts[-1].text.endswith("\n") else "\n")
            self._err.write(statistics_line(event.numbers) + "\n")
            for note in event.numbers.notes:
                self._err.write(f"note: {note}\n")
            self._keep(event)

    def put(self, text: str) -> None:
        """Write to stdout, now.

        Raises:
            BrokenPipeError: nobody reads any more.
            OutputLost: it cannot be written.
        """
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(f"stdout cannot be written: {error.strerror or error}.") from error

    def _answer(self, text: str) -> None:
        if not self._silent:
            self.put(text)

    def _loading(self, event: ModelLoading) -> None:
        if self._err.isatty():
            share = "" if event.fraction is None else f" {event.fraction:.0%}"
            self._show(f"{visible(event.text)}{share}"[:79])
        elif event.text != self._step:
            self._err.write(f"{visible(event.text)}\n")
            self._err.flush()
        self._step = event.text

    def _keep(self, done: TurnDone) -> None:
        if self._metrics is None or not done.record:
            return
        try:
            self._metrics.write(done.record)
        except StoreError as error:
            self._err.write(f"note: {error}\n")

    def _show(self, line: str) -> None:
        if self._progress or line:
            self._err.write("\r" + line.ljust(self._progress) + ("" if line else "\r"))
            self._err.flush()
        self._progress = len(line)


def run(
    load: LoadModel,
    settings: Settings,
    questions: Iterator[str],
    *,
    as_json: bool = False,
    metrics: MetricsLog | None = None,
    backend: Callable[[], Backend] = mlx_backend,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Load, then answer each question in one conversation.

    Args:
        as_json: instead of the text, one object for every answer, a line each: the keys of `generate --json`.
        metrics: where a line for every turn goes; a disk that fails is a note.
    Returns:
        Exit code: 0, 1 after an error (said on stderr), 130 after Ctrl-C. A closed pipe ends quietly with 0.
    """
    out, err = out or sys.stdout, err or sys.stderr
    if out is None:
        err.write("stdout is closed, so there is nowhere to print an answer.\n")
        return 1
    printer = PlainPrinter(out, err, silent=as_json, metrics=metrics)
    ready: Backend | None = None
    loading = True
    try:
        ready = backend()
        engine = ChatEngine(ready, printer)
        engine.load(load)
        loading = False
        _converse(engine, settings, questions, printer, as_json=as_json)
        return 0
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        err.write("\nInterrupted.\n")
        return INTERRUPTED
    except OutputLost as error:
        err.write(f"{error}\n")
        return 1
    except Exception as error:  # the command line's outermost frame
        failed = failure(error, ready, "load" if loading else "answer")
        err.write(f"\n{failed.details}" if failed.details else f"\n{failed.title}: {failed.body}\n")
        return 1
    finally:
        if ready is not None:
            ready.clear_streams()


def _converse(
    engine: ChatEngine, settings: Settings, questions: Iterator[str], printer: PlainPrinter, *, as_json: bool
) -> None:
    conversation = Conversation()
    for number, question in enumerate(questions, start=1):
        asked_at = time.perf_counter()
        conversation.ask(question, number)
        printer.begin()
        try:
            engine.answer(Ask(number, conversation.messages(settings.system), settings, asked_at))
        finally:
            if as_json and engine.answered:  # of an interrupted answer too
                printer.put(json.dumps(engine.answered, ensure_ascii=False) + "\n")
        conversation.append(number, printer.parts)
        conversation.finish(number, printer.done.reason if printer.done is not None else "stop")


def typed_lines(err: TextIO | None = None) -> Iterator[str]:
    """Questions as the user types them, one a line; ends with the input, or with /quit."""
    err = err or sys.stderr
    while True:
        err.write("> ")
        err.flush()
        line = sys.stdin.readline()
        if not line or line.strip() in ("/quit", "/bye", "q"):
            err.write("\n")
            return
        if line.strip():
            yield line.strip()
