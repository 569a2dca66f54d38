"""One request's state, and what becomes of it when a block is kept, taken back or given up.

Invariant between cycles: base + len(tokens) == cache.length + 1, and the draft's context covers cache.length positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from dflash_mlx.accept import Decider
from dflash_mlx.blocksize import BlockSchedule
from dflash_mlx.cache import TargetCache
from dflash_mlx.proposers import DraftsAhead, Proposer
from dflash_mlx.stats import Stats, Timings
from dflash_mlx.targets import Forward, Target


@dataclass(frozen=True)
class Commit:
    """Tokens that became final together.

    cycle 0 is the token that prefill gave; then accepted drafts and one correction or bonus per cycle.
    """

    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    cycle: int
    log_probs: tuple[mx.array, ...]  # [V] per token
    finish_reason: str | None = None  # "stop" or "length" on the last commit


@dataclass
class Session:
    """One request's state: what the loop needs and what a prompt cache keeps.

    tokens:  host truth of positions base, base + 1, ...; shared with the caller's prompt cache if there is one.
    borders: positions at which prefill ends a chunk and calls `at_border`; the end of prefill is one too.
    pipelined: draft before the verdict is read, where proposer and decider can (`dflash_mlx.decode`).
    """

    target: Target
    cache: TargetCache
    proposer: Proposer
    decider: Decider
    schedule: BlockSchedule
    tokens: list[int] = field(default_factory=list)
    base: int = 0
    stats: Stats = field(default_factory=Stats)
    timings: Timings = field(default_factory=Timings)
    last: Commit | None = None  # whose tokens are being delivered; None while a cycle runs
    borders: Collection[int] = ()
    at_border: Callable[[], None] | None = None
    pipelined: bool = False
    _delivered: int = 0  # of `tokens`, those that the caller was given, and the prompt
    _observed: list[mx.array] = field(default_factory=list)  # features of the last `keep`

    def __post_init__(self) -> None:
        self._delivered = len(self.tokens)

    @property
    def drafter(self) -> DraftsAhead | None:
        """The proposer, if it is to draft before verdicts are read."""
        return self.proposer if self.pipelined and isinstance(self.proposer, DraftsAhead) else None

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self.base + len(self.tokens)

    def forward(self, ids: mx.array) -> Forward:
        """Run [T] ids inside a new transaction, which the caller commits or aborts."""
        self.cache.begin(ids.size)
        return self.target.forward(ids[None], self.cache, self.proposer.taps)

    def keep(
        self,
        forward: Forward,
        count: int,
        tokens: Sequence[int] = (),
        *,
        undelivered: int = 0,
        drafter: DraftsAhead | None = None,
    ) -> None:
        """Commit the first `count` positions of a forward, and the tokens that are known with them.

        In this order, so that an exception at any point leaves something that `retract` can put right.

        drafter: given if it has drafted on top of the forward, so that it only has to be told the count.
        """
        self.cache.commit(count)
        self.know(tokens, undelivered)
        if drafter is not None:
            drafter.settle(count)
            self._observed = []
            return
        features = None if forward.features is None else forward.features[:, :count]
        self.proposer.observe(features)
        self._observed = [] if features is None else [features]

    def know(self, tokens: Sequence[int], undelivered: int) -> None:
        """`tokens` follow; the last `undelivered` of them have not been passed on."""
        self._delivered = len(self.tokens) + len(tokens) - undelivered
        self.tokens.extend(tokens)

    @property
    def undelivered(self) -> int:
        """Tokens at the end that the caller was not given."""
        return max(len(self.tokens) - self._delivered, 0)

    @undelivered.setter
    def undelivered(self, count: int) -> None:
        self._delivered = len(self.tokens) - count

    def pending(self, ahead: Forward | None) -> list[mx.array]:
        """What is left to compute of the last commit, and of a forward that is one step ahead."""
        features = [] if ahead is None or ahead.features is None else [ahead.features]
        pending, self._observed = [*self.cache.pending, *self._observed, *features], []
        return pending

    def retract(self) -> None:
        """Take back what was never delivered: cache and tokens hold exactly what the caller got.

        Of a block that was not delivered at all the anchor's row may stay, since that token was.
        """
        if self.cache.closed is not None:
            return
        count, commit = self.undelivered, self.last
        if count:
            del self.tokens[-count:]
        drop = self.cache.length - (self.position - 1 if count else self.position)
        if drop > 0 and self.cache.kept > 1:
            self.cache.shrink(max(self.cache.kept - drop, 1))
        self.proposer.trim_to(self.cache.length)
        if count and commit is not None and commit.cycle:
            self.stats.retract(
                drafted=commit.drafted,
                accepted=commit.accepted,
                emitted=len(commit.tokens),
                delivered=len(commit.tokens) - count,
            )

    def write_anchor(self) -> None:
        """Hold the anchor too, so that an mlx_lm cache list holds every returned token, as after mlx_lm."""
        if self.position == self.cache.length + 1:
            try:
                self.keep(self.forward(mx.array(self.tokens[-1:])), 1)
            finally:
                self.undo()
        self.finish()

    def finish(self) -> None:
        """Leave the cache as mlx_lm would: what is due is quantised, nothing is lazy."""
        if self.cache.closed is None:
            self.cache.quantize()
        self.evaluate()

    def undo(self) -> None:
        """Drop a forward that was not committed, and what was drafted on top of it."""
        if self.cache.is_open:
            self.cache.abort()
        if self.drafter is not None:
            self.drafter.settle(0)

    def evaluate(self) -> None:
        """Leave nothing lazy behind: another thread may use the cache next."""
        if self.cache.closed is None:
            self.cache.evaluate()
        self.proposer.evaluate()
