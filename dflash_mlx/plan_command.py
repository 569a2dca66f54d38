"""`dflash-metal plan TARGET`: the verdict in one line, then what it is made of, or one JSON object.

MLX is imported after the arguments are read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.chips import NAMES, apple_chip, name_here
from dflash_mlx.cli import guarded
from dflash_mlx.fit import CONTEXT, KV_START
from dflash_mlx.machine import Machine, this_machine

_UNITS = {"": 2**30, "gb": 2**30, "gib": 2**30, "g": 2**30, "mb": 2**20, "mib": 2**20, "tb": 2**40}
# Name in JSON, for people, and what it is.
_PARTS = {
    "target": ("target", "weights"),
    "draft": ("draft", "weights, and the rows of the target's head that it copies"),
    "keys_values": ("keys and values", "of the target"),
    "draft_keys_values": ("draft's context", "keys and values of the draft"),
    "states": ("states and tape", "of recurrent layers, before and after a block"),
    "prefix_cache": ("prefix cache", "states and windows that a conversation comes back to, of four turns"),
    "activations": ("activations", "of one piece of the prompt"),
    "block_buffers": ("block buffers", "logits of target and draft; not while a prompt is read"),
    "system_reserve": ("system reserve", "what a model may not use; not part of what it needs"),
}


def plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx plan",
        description="Say, before anything large is fetched, which draft a target gets, whether it is run here, whether "
        "both fit into memory, and what speculation has to reach to pay. Calculated, not measured.",
    )
    parser.add_argument("target", metavar="TARGET", help="folder, Hugging Face repository, or demo")
    parser.add_argument(
        "--draft", "--draft-model", default="auto", help="auto (default), none, or a folder or repository"
    )
    parser.add_argument("--revision", help="branch, tag or commit of TARGET")
    parser.add_argument("--draft-revision", help="branch, tag or commit of the draft; default: the registry's, or main")
    parser.add_argument(
        "--context", type=_positions, default=CONTEXT, metavar="N", help=f"prompt and answer (default {CONTEXT})"
    )
    machine = "of the machine to plan for, as Apple sells it (64GB); default: this one's"
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help=machine)
    parser.add_argument("--chip", metavar="NAME", help='a Mac to plan for ("M4 Pro"); default: this machine')
    parser.add_argument("--kv-bits", type=int, choices=[2, 3, 4, 5, 6, 8], help="keys and values of the target")
    parser.add_argument("--kv-group-size", type=int, choices=[32, 64, 128], default=64, help="default 64")
    parser.add_argument("--draft-bits", type=int, choices=[4, 8], help="quantise the draft when it is loaded")
    parser.add_argument("--block-size", type=_positions, metavar="N", help="anchor + drafts; default: the draft's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def plan_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if it fits; 1 if it does not, is not supported or not known; 2 for wrong usage."""
    parser = plan_parser()
    args = parser.parse_args(argv)
    here = this_machine()
    if args.chip and not here.metal and args.memory is None:
        parser.error("--chip needs --memory, since this machine is no Mac")
    memory = args.memory or here.memory
    chip = apple_chip(args.chip or name_here() or "", memory) if args.chip or here.metal else None
    if args.chip and chip is None:
        parser.error(f"--chip has to be one of {', '.join(NAMES)}, got {args.chip!r}")
    machine = here
    if args.memory is not None or args.chip:
        machine = Machine.mac(memory) if args.chip or here.metal else Machine.other(memory)
    return guarded(lambda: _plan(parser, args, machine, chip))


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace, machine: Machine, chip: Any) -> int:
    from dflash_mlx.plan import plan
    from dflash_mlx.planned import Asked

    asked = Asked(
        target=args.target,
        machine=machine,
        chip=chip,
        revision=args.revision,
        draft=None if args.draft == "none" else args.draft,
        draft_revision=args.draft_revision,
        context=args.context,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        draft_bits=args.draft_bits,
        block_size=args.block_size,
    )
    try:
        found = plan(asked)
    except ValueError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(found, ensure_ascii=False, indent=1))
    else:
        show(found)
    return 0 if found["verdict"] in ("fits", "tight") else 1


def _positions(text: str) -> int:
    """For argparse. Raises ArgumentTypeError."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"has to be an integer of 1 or more, got {text!r}")


def _memory(text: str) -> int:
    """Bytes of "64GB", "64" or "16.5 GiB". Memory is sold in units of 2**30. Raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found and found[2] in _UNITS and float(found[1]) > 0:
        return int(float(found[1]) * _UNITS[found[2]])
    raise argparse.ArgumentTypeError(f"has to be a size such as 64GB, got {text!r}")


def show(found: Mapping[str, Any]) -> None:
    """The verdict, the table of memory, and what else was asked."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(found["line"])
    if found["memory"] is not None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name, side in (("memory", "left"), ("GB", "right"), ("", "left")):
            table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
        for part, size in found["memory"].items():
            if size:
                table.add_row(_PARTS[part][0], f"{size / 1e9:.2f}", _PARTS[part][1])
        table.add_section()
        needed, usable = found["needed_bytes"], found["machine"]["usable_bytes"]
        table.add_row("needed", f"{needed / 1e9:.2f}", f"of {usable / 1e9:.2f} GB")
        Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    print("\n".join(lines(found)))


def lines(found: Mapping[str, Any]) -> list[str]:
    """What is not in the table."""
    target, draft, machine = found["target"], found["draft"], found["machine"]
    rows = [("target", f"{target['name']}, {target['where']}"), ("runs here", _runs(target))]
    where = f", {draft['where']}" if draft["name"] else ""
    rows += [("draft", f"{draft['name'] or 'none'}{where}"), ("why", draft["reason"])]
    rows += [("note", note) for note in draft["notes"]]
    chip = f"{machine['chip']}, {machine['bandwidth_gbs']} GB/s by its specification" if machine["chip"] else None
    rows.append(("machine", chip or ("a Mac" if machine["metal"] else "a CPU")))
    if found["largest_context"]:
        own = " (as long as the model was made for)" if found["largest_context"] == found["context_limit"] else ""
        rows.append(("context", f"up to {found['largest_context']:,} tokens fit{own}"))
    settings = found["settings"]
    if settings["kv_bits"] and settings["context"] <= KV_START:
        rows.append(("kv bits", f"no keys are quantised at this context: they are from {KV_START:,} positions on"))
    if bits := found["draft_bits"]:
        choice = f"--draft-bits {bits['choose']}" if bits["choose"] else "as it is stored"
        rows.append(("bits", f"draft {choice}: {bits['reason']}"))
    rows += _regime(found["regime"])
    bench = found["benchmark"]
    rows.append(("benchmark", f"reports {bench['number']}: {bench['command']}"))
    return [f"{name:<9}  {text}" for name, text in rows if text]


def _regime(paying: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if paying is None:
        return []
    if paying["reason"]:
        return [("regime", f"not calculated: {paying['reason']}")]
    low, high, most = (paying[key] for key in ("pays_above_low", "pays_above_high", "at_most"))
    text = (
        f"a cycle of block {paying['block_size']} costs {low:.2f} to {high:.2f} plain steps, so that many tokens per "
    )
    text += f"cycle are needed to gain; at most {most:.1f}x if all are accepted. Calculated, not measured."
    rows = [("regime", text)]
    if paying["plain_ceiling_tps"]:
        ceiling = f"memory gives plain decoding at most {paying['plain_ceiling_tps']:.1f} tokens per second"
        rows.append(("", ceiling + f" ({paying['step_bytes'] / 1e9:.2f} GB each)"))
    return rows + [("assumed", text) for text in paying["assumptions"]]


def _runs(target: Mapping[str, Any]) -> str | None:
    reason = target["runs_reason"]
    return "yes" if target["runs"] else f"no: {reason}" if target["runs"] is False else reason
