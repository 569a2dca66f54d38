"""The chat without a screen: answer text on stdout as it comes, everything else on stderr.

For pipes and scripts (`--print`, piped stdin), and line by line where Textual is missing. It runs the same
`ChatEngine` as the app, in the calling thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from dflash_mlx.app.backend import Backend, mlx_backend
from dflash_mlx.app.chat_engine import ChatEngine, failure
from dflash_mlx.app.conversation import Conversation
from dflash_mlx.app.jobs import Ask, LoadModel
from dflash_mlx.app.messages import Chunk, Event, ModelLoading, ModelReady, TurnDone
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.text import statistics_line, visible

INTERRUPTED = 130


class OutputLost(Exception):
    """The answer cannot be written where it was sent, a full disk say."""


class PlainPrinter:
    """Prints events. Progress is one line that overwrites itself; off a terminal, a line for each step."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._progress = 0
        self._step = ""
        self.answer = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, ModelLoading):
            if self._err.isatty():
                share = "" if event.fraction is None else f" {event.fraction:.0%}"
                self._show(f"{visible(event.text)}{share}"[:79])
            elif event.text != self._step:
                self._err.write(f"{visible(event.text)}\n")
                self._err.flush()
            self._step = event.text
        elif isinstance(event, ModelReady):
            self._show("")
            for note in event.card.notes:
                self._err.write(f"note: {note}\n")
        elif isinstance(event, Chunk):
            self.answer += event.text
            # A terminal obeys control characters, so a model does not get to send it any; a file gets the text.
            self._put(visible(event.text) if self._out.isatty() else event.text)
        elif isinstance(event, TurnDone):
            if event.reason == "cancelled" and not event.numbers.generation_tokens:
                return
            self._put("" if self.answer.endswith("\n") else "\n")
            self._err.write(statistics_line(event.numbers) + "\n")
            for note in event.numbers.notes:
                self._err.write(f"note: {note}\n")

    def _put(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(f"stdout cannot be written: {error.strerror or error}.") from error

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
    backend: Callable[[], Backend] = mlx_backend,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Load, then answer each question in one conversation.

    Returns:
        Exit code: 0, 1 after an error (said on stderr), 130 after Ctrl-C. A closed pipe ends quietly with 0.
    """
    out, err = out or sys.stdout, err or sys.stderr
    if out is None:
        err.write("stdout is closed, so there is nowhere to print an answer.\n")
        return 1
    printer = PlainPrinter(out, err)
    ready: Backend | None = None
    loading = True
    try:
        ready = backend()
        engine = ChatEngine(ready, printer)
        engine.load(load)
        loading = False
        _converse(engine, settings, questions, printer)
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
        failed = failure(error, ready.user_errors if ready is not None else (), fatal=loading)
        err.write(f"\n{failed.details}" if failed.details else f"\n{failed.title}: {failed.body}\n")
        return 1
    finally:
        if ready is not None:
            ready.clear_streams()


def _converse(engine: ChatEngine, settings: Settings, questions: Iterator[str], printer: PlainPrinter) -> None:
    conversation = Conversation()
    for question in questions:
        asked_at = time.perf_counter()
        turn = conversation.ask(question)
        printer.answer = ""
        engine.answer(Ask(turn.number, conversation.messages(settings.system), settings, asked_at))
        conversation.append(turn.number, printer.answer)
        conversation.finish(turn.number, "stop")


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
