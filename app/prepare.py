"""All of loading a pair that can fail before weights are read, so that the pair before it can stay until then.

Imports MLX: only for the engine's thread, through `library`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mlx import demo
from dflash_mlx.app.backend import Progress, TooLarge
from dflash_mlx.errors import CheckpointError, IncompatiblePair
from dflash_mlx.machine import this_machine
from dflash_mlx.pairing.inspection import Pair, examine
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.planned import Asked, sized


def prepare(path: str, options: Mapping[str, Any], progress: Progress, insist: bool = False) -> None:
    """Find a pair, check it, and fetch what is not here; no weights are read.

    Args:
        path, options: as `dflash_mlx.load` takes them.
        progress: called while something is fetched, and before; what it raises comes out here.
        insist: what is too large by the estimate is none the less for that.
    Raises:
        TooLarge, or what `load` would raise: the text is for the user.
    """
    progress(f"Looking for {path}", None)
    pair = _examined(path, options)
    if not insist:
        _check_memory(path, options, pair)
    if path == DEMO:
        gguf = options["gguf"]
        demo.target_folder(gguf=Path(gguf).expanduser() if gguf is not None else None, progress=progress)
        return
    sources = [source for source in (pair.target, pair.draft) if source is not None and source.folder is None]
    for source in sources:
        source.fetch(progress)
    if sources:
        _examined(path, options)  # with the tokenizers, which could not be compared before


def _examined(path: str, options: Mapping[str, Any]) -> Pair:
    """The pair as `load` would put it together.

    Raises:
        DFlashError, ValueError: what that would raise.
    """
    draft, draft_revision = options["draft"], options["draft_revision"]
    pair = examine(path, options["revision"], draft, draft_revision)
    if draft is not None and not pair.resolution.asked and isinstance(pair.refused, CheckpointError | IncompatiblePair):
        # Of a draft that was only found `load` warns, and leaves it out; is it the draft?
        pair = examine(path, options["revision"], None, None)
    if pair.refused is not None:
        raise pair.refused
    return pair


def _check_memory(path: str, options: Mapping[str, Any], pair: Pair) -> None:
    names = ("revision", "draft", "draft_revision", "draft_bits")
    numbers = sized(Asked(path, this_machine(), **{name: options[name] for name in names}), pair)
    fit = numbers.fit if numbers is not None else None
    if fit is not None and fit.verdict == "too large":
        raise TooLarge(
            f"{path} needs about {fit.needed_gb:.1f} GB, and a model may use {fit.available_gb:.1f} GB here: it would "
            "swap or be ended. Ask for it once more, and it is loaded all the same."
        )
