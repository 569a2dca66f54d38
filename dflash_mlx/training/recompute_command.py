"""`python -m dflash_mlx.training.recompute`: the target of a data set reads its answers again.

Heavy imports happen after the arguments are read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_mlx.training.dataset import Dataset


def check_target(dataset: Dataset, target: dict[str, Any], tokenizer: Any) -> None:
    """Refuse a target that did not make the answers.

    Args:
        target: as `target_identity.identity` describes it.
    Raises:
        DatasetError: says what differs.
    """
    from dflash_mlx.training.dataset import DatasetError
    from dflash_mlx.training.target_identity import tokenizer_facts, what_decides

    found, wanted = what_decides(dataset.manifest, {"target": target, **tokenizer_facts(tokenizer)})
    for name, value in wanted.items():
        if found.get(name) != value:
            raise DatasetError(
                f"The answers in {dataset.folder} were made by another target: their {name} is {found.get(name)}, and "
                f"that of the target which was loaded is {value}. What it would compute is not what they were chosen "
                "from. Name the target that made them with --target, in the dtype that they were made in (--dtype)."
            )


def parser() -> argparse.ArgumentParser:
    from dflash_mlx.training.generate import layers

    made = argparse.ArgumentParser(
        prog="python -m dflash_mlx.training.recompute",
        description="Compute again what lies beside the tokens of a data set. Go on with the same arguments.",
    )
    made.add_argument("--data", type=Path, required=True, help="the data set's folder")
    made.add_argument("--target", help="folder, Hugging Face repository, or demo (default: as the data set names it)")
    made.add_argument("--revision", help="branch, tag or commit of the target's repository")
    dtype = "default: what the data set was made in"
    made.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=dtype)
    kept = "likeliest tokens kept of each distribution (default 16); 0: none"
    made.add_argument("--top", type=int, default=16, help=kept)
    stored = "store outputs of these layers too, as in 1,8,14"
    made.add_argument("--features", type=layers, default=(), metavar="LAYERS", help=stored)
    made.add_argument("--threads", type=int, default=1, help="of the CPU's matrix products (default 1)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does."""
    from dflash_mlx.cli import guarded
    from dflash_mlx.training.interrupts import Interrupts

    read = parser()
    args = read.parse_args(argv)
    if args.top < 0:
        read.error(f"--top has to be 0 (none) or more, got {args.top}")
    if not args.top and not args.features:
        read.error("--top 0 without --features asks for nothing: name layers, or a number of tokens")

    def run() -> int:
        with Interrupts() as interrupts, interrupts.at_once():
            return _run(args)

    # numpy brings a BLAS of its own, which reads this when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(args.threads))
    return guarded(run)


def _run(args: argparse.Namespace) -> int:
    from dflash_mlx import blas, load
    from dflash_mlx.training.dataset import Dataset
    from dflash_mlx.training.decoder import decoder_for
    from dflash_mlx.training.recompute import complete
    from dflash_mlx.training.target_identity import identity

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    dataset = Dataset.open(args.data)
    made = dataset.manifest["target"]
    name, dtype = args.target or made.get("name"), args.dtype or made.get("dtype")
    if not name:
        raise ValueError(f"{args.data} does not name its target. Give it with `--target`.")
    revision = args.revision if args.target or args.revision else made.get("revision")
    model, tokenizer = load(name, dtype=dtype, revision=revision)
    blas.bind(args.threads)
    check_target(dataset, identity(name, revision, model), tokenizer)
    complete(dataset, decoder_for(model, args.features), top=args.top, layers=args.features, tell=say)
    print(args.data)
    return 0
