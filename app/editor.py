"""A text in the user's own editor."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class EditorError(Exception):
    """The editor could not be run; the text is as it was. The message is for the user."""


def command(environment: Mapping[str, str]) -> list[str]:
    """What `$VISUAL` or `$EDITOR` says, or vi.

    Raises:
        EditorError: the variable cannot be read as a command.
    """
    wanted = environment.get("VISUAL") or environment.get("EDITOR") or "vi"
    try:
        return shlex.split(wanted)
    except ValueError as error:
        raise EditorError(f"$EDITOR is {wanted!r}, which is no command ({error}). Set it to a program.") from error


def edit(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Let the user edit `text`; the terminal has to be theirs. Returns the text without the line break at its end.

    Raises:
        EditorError: the editor is not there, or ended with an error.
    """
    line = command(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:  # readable by the user alone
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            with _ctrl_c_is_the_editors():
                ended = subprocess.run([*line, str(file)], check=False)
        except OSError as error:
            raise EditorError(f"{line[0]} cannot be run ({error.strerror}). Set $EDITOR to a program.") from error
        if ended.returncode:
            raise EditorError(f"{line[0]} ended with {ended.returncode}, so the message is as it was.")
        try:
            return file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise EditorError(f"What {line[0]} wrote cannot be read: {error}. The message is as it was.") from error


@contextmanager
def _ctrl_c_is_the_editors() -> Iterator[None]:
    """A terminal sends Ctrl+C to every program in front, and the chat is one of them. To ignore the signal would be
    inherited by the editor; a handler is not."""
    former = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
