"""How a model is converted, and what is written beside its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx import __version__
from dflash_mlx.draft.quantize import BITS, GROUP_SIZES, check_choice
from dflash_mlx.errors import CheckpointError

TARGET_DTYPES = ("float32", "bfloat16", "float16")
CONVERTED = "converted"  # key of config.json
SLACK = 64 << 20  # bytes for everything but the weights
LEGAL = ("README*", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")


@dataclass(frozen=True)
class Recipe:
    """What becomes of the weights: `bits` per packed weight in groups of `group_size` (None: none is packed), `dtype`
    of all others (None: as stored).

    Raises:
        ValueError: a value is out of range.
    """

    bits: int | None = None
    group_size: int = 64
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_choice("bits", self.bits, BITS, "or None, which packs nothing")
        check_choice("group_size", self.group_size, GROUP_SIZES)
        if self.dtype is not None and self.dtype not in TARGET_DTYPES:
            raise ValueError(f"`dtype` has to be one of {', '.join(TARGET_DTYPES)} or None; got {self.dtype!r}.")

    def refuse_packed(self, config: Mapping[str, Any] | None, name: str) -> None:
        """Raises CheckpointError if weights that `config` says are packed were to be packed again."""
        if self.bits is not None and config:
            how = f"{config['bits']} bits" if "bits" in config else config.get("quant_method", "by its config.json")
            raise CheckpointError(
                f"{name} is quantised already ({how}). Rounding rounded weights again loses more than rounding once. "
                "Give the original, or leave `bits` out to copy this one as it is."
            )


def write_config(folder: Path, config: dict[str, Any], recipe: Recipe, made_from: Mapping[str, Any] | None) -> None:
    packed = {} if recipe.bits is None else {"bits": recipe.bits, "group_size": recipe.group_size}
    config[CONVERTED] = {"by": f"dflash-metal {__version__}", **(made_from or {}), **packed}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def copy_beside(folder: Path, output: Path, patterns: tuple[str, ...]) -> None:
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, output / path.name)  # what a link leads to, under the mode of a new file
