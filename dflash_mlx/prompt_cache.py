"""What is kept between two requests: the target's cache, the draft's context in step with it, and the token ids.

Unlike a bare mlx_lm cache list it knows its tokens, so a conversation can be sent whole every turn and only what
is new is computed. After a request it holds exactly the tokens that were returned; the last one is written by
the next request, because it is the anchor of the first block then.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn

from dflash_mlx.cache import TargetCache
from dflash_mlx.draft.context import DraftContext
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.targets import Target, target_for


class PromptCache:
    """Made by `make_prompt_cache`, passed as `prompt_cache=`.

    tokens: the ids it stands for.
    """

    def __init__(self, target: Target, draft: DraftModel | None) -> None:
        self.target, self.draft = target, draft
        self.tokens: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.cache = TargetCache(self.target.make_entries(), 0)
        self.context = self.draft.make_context() if self.draft else None
        self.tokens.clear()

    def reuse(self, ids: Sequence[int]) -> int:
        """Keep the longest common prefix with `ids` and return its length, always less than len(ids).

        Call it with the whole conversation, then generate from ids[reused:]. Where a layer cannot be cut back
        (a sliding window that has wrapped, a recurrent state) everything is forgotten and 0 is returned.

        Raises:
            ValueError: `ids` is empty.
        """
        if not len(ids):
            raise ValueError("`ids` has to hold at least one token.")
        shared = _common_prefix(self.tokens, ids)
        keep = min(shared, self.cache.length, len(ids) - 1)
        if self.cache.closed is not None or not self._trim_to(keep):
            self.reset()
            return 0
        return keep

    def _trim_to(self, length: int) -> bool:
        drop = self.cache.length - length
        if drop and not self.cache.trim_to(length):
            return False
        if drop and self.context is not None:
            self.context.drop(drop)
        del self.tokens[length:]
        return True

    def context_in_step(self) -> DraftContext | None:
        """The draft's context; a new one that starts late if an exception left it out of step."""
        if self.draft is None:
            return None
        if self.context is None or self.context.length != self.cache.length:
            self.context = self.draft.make_context(self.cache.length)
        return self.context


def make_prompt_cache(model: nn.Module, draft_model: DraftModel | None = None) -> PromptCache:
    """A cache for several requests to one pair of models.

    Raises:
        UnsupportedTarget: no adapter for the model, or no exact rollback for one of its layers.
    """
    return PromptCache(target_for(model), draft_model)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
