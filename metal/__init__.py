"""The Metal sources of this package, as text.

A kernel is four pieces with one name: `metal/<name>.metal`, `dflash_mlx/kernels/<name>.py`,
`tests/kernels/test_<name>.py` and a row in `bench/kernels.py`. This module only reads the first.
"""

from __future__ import annotations

from importlib.resources import files


def names() -> list[str]:
    """The kernels whose sources are installed, sorted."""
    return sorted(p.name.removesuffix(".metal") for p in files(__package__).iterdir() if p.name.endswith(".metal"))


def source(name: str) -> str:
    """The text of `<name>.metal`.

    Raises:
        KeyError: no such kernel; the message lists the ones there are.
    """
    path = files(__package__).joinpath(f"{name}.metal")
    if not path.is_file():
        raise KeyError(f"No Metal source named {name!r}; installed: {', '.join(names()) or 'none'}.")
    return path.read_text(encoding="utf-8")
