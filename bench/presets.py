"""Presets: what is run under which conditions. The data is in presets.toml; what the command line says goes before it.

The numbers that others published are in there too, and read by `published`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from .form import BenchError, read
from .published import Published, published

ARMS = ("stock", "plain", "dflash", "auto", "sequential")


@dataclass(frozen=True)
class Settings:
    """One run, but for its models.

    prompts: names of sets (`prompt_sets`); limit: prompts of each category at most; limits: of some, another one.
    block_sizes: of the arm `dflash`, an arm for each; none is the draft's own choice. pairs: of passes, A B B A.
    """

    name: str = ""
    prompts: tuple[str, ...] = ("offline",)
    limit: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    max_tokens: int = 256
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int | None = None
    template: Literal["chat", "raw"] = "chat"
    thinking: bool | None = None
    block_sizes: tuple[int, ...] = ()
    arms: tuple[str, ...] = ("stock", "plain", "dflash", "auto")
    pairs: int = 1

    def __post_init__(self) -> None:
        wrong = [name for name in self.arms if name not in ARMS]
        if wrong or not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"`arms` has to be some of {', '.join(ARMS)}, each once, got {', '.join(self.arms)!r}.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`limit` has to be 1 or more, got {self.limit}.")
        if any(size < 2 for size in self.block_sizes) or len(set(self.block_sizes)) < len(self.block_sizes):
            raise ValueError(
                f"`block_sizes` have to be 2 or more (an anchor and drafts), each once: {self.block_sizes}."
            )

    def limit_of(self, prompts: str) -> int | None:
        return self.limits.get(prompts, self.limit)


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    targets: tuple[str, ...]
    parts: tuple[Settings, ...]
    published: tuple[Published, ...] = ()


@cache
def presets() -> dict[str, Preset]:
    """By name, in the order of the file."""
    content = tomllib.loads((Path(__file__).parent / "presets.toml").read_text("utf-8"))
    return {name: _preset(name, table) for name, table in content.items()}


def _preset(name: str, table: dict[str, Any]) -> Preset:
    parts = tuple(read(Settings, each, f"{name}.part") for each in table["part"])
    rows = published(table.get("published", []), table.get("conditions", {}), name)
    return Preset(name, table["about"], tuple(table["targets"]), parts, rows)


def preset(name: str) -> Preset:
    """Raises BenchError: there is none of this name."""
    found = presets().get(name)
    if found is None:
        raise BenchError(f"There is no preset {name!r}. Give one of {', '.join(presets())}.")
    return found


def parts_of(made: Preset, names: tuple[str, ...]) -> tuple[Settings, ...]:
    """All, or those of these names. Raises BenchError."""
    known = [part.name for part in made.parts]
    unknown = [name for name in names if name not in known]
    if unknown:
        parts = f"its parts are {', '.join(known)}" if any(known) else "it has no parts"
        raise BenchError(
            f"The preset {made.name} has no part {unknown[0]!r}: {parts}. Give one of them, or none for all."
        )
    return tuple(part for part in made.parts if not names or part.name in names)
