"""What is kept between two requests: the target's cache, the draft's context in step with it, and the token ids.

Unlike a bare mlx_lm cache list it knows its tokens, so a conversation can be sent whole every turn and only what
is new is computed. After a request it holds exactly the tokens that were returned; the last one is written by
the next request, because it is the anchor of the first block then.

A recurrent state, or a sliding window that has wrapped, cannot be cut back to an earlier position. For targets with
such layers a request leaves snapshots behind: at the end of its prompt and, if `reuse` was told one, at the border up
to which the next turn will repeat it (`dflash_mlx.stable_length`). Chat templates rewrite the last answer (its
reasoning is dropped), so that border is usually the end of the user's message.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.nn as nn

from dflash_mlx.cache import Snapshot, TargetCache
from dflash_mlx.draft.context import ContextSnapshot, DraftContext
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CacheStateError
from dflash_mlx.targets import Target, target_for
from dflash_mlx.templates import common_prefix

SNAPSHOTS = 4  # of the newest turns; each holds its recurrent states and windows


@dataclass(frozen=True)
class Reuse:
    """What `PromptCache.reuse` found.

    reused:     positions that are kept.
    recomputed: positions that were held, and have to be computed again because some layer cannot be cut back to the
                end of the common prefix.
    """

    reused: int = 0
    recomputed: int = 0


@dataclass(frozen=True)
class Place:
    """A snapshot of target and draft at one position."""

    target: Snapshot
    context: ContextSnapshot | None  # of the present context, or None


class PromptCache:
    """Made by `make_prompt_cache`, passed as `prompt_cache=`.

    tokens:     the ids it stands for.
    last_reuse: what the latest `reuse` kept, and what it could not keep.
    expected:   the ids that `reuse` left to generate from, until a request starts.
    """

    def __init__(self, target: Target, draft: DraftModel | None) -> None:
        self.target, self.draft = target, draft
        self.tokens: list[int] = []
        self._lock = threading.Lock()
        self._user: weakref.ref | None = None  # the session that runs on it
        self._forget()

    def reset(self) -> None:
        """Forget everything. Raises CacheStateError if a request runs on it."""
        with self.exclusive():
            self._forget()

    def _forget(self) -> None:
        self.cache = TargetCache(self.target.make_entries(), 0)
        self.context = self.draft.make_context() if self.draft else None
        self.tokens.clear()
        self.places: list[Place] = []  # oldest first
        self.border: int | None = None
        self.expected: list[int] | None = None
        self.last_reuse = Reuse()

    def reuse(self, ids: Sequence[int], stable: int | None = None) -> int:
        """Keep as much as possible of the longest common prefix with `ids`; its length, always less than len(ids).

        Call it with the whole conversation, then generate from ids[reused:]. Where a layer cannot be cut back (a
        sliding window that has wrapped, a recurrent state) the nearest snapshot before that point is taken; without
        one everything is forgotten and 0 is returned.

        Args:
            stable: how many of `ids` the next turn will begin with, if known; see `stable_length`.
        Raises:
            ValueError: `ids` is empty, or `stable` is not in 0..len(ids).
            CacheStateError: a request is still running on this cache.
        """
        if not len(ids):
            raise ValueError("`ids` has to hold at least one token.")
        if stable is not None and not 0 <= stable <= len(ids):
            raise ValueError(f"`stable` has to be in 0..{len(ids)}, the length of `ids`, got {stable}.")
        with self.exclusive():
            shared = min(common_prefix(self.tokens, ids), self.cache.length, len(ids) - 1)
            kept = self._keep(shared)
            self.cache.evaluate()  # another thread may generate
            if self.context is not None:
                self.context.evaluate()
            self.last_reuse = Reuse(kept, shared - kept)
            self.border, self.expected = stable, list(ids[kept:])
        return kept

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Nothing else changes it meanwhile. Raises CacheStateError if a request runs on it."""
        with self._lock:
            if self._user is not None and self._user() is not None:
                raise CacheStateError(
                    "A request is still running on this prompt cache, and two at once would write into each other. "
                    "Finish or close its generator first, or make a prompt cache for each."
                )
            yield

    def begin(self, session: object) -> None:
        """A request starts, and ends with `end` or with its session. Raises CacheStateError if another one runs."""
        with self.exclusive():
            self._user = weakref.ref(session)
            self.expected = None

    def end(self, session: object) -> None:
        """It has ended, in whichever thread."""
        if self._user is not None and self._user() is session:
            self.border, self._user = None, None

    def check_whole(self) -> None:
        """Raises CacheStateError if it cannot be continued: an interrupt left more positions than tokens are known."""
        if self.cache.closed is None and self.cache.length > len(self.tokens):
            self.cache.closed = "An interrupt left rows in it whose tokens are not known. Call `reuse`, or `reset`."
        if self.cache.closed is not None:
            raise CacheStateError(self.cache.closed)

    def _keep(self, length: int) -> int:
        """Cut back to `length`, or to the nearest place before it that can be reached."""
        if self.cache.closed is None:
            if self.cache.can_trim_to(length):
                self._trim_to(length)
                return length
            place = self._place_before(length)
            if place is not None:
                self._go_back(place)
                return place.target.length
        self._forget()
        return 0

    def _place_before(self, length: int) -> Place | None:
        return next((place for place in reversed(self.places) if place.target.length <= length), None)

    def _trim_to(self, length: int) -> None:
        drop = self.cache.length - length
        if drop:
            self.cache.trim_to(length)
            place = self._place_before(length)
            if self.context is not None and place is not None and place.context and place.target.length == length:
                self.context.restore(place.context)  # also what a sliding layer has forgotten since
            elif self.context is not None:
                self.context.drop(drop)
        self._forget_after(length)

    def _go_back(self, place: Place) -> None:
        self.cache.restore(place.target)
        if self.context is not None and place.context is not None:
            self.context.restore(place.context)
        self._forget_after(place.target.length)

    def _forget_after(self, length: int) -> None:
        del self.tokens[length:]
        self.places = [place for place in self.places if place.target.length <= length]

    @property
    def needs_places(self) -> bool:
        """Whether a layer of the target or of the draft's context cannot be cut back without a snapshot."""
        slides = self.context is not None and self.context.slides
        return slides or any(state.needs_snapshot for state in self.cache.states)

    def remember_place(self) -> None:
        """Take a snapshot here; everything is evaluated."""
        context = self.context_in_step()
        place = Place(self.cache.snapshot(), context.snapshot() if context else None)
        others = [p for p in self.places if p.target.length != place.target.length]
        self.places = [*others, place][-SNAPSHOTS:]

    def context_in_step(self) -> DraftContext | None:
        """The draft's context; a new one that starts late if an exception left it out of step."""
        if self.draft is None:
            return None
        if self.context is None or not self.context.covers(self.cache.length):
            self.context = self.draft.make_context(self.cache.length)
            self.places = [replace(place, context=None) for place in self.places]
        return self.context

    @property
    def draft_is_late(self) -> bool:
        """Whether positions are held that the draft has not seen."""
        context = self.context
        if self.draft is None or self.cache.length == 0:
            return False
        return context is None or context.start > 0 or not context.covers(self.cache.length)

    @property
    def recomputed(self) -> int:
        """Positions that the request after `reuse` reads again."""
        return self.last_reuse.recomputed if self.last_reuse.reused == self.cache.length else 0

    @property
    def snapshots(self) -> list[int]:
        """Positions that `reuse` can go back to although a layer cannot be cut back."""
        return [place.target.length for place in self.places]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, states, the draft's context and the snapshots."""
        entries = [*self.cache.entries, *(e for p in self.places for e in p.target.layers if e is not None)]
        held = sum(entry.nbytes for entry in entries) + sum(p.context.nbytes for p in self.places if p.context)
        return held + sum(array.nbytes for array in (self.context.arrays if self.context else []))


def make_prompt_cache(model: nn.Module, draft_model: DraftModel | None = None) -> PromptCache:
    """A cache for several requests to one pair of models.

    Raises:
        UnsupportedTarget: no adapter for the model, or no exact rollback for one of its layers.
        ValueError: `draft_model` is something else, mlx_lm's `max_kv_size` say.
    """
    if draft_model is not None and not isinstance(draft_model, DraftModel):
        raise ValueError(
            f"`draft_model` has to be a DFlash draft or None, got {type(draft_model).__name__}. A window (mlx_lm's "
            "`max_kv_size`) is not honoured here; for one, take mlx_lm.models.cache.make_prompt_cache."
        )
    return PromptCache(target_for(model), draft_model)
