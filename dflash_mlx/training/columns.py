"""Files of a data set: columns of numbers, each file there whole or not at all, and read whole or in part."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_mlx.errors import DFlashError
from dflash_mlx.files import check_written, whole_file


class DatasetError(DFlashError):
    """A data set is incomplete, damaged, or of something else than what was asked for."""


def save(path: Path, columns: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Raises OSError: the disk is full, or it cannot be written."""
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as aside:
        try:
            save_file(dict(columns), aside, metadata)
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(errno.EIO, f"cannot be written ({error}). Is the disk full?", str(path)) from error
        check_written(aside)
        aside.chmod(0o644)


def load(path: Path, cure: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All columns, and the metadata. Raises DatasetError, which says `cure`."""
    with opened(path, cure) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def opened(path: Path, cure: str) -> Iterator[Any]:
    """A file, of which only what is asked for is read.

    Raises:
        DatasetError: it is not there or damaged, also while the block reads; says `cure`.
    """
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except FileNotFoundError:
        raise DatasetError(f"{path} is not there. To have it, {cure}.") from None
    except (SafetensorError, OSError) as error:
        raise DatasetError(f"{path} is damaged ({error}). Delete it, and {cure}.") from error


def rows(file: Any, name: str, start: int, stop: int) -> np.ndarray:
    """Rows start..stop-1 of a column of an open file; nothing else is read.

    Raises:
        ValueError: there are not so many.
    """
    column = file.get_slice(name)
    length = column.get_shape()[0]
    if not 0 <= start <= stop <= length:
        raise ValueError(f"`start` and `stop` have to be in 0..{length} and ascend, got {start} and {stop}.")
    return column[start:stop]
