"""Which draft belongs to which target: data. The draft's own config.json stays the authority on shapes.

Sources: z-lab's model list and the survey in its checkpoints' configs; the embedded pair is our own.
"""

from __future__ import annotations

import re
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
    Row("qwen3-coder-next", "z-lab/Qwen3-Coder-Next-DFlash"),
    Row("qwen3.5-4b", "z-lab/Qwen3.5-4B-DFlash"),
    Row("qwen3.5-9b", "z-lab/Qwen3.5-9B-DFlash"),
    Row("qwen3.5-27b", "z-lab/Qwen3.5-27B-DFlash"),
    Row("qwen3.5-35b-a3b", "z-lab/Qwen3.5-35B-A3B-DFlash"),
    Row("qwen3.6-27b", "z-lab/Qwen3.6-27B-DFlash"),
    Row("qwen3.6-35b-a3b", "z-lab/Qwen3.6-35B-A3B-DFlash"),
    Row("gemma-4-31b-it", "z-lab/gemma-4-31B-it-DFlash"),
    Row("gemma-4-26b-a4b-it", "z-lab/gemma-4-26B-A4B-it-DFlash"),
    Row("gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
    Row("gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"),
    Row("llama-3.1-8b-instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    Row("meta-llama-3.1-8b-instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
)


# What may follow a model's name without making it another model: formats and quantisations.
_SAME_MODEL = re.compile(
    r"([-_.](mlx|hf|gguf|safetensors|bf16|fp16|fp8|fp32|\d+-?bits?|int[48]|q\d\w*|mxfp[48]|nvfp4|awq|gptq|dwq|dq\d?|g\d+"
    r"|gs\d+|quantized|optiq|v\d+))*"
)


def draft_for(target: str) -> Row | None:
    """The row of the target's base name (repository or folder), at any quantisation.

    A name that goes on otherwise (-Thinking, -2507, -Base) is another model, whose draft would accept less.
    """
    name = target.rstrip("/").rpartition("/")[2].lower()
    return next(
        (row for row in ROWS if name.startswith(row.target) and _SAME_MODEL.fullmatch(name[len(row.target) :])), None
    )
