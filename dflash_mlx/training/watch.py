"""Look on while another process trains: the same panel, from the log of its run.

    python -m dflash_mlx.training.watch RUN

Ctrl-C stops looking, not the training. It ends by itself when the training ends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_EVERY = 1.0  # seconds between two looks at the log
_QUIET = 300  # seconds without a line after which it is said: an evaluation can take minutes


def watch(run: Path, *, once: bool = False, every: int = 50, console: Console | None = None) -> None:
    """Show the run until it ends.

    Args:
        once: show what there is, and return.
        every, console: as for `Progress`.
    Raises:
        LogError: there is no log, or it is damaged.
    """
    from rich.console import Console

    from dflash_mlx.training.log import LOG, Log, LogError, Tail
    from dflash_mlx.training.panel import duration
    from dflash_mlx.training.progress import Progress

    tail = Tail(Log(run / LOG))
    footer = "" if once else "Ctrl-C stops looking, not the training."
    console = console or Console()
    progress = Progress(run / "checkpoint", console=console, every=every, footer=footer)
    try:
        progress.show_past(tail.poll()[0])
    except FileNotFoundError:
        raise LogError(
            f"There is no {run / LOG}, so there is nothing to watch. Give the folder that the training was given as "
            "--out; its log begins with the first step."
        ) from None
    if once:
        console.print(progress.board)
        return
    with progress:
        while not progress.board.history.end:
            time.sleep(_EVERY)
            records, replaced = tail.poll()
            if replaced:
                progress.show_past(records)
            else:
                for record in records:
                    progress.show(record)
            quiet = time.time() - tail.log.path.stat().st_mtime
            said = f"No line for {duration(quiet)}: is the training still running? " if quiet > _QUIET else ""
            progress.board.footer = said + footer
            progress.draw()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does."""
    from dflash_mlx.cli import guarded

    made = argparse.ArgumentParser(
        prog="python -m dflash_mlx.training.watch", description="Look on while a draft trains."
    )
    made.add_argument("run", type=Path, metavar="RUN", help="the folder of the run (--out of the training)")
    made.add_argument("--once", action="store_true", help="show what there is by now, and end")
    made.add_argument("--every", type=int, default=50, help="steps between two lines without a terminal (default 50)")
    args = made.parse_args(argv)

    def run() -> int:
        watch(args.run, once=args.once, every=args.every)
        return 0

    return guarded(run)


if __name__ == "__main__":
    raise SystemExit(main())
