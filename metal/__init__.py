"""The Metal sources of this package, as text.

A kernel is four pieces with one name: `metal/<name>.metal`, `dflash_mlx/kernels/<name>.py`,
`tests/kernels/test_<name>.py` and a row in `bench/kernels.py`. This module only reads the first.
"""

from __future__ import annotations

import re
from importlib.resources import files

_INCLUDE = re.compile(r'^#include "(?P<file>[\w.]+)"\n', re.MULTILINE)


def names() -> list[str]:
    """The kernels whose sources are installed, sorted."""
    return sorted(p.name.removesuffix(".metal") for p in files(__package__).iterdir() if p.name.endswith(".metal"))


def source(name: str) -> str:
    """The text of `<name>.metal`; headers that it includes by `#include "<file>"` are put in, each once.

    MLX compiles text that has no folder, so an include of a file of ours could not be resolved later. `#include <...>`
    stays as it is.

    Raises:
        KeyError: no such kernel; the message lists the ones there are.
        FileNotFoundError: an included header is not among the sources.
    """
    path = files(__package__).joinpath(f"{name}.metal")
    if not path.is_file():
        raise KeyError(f"No Metal source named {name!r}; installed: {', '.join(names()) or 'none'}.")
    return put_in(path.read_text(encoding="utf-8"), f"{name}.metal")


def put_in(text: str, file: str) -> str:
    """`text`, the content of `file`, with the headers of this folder that it includes, and theirs, put in."""
    seen = {file}

    def header(match: re.Match[str]) -> str:
        name = match["file"]
        if name in seen:
            return ""
        seen.add(name)
        path = files(__package__).joinpath(name)
        if not path.is_file():
            raise FileNotFoundError(
                f'{file} includes "{name}", which is not among the Metal sources: MLX compiles them as one text. Put '
                "the file into metal/, or correct the include."
            )
        return _INCLUDE.sub(header, path.read_text(encoding="utf-8"))

    return _INCLUDE.sub(header, text)
