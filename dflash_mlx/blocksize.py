"""How many drafts the next cycle asks for. A schedule changes speed, never the text of greedy decoding.

`FixedBlock` always asks for the same number. `AdaptiveBlock` asks for as many as give most tokens per second on the
machine and the text at hand, and for none where plain decoding is faster. It knows what cycles cost by their width
(`Costs`) and how often the draft is right by position (`Acceptance`); both are kept with the draft too, so that later
requests start knowing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

_PROBE = 4  # speculative cycles before a decision to rest
_MEASURE = 4  # plain steps when the cost of one is not known
_REST, _LONGEST_REST = 24, 96  # plain steps before the next look
_LOOK = 3  # speculative cycles between two looks while it pays
_PATIENCE = 0.95  # rest when slower than this share of plain: a dip of luck costs less than a rest
_LOYALTY = 1.02  # another width has to be so much faster, since a change may throw a draft away

_SMOOTHING = 0.25  # weight of a new timing
_OUTLIER = 3.0  # a cycle that waited for something else counts as at most so many usual ones
_STALE = 512  # timings after which one that was not renewed says nothing

_FRESH, _LASTING = 0.9, 0.98  # what a cycle leaves of the counts before it: of one text, and of all
_WEIGHT = 8.0  # cycles of this text that weigh as much as what is believed of others
_UNKNOWN = 0.6  # acceptance by position before anything is known


class BlockSchedule(Protocol):
    """Decides the width of the next cycle; told what every cycle gave."""

    def limit(self) -> int:
        """Drafts to ask for next; 0 is a plain step."""
        ...

    def record(self, *, drafted: int, accepted: int | None, emitted: int, seconds: float, position: int) -> None:
        """A cycle ended: `seconds` since the one before it ended, `position` of its first token.

        accepted: of the drafts; None if a near-tie ended the block before the rest of them were judged.
        """
        ...


@dataclass
class FixedBlock:
    """Always `block_size` - 1 drafts."""

    block_size: int

    def limit(self) -> int:
        return self.block_size - 1

    def record(self, *, drafted: int, accepted: int | None, emitted: int, seconds: float, position: int) -> None:
        pass


@dataclass(frozen=True)
class _Timing:
    """Seconds of a cycle, smoothed; `count` timings, the last of them as the `at`-th of all and at `position`."""

    seconds: float
    position: int
    at: int
    count: int = 1

    def says_something(self, position: int, now: int) -> bool:
        """Whether it is recent, and from a context of about this length (within a factor of 2 above 1024)."""
        near, far = sorted((max(self.position, 1024), max(position, 1024)))
        return far <= 2 * near and now - self.at <= _STALE


@dataclass
class Costs:
    """Smoothed seconds of a cycle by its number of drafts. Known from the second timing on: the first may compile."""

    measured: dict[int, _Timing] = field(default_factory=dict)
    timings: int = 0

    def update(self, drafts: int, seconds: float, position: int) -> None:
        self.timings += 1
        old = self.measured.get(drafts)
        if old is None or not old.says_something(position, self.timings):
            self.measured[drafts] = _Timing(seconds, position, self.timings)
            return
        if old.count == 1:
            smoothed = min(seconds, old.seconds)
        else:
            smoothed = old.seconds + _SMOOTHING * (min(seconds, _OUTLIER * old.seconds) - old.seconds)
        self.measured[drafts] = _Timing(smoothed, position, self.timings, old.count + 1)

    def get(self, drafts: int, position: int) -> float | None:
        """None if unknown, or measured too long ago or at a context so different that it says little."""
        known = self.measured.get(drafts)
        if known is None or known.count < 2 or not known.says_something(position, self.timings):
            return None
        return known.seconds

    def estimate(self, drafts: int, position: int) -> float | None:
        """As `get`, else from the widths around it, hopefully: what is tried is then measured.

        On the line between its neighbours; above all known widths as much as the widest. None if neither is known.
        """
        known = {width: cost for width in tuple(self.measured) if (cost := self.get(width, position)) is not None}
        if drafts in known:
            return known[drafts]
        below = max((width for width in known if width < drafts), default=None)
        above = min((width for width in known if width > drafts), default=None)
        if below is None:
            return None
        if above is None:
            return known[below]
        share = (drafts - below) / (above - below)
        return known[below] + share * (known[above] - known[below])


class Acceptance:
    """How often the draft at a position of the block is accepted where all before it were, lately.

    fading:   what a cycle leaves of the counts before it.
    believed: of a text about which little is known: what is known of others. Without it counts fade where new ones come
        in only, and an unknown position is believed to be like the one before it.
    """

    def __init__(self, drafts: int, fading: float, believed: Acceptance | None = None) -> None:
        self._fading, self._believed = fading, believed
        self._reached, self._accepted = [0.0] * drafts, [0.0] * drafts

    def record(self, drafted: int, accepted: int) -> None:
        """A cycle in which the first `accepted` of `drafted` drafts were right, and the next one was not."""
        reached = min(accepted + 1, drafted, len(self._reached))
        fading = reached if self._believed is None else len(self._reached)
        for position in range(fading):
            self._reached[position] = self._fading * self._reached[position] + (position < reached)
            self._accepted[position] = self._fading * self._accepted[position] + (position < min(accepted, reached))

    def forget(self) -> None:
        """Another text begins."""
        for counts in (self._reached, self._accepted):
            counts[:] = [0.0] * len(counts)

    def rates(self) -> list[float]:
        """By position, in 0..1."""
        others = None if self._believed is None else self._believed.rates()
        rates, belief = list[float](), _UNKNOWN
        for position, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            belief = belief if others is None else others[position]
            belief = (accepted + _WEIGHT * belief) / (reached + _WEIGHT)
            rates.append(belief)
        return rates

    def expected(self) -> list[float]:
        """Tokens of a cycle with 0, 1, 2, ... drafts: the accepted ones and the target's own."""
        return list(accumulate(accumulate(self.rates(), mul), initial=1.0))


class AdaptiveBlock:
    """As many drafts as pay best, at most `block_size` - 1; none where plain decoding is faster."""

    def __init__(self, block_size: int, costs: Costs, lasting: Acceptance | None = None, position: int = 0) -> None:
        """costs, lasting: of the draft, over its requests. position: where this one begins, as far as is known."""
        most = block_size - 1
        self._widths = _widths(most)
        self._costs = costs
        self._lasting = lasting or lasting_acceptance(block_size)
        self._here = Acceptance(most, _FRESH, self._lasting)
        self._speculating = True
        self._drafts = most
        self._left = _PROBE  # cycles until the next decision
        self._rest = _REST
        self._settling = 1  # cycles whose time is that of a change, not of the phase
        if costs.get(0, position) is not None:
            self._drafts, _ = self._fastest(position)

    def limit(self) -> int:
        return self._drafts if self._speculating else 0

    def record(self, *, drafted: int, accepted: int | None, emitted: int, seconds: float, position: int) -> None:
        if self._settling:
            self._settling -= 1
        elif drafted == self.limit():
            self._costs.update(drafted, seconds, position)
        if drafted:
            self._learn(drafted, accepted, emitted)
        self._left -= 1
        if self._left <= 0:
            self._decide(position)

    def _learn(self, drafted: int, accepted: int | None, emitted: int) -> None:
        if accepted is None:  # what a near-tie cut off was not gained
            accepted = emitted - 1
        elif emitted <= accepted:  # what a stop token or the budget cut off was not judged
            drafted = accepted
        self._here.record(drafted, accepted)
        self._lasting.record(drafted, accepted)

    def _decide(self, position: int) -> None:
        self._drafts, rate = self._fastest(position)
        if not self._speculating:
            self._enter(speculating=True, cycles=_PROBE)
            return
        plain = self._costs.get(0, position)
        if rate is None:
            self._left = 1
        elif plain is None:
            self._enter(speculating=False, cycles=_MEASURE)
        elif rate < _PATIENCE / plain:
            self._here.forget()  # the text will be another one after the rest
            self._enter(speculating=False, cycles=self._rest)
            self._rest = min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest, self._left = _REST, _LOOK

    def _fastest(self, position: int) -> tuple[int, float | None]:
        """The width to draft, and its tokens per second; the present one and None where no cost is known."""
        expected, rates = self._here.expected(), dict[int, float]()
        for width in self._widths:
            if cost := self._costs.estimate(width, position):
                rates[width] = expected[width] / cost
        if not rates:
            return self._drafts, None
        best = max(rates, key=rates.__getitem__)
        if rates[best] < _LOYALTY * rates.get(self._drafts, 0.0):
            best = self._drafts
        return best, rates[best]

    def _enter(self, *, speculating: bool, cycles: int) -> None:
        self._speculating, self._left = speculating, cycles
        self._settling = 1 if speculating else 2  # plain steps are submitted ahead: the first one waits for two


def lasting_acceptance(block_size: int) -> Acceptance:
    """What a draft of such blocks learns over its requests."""
    return Acceptance(block_size - 1, _LASTING)


def _widths(most: int) -> Sequence[int]:
    """Drafts per cycle worth trying: those of blocks of 2, 3, 4, 6, 8, 12, 16, 24, ... and `most`."""
    powers = [1 << exponent for exponent in range(1, most.bit_length() + 1)]
    blocks = {size for power in powers for size in (power, power * 3 // 2)}
    return sorted({block - 1 for block in blocks if block - 1 < most} | {most})
