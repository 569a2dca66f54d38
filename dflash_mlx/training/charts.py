"""The curves of a training as report.svg and report.png, drawn from its log. The same log gives the same bytes.

    python -m dflash_mlx.training.charts RUN

Needs matplotlib (the extra `report`); without it a line says so, and nothing is drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dflash_mlx.drawing import FORMS, save, styled
from dflash_mlx.files import whole_file
from dflash_mlx.training.figure import NAME, STYLE, figure
from dflash_mlx.training.log import LOG, History, Log, LogError, Record


def write(
    records: Iterable[Record], folder: Path, *, tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
) -> list[Path]:
    """Draw the report into a folder that is there.

    Args:
        records: of a log.
        tell: called with a line if matplotlib is missing.
    Returns:
        What was written: the SVG and the PNG, or nothing.
    Raises:
        OSError: they cannot be written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        tell(
            f"No {NAME}.svg and {NAME}.png: they are drawn with matplotlib, which cannot be imported ({error}). "
            f"`pip install 'dflash-metal[report]'` brings it, and `python -m dflash_mlx.training.charts {folder}` "
            "then draws them; the log has everything that they show."
        )
        return []
    written = []
    with styled(NAME, STYLE):
        drawn = figure(History(records))
        for form in FORMS:
            path = folder / f"{NAME}.{form}"
            with whole_file(path) as aside:
                save(drawn, aside, form)
                aside.chmod(0o644)
            written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does."""
    from dflash_mlx.cli import guarded

    made = argparse.ArgumentParser(prog="python -m dflash_mlx.training.charts", description="Draw a training's curves.")
    made.add_argument("run", type=Path, metavar="RUN", help="the folder of the run, which has a log.jsonl")
    args = made.parse_args(argv)
    return guarded(lambda: _run(args.run))


def _run(run: Path) -> int:
    log = Log(run / LOG)
    if not log.path.exists():
        raise LogError(f"There is no {log.path}, so there is nothing to draw. Give the folder of a run (--out).")
    written = write(log.read(), run)
    print(*written, sep="\n", end="\n" if written else "")
    return 0 if written else 1


if __name__ == "__main__":
    raise SystemExit(main())
