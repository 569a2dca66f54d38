"""Writing whole or not at all: a folder or file appears complete under its name, or the name keeps what it had.

It is written beside its place and moved there at the end. After an interrupt, a full disk or an exception the part
that was written is removed; only a process that is killed leaves it behind, under a name that begins with a dot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:  # the chat's window writes files too, and must not wait for MLX
    import mlx.core as mx

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def whole_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which becomes `path` if the block ends well. Missing parents are made.

    Args:
        replace: what is at `path` gives way, at the end.
    Raises:
        FileExistsError: something is at `path`, and `replace` is not set.
        OSError: it cannot be written there.
    """
    if not replace:
        refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.parent / f".{path.name}.{uuid.uuid4().hex}"  # mkdtemp would make the folder private
    try:
        scratch.mkdir()
        yield scratch
        for file in scratch.rglob("*"):
            if file.is_file():
                _flush(file)
        if not replace:
            refuse_existing(path)
        elif path.exists():  # os.replace needs the place free
            shutil.rmtree(path)
        os.replace(scratch, path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def refuse_existing(path: Path) -> None:
    """Raises FileExistsError if something is there, a dangling link too."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already, and nothing is overwritten. Delete it, or give another name.")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, with its suffix, that replaces it if the block ends well.

    It can be read by its owner only, unless `path` is there already: then its mode is kept.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        if path.exists():
            aside.chmod(path.stat().st_mode)
        _flush(aside)
        os.replace(aside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()


def _flush(file: Path) -> None:
    """Some file systems notice only here that they are full."""
    with file.open("rb+") as written:
        os.fsync(written.fileno())


def save_weights(path: Path, weights: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. metadata: more entries of its header.

    Raises:
        OSError: it cannot be written, or was cut short. MLX reports a full disk as a RuntimeError, or not at all.
    """
    import mlx.core as mx

    try:
        mx.save_safetensors(str(path), dict(weights), metadata={"format": "mlx", **(metadata or {})})
    except RuntimeError as error:
        full = shutil.disk_usage(path.parent).free < sum(value.nbytes for value in weights.values())
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
    check_written(path)


def check_written(path: Path) -> None:
    """Raises OSError if a safetensors file is not as long as its header says."""
    try:
        with safe_open(path, "numpy"):
            pass
    except SafetensorError as error:
        raise OSError(errno.ENOSPC, f"was cut short ({error}). Is the disk full?", str(path)) from error


def check_space(path: Path, needed: int) -> None:
    """Raises OSError if the disk on which `path` would be has fewer than `needed` bytes free."""
    there = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise OSError(
            f"{path} needs {needed / 1e9:.2f} GB, and the disk of {there} has {free / 1e9:.2f} GB free. Free some "
            "space, or give a folder on another disk."
        )
