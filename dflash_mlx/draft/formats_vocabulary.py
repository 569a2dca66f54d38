"""The tables of a reduced vocabulary: which token of the target each row of a draft's own head means.

speculators stores `d2t` [rows] as offsets (target id = row + d2t[row]) and `t2d` [vocabulary] of bool, true for the
target ids that are kept. Either is enough; both have to agree.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import CheckpointError

TABLES = ("d2t", "t2d")


def take_target_ids(tensors: dict[str, mx.array], config: DraftConfig, name: str) -> mx.array | None:
    """Remove the tables from the tensors, and return the target id of each row of the head.

    Args:
        config: of which `draft_vocab_size` is the rows of the head that the checkpoint holds.
    Returns:
        [rows] int32, or None if a row is the target id.
    Raises:
        CheckpointError: a table is missing, or the two contradict the vocabulary or each other.
    """
    offsets, marks = (_integers(tensors.pop(key), key, name) if key in tensors else None for key in TABLES)
    vocab = config.vocab_size
    rows = config.draft_vocab_size or vocab
    kept = None if marks is None else [index for index, mark in enumerate(marks) if mark]
    if offsets is None and kept is None:
        if rows == vocab:
            return None
        raise CheckpointError(
            f"{name} has a head of {rows} tokens and no table (`d2t`) that says which of the target's {vocab} they "
            "are. Every proposal would be another token than meant. Download the draft again."
        )
    ids = kept or [] if offsets is None else [row + offset for row, offset in enumerate(offsets)]
    problem = _problem(ids, kept, rows, vocab)
    if problem:
        absolute = offsets is not None and _problem(offsets, kept, rows, vocab) is None
        why = " Its entries look like target ids; this format stores offsets (target id - row)." if absolute else ""
        raise CheckpointError(
            f"The vocabulary table of {name} {problem}.{why} Every wrong id costs a token. Download the draft again, "
            "or correct its table."
        )
    if ids == list(range(vocab)):
        return None
    if config.draft_vocab_size is None:
        raise CheckpointError(
            f"{name} has a vocabulary table that reorders tokens and no head of its own (`lm_head.weight`). With the "
            "target's head it would turn right tokens into wrong ones. Download the draft again."
        )
    return mx.array(ids, dtype=mx.int32)


def _integers(table: mx.array, key: str, name: str) -> list[int]:
    if table.ndim != 1 or mx.issubdtype(table.dtype, mx.floating):
        raise CheckpointError(
            f"`{key}` of {name} has to be one row of integers, got {table.dtype} of shape {list(table.shape)}. Its "
            "tokens cannot be told from it. Download the draft again."
        )
    return table.tolist()  # type: ignore[return-value]


def _problem(ids: list[int], kept: list[int] | None, rows: int, vocab: int) -> str | None:
    if len(ids) != rows:
        return f"has {len(ids)} entries, and its head {rows} rows"
    wrong = next((index for index in ids if not 0 <= index < vocab), None)
    if wrong is not None:
        return f"names the target id {wrong}, and ids have to be in 0..{vocab - 1}"
    if len(set(ids)) < rows:
        return f"names a target id twice ({rows - len(set(ids))} of {rows} entries repeat another)"
    if kept is not None and sorted(ids) != kept:
        return f"contradicts itself: `d2t` names {rows} target ids, and `t2d` marks {len(kept)}, not the same ones"
    return None
