"""The embedded pair `demo`: SmolLM2-135M-Instruct and the small DFlash draft that ships with this package.

The draft is package data. The target is found or fetched once as a GGUF, converted to an MLX folder in the
cache, and loaded in the dtype that decodes fastest here:

    folder = target_folder(progress=print)
    model, config = load_target(folder, best_dtype())

`fetch` finds or downloads, `gguf` converts, `target` loads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_mlx.demo import artifact, manifest
from dflash_mlx.demo.fetch import disk_error, find_or_fetch_gguf
from dflash_mlx.demo.lock import exclusive
from dflash_mlx.demo.progress import Progress, silent

if TYPE_CHECKING:
    from dflash_mlx.demo.target import best_dtype, load_target

__all__ = ["best_dtype", "converted_folder", "default_cache_dir", "draft_folder", "load_target", "target_folder"]

_FOLDER = "SmolLM2-135M-Instruct-Q4_1"


def __getattr__(name: str) -> Any:
    """What imports MLX, imported when it is first asked for: lists of models need the folders only."""
    if name in ("best_dtype", "load_target"):
        from dflash_mlx.demo import target

        return getattr(target, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def target_folder(*, gguf: Path | None = None, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The target as an MLX model folder, fetched and converted if it is not there yet.

    Args:
        gguf: a copy of the GGUF to use; checked even if the folder is there already.
        cache_dir: where models are kept; `default_cache_dir()` if None.
    Raises:
        FetchError: the GGUF cannot be found or fetched, or the disk is full.
        CheckpointError: it cannot be converted.
    """
    tell = progress or silent
    cache = (cache_dir or default_cache_dir()) / "demo"
    folder = cache / _FOLDER
    if gguf is None and manifest.complete(folder, artifact.GGUF_SHA256):
        return folder
    from dflash_mlx.demo.gguf import convert

    source = find_or_fetch_gguf(gguf, cache, tell)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with exclusive(cache / ".convert.lock", tell, "Waiting for another process to convert the demo target"):
            if not manifest.complete(folder, artifact.GGUF_SHA256):
                convert(source, folder, tell, sha256=artifact.GGUF_SHA256)
    except OSError as error:
        raise disk_error(error, cache) from error
    return folder


def converted_folder(cache_dir: Path | None = None) -> Path | None:
    """The target's folder if it was converted before; nothing is fetched."""
    folder = (cache_dir or default_cache_dir()) / "demo" / _FOLDER
    return folder if manifest.complete(folder, artifact.GGUF_SHA256) else None


def draft_folder() -> Path:
    """The draft's folder inside the package, in z-lab's checkpoint format."""
    return Path(__file__).parent / "draft"


def default_cache_dir() -> Path:
    """~/Library/Caches/dflash-metal on macOS, else $XDG_CACHE_HOME or ~/.cache, below it dflash-metal."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dflash-metal"
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "dflash-metal"
