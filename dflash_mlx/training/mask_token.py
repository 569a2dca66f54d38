"""The token that stands for what is to be guessed: one that no text has.

Its row of the target's embedding is not learned, so any row serves that never means something else.
"""

from __future__ import annotations

import re
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.training.recipe import RecipeError

# In names of tokens that are there for this, or for nothing; the first that fits.
_MEANT = (r"\bmask\b|_mask_", r"unused|reserved|empty|dummy|placeholder")


def find_mask_token(tokenizer: TokenizerWrapper, rows: int, asked: int | None = None) -> int:
    """The id of the mask token.

    In this order: the one that was asked for; the first id past the tokenizer's last, if the embedding is padded and
    has a row for it (as z-lab's drafts for Qwen3); a special token that no chat text has, by its name the likeliest to
    be free, then the highest.

    Args:
        rows: of the target's embedding.
        asked: the recipe's.
    Raises:
        RecipeError: the one that was asked for has no row, or there is none to be found.
    """
    if asked is not None:
        if not 0 <= asked < rows:
            raise RecipeError(
                f"`mask_token_id` has to be in 0..{rows - 1} (rows of the target's embedding), got {asked}. Another id "
                "has no embedding. Give the id of a token that no text has, or leave it out."
            )
        return asked
    past = max(tokenizer.get_vocab().values(), default=-1) + 1
    if past < rows:
        return past
    free = _free(tokenizer, rows)
    for pattern in _MEANT:
        if named := [index for index, text in free.items() if re.search(pattern, text.lower())]:
            return max(named)
    if free:
        return max(free)
    raise RecipeError(
        f"No token can stand for what is to be guessed: the tokenizer uses all {rows} rows of the target's embedding, "
        "and each of its special tokens can occur in a conversation. A mask that also means something else costs "
        "acceptance. Choose a token that your texts never have, and give its id as `mask_token_id`."
    )


def _free(tokenizer: TokenizerWrapper, rows: int) -> dict[int, str]:
    """Special tokens that have a row, no purpose of their own, and no place in the chat template."""
    inner: Any = tokenizer._tokenizer
    special = {index: str(token) for index, token in inner.added_tokens_decoder.items() if token.special}
    special |= dict(zip(inner.all_special_ids, inner.all_special_tokens, strict=True))
    names = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "sep_token_id", "cls_token_id")
    used = set(tokenizer.eos_token_ids) | {getattr(inner, name, None) for name in names}
    template = str(getattr(inner, "chat_template", None) or "")
    return {i: text for i, text in special.items() if i < rows and i not in used and text not in template}
