"""The target and its tokenizer through mlx_lm, whose errors are explained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import demo, threads
from dflash_mlx.errors import CheckpointError
from dflash_mlx.pairing.registry import DEMO


def load_target(
    folder: Path, name: str, dtype: str | None, model_config: dict[str, Any] | None, lazy: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its config, in `dtype`.

    Raises:
        CheckpointError: mlx_lm cannot load it.
    """
    if name == DEMO:
        return demo.load_target(folder, dtype or demo.best_dtype())
    try:
        model, config = mlx_lm_utils.load_model(folder, lazy, model_config=model_config)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{name} could not be loaded by mlx_lm: {summary(error)}. Config and weights do not belong together, the "
            "download is damaged, or the model is newer than this mlx_lm. Download it again, or update mlx_lm."
        ) from error
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
    threads.compute_constants(model)
    return model, config


def summary(error: Exception) -> str:
    """One line: of a list of parameters the first, and how many follow."""
    if isinstance(error, KeyError):
        key = str(error.args[0] if error.args else "?")
        return f"its {'weights have' if '.' in key else 'config.json has'} no `{key}`"
    lines = [line.strip().rstrip(".,") for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if len(lines) == 1 or not lines[0].endswith(":"):
        return lines[0]
    return f"{lines[0]} {lines[1]}" + (f" and {len(lines) - 2} more" if lines[2:] else "")


def load_tokenizer(
    folder: Path, name: str, tokenizer_config: dict[str, Any] | None, model_config: dict[str, Any] | None
) -> TokenizerWrapper:
    """The tokenizer, with every end token that the folder names.

    Raises:
        CheckpointError: it is not there or cannot be read.
    """
    changed = model_config or {}
    ends = changed["eos_token_id"] if "eos_token_id" in changed else _end_tokens(folder)
    try:
        return mlx_lm_utils.load_tokenizer(folder, tokenizer_config, eos_token_ids=ends)
    except Exception as error:  # the readers behind it raise a dozen kinds, plain Exception among them
        asked = ", and check `tokenizer_config`" if tokenizer_config else ""
        raise CheckpointError(
            f"The tokenizer of {name} in {folder} cannot be loaded ({_first(error)}). Without it there is no text to "
            f"read or to write. Download its tokenizer files (tokenizer.json, tokenizer_config.json) again{asked}."
        ) from error


def _first(error: Exception) -> str:
    """The first sentence of what may be a page."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.split(r"\.\s", lines[0])[0].rstrip(".:")


def _end_tokens(folder: Path) -> list[int] | None:
    """End-token ids of config.json (its text_config too) and generation_config.json together, each an int or a list.

    mlx_lm lets generation_config.json replace config.json's, and takes its id 0 for none. The tokenizer's own comes on
    top of these.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        content = _json(folder / name)
        for ids in (content.get("eos_token_id"), (content.get("text_config") or {}).get("eos_token_id")):
            several = ids if isinstance(ids, list) else [ids]
            found |= {token for token in several if isinstance(token, int)}
    return sorted(found) or None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file that need not be there; mlx_lm says what is wrong with one that has to."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
