"""`dflash-metal models`: which drafts there are, or which one a target gets, why, and what `load` would refuse.

Nothing but configs, model cards and lists of files is fetched. MLX is imported after the arguments are read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.cli import guarded
from dflash_mlx.errors import DFlashError
from dflash_mlx.pairing import registry

_TABLE_WIDTH = 140
_SEE_PAGE = "see its page"


def models_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx models",
        description="List the public DFlash drafts, or say which one a target gets and what loading would refuse.",
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help="folder, Hugging Face repository, or demo")
    drafts = "auto (default), none, or a folder or repository to check with TARGET"
    parser.add_argument("--draft", "--draft-model", help=drafts)
    parser.add_argument("--revision", help="branch, tag or commit of TARGET")
    parser.add_argument("--draft-revision", help="branch, tag or commit of the draft; default: the registry's, or main")
    parser.add_argument("--json", action="store_true", help="print one JSON array, or one object about TARGET")
    return parser


def models_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 for an explained error or if loading TARGET would be refused; 2 for wrong usage."""
    parser = models_parser()
    args = parser.parse_args(argv)
    if args.target is None:
        for name in ("draft", "revision", "draft_revision"):
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} needs a TARGET")
        return guarded(lambda: _list(args.json))
    return guarded(lambda: _inspect(args))


def _list(as_json: bool) -> int:
    from dflash_mlx.pairing.inspection import listed

    found = listed()
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=1))
        return 0
    width = _width()
    if width < _TABLE_WIDTH:
        print(*(line for row in found for line in entry(row)), sep="\n")
    else:
        _print_table(found, width)
    tested = ", ".join(row["draft"] for row in found if row["tested"])
    print(f"Run here with its real weights: {tested}. The others as tiny random models of their kind, or not at all.")
    return 0


def _width() -> int:
    """Columns of the terminal; elsewhere what the table needs."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 200


def _print_table(found: list[dict[str, Any]], width: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("target", "draft", "format", "block", "runs here", "licence", "note"):
        table.add_column(name, overflow="fold", no_wrap=name in ("target", "draft"))
    for row in found:
        note = "; ".join([*row["notes"], *filter(None, [row["remark"]])])
        block, licence = str(row["block"] or "?"), row["licence"] or _SEE_PAGE
        table.add_row(row["targets"][0], row["draft"], row["format"], block, runs_here(row), licence, note)
    Console(width=width, highlight=False).print(table)


def entry(row: dict[str, Any]) -> list[str]:
    """A row of the list where a table does not fit: names stay whole, so that they can be copied."""
    facts = [row["format"], f"block {row['block'] or '?'}", f"runs here: {runs_here(row)}"]
    return [row["draft"], f"  for {row['targets'][0]}", f"  {', '.join(facts)}"]


def runs_here(part: dict[str, Any]) -> str | None:
    """In words; None if it is not known."""
    reason = part["runs_reason"]
    return "yes" if part["runs"] else f"no: {reason}" if part["runs"] is False else reason


def _inspect(args: argparse.Namespace) -> int:
    from dflash_mlx.pairing.inspection import inspect

    draft = {None: "auto", "none": None}.get(args.draft, args.draft)
    try:
        found = inspect(args.target, args.revision, draft, args.draft_revision)
    except (DFlashError, ValueError) as error:
        if not args.json:
            raise
        found = dict(target=dict(name=args.target), draft=None, refused=str(error))
    print(json.dumps(found, ensure_ascii=False, indent=1) if args.json else "\n".join(lines(found)))
    return 1 if found["refused"] else 0


def lines(found: dict[str, Any]) -> list[str]:
    """What `inspection.inspect` found, for people."""
    target, draft = found["target"], found["draft"]
    rows = [("target", target["name"]), ("", _facts(target)), ("runs here", runs_here(target))]
    if draft["name"] is None:
        rows += [("draft", "none"), ("why", draft["reason"])]
    else:
        at = f" at {draft['revision']}" if draft["revision"] else ""
        rows += [("draft", f"{draft['name']}{at}"), ("", _facts(draft)), ("why", draft["reason"])]
        path = Path(os.path.expanduser(draft["name"]))
        local = draft["name"] != registry.DEMO and (os.path.exists(path) or path.is_absolute())
        rows.append(("licence", draft["licence"] or ("unknown" if local else _SEE_PAGE)))
        rows += [("note", note) for note in draft["notes"]]
    rows.append(("refused", found["refused"]))
    return [f"{name:<9}  {text}" for name, text in rows if text]


def _facts(part: dict[str, Any]) -> str:
    """The config's facts and where the model is, as far as they are known."""
    facts = [f"{name.replace('_', ' ')} {'?' if value is None else value}" for name, value in part["config"].items()]
    return ", ".join([*facts, part["where"]])
