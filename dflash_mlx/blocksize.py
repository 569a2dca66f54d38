"""How many drafts the next cycle asks for. A schedule changes speed, never the text of greedy decoding.

`FixedBlock` always asks for the same number. `AdaptiveBlock` asks for as many as give most tokens per second on the
machine and the text at hand, and for none where plain decoding is faster. It knows what cycles cost by their width
(`Costs`) and how often the draft is right by position (`Acceptance`); both are kept with the draft too, so that later
requests start knowing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median_low
from typing import Protocol

_FIRST = 3  # drafts while nothing is known: dear nowhere, and more are tried next where it pays
_SURE = 3.0  # tokens per cycle that pay on most machines, so that it can wait to be measured whether they do,
_LATER = 16  # for so many cycles of a new draft: a first short answer is not kept waiting
_PROBE = 3  # cycles before a decision to rest; after a rest the first of them is the plain step still in flight
_MEASURE = 4  # plain steps when the cost of one is not known
_REST, _LONGEST_REST = 24, 96  # plain steps before the next look
_LOOK = 3  # speculative cycles between two looks while it pays: a new width is measured by then
_PATIENCE = 0.95  # rest when slower than this share of plain: a dip of luck costs less than a rest
_LOYALTY = 1.02  # another width has to be so much faster, since a change may throw a draft away

_LATEST = 7  # timings whose median counts: three that waited for something else change little
_STALE = 512  # timings after which those that were not renewed say nothing

_FRESH, _LASTING = 0.93, 0.98  # what a cycle leaves of the counts before it: of one text, and of all
_WEIGHT = 5.0  # cycles of this text that weigh as much as what is believed of others
_UNKNOWN = 0.5  # acceptance by position before anything is known


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
class _Timings:
    """Seconds of the latest cycles, the last of them as the `at`-th of all timings and at `position`."""

    latest: tuple[float, ...]
    position: int
    at: int

    def say_something(self, position: int, now: int) -> bool:
        """Whether they are recent, and from a context of about this length (within a factor of 2 above 1024)."""
        near, far = sorted((max(self.position, 1024), max(position, 1024)))
        return far <= 2 * near and now - self.at <= _STALE


@dataclass
class Costs:
    """Seconds of a cycle by its number of drafts. Known from the second timing on: the first may compile."""

    measured: dict[int, _Timings] = field(default_factory=dict)
    timings: int = 0

    def update(self, drafts: int, seconds: float, position: int) -> None:
        self.timings += 1
        old = self.measured.get(drafts)
        latest = old.latest if old is not None and old.say_something(position, self.timings) else ()
        self.measured[drafts] = _Timings((*latest, seconds)[-_LATEST:], position, self.timings)

    def get(self, drafts: int, position: int) -> float | None:
        """None if unknown, or measured too long ago or at a context so different that it says little."""
        known = self.measured.get(drafts)
        if known is None or len(known.latest) < 2 or not known.say_something(position, self.timings):
            return None
        return median_low(known.latest)

    def estimate(self, widths: Iterable[int], position: int, *, hopefully: bool = False) -> dict[int, float]:
        """Seconds by number of drafts, without those of which nothing is known.

        What was not measured is on the line between its neighbours. Hopefully it costs as little as any that drafts, if
        its block is at most twice the next smaller one: what looks fast in this way is tried, and then measured.
        """
        known = {width: cost for width in tuple(self.measured) if (cost := self.get(width, position)) is not None}
        estimates = {}
        for width in widths:
            below = max((other for other in known if other <= width), default=None)
            above = min((other for other in known if other >= width), default=None)
            if below == width:
                estimates[width] = known[width]
            elif hopefully and below and width + 1 <= 2 * (below + 1):
                estimates[width] = min(cost for other, cost in known.items() if other)
            elif below is not None and above is not None:
                share = (width - below) / (above - below)
                estimates[width] = known[below] + share * (known[above] - known[below])
        return estimates


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
        self._drafts = min(_FIRST, most)
        self._left = _PROBE  # cycles until the next decision
        self._rest = _REST
        self._settling = 1  # cycles whose time is that of a change, not of the phase
        self._drafts, _ = self._fastest(position)

    def limit(self) -> int:
        return self._drafts if self._speculating else 0

    def record(self, *, drafted: int, accepted: int | None, emitted: int, seconds: float, position: int) -> None:
        if self._settling:
            self._settling -= 1
        elif drafted or not self._speculating:  # a near-tie decided again is no usual plain step
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
        before = self._drafts
        self._drafts, gain = self._fastest(position)
        if not self._speculating:
            self._enter(speculating=True, cycles=_PROBE)
        elif gain is None and self._costs.get(0, position) is not None:
            self._left = 1
        elif gain is None and not (self._seems_sure() and self._costs.timings < _LATER):
            self._enter(speculating=False, cycles=_MEASURE)
        elif gain is not None and gain < _PATIENCE:
            self._here.forget()  # the text will be another one after the rest
            self._enter(speculating=False, cycles=self._rest)
            self._rest = min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest, self._left = _REST, _LOOK
            self._settling = int(self._drafts != before)  # a draft that was made ahead is made again

    def _fastest(self, position: int) -> tuple[int, float | None]:
        """The width to draft, and how many times plain decoding drafts give; None where costs are not known.

        Widths that were never measured are tried where drafts pay, not where it is to be found out whether they do.
        """
        rates = self._rates(position)
        if not rates:
            return self._drafts, None
        plain = self._costs.get(0, position)
        gain = None if plain is None else plain * max(rates.values())
        if self._seems_sure() if gain is None else gain >= _PATIENCE:
            rates = self._rates(position, hopefully=True)
        best = max(rates, key=rates.__getitem__)
        return (best if rates[best] >= _LOYALTY * rates.get(self._drafts, 0.0) else self._drafts), gain

    def _seems_sure(self) -> bool:
        return self._here.expected()[self._drafts] >= _SURE

    def _rates(self, position: int, *, hopefully: bool = False) -> dict[int, float]:
        """Tokens per second by number of drafts."""
        expected, costs = self._here.expected(), self._costs.estimate(self._widths, position, hopefully=hopefully)
        return {width: expected[width] / cost for width, cost in costs.items() if cost}

    def _enter(self, *, speculating: bool, cycles: int) -> None:
        """Plain steps are submitted ahead: the first waits for two, and one is in flight when drafts come back."""
        self._speculating, self._left, self._settling = speculating, cycles, 2


def lasting_acceptance(block_size: int) -> Acceptance:
    """What a draft of such blocks learns over its requests."""
    return Acceptance(block_size - 1, _LASTING)


def _widths(most: int) -> Sequence[int]:
    """Drafts per cycle worth trying: those of blocks of 2, 3, 4, 6, 8, 12, 16, 24, ... and `most`."""
    powers = [1 << exponent for exponent in range(1, most.bit_length() + 1)]
    blocks = {size for power in powers for size in (power, power * 3 // 2)}
    return sorted({block - 1 for block in blocks if block - 1 < most} | {most})
