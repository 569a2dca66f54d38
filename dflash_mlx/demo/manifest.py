"""The converted folder's list of files and sizes; written last, so its presence says that the rest is there."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "manifest.json"
FORMAT = 1  # raise it when convert() writes something else; older folders are then made again


def write(folder: Path, *, source: str, sha256: str) -> None:
    """Note every file of `folder` with its size in bytes, and the GGUF it came from."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    entry = {"format": FORMAT, "source": source, "sha256": sha256, "files": files}
    (folder / NAME).write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")


def complete(folder: Path, sha256: str) -> bool:
    """Whether `folder` holds every file that its manifest lists, with that size, from the GGUF with this sha256."""
    try:
        entry = json.loads((folder / NAME).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in entry["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(entry.get("format") == FORMAT and entry.get("sha256") == sha256 and sizes == entry["files"])
