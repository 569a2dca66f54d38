"""`python -m dflash_mlx` and `dflash-metal`: what can I run?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dflash_mlx import __version__

USAGE = f"""dflash_mlx {__version__}: exact DFlash speculative decoding on MLX.

  python -m dflash_mlx.chat       a chat in the terminal                     (dflash-metal chat)
  python -m dflash_mlx.generate   one prompt, text or JSON                   (dflash-metal generate)
  python -m dflash_mlx models     the drafts there are, or a target's draft  (dflash-metal models)
  python -m dflash_mlx plan       does a pair fit here, and can it pay       (dflash-metal plan)
  python -m dflash_mlx convert    a draft or a target as an MLX folder       (dflash-metal convert)
  python -m dflash_mlx train      a draft for a model of your own            (dflash-metal train)
  python -m dflash_mlx bench      what drafts are worth here, in numbers     (dflash-metal bench)
  python -m dflash_mlx doctor     what runs on this machine, and why         (dflash-metal doctor)

Each takes --help. In Python: from dflash_mlx import load, generate, stream_generate
"""


def _chat(argv: Sequence[str]) -> int:
    from dflash_mlx.chat import main as run

    return run(argv)


def _generate(argv: Sequence[str]) -> int:
    from dflash_mlx.cli import generate_main

    return generate_main(argv)


def _models(argv: Sequence[str]) -> int:
    from dflash_mlx.models_command import models_main

    return models_main(argv)


def _plan(argv: Sequence[str]) -> int:
    from dflash_mlx.plan_command import plan_main

    return plan_main(argv)


def _convert(argv: Sequence[str]) -> int:
    from dflash_mlx.convert_command import convert_main

    return convert_main(argv)


def _train(argv: Sequence[str]) -> int:
    from dflash_mlx.train_command import train_main

    return train_main(argv)


def _bench(argv: Sequence[str]) -> int:
    from dflash_mlx.bench_command import bench_main

    return bench_main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from dflash_mlx.doctor_command import doctor_main

    return doctor_main(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "chat": _chat,
    "generate": _generate,
    "models": _models,
    "plan": _plan,
    "convert": _convert,
    "train": _train,
    "bench": _bench,
    "doctor": _doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or list them. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "help"
    if name in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        print(__version__)
        return 0
    command = COMMANDS.get(name)
    if command is None:
        print(f"Unknown command {name!r}.\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    return command(words[1:])


if __name__ == "__main__":
    sys.exit(main())
