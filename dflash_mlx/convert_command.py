"""`python -m dflash_mlx convert`: a draft or a target as an MLX folder. Its path goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from dflash_mlx.cli import LoadingBar, guarded, noted_warnings

_GROUP_SIZE = 64


def convert_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx convert",
        description="Write a draft or a target as an MLX folder, quantised with --bits. "
        "Then: python -m dflash_mlx.generate --model TARGET --draft OUTPUT",
    )
    parser.add_argument("source", help="folder or Hugging Face repository; a draft of any format, or a target")
    parser.add_argument("output", help="the folder to make; nothing is overwritten")
    packing = "quantise: of a draft the layers' matrices only, of a target what mlx_lm packs (default: nothing)"
    parser.add_argument("--bits", type=int, choices=[4, 8], help=packing)
    sharing = f"with --bits: packed weights that share a scale (default {_GROUP_SIZE})"
    parser.add_argument("--group-size", type=int, choices=[32, 64, 128], help=sharing)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights that are not packed (default: as stored); float16 for a target only",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a repository")
    return parser


def convert_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 for an explained error; 2 for wrong usage; 130 when interrupted."""
    parser = convert_parser()
    args = parser.parse_args(argv)
    if args.group_size is not None and args.bits is None:
        parser.error("--group-size is for weights that are quantised: pass --bits too, or leave it out")
    return guarded(lambda: _convert(args))


def _convert(args: argparse.Namespace) -> int:
    from dflash_mlx.convert import convert

    notes: list[str] = []
    try:
        with LoadingBar() as bar, noted_warnings(notes), contextlib.redirect_stdout(sys.stderr):  # mlx_lm prints
            folder = convert(
                args.source,
                args.output,
                bits=args.bits,
                group_size=args.group_size or _GROUP_SIZE,
                dtype=args.dtype,
                revision=args.revision,
                progress=bar,
            )
    finally:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    print(folder)
    return 0
