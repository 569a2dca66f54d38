"""Sources of draft tokens. At temperature 0 a proposer can only change speed, never the text.

In sampled mode a proposer either hands over the distribution q that it really sampled from, or none; then its
tokens are a guess that the target may confirm.
"""

from __future__ import annotations

from typing import Protocol

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
