"""What `bench.report` writes into the pages about the chat: pictures, and the tables of keys and commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TOUR = ROOT / "docs" / "tour"
README = ("streaming", "origins", "race", "chats")
"""The pictures that the README shows; docs/chat.md has all of them."""


def tour() -> dict[str, Any]:
    """The committed run."""
    found: dict[str, Any] = json.loads((TOUR / "tour.json").read_text(encoding="utf-8"))
    return found


def gallery(found: dict[str, Any], page: Path, names: Sequence[str] = ()) -> str:
    """Pictures with what they show, then on what machine they were taken.

    Args:
        page: where the links are read from.
        names: which ones, in this order; empty is all, in the order in which they were taken.
    """
    by_name = {Path(picture["file"]).stem: picture for picture in found["pictures"]}
    there = os.path.relpath(TOUR, page.parent)
    parts = [f"{by_name[name]['shows']}\n\n![{name}]({there}/{name}.svg)" for name in names or by_name]
    machine, cpu = found["machine"], found["race"]["cpu_share"]
    busy = f" CPU time of the race's two runs, window included: {cpu['plain']:.0%} and {cpu['dflash']:.0%} of a core."
    busy *= on_cpu(machine)
    parts.append(
        f"{machine['chip']}, {machine['cores']} cores, {machine['system']}, mlx {machine['mlx']}, {machine['date']}, "
        f"with a load average of {machine['load_average_before']:.1f} before the run. Greedy, at most "
        f"{found['settings']['max_tokens']} tokens.{busy} `{found['command']}`, [tour.json]({there}/tour.json)."
    )
    return "\n\n".join(parts)


def on_cpu(machine: dict[str, Any]) -> bool:
    """Where a GPU computes, how much CPU a run had says little."""
    return "cpu" in machine["device"]


def keys() -> str:
    """Of `app.actions`."""
    from dflash_mlx.app.actions import key_rows

    return _table(("key", "what it does"), key_rows(), code=False)


def commands() -> str:
    """Of `app.actions`, with all names of each."""
    from dflash_mlx.app.actions import ACTIONS
    from dflash_mlx.app.commands import setting_rows

    rows = [
        (action.command, ", ".join(f"`/{name}`" for name in action.slash[1:]), action.key, action.title)
        for action in ACTIONS
        if action.slash
    ]
    rows += [(command, "", "", meaning) for command, meaning in setting_rows()]
    return _table(("command", "also", "key", "what it does"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, code: bool = True) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for first, *rest in rows:
        shown = f"`{first}`" if code else first
        lines.append(f"| {' | '.join([shown, *rest])} |".replace("  ", " "))
    return "\n".join(lines)
