"""What `dflash-metal bench` does once its arguments are read: find everything, load, measure each part, write, show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from dflash_mlx.cli import INTERRUPTED
from dflash_mlx.pairing.registry import DEMO

from . import machine, public_sets
from .compare import model_judge
from .items import Item
from .jobs import load_models, make_job
from .measure import Comparing, Step, measure
from .output import check_writable, file_for, give
from .pair import Found, Wanted, check_memory, find_pair
from .presets import Preset, Settings, parts_of, preset
from .prompt_sets import read_set
from .published import beside, differing
from .record import Record
from .statistics import summarise

_CHARACTERS = 3  # of a token, at least, in most texts: the longest prompt in tokens before there is a tokenizer


def run(args: argparse.Namespace, command: str) -> int:
    """Returns the exit status.

    Raises:
        ValueError, DFlashError, OSError, KeyboardInterrupt: for `cli.guarded`.
    """
    check_writable(args.out)
    made = None if args.preset is None else preset(args.preset)
    parts = [settled(part, args) for part in (parts_of(made, tuple(args.part)) if made else [Settings()])]
    args.model = args.model or (made.targets[0] if made else DEMO)
    found = find_pair(_wanted(args), _missing_sets(parts))
    asked = [[item for name in part.prompts for item in read_set(name, part.limit_of(name))] for part in parts]
    for note in _announced(made, parts, asked, found):
        print(note, file=sys.stderr)
    loaded = load_models(args, found)
    jobs = [make_job(part, items, made, args, loaded, command) for part, items in zip(parts, asked, strict=True)]
    for number, job in enumerate(jobs, 1):
        job.record.run.conditions["before"] = machine.conditions()
        comparing = Comparing(model_judge(loaded.models.model, job.record.run.limits, args.kernels), args.run_code)
        try:
            measure(job.record, job.arms, job.prompts, comparing=comparing, progress=_progress())
        finally:
            record = _finished(job.record, made)
            if record.measured:
                path = file_for(args.out, args.json, job.name if len(jobs) > 1 else None)
                give(record, path, args.json, beside(record, made.published) if made else [])
        if record.ended == "interrupted":
            kept = "what was measured is kept" if record.measured else "nothing was measured of it yet"
            print(f"Interrupted in part {number} of {len(jobs)}: {kept}.", file=sys.stderr)
            return INTERRUPTED
    return 0


def settled(part: Settings, args: argparse.Namespace) -> Settings:
    """A part with what the command line says.

    Raises:
        ValueError: it cannot be.
    """
    given = dict(
        prompts=args.prompts,
        limit=args.limit,
        limits={} if args.limit is not None else None,
        max_tokens=args.max_tokens,
        pairs=args.trials,
        temperature=args.temperature,
        seed=args.seed,
        arms=args.arms,
        block_sizes=args.block_size,
        ignore_eos=None if args.eos is None else not args.eos,
        template="raw" if args.raw else None,
        thinking=args.think,
    )
    made = replace(part, **{name: value for name, value in given.items() if value is not None})
    if args.draft == "none" and args.arms is None:
        made = replace(made, arms=tuple(arm for arm in made.arms if arm not in ("dflash", "auto")))
    if made.temperature and made.seed is None:
        made = replace(made, seed=0)
    return made


def _wanted(args: argparse.Namespace) -> Wanted:
    draft = None if args.draft == "none" else args.draft
    return Wanted(args.model, draft, args.revision, args.draft_revision, args.draft_bits, args.sequential_draft)


def _missing_sets(parts: Sequence[Settings]) -> list[str]:
    """Commands that fetch the public sets which are not here, and what reads them."""
    names = dict.fromkeys(name for part in parts for name in part.prompts if name in public_sets.SETS)
    commands = dict.fromkeys(command for name in names if (command := public_sets.missing(name)))
    packed = any(file.endswith(".parquet") for name in names for file in public_sets.SETS[name].files)
    return [*commands, *(["pip install pyarrow"] if packed and find_spec("pyarrow") is None else [])]


def _announced(
    made: Preset | None, parts: Sequence[Settings], asked: Sequence[Sequence[Item]], found: Found
) -> list[str]:
    """The conditions, before anything is loaded. Raises BenchError: it does not fit into memory."""
    longest = max(
        max(item.tokens or len("".join(item.turns)) // _CHARACTERS for item in items) + part.max_tokens
        for part, items in zip(parts, asked, strict=True)
    )
    lines = [f"{made.name}: {made.about}"] if made else []
    for part, items in zip(parts, asked, strict=True):
        what = [f"{len(items)} prompts of {', '.join(part.prompts)}", f"at most {part.max_tokens} tokens"]
        what.append("greedy" if not part.temperature else f"temperature {part.temperature:g}, seed {part.seed}")
        what += ["ends ignored"] * part.ignore_eos + ["no chat template"] * (part.template == "raw")
        what += [] if part.thinking is None else [f"thinking {'on' if part.thinking else 'off'}"]
        what += [f"block {', '.join(map(str, part.block_sizes))}"] if part.block_sizes else []
        lines.append(f"{part.name + ': ' if part.name else ''}{'; '.join(what)}; arms {', '.join(part.arms)}")
    return lines + [remark for remark in [check_memory(found, longest)] if remark]


def _progress() -> Callable[[Step], None]:
    def tell(step: Step) -> None:
        seen, kind = step.measured, "" if step.asking.kind == "measured" else f" ({step.asking.kind})"
        rate = "" if seen.decode_tps is None else f", {seen.decode_tps:.1f} tok/s generation only"
        what = f"{step.asking.prompt} {step.asking.arm}{kind}: {seen.generated} tokens in {seen.end_s:.1f} s{rate}"
        print(f"{step.done}/{step.total} {what}", file=sys.stderr)

    return tell


def _finished(record: Record, made: Preset | None) -> Record:
    """With what the machine was like at the end, and what differs from the published runs."""
    record.run.conditions["after"] = machine.conditions()
    record.summary = summarise(record)
    return record if made is None else differing(record, made.published)
