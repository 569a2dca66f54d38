"""`dflash-metal doctor`: what this machine runs on and why, in lines or as one JSON object.

Each part is a function that examines one thing and returns plain values; `lines` shows them. What the user should
repair is a problem, says what to do and sets the exit status. MLX is imported after the arguments are read.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_mlx import environment
from dflash_mlx.cli import add_kernels_argument, check_kernels_argument, guarded
from dflash_mlx.environment import versions as versions

if TYPE_CHECKING:
    from dflash_mlx.kernels.gate import Gate

UNRACED_HERE = "not raced here yet: `generate` and `chat` do it when they load a model with a draft"


def doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx doctor",
        description="Say what runs here and why, decode a little, and say what to repair.",
    )
    add_kernels_argument(parser)
    skipping = "do not decode 20 tokens with and without drafts (the demo pair if it is here, else a random one)"
    parser.add_argument("--no-self-test", dest="self_test", action="store_false", help=skipping)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def doctor_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if there are problems; 2 for wrong usage."""
    parser = doctor_parser()
    args = parser.parse_args(argv)
    check_kernels_argument(parser, args)
    return guarded(lambda: _doctor(args))


def _doctor(args: argparse.Namespace) -> int:
    found = examine(args.kernels, decoding=args.self_test)
    print(json.dumps(found, ensure_ascii=False, indent=1) if args.json else "\n".join(lines(found)))
    return 1 if found["problems"] else 0


def examine(wish: str = "auto", gate: Gate | None = None, *, decoding: bool = False) -> dict[str, Any]:
    """Everything, as plain values; unknown is None. decoding: whether the self-test is run."""
    problems: list[str] = []
    made = versions()
    return {
        "environment": environment.environment(),
        "versions": made,
        "tested": environment.tested(made, problems),
        "foreign": environment.foreign(problems),
        "device": device(),
        "memory": environment.memory(),
        "cpu": cpu_backend(problems),
        "caches": environment.caches(problems),
        "kernels": kernels(wish, gate),
        "self_test": decoded(wish, problems) if decoding else None,
        "problems": problems,
    }


def decoded(wish: str, problems: list[str]) -> dict[str, Any]:
    """The self-test, after `cpu_backend` bound what it runs on."""
    from dflash_mlx.self_test import self_test

    return self_test(wish, problems)


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
        ("package", found["environment"]["package"]),
        ("versions", ", ".join(f"{name} {number or '?'}" for name, number in made.items())),
        *(("", _newer(row)) for row in found["tested"] if row["state"] == "newer"),
        ("device", f"{on['name']} ({on['architecture']}{generation}), {on['system']}, MLX computes on {on['default']}"),
        ("metal", "kernels run" if on["metal"] else on["reason"]),
        ("", on["remark"]),
        ("memory", f"{_gb(found['memory']['bytes'])}, of which a model may use {_gb(found['memory']['usable_bytes'])}"),
        ("blas", cpu and cpu["note"]),
        *(("cache", _cache(cache)) for cache in found["caches"]),
    ]
    for operation in kernel["operations"]:
        opened = sum(race["reason"] is None for race in operation["races"])
        shapes = f" ({opened} of {len(operation['races'])} raced shapes)" if operation["uses"] == "kernel" else ""
        why = f": {operation['reason']}" if operation["reason"] else ""
        rows.append(("kernel", f"{operation['name']:<12}  {operation['uses']}{shapes}{why}"))
        rows += [("", f"  {_race(race)}") for race in operation["races"]]
    rows += [("races", kernel["file"]), ("", kernel["note"])]
    if test := found["self_test"]:
        rows.append(("self-test", f"{test['pair'] or 'no pair'}, with and without drafts: {test['explanation']}"))
    rows += [("problem", problem) for problem in found["problems"]] or [("problem", "none")]
    return [f"{name:<9}  {text}" for name, text in rows if text]


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _newer(row: dict[str, Any]) -> str:
    return f"{row['name']} {row['version']} is newer than {row['newest']}, with which this version was tested"


def _cache(cache: dict[str, Any]) -> str:
    return f"{cache['name']}: {_gb(cache['bytes'])} in {cache['path']}, {_gb(cache['free_bytes'])} free"


def _race(race: dict[str, Any]) -> str:
    sizes = " ".join(f"{name} {value}" for name, value in race.items() if name not in ("reason", "speedups"))
    speedups = ", ".join(f"{speedup:.2f}x at {rows}" for rows, speedup in race["speedups"].items())
    return f"{sizes}: {'; '.join(filter(None, [speedups, race['reason']])) or 'open'}"
