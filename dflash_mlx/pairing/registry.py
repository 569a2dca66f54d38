"""Which public draft belongs to which target: `registry.toml`, read when it is first asked for."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_mlx.hub.names import cached_repository

DEMO = "demo"
FORMATS = ("dflash", "dflash2")


@dataclass(frozen=True)
class Row:
    """One draft; the fields are explained in `registry.toml`."""

    draft: str
    targets: tuple[str, ...]
    family: str
    format: str
    block: int | None = None
    revision: str | None = None
    licence: str | None = None
    notes: tuple[str, ...] = ()
    remark: str | None = None
    refused: str | None = None
    tested: bool = False

    def __post_init__(self) -> None:
        names = [name == name.lower() and "/" not in name for name in self.targets]
        if not names or not all(names) or self.format not in FORMATS or (self.block or 2) < 2:
            raise ValueError(f"registry.toml: the row of {self.draft} is not well formed: {self}.")


@cache
def rows() -> tuple[Row, ...]:
    """Every row, in the order of the file.

    Raises:
        ValueError: a row is malformed, or a draft or a target is named twice.
    """
    content = tomllib.loads(Path(__file__).with_name("registry.toml").read_text(encoding="utf-8"))
    return parse(content)


def parse(content: dict) -> tuple[Row, ...]:
    """The rows of a parsed registry file; `rows` says what it raises."""
    tables: list[dict[str, Any]] = content["draft"]
    lists = ("targets", "notes")
    found = tuple(Row(**table | {key: tuple(table[key]) for key in lists if key in table}) for table in tables)
    names = [row.draft for row in found] + [name for row in found for name in row.targets if name != DEMO]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"registry.toml names {', '.join(twice)} twice, so a target would have two drafts.")
    return found


# What may follow a model's name without making it another model: formats, quantisations, who converted it and when.
_FORMAT = (
    r"mlx|hf|gguf|safetensors|bf16|fp16|fp8|fp32|f16|f32|\d+(\.\d+)?-?bits?|int[48]|w\d+a\d+|q\d\w*|mxfp[48]|nvfp4|nf4"
    r"|awq|gptq|bnb|unsloth|autoround|dwq([-_]\d{4,8})?|dq\d?|g\d+|gs\d+|ud|dynamic|mixed|quantized|optiq|v\d+"
)
_COPY = re.compile(rf"([-_.]({_FORMAT}))*")


def is_copy(name: str, base: str) -> bool:
    """Whether `name` is `base` or its name with formats and quantisations behind it; upper and lower case are alike.

    A name that goes on otherwise (-Thinking, -2507, -Base) is another model, whose draft would accept less.
    """
    name, base = name.lower(), base.lower()
    return name.startswith(base) and _COPY.fullmatch(name, len(base)) is not None


def base_name(target: str) -> str:
    """The last part of a repository's name or of a path; a snapshot folder of the hub's cache is its repository."""
    return (cached_repository(target) or target).replace("\\", "/").rstrip("/").rpartition("/")[2]


def draft_for(target: str) -> Row | None:
    """The row of the target's name (repository or folder), at any quantisation; "demo" means the embedded pair."""
    if target == DEMO:
        return row_of(DEMO)
    name = base_name(target)
    return next((r for r in rows() if r.draft != DEMO and any(is_copy(name, base) for base in r.targets)), None)


def row_of(draft: str) -> Row | None:
    """The row that names this draft."""
    return next((row for row in rows() if row.draft.lower() == draft.lower()), None)
