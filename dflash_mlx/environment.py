"""What `dflash-metal doctor` looks at around the models: versions, other packages of our name, caches and disk.

Without importing MLX. Each function returns plain values and appends to `problems` what the user should repair, with
what to do.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from dflash_mlx import __version__
from dflash_mlx.demo import default_cache_dir
from dflash_mlx.machine import this_machine

TESTED = {"mlx": ("0.32.2", "0.32.4"), "mlx-lm": ("0.32.2", "0.32.2"), "transformers": ("5", "5.24.0")}
"""The oldest versions that are supported, as in pyproject.toml, and the newest ones that the tests ran with."""
PYTHON = (3, 11)
OURS = "dflash-metal"
_IMPORT = "dflash_mlx"
_LITTLE = 2 * 10**9  # bytes: less than a small model and its conversion take


def versions() -> dict[str, str | None]:
    """Of this package, of Python and of what `TESTED` names; None where it is not installed as a distribution."""
    found: dict[str, str | None] = {_IMPORT: __version__, "python": platform.python_version()}
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout on the path
            found[name] = None
    return found


def tested(found: dict[str, str | None], problems: list[str]) -> list[dict[str, Any]]:
    """Each version against `TESTED`: "tested", "older", "newer" or "unknown"."""
    rows = []
    if sys.version_info[:2] < PYTHON:
        needed = ".".join(map(str, PYTHON))
        problems.append(f"Python {found['python']} is older than {needed}: make the environment with a newer one")
    for name, (oldest, newest) in TESTED.items():
        number = found.get(name)
        state = "unknown" if number is None else "tested"
        if number is not None and _parts(number) < _parts(oldest):
            state = "older"
            cure = f"pip install --upgrade '{name}>={oldest}'"
            problems.append(f"{name} {number} is older than {oldest}, which this version needs: {cure}")
        elif number is not None and _parts(number) > _parts(newest):
            state = "newer"  # no problem by itself: what it breaks, the self-test shows
        rows.append(dict(name=name, version=number, oldest=oldest, newest=newest, state=state))
    return rows


def _parts(number: str) -> tuple[int, ...]:
    """ "5.24.0rc1" -> (5, 24, 0): enough to compare releases."""
    found = re.match(r"\d+(?:\.\d+)*", number)
    parts = [int(part) for part in found[0].split(".")] if found else []
    return tuple((parts + [0, 0, 0])[:3])


def foreign(problems: list[str]) -> list[dict[str, Any]]:
    """Other packages that are imported by our name: PyPI's dflash-mlx is one."""
    here = Path(__file__).resolve().parent
    found: list[dict[str, Any]] = []
    for name in sorted(set(packages_distributions().get(_IMPORT, ())) - {OURS}):
        found.append(dict(name=name, version=version(name), path=str(distribution(name).locate_file(_IMPORT))))
        problems.append(
            f"{name} {version(name)} is installed here too and has files of the same name ({_IMPORT}), so that parts "
            f"of the one run with parts of the other: pip uninstall -y {name} {OURS}, then install {OURS} again"
        )
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or os.curdir) / _IMPORT
        if not (folder / "__init__.py").is_file() or folder.resolve() == here:
            continue
        if any(Path(each["path"]).resolve() == folder.resolve() for each in found):
            continue
        found.append(dict(name=None, version=None, path=str(folder.resolve())))
        problems.append(
            f"another {_IMPORT} lies in {folder.resolve()}, and this one is {here}; which is imported depends on where "
            "Python is started: remove one of the two from the path"
        )
    return found


def environment() -> dict[str, Any]:
    """Where this package is, and which Python runs it."""
    return dict(
        package=str(Path(__file__).resolve().parent),
        executable=sys.executable,
        virtual=sys.prefix != sys.base_prefix,
    )


def memory() -> dict[str, int]:
    """Bytes that this machine has, and that a model may use."""
    machine = this_machine()
    return dict(bytes=machine.memory, usable_bytes=machine.usable)


def caches(problems: list[str]) -> list[dict[str, Any]]:
    """The hub's cache and ours: how much they hold, and how much is free where they are."""
    return [
        _cache("hub", Path(constants.HF_HUB_CACHE), "HF_HOME", problems),
        _cache("dflash-metal", default_cache_dir(), "XDG_CACHE_HOME", problems),
    ]


def _cache(name: str, folder: Path, variable: str, problems: list[str]) -> dict[str, Any]:
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    writable = os.access(place, os.W_OK)
    move = f"set {variable} to a folder on another disk"
    if not writable:
        problems.append(f"{place}, where models are kept ({name}), cannot be written to: make it writable, or {move}")
    elif free < _LITTLE:
        problems.append(
            f"{free / 1e9:.1f} GB are free in {place}, where models are kept ({name}), and a small one takes 2: free "
            f"some space, or {move}"
        )
    return dict(name=name, path=str(folder), bytes=_size(folder), free_bytes=free, writable=writable)


def _size(folder: Path) -> int:
    """Bytes of all files, links left out (the hub's snapshots are links to its blobs), and what cannot be read."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                try:
                    total += os.path.getsize(path)
                except OSError:
                    continue
    return total
