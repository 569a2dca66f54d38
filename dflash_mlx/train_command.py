"""`python -m dflash_mlx train`: a draft for a model of your own. The draft's folder goes to stdout, all else to stderr.

Heavy imports happen after the arguments are read, so --help and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx import openblas
from dflash_mlx.cli import guarded


def train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx train",
        description="Train a DFlash draft for a target on the target's own answers. Ctrl-C stops it and loses nothing; "
        "`train --out RUN --resume` goes on to the same result.",
    )
    parser.add_argument("--target", help="folder, Hugging Face repository, or demo")
    data = "prompts for the target to answer (a .jsonl or .txt file, a Hugging Face data set, or demo), or the folder "
    parser.add_argument("--data", help=data + "of a data set that was generated")
    parser.add_argument("--out", required=True, type=Path, metavar="RUN", help="the folder of this run")
    parser.add_argument("--resume", action="store_true", help="go on with the run in RUN; needs no other argument")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and what it needs, and stop")
    parser.add_argument("--json", action="store_true", help="print the records of the log instead of showing them")
    _add_recipe(parser.add_argument_group("recipe", "everything that decides the result; RUN/run.json keeps it"))
    _add_answers(parser.add_argument_group("answers", "of the target, where --data names prompts"))
    group = parser.add_argument_group("models")
    group.add_argument("--revision", help="branch, tag or commit of the target's repository")
    dtype = "of the target (default: as stored; demo: what decodes fastest, or what its data set was made in)"
    group.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=dtype)
    storing = "the target's features are stored beside the answers, or computed in every step (default: stored if the "
    group.add_argument("--features", choices=["cached", "computed"], help=storing + "disk has room)")
    group.add_argument("--bits", type=int, choices=[4, 8], help="quantise the finished draft (default: bfloat16)")
    sharing = "with --bits: weights that share a scale (default 64)"
    group.add_argument("--group-size", type=int, choices=[32, 64, 128], help=sharing)
    group.add_argument("--threads", type=_one_or_more, help="of the CPU's matrix products (default: what suits it)")
    return parser


def _add_recipe(group: Any) -> None:
    group.add_argument("--recipe", type=Path, metavar="FILE", help="a .toml file (default: the DFlash paper's values)")
    setting = "an entry of the recipe, as in --set window=512; may be repeated"
    group.add_argument("--set", type=setting_of, action="append", default=[], metavar="NAME=VALUE", help=setting)
    group.add_argument("--draft", help="a draft to begin with: folder, repository, target (default) or random")
    group.add_argument("--block-size", type=int, metavar="N", help="anchor + proposals (default 16, or the draft's)")
    group.add_argument("--layers", type=int, metavar="N", help="of the draft (default 5)")
    group.add_argument("--steps", type=int, metavar="N", help="(default: 6 passes over the answers)")
    group.add_argument("--seed", type=int, metavar="N", help="of everything that is drawn (default 0)")


def _add_answers(group: Any) -> None:
    group.add_argument("--answers", type=_one_or_more, metavar="N", help="prompts at most (default: all; demo: 24000)")
    group.add_argument("--samples", type=_one_or_more, metavar="N", help="per prompt, the first greedy (default 2)")
    group.add_argument("--temperature", type=float, metavar="T", help="of those that are not greedy (default 0.7)")
    group.add_argument("--max-tokens", type=_one_or_more, metavar="N", help="of an answer (default 160)")
    group.add_argument("--batch", type=_one_or_more, metavar="N", help="decoded together (default: 96, or what fits)")


def setting_of(text: str) -> tuple[str, Any]:
    """Of --set: a TOML value, or a word as it is. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals):
        raise argparse.ArgumentTypeError(f"has to be NAME=VALUE, as in window=512, got {text!r}")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def _one_or_more(text: str) -> int:
    """For argparse. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"has to be an integer of 1 or more, got {text!r}")
    return int(text)


def train_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 for an explained error; 2 for wrong usage; 128 + the number of the signal that
    stopped it, 130 for Ctrl-C."""
    parser = train_parser()
    args = parser.parse_args(argv)
    missing = [name for name in ("target", "data") if getattr(args, name) is None]
    if missing and not args.resume:
        parser.error(f"--{missing[0]} is needed to begin a run (only --resume goes without)")
    if args.group_size is not None and args.bits is None and not args.resume:
        parser.error("--group-size is for a draft that is quantised: pass --bits too, or leave it out")
    # numpy brings a BLAS of its own, which reads this when it is imported.
    threads = args.threads or openblas.default_threads(openblas.usable_cores())
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))

    def run() -> int:
        from dflash_mlx.training.command import run

        return run(args)

    return guarded(run)
