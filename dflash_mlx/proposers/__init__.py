"""Sources of draft tokens. At temperature 0 a proposer can only change speed, never the text.

In sampled mode a proposer either hands over the distribution q that it really sampled from, or none; then its
tokens are a guess that the target may confirm.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import mlx.core as mx

from dflash_mlx.proposal import Proposal


class Proposer(Protocol):
    """What the decode loop asks of a source of drafts.

    taps: target layers whose features it wants from every forward; empty if none.
    """

    taps: tuple[int, ...]

    def propose(self, anchor: int, limit: int, position: int) -> Proposal:
        """Up to `limit` tokens after the anchor; may be none, may be lazy.

        position: absolute position of the first proposed token.
        """
        ...

    def observe(self, features: mx.array | None) -> None:
        """Features [1, S, len(taps) * H] of positions that became final, in order; None without taps."""
        ...

    def trim_to(self, length: int) -> None:
        """Of the observed positions only those below `length` are final after all."""
        ...

    def flush(self) -> None:
        """Start pending device work on what was observed, without waiting for it."""
        ...

    def evaluate(self) -> None:
        """Finish pending device work on what was observed."""
        ...


@runtime_checkable
class DraftsAhead(Protocol):
    """A proposer that can draft before the host knows what was accepted: the pipelined cycle.

    `propose_after` is `observe` and `propose` in one; then comes `settle`, once, before anything else is called. What
    it proposed may be dropped without a word.
    """

    def propose_after(
        self, features: mx.array | None, count: mx.array, anchor: mx.array, limit: int, position: int
    ) -> Proposal:
        """Up to `limit` tokens after the anchor, 1 or more asked for; lazy, and without reading anything.

        Args:
            features: [1, L, len(taps) * H] of a block of which only the first `count` positions become final.
            count: [1] int32.
            anchor: [1] int32, the last token that the block makes.
            position: absolute position of the first token that the block makes; of the first proposed one it is
                position + count.
        """
        ...

    def settle(self, kept: int) -> None:
        """The first `kept` positions of that block became final; 0 where it was given up. May be called without one."""
        ...


class NullProposer:
    """Proposes nothing: plain decoding through the same loop."""

    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._nothing = Proposal(mx.array([], dtype=mx.int32))

    def propose(self, anchor: int, limit: int, position: int) -> Proposal:
        return self._nothing

    def observe(self, features: mx.array | None) -> None:
        pass

    def trim_to(self, length: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def evaluate(self) -> None:
        pass
