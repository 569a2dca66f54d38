"""The tokens worth proposing, for a draft that shares the target's head: only their rows of it are computed.

`draft_vocabulary.json` lies beside a plain checkpoint, so that other tools can use the folder and ignore the file:

    {"format": 1, "vocab_size": 49152, "ids": [0, 1, 13, ...]}

The target still chooses every token from its whole head: a token that is not listed is never drafted, and written all
the same. The rows are gathered as they are stored, packed or not, when the draft meets its target.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.config import DraftConfig
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CheckpointError
from dflash_mlx.kernels.modules.linear import RowsEmbedding, RowsLinear
from dflash_mlx.targets import Target

FILE = "draft_vocabulary.json"
FORMAT = 1
PADDING = 512  # rows by which padded embeddings of one vocabulary may differ
_DENSE = (nn.Linear, nn.Embedding)
_PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding, RowsLinear, RowsEmbedding)


def write_vocabulary(folder: Path, vocab_size: int, ids: Sequence[int] | np.ndarray) -> None:
    """Store the ids worth proposing, of a target with `vocab_size` tokens, beside a draft.

    Of a packed head `qmm_small_m` takes a number of rows that is a multiple of 8.

    Raises:
        ValueError: they are not two or more ascending ids below `vocab_size`.
    """
    listed = [int(token) for token in ids]
    if problem := _problem(listed, vocab_size):
        raise ValueError(f"`ids` has to be two or more ascending ids in 0..{vocab_size - 1}, and {problem}.")
    content = {"format": FORMAT, "vocab_size": vocab_size, "ids": listed}
    (folder / FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_vocabulary(folder: Path, config: DraftConfig, name: str) -> np.ndarray | None:
    """What the file in a draft folder lists; None without a file, and where it lists every token.

    Returns:
        [n] int32, ascending.
    Raises:
        CheckpointError: the file cannot be read, is damaged, or is not for such a draft.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), so which tokens the draft proposes is not known. Fetch it again, or "
            "delete it: the draft then proposes from the whole vocabulary."
        ) from error
    return listed_in(content, config, name)


def listed_in(content: Any, config: DraftConfig, name: str) -> np.ndarray | None:
    """As `read_vocabulary`, from what the file of the draft `name` holds."""
    problem = _unfit(content, config)
    if problem is not None:
        raise CheckpointError(
            f"{FILE} of {name} {problem}. Tokens that are listed wrongly are never accepted. Fetch the draft again, or "
            "delete the file: the draft then proposes from the whole vocabulary."
        )
    ids = np.array(content["ids"], np.int32)
    return None if len(ids) == config.vocab_size else ids


def _unfit(content: Any, config: DraftConfig) -> str | None:
    if not isinstance(content, Mapping):
        return f"holds a {type(content).__name__}, not an object"
    if content.get("format") != FORMAT:
        return f"has format {content.get('format')!r}, and this version reads {FORMAT}"
    if config.selector is not None:
        return "is beside a DFlash 2 draft, whose selector scores every token and needs the full vocabulary"
    if config.draft_vocab_size is not None:
        return "is beside a draft with a head of its own, which says itself what it proposes"
    size, ids = content.get("vocab_size"), content.get("ids")
    if type(size) is not int or abs(size - config.vocab_size) >= PADDING:
        return f"is for a vocabulary of {size!r} tokens, and the draft's config.json says {config.vocab_size}"
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        return "has no list of integers as `ids`"
    return _problem(ids, min(size, config.vocab_size))


def _problem(ids: Sequence[int], vocab_size: int) -> str | None:
    if len(ids) < 2:
        return f"lists {len(ids)} ids, and 2 or more are needed"
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        return f"lists the id {wrong}, and ids have to be in 0..{vocab_size - 1}"
    later = next((after for before, after in pairwise(ids) if after <= before), None)
    return None if later is None else f"lists ids that do not ascend (at {later})"


def borrow_head(draft: DraftModel, target: Target) -> None:
    """Give a draft with a vocabulary the rows of this target's head, unless it has them already.

    A head of a kind whose rows cannot be picked (an adapter's, say) is shared whole, and a note says so.
    """
    head = target.head_module
    if draft.vocabulary is None or (draft.lender is not None and draft.lender() is head):
        return
    ids = mx.array(draft.vocabulary)
    rows = head_rows(head, ids)
    if rows is None:
        draft.vocabulary = None
        draft.share_head()
        draft.notes = (
            *draft.notes,
            f"the target's head is a {type(head).__name__}, of which no rows can be picked, so {FILE} is not used and "
            "the draft proposes from the whole vocabulary",
        )
        return
    draft.borrow_head(rows, ids)
    draft.lender = weakref.ref(head)


def head_rows(head: nn.Module, ids: mx.array) -> nn.Module | None:
    """A linear layer of the rows `ids` [n] of a head, or of an embedding that serves as one: copies, packed like it.

    None of a kind that is not known here.
    """
    kind = type(head)
    if kind not in (*_DENSE, *_PACKED):
        return None
    rows: nn.Module
    if kind in _DENSE:
        rows = nn.Linear(1, 1, bias=False)
    else:
        rows = nn.QuantizedLinear(64, 1, bias=False, group_size=64, bits=4)
        rows.group_size, rows.bits, rows.mode = head.group_size, head.bits, head.mode
        rows.pop("biases", None)
    for name in ("weight", "scales", "biases", "bias"):
        if head.get(name) is not None:
            rows[name] = head[name][ids]
    rows.eval()
    mx.eval(rows.parameters())
    return rows
