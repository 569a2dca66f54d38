"""What the heads of safetensors files say about the weights in a folder. Nothing but the heads is read, and no MLX."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import CheckpointError

_LARGEST_HEAD = 100_000_000  # the format's own limit
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_BESIDE = frozenset({
    "vision_tower", "vision_model", "vision_embedder", "vision_adapter", "vision_projection", "visual", "embed_vision",
    "multi_modal_projector", "mm_projector", "audio_tower", "embed_audio", "mtp",
})  # fmt: skip
_SEEING = frozenset({"muse_spark"})  # `model_type` of what mlx_lm loads with its tower


@dataclass(frozen=True)
class Stored:
    """bytes: as they are stored. parameters: how many there are, unpacked. size: bytes of a floating one. beside: bytes
    of what a target is loaded without."""

    bytes: int
    parameters: int
    size: int
    beside: int = 0

    @property
    def held(self) -> int:
        """Bytes of a target in memory."""
        return self.bytes - self.beside


def is_held(name: str, config: Mapping[str, Any]) -> bool:
    """Whether mlx_lm keeps a target's tensor of this name: in its `sanitize` a text model drops towers for pictures and
    sound, their projectors, and heads for more than one token.

    `tests/test_plan.py` holds it to what is loaded.
    """
    return config.get("model_type") in _SEEING or _BESIDE.isdisjoint(name.split("."))


def read_stored(folder: Path, config: Mapping[str, Any], pattern: str = "*.safetensors") -> Stored:
    """The weights in the files of a folder.

    Args:
        config: its config.json, which says how many weights share a scale.
    Raises:
        CheckpointError: a file is no safetensors file, or there is none.
    """
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob(pattern)):
        tensors |= _head(path)
    if not tensors:
        raise CheckpointError(f"{folder} has no {pattern}, so there are no weights to count. Download them too.")
    sizes = {name: each["data_offsets"][1] - each["data_offsets"][0] for name, each in tensors.items()}
    beside = sum(size for name, size in sizes.items() if not is_held(name, config))
    floats = [each["dtype"] for each in tensors.values() if each["dtype"] in _SIZES]
    size = max((_SIZES[kind] for kind in set(floats) if 2 * floats.count(kind) > len(floats)), default=2)
    parameters = sum(_parameters(name, tensors, config) for name in tensors)
    return Stored(sum(sizes.values()), parameters, size, beside)


def _parameters(name: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Of a packed layer the weights are counted, by its scales, and not what they are packed with."""
    layer, _, last = name.rpartition(".")
    scales = tensors.get(f"{layer}.scales")
    if scales is None:
        return math.prod(tensors[name]["shape"])
    if last != "weight":
        return 0 if last in ("scales", "biases") else math.prod(tensors[name]["shape"])
    quantization = config.get("quantization") or {}
    own = quantization.get(layer)
    group = (own if isinstance(own, Mapping) else quantization).get("group_size", 64)
    return math.prod(scales["shape"]) * int(group)


def _head(path: Path) -> dict[str, Any]:
    """Name -> dtype, shape, data_offsets."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEAD:
                raise ValueError(f"a head of {length} bytes")
            head = json.loads(file.read(length))
        return {name: value for name, value in head.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error}). Fetch it again.") from error
