"""The metrics file: one JSON line for every turn, whatever window it was in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mlx.app.lines import LineFile, StoreError, encode


class MetricsLog:
    """Appends to `path`, which is made with the first line. Several processes may write to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refused = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            StoreError: it cannot be written; raised once, and again only after a line that could.
        """
        try:
            file = LineFile(self.path, make=True, wait=True)
            try:
                file.append(encode(record))
            finally:
                file.close()
        except StoreError as error:
            if self._refused:
                return
            self._refused = True
            raise StoreError(f"{error} The numbers of this turn are not kept; the chat goes on.") from error
        self._refused = False
