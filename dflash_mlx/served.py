"""Which models are run here, by their config.json alone and without importing MLX: for lists that have to be quick.

`targets.supported` and mlx_lm's own tables are the authority; `tests/test_served.py` holds this to them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SERVED = frozenset({
    "gemma3_text", "gemma4", "gemma4_text", "gpt_oss", "lfm2", "lfm2_moe", "llama", "llama4_text", "muse_glimmer",
    "nemotron_h", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
})  # fmt: skip
"""mlx_lm's model files that have an adapter in `targets/`."""


def runs(config: Mapping[str, Any]) -> tuple[bool | None, str | None]:
    """Whether a model is run here, None where that is found out at loading; and why."""
    if config.get("model_file") is not None:
        return False, f"it needs code of its own ({config['model_file']!r})"
    files = model_files(config)
    if set(files) & SERVED:
        return True, None
    if not any(has_file(file) for file in files):
        return False, f"mlx_lm has no {' or '.join(files) or 'model type'}"
    return None, "if it passes the check at loading"


def model_files(config: Mapping[str, Any]) -> list[str]:
    """mlx_lm's file for a config.json, and that for its text part if it has one; [] if it names none."""
    text = config.get("text_config")
    kinds = [config.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None]
    return [_remapping().get(kind, kind) for kind in kinds if isinstance(kind, str)]


def has_file(file: str) -> bool:
    """Whether mlx_lm has a model file of this name."""
    folder = _mlx_lm()
    return folder is not None and file.isidentifier() and (folder / "models" / f"{file}.py").is_file()


@cache
def _mlx_lm() -> Path | None:
    """Where mlx_lm lies. Found, not imported."""
    spec = find_spec("mlx_lm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


@cache
def _remapping() -> dict[str, str]:
    """`mlx_lm.utils.MODEL_REMAPPING`, read from its source, since importing it imports MLX."""
    folder = _mlx_lm()
    try:
        tree = ast.parse((folder / "utils.py").read_text("utf-8")) if folder else ast.Module([], [])
    except (OSError, SyntaxError):
        return {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "MODEL_REMAPPING":
            return dict(ast.literal_eval(statement.value))
    return {}
