"""Where prompts come from: the built-in set, a file, or a data set of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from dflash_mlx.training.prompts import Prompt, demo

DEMO_COUNT = 24000


def read_prompts(name: str, count: int | None = None, seed: int = 0) -> list[Prompt]:
    """Up to `count` prompts.

    Args:
        name: "demo", a path ending in .jsonl or .txt, or the name of a data set.
    """
    if name == "demo":
        return demo.prompts(count or DEMO_COUNT, seed)
    raise ValueError(f"{Path(name)}")
