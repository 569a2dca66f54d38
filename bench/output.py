"""Where a record goes: into its file, and onto the screen, or as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from .facts import facts
from .form import BenchError
from .published import Beside, published_table
from .record import Record, save, to_json
from .tables import WIDE, rich_group, tables


def file_for(out: Path | None, as_json: bool, part: str | None = None) -> Path | None:
    """`out`, or a name with the time where it is not printed whole. part: of several, each in a file of its own."""
    if out is None and as_json:
        return None
    path = out or Path(f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    return path if part is None else path.with_stem(f"{path.stem}-{part}")


def check_writable(out: Path | None) -> None:
    """Before an hour is measured.

    Raises:
        BenchError: no file can be made there.
    """
    if out is not None and (out.is_dir() or not os.access(out.absolute().parent, os.W_OK)):
        raise BenchError(
            f"No file can be written as {out}: "
            + ("it is a folder" if out.is_dir() else f"{out.absolute().parent} is no folder that can be written to")
            + ". Nothing would be kept of the run: give `--out` another name, or make the folder first."
        )


def give(record: Record, path: Path | None, as_json: bool, published: Sequence[Beside] = ()) -> None:
    """To its file, and to stdout: that too where the file cannot be written.

    Raises:
        OSError: it cannot.
    """
    try:
        if path is not None:
            save(record, path, published=published)
            print(f"The record is in {path}.", file=sys.stderr)
    finally:
        _show(record, as_json, published)


def _show(record: Record, as_json: bool, published: Sequence[Beside]) -> None:
    if as_json:
        print(json.dumps(to_json(record, published=published), ensure_ascii=False, allow_nan=False), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    shown = tables(record) + ([published_table(published)] if published else [])
    console.print(rich_group(shown, facts(record), console.width))
