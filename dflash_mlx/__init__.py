"""Exact DFlash speculative decoding on MLX, with mlx_lm's API.

Importing this package costs milliseconds: MLX and mlx_lm are imported when a name below is first used.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a bare checkout (no install) `dflash_mlx.app`, `.metal` and `.bench` live beside this folder.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "app").is_dir():
    __path__.append(str(_root))

_EXPORTS = {
    "load": "load",
    "generate": "generate",
    "stream_generate": "generate",
    "convert": "convert",
    "GenerationResponse": "generate",
    "PromptCache": "prompt_cache",
    "make_prompt_cache": "prompt_cache",
    "stable_length": "templates",
    "save_prompt_cache": "prompt_file",
    "load_prompt_cache": "prompt_file",
    "Divergence": "divergence",
    "compare": "divergence",
    "SamplingPolicy": "sampling",
    "make_sampler": "sampling",
    "Segment": "segments",
    "Segments": "segments",
    "read_tool_call": "segments",
    "DFlashError": "errors",
}

if TYPE_CHECKING:
    from dflash_mlx.convert import convert as convert
    from dflash_mlx.divergence import Divergence as Divergence
    from dflash_mlx.divergence import compare as compare
    from dflash_mlx.errors import DFlashError as DFlashError
    from dflash_mlx.generate import GenerationResponse as GenerationResponse
    from dflash_mlx.generate import generate as generate
    from dflash_mlx.generate import stream_generate as stream_generate
    from dflash_mlx.load import load as load
    from dflash_mlx.prompt_cache import PromptCache as PromptCache
    from dflash_mlx.prompt_cache import make_prompt_cache as make_prompt_cache
    from dflash_mlx.prompt_file import load_prompt_cache as load_prompt_cache
    from dflash_mlx.prompt_file import save_prompt_cache as save_prompt_cache
    from dflash_mlx.sampling import SamplingPolicy as SamplingPolicy
    from dflash_mlx.sampling import make_sampler as make_sampler
    from dflash_mlx.segments import Segment as Segment
    from dflash_mlx.segments import Segments as Segments
    from dflash_mlx.segments import read_tool_call as read_tool_call
    from dflash_mlx.templates import stable_length as stable_length

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `dflash_mlx.load`, `dflash_mlx.generate` and `dflash_mlx.convert` the functions, as in mlx_lm.

    Importing the submodule of the same name would bind the module over them.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
