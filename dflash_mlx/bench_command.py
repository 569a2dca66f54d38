"""`dflash-metal bench`: what drafts are worth on this machine, in numbers that are checked.

`bench openai`, `bench report` and `bench import` are commands of their own. Heavy imports happen after the arguments
are read, so --help and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_mlx.cli import add_model_arguments, check_model_arguments, guarded

PRESETS = ("quick", "demo", "paper", "reddit", "lucebox")
SUBCOMMANDS = {
    "openai": "dflash_mlx.bench.openai:openai_main",
    "report": "dflash_mlx.bench.report_command:report_main",
    "import": "dflash_mlx.bench.imports:import_main",
    "profile": "dflash_mlx.bench.profile:profile_main",
}
_EPILOG = """Also: bench openai (a server with OpenAI's API), bench report FILE... (tables, Markdown, HTML),
bench import FILE (results of others), bench profile (a cycle by phase). Each takes --help."""


def bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx bench",
        description="Measure mlx_lm and this package on the same prompts, A B B A: speed with and without prefill, "
        "acceptance, and whether the answers are the same. Without a preset: 48 prompts of our own.",
        epilog=_EPILOG,
    )
    group = parser.add_argument_group("what is measured", "what is given here goes before the preset")
    group.add_argument("--preset", choices=PRESETS, help="conditions of runs that people quote, and their numbers")
    group.add_argument(
        "--part", action="append", default=[], metavar="NAME", help="of a preset; default: all its parts"
    )
    arms = "some of stock (mlx_lm), plain, dflash, auto, sequential; the first is the baseline"
    group.add_argument("--arms", type=_words, metavar="NAME,...", help=arms)
    sets = "offline, one of its categories, demo, gsm8k and other public sets, gsm8k:FILE, context:N, or a .jsonl file"
    group.add_argument("--prompts", type=_words, metavar="SET|FILE,...", help=sets)
    group.add_argument("--limit", type=one_or_more, metavar="N", help="prompts of each category at most")
    group.add_argument("--max-tokens", type=one_or_more, metavar="N", help="of an answer (default 256)")
    group.add_argument("--trials", type=one_or_more, metavar="N", help="pairs of passes, A B and B A (default 1)")
    blocks = "anchor and drafts, an arm for each (default: the draft's)"
    group.add_argument("--block-size", type=_sizes, metavar="N,...", help=blocks)
    group.add_argument("--temperature", "--temp", type=_zero_or_more, metavar="T", help="0 (default) is greedy")
    group.add_argument("--seed", type=int, metavar="N", help="of drawn tokens (default 0)")
    ends = "end an answer where the model ends it (default), or never before --max-tokens"
    group.add_argument("--eos", action=argparse.BooleanOptionalAction, help=ends)
    group.add_argument("--raw", action="store_true", help="prompts without the chat template")
    thinking = "let the model reason before it answers, or not; default: the model's"
    group.add_argument("--think", action=argparse.BooleanOptionalAction, help=thinking)
    running = "run the Python of answers to check it: isolated, but no sandbox"
    group.add_argument("--run-code", action="store_true", help=running)
    add_model_arguments(parser)
    parser.set_defaults(model=None)
    group = parser.add_argument_group("arm sequential", "an ordinary small model that drafts token by token, by mlx_lm")
    group.add_argument("--sequential-draft", metavar="MODEL", help="folder or repository")
    group.add_argument("--sequential-tokens", type=one_or_more, default=3, metavar="N", help="per cycle (default 3)")
    group = parser.add_argument_group("result")
    out = "write the record here; of several parts, a file each (default without --json: bench-TIME.json)"
    group.add_argument("--out", type=Path, metavar="FILE", help=out)
    group.add_argument(
        "--json", action="store_true", help="print the record, one line for each part, instead of tables"
    )
    return parser


def _words(text: str) -> tuple[str, ...]:
    """For argparse. Raises ArgumentTypeError."""
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise argparse.ArgumentTypeError("has to name something")
    return words


def _sizes(text: str) -> tuple[int, ...]:
    """For argparse. Raises ArgumentTypeError."""
    words = _words(text)
    if not all(word.isdecimal() and int(word) >= 2 for word in words):
        raise argparse.ArgumentTypeError(f"has to be integers of 2 or more (an anchor and drafts), got {text!r}")
    return tuple(int(word) for word in words)


def one_or_more(text: str) -> int:
    """For argparse. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"has to be an integer of 1 or more, got {text!r}")
    return int(text)


def _zero_or_more(text: str) -> float:
    """For argparse. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"has to be a number of 0 or more, got {text!r}")
    return value


def bench_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 for an explained error, or a run whose numbers do not agree; 2 for wrong usage; 130
    when interrupted. What was measured is written in every case."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in SUBCOMMANDS:
        module, _, function = SUBCOMMANDS[words[0]].partition(":")
        main: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return main(words[1:])
    parser = bench_parser()
    args = parser.parse_args(words)
    check_model_arguments(parser, args)
    if args.part and args.preset is None:
        parser.error("--part is of a preset: pass --preset too")
    if args.arms and "sequential" in args.arms and args.sequential_draft is None:
        parser.error("the arm sequential needs a small model: pass --sequential-draft too")

    def run() -> int:
        from dflash_mlx.bench.command import run

        return run(args, command(words))

    return guarded(run)


def command(words: Sequence[str]) -> str:
    """What to type to repeat a run, without where its record goes."""
    kept = [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]
    return shlex.join(["dflash-metal", "bench", *(word for word in kept if not word.startswith("--out="))])
