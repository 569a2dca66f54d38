"""What was loaded, in plain values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from dflash_mlx.app.backend import Pair, Tokenizer
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.templates import render


def describe(job: LoadModel, pair: Pair, ready_s: float, notes: Sequence[str], memory_gb: float | None) -> ModelCard:
    """The card of a pair that took `ready_s` to load, and of what the library warned about meanwhile."""
    draft = pair.draft
    return ModelCard(
        target=PurePath(job.model).name or job.model,
        draft=draft.name if draft is not None else None,
        block_size=draft.block_size if draft is not None else None,
        ready_s=ready_s,
        notes=tuple(notes),
        largest_block=pair.largest_block,
        model=job.model,
        context_length=pair.context_length,
        target_gb=pair.target_gb,
        draft_gb=pair.draft_gb,
        memory_gb=memory_gb,
        thinks=thinks(pair.tokenizer),
        from_launch=job.launched_at is not None,
    )


def thinks(tokenizer: Tokenizer) -> bool:
    """Whether the chat template can switch reasoning on and off."""
    if not tokenizer.has_chat_template:
        return False
    try:
        render(tokenizer, [{"role": "user", "content": "."}], thinking=True)
    except Exception:  # no such switch; or a template that raises, as it may, and then nothing is known
        return False
    return True
