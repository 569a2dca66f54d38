"""`bench report FILE...`: a record as tables in the terminal, as Markdown, or as one HTML file with its charts.

A profile (`bench profile`) that is named too is shown beside the record, apart from its rates. Results of other
programs (`imports`) come last, each by its own definitions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_mlx.files import whole_file

from . import profile as profiles
from . import record as records
from .facts import facts
from .form import BenchError
from .form import read as read_form
from .imports import read_peers
from .peers import Peer, peer_table
from .profile import PHASES, Profile
from .published import Beside, published_table
from .record import Record
from .tables import UNKNOWN, WIDE, Table, rich_group, tables


@dataclass(frozen=True)
class Shown:
    """What the files hold. profile: at most one, which belongs to the first record.

    published: numbers that presets put beside a run of ours.
    """

    records: list[Record] = field(default_factory=list)
    profile: Profile | None = None
    peers: list[Peer] = field(default_factory=list)
    published: list[Beside] = field(default_factory=list)

    def tables(self) -> list[Table]:
        made = [table for record in self.records for table in tables(record)]
        made += [published_table(self.published)] if self.published else []
        if self.profile is not None:
            made.append(profile_table(self.profile, next(iter(self.records), None)))
        return made + ([peer_table(self.peers, self.records)] if self.peers else [])

    def facts(self) -> list[str]:
        lines = [line for record in self.records for line in facts(record)]
        return lines + ([f"profile: {self.profile.command}"] if self.profile else [])

    @property
    def title(self) -> str:
        targets = dict.fromkeys(record.run.pair.target for record in self.records)
        return f"Benchmark of {', '.join(targets)}" if targets else "Benchmarks"


def report_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does."""
    from dflash_mlx.cli import guarded

    made = argparse.ArgumentParser(prog="dflash-metal bench report", description="Show what a benchmark wrote.")
    made.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="records, a profile, results of other programs"
    )
    made.add_argument(
        "--markdown", nargs="?", const="-", metavar="OUT", help="tables as Markdown; without OUT on stdout"
    )
    made.add_argument("--html", type=Path, metavar="OUT", help="one file with tables and charts; needs matplotlib")
    made.add_argument("--png", type=Path, metavar="FOLDER", help="the charts, one file each; needs matplotlib")
    args = made.parse_args(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    shown = read(args.files)
    if args.html or args.png:
        _draw(shown, args.html, args.png)
    if args.markdown == "-":
        print(markdown(shown))
    elif args.markdown:
        _write(Path(args.markdown), markdown(shown) + "\n")
    elif not (args.html or args.png):
        _print(shown.tables(), shown.facts())
    return 0


def read(files: Sequence[Path]) -> Shown:
    """Raises BenchError: a file that is none of these, or two profiles."""
    shown = Shown()
    for file in files:
        value = _object(file)
        kind = value.get("kind")
        if kind == records.KIND:
            record = records.load(file)
            if record.summary is None or not record.summary.arms:
                raise BenchError(
                    f"{file} holds no prompt that every arm finished ({record.ended or 'ended early'}), so there is "
                    "nothing to show. Run the benchmark again."
                )
            shown.records.append(record)
            rows = value.get("published") or []
            shown.published.extend(read_form(Beside, row, "published") for row in rows)
        elif kind == profiles.KIND:
            if shown.profile is not None:
                raise BenchError(f"{file} is a second profile, and one is shown beside a record. Name one of them.")
            shown = replace(shown, profile=profiles.from_json(value))
        else:
            shown.peers.extend(read_peers(file))
    return shown


def _object(file: Path) -> dict[str, Any]:
    """Empty for what is no JSON object."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError:  # a peer's text
        return {}
    return value if isinstance(value, dict) else {}


def markdown(shown: Shown) -> str:
    lines = "\n".join(f"- {line}" for line in shown.facts())
    return "\n\n".join([f"## {shown.title}", *([lines] if lines else []), *(t.markdown() for t in shown.tables())])


def _print(shown: list[Table], lines: list[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe has no width to fold at
        console = Console(highlight=False, width=WIDE)
    console.print(rich_group(shown, lines, console.width))


def _draw(shown: Shown, html: Path | None, png: Path | None) -> None:
    if not shown.records:
        raise BenchError("There is no record among the files, and charts are drawn from one. Name a record too.")
    from .charts import pngs, svgs
    from .page import page

    record = shown.records[0]
    if html is not None:
        _write(html, page(shown.title, shown.facts(), shown.tables(), svgs(record, shown.profile)))
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for name, data in pngs(record, shown.profile).items():
            with whole_file(png / f"{name}.png") as part:
                part.write_bytes(data)
                part.chmod(0o644)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text, "utf-8")
        part.chmod(0o644)


def profile_table(made: Profile, record: Record | None = None) -> Table:
    """Phases of a cycle; beside them the cycle of the record's arm of drafts, which did not wait."""
    medians = {phase: made.median_s(phase) for phase in PHASES}
    known = [value for value in medians.values() if value is not None]
    whole = sum(known)
    rows: list[tuple[str, ...]] = [
        (phase, UNKNOWN if value is None else f"{value * 1e3:.2f}", UNKNOWN if not value else f"{value / whole:.0%}")
        for phase, value in medians.items()
    ]
    rows.append(("all phases", f"{whole * 1e3:.2f}", "100%" if known else UNKNOWN))
    if (cycle := _cycle_of(record)) is not None:
        rows.append(("a cycle without waits, of the record's `dflash`", f"{cycle * 1e3:.2f}", UNKNOWN))
    return Table(
        f"A cycle by phase: blocks of {made.block_size}, {len(made.cycles)} cycles that drafted",
        ("phase", "median (ms)", "share of the sum"),
        tuple(rows),
        (
            "from a run apart, which waits for the device at the end of each phase: it is slower than the run above, "
            "and none of its numbers is a throughput",
            "draft: proposing, and taking in features; verify: the target's forward and the verdict; commit: what the "
            "cache keeps and takes back; rest: the host",
        ),
    )


def _cycle_of(record: Record | None) -> float | None:
    arm: Any = record.summary.arms.get("dflash") if record is not None and record.summary is not None else None
    return None if arm is None else arm.cycle_s.p50


if __name__ == "__main__":
    raise SystemExit(report_main())
