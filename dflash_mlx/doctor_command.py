"""`dflash-metal doctor`: what this machine runs on and why, in lines or as one JSON object.

Each part is a function that examines one thing and returns plain values; `lines` shows them. What the user should
repair is a problem and sets the exit status. MLX is imported after the arguments are read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dflash_mlx import __version__
from dflash_mlx.cli import add_kernels_argument, check_kernels_argument, guarded

if TYPE_CHECKING:
    from dflash_mlx.kernels.gate import Gate

UNRACED_HERE = "not raced here yet: `generate` and `chat` do it when they load a model with a draft"


def doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx doctor", description="Say what runs here: versions, device, BLAS, kernels and why."
    )
    add_kernels_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def doctor_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if there are problems; 2 for wrong usage."""
    parser = doctor_parser()
    args = parser.parse_args(argv)
    check_kernels_argument(parser, args)
    return guarded(lambda: _doctor(args))


def _doctor(args: argparse.Namespace) -> int:
    found = examine(args.kernels)
    print(json.dumps(found, ensure_ascii=False, indent=1) if args.json else "\n".join(lines(found)))
    return 1 if found["problems"] else 0


def examine(wish: str = "auto", gate: Gate | None = None) -> dict[str, Any]:
    """Everything, as plain values; unknown is None."""
    problems: list[str] = []
    return {
        "versions": versions(),
        "device": device(),
        "cpu": cpu_backend(problems),
        "kernels": kernels(wish, gate),
        "problems": problems,
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"dflash_mlx": __version__, "python": platform.python_version()}
    for name in ("mlx", "mlx-lm", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout on the path
            found[name] = None
    return found


def device() -> dict[str, Any]:
    """What MLX computes on, and whether Metal kernels run, which is found out by running one."""
    import mlx.core as mx

    from dflash_mlx.kernels.chip import this_chip

    chip = this_chip()
    return {
        "name": chip.name,
        "default": str(mx.default_device()),
        "system": chip.system,
        "architecture": chip.architecture,
        "generation": chip.generation,
        "metal": chip.closed is None,
        "reason": chip.closed,
        "remark": chip.remark,
    }


def cpu_backend(problems: list[str]) -> dict[str, Any] | None:
    """Which BLAS MLX's CPU backend calls, bound as `load` binds it; None where a GPU computes."""
    import mlx.core as mx

    from dflash_mlx import blas, cpu

    if mx.default_device() != mx.Device(mx.cpu):
        return None
    off = os.environ.get("DFLASH_BLAS") == "off"
    status = blas.status() if off else blas.bind()
    broken = cpu.ensure_compile()
    if broken:
        problems.append(broken)
    if not status.fast and not off:
        problems.append(f"drafts cannot pay on this CPU: {status.note}")
    return {
        "blas": status.library,
        "version": status.version,
        "threads": status.threads,
        "fast": status.fast,
        "note": status.note,
    }


def kernels(wish: str, gate: Gate | None = None) -> dict[str, Any]:
    """What every operation runs on, and the races that say so."""
    from dflash_mlx.kernels.gate import parse_wish, this_gate

    gate, names = gate or this_gate(), parse_wish(wish)
    operations = []
    for name, operation in sorted(gate.operations.items()):
        rule = "kernels are off" if names is not None and not names else gate.rule(operation, names)
        raced = {  # as a request's notes: without what is not for this chip
            case: verdict
            for case, verdict in gate.held.items()
            if case.operation == name and gate.too_new(operation, case) is None
        }
        # Where a rule closes the operation, the races say what they found.
        reasons = {case: v.reason if rule else gate.closed(operation, case, names) for case, v in raced.items()}
        if rule is None and None not in reasons.values():
            rule = next(iter(reasons.values()), UNRACED_HERE)
        races = [
            {"dtype": case.dtype, **case.size, "reason": reasons[case], "speedups": dict(verdict.speedups)}
            for case, verdict in raced.items()
        ]
        operations.append({"name": name, "uses": "stock" if rule else "kernel", "reason": rule, "races": races})
    return {"wish": wish, "file": str(gate.file.path), "note": gate.file.note, "operations": operations}


def lines(found: dict[str, Any]) -> list[str]:
    """What `examine` found, for people."""
    made, on, cpu, kernel = (found[part] for part in ("versions", "device", "cpu", "kernels"))
    generation = "" if on["generation"] is None else f", generation {on['generation']}"
    rows = [
        ("versions", ", ".join(f"{name} {number or '?'}" for name, number in made.items())),
        ("device", f"{on['name']} ({on['architecture']}{generation}), {on['system']}, MLX computes on {on['default']}"),
        ("metal", "kernels run" if on["metal"] else on["reason"]),
        ("", on["remark"]),
        ("blas", cpu and cpu["note"]),
    ]
    for operation in kernel["operations"]:
        opened = sum(race["reason"] is None for race in operation["races"])
        shapes = f" ({opened} of {len(operation['races'])} raced shapes)" if operation["uses"] == "kernel" else ""
        why = f": {operation['reason']}" if operation["reason"] else ""
        rows.append(("kernel", f"{operation['name']:<12}  {operation['uses']}{shapes}{why}"))
        rows += [("", f"  {_race(race)}") for race in operation["races"]]
    rows += [("races", kernel["file"]), ("", kernel["note"])]
    rows += [("problem", problem) for problem in found["problems"]] or [("problem", "none")]
    return [f"{name:<9}  {text}" for name, text in rows if text]


def _race(race: dict[str, Any]) -> str:
    sizes = " ".join(f"{name} {value}" for name, value in race.items() if name not in ("reason", "speedups"))
    speedups = ", ".join(f"{speedup:.2f}x at {rows}" for rows, speedup in race["speedups"].items())
    return f"{sizes}: {'; '.join(filter(None, [speedups, race['reason']])) or 'open'}"
