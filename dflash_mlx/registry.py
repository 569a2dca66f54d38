"""Which draft belongs to which target: data. The draft's own config.json stays the authority on shapes.

Sources: z-lab's model list and the survey in its checkpoints' configs; the embedded pair is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

DEMO = "demo"


@dataclass(frozen=True)
class Row:
    """target: base name of a model repository, lower case; quantised and converted copies start with it."""

    target: str
    draft: str
    note: str = ""


ROWS = (
    Row("qwen3-4b", "z-lab/Qwen3-4B-DFlash-b16", "trained with thinking off"),
    Row("qwen3-8b", "z-lab/Qwen3-8B-DFlash-b16", "trained with thinking off"),
    Row("qwen3-coder-30b-a3b-instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    Row("llama-3.1-8b-instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    Row("meta-llama-3.1-8b-instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
)


def draft_for(target: str) -> Row | None:
    """The row whose name starts the target's base name (repository or folder); the longest wins."""
    name = target.rstrip("/").rpartition("/")[2].lower()
    rows = [row for row in ROWS if name == row.target or name.startswith((row.target + "-", row.target + "_"))]
    return max(rows, key=lambda row: len(row.target), default=None)
