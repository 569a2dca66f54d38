"""How many drafts the next cycle asks for. A schedule changes speed, never the text of greedy decoding.

`FixedBlock` always speculates. `AdaptiveBlock` compares, on the machine and the text at hand, tokens per second of
speculative cycles with that of plain steps, and rests where plain is faster; it comes back to look again, after 24
tokens at first and later ever more rarely. Costs are kept with the draft, so later requests start knowing them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

_PROBE = 4  # speculative cycles before each decision
_MEASURE = 4  # plain steps when the cost of one is not known
_REST, _LONGEST_REST = 24, 96  # plain steps before the next look
_MEMORY = 20  # speculative cycles whose tokens are averaged
_LOOK = 3  # speculative cycles between two looks while it pays
_PATIENCE = 0.95  # rest when slower than this share of plain: a dip of luck costs less than a rest
_REFRESH = 256  # speculative cycles after which the cost of a plain step is measured anew
_SMOOTHING = 0.25  # weight of a new timing
_OUTLIER = 3.0  # a cycle that waited for something else counts as at most so many usual ones


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


@dataclass
class Costs:
    """Smoothed seconds of a cycle by its number of drafts, and the context length they were measured at."""

    measured: dict[int, tuple[float, int]] = field(default_factory=dict)

    def update(self, drafts: int, seconds: float, position: int) -> None:
        old = self.get(drafts, position)
        if old is not None:
            seconds = old + _SMOOTHING * (min(seconds, _OUTLIER * old) - old)
        self.measured[drafts] = (seconds, position)

    def get(self, drafts: int, position: int) -> float | None:
        """None if unknown, or measured at a context so different that it says little (a factor 2 above 1024)."""
        seconds, where = self.measured.get(drafts, (None, 0))
        near, far = sorted((max(where, 1024), max(position, 1024)))
        return seconds if far <= 2 * near else None


class AdaptiveBlock:
    """Speculates with `block_size` while that is faster than plain decoding here."""

    def __init__(self, block_size: int, costs: Costs) -> None:
        self._drafts = block_size - 1
        self._costs = costs
        self._gains: deque[int] = deque(maxlen=_MEMORY)  # tokens of the latest speculative cycles
        self._speculating = True
        self._left = _PROBE  # cycles until the next decision
        self._rest = _REST
        self._since_measured = 0
        self._first_of_phase = True  # its time is that of a change, not of the phase

    def limit(self) -> int:
        return self._drafts if self._speculating else 0

    def record(self, *, drafted: int, accepted: int | None, emitted: int, seconds: float, position: int) -> None:
        if drafted == self.limit() and not self._first_of_phase:
            self._costs.update(drafted, seconds, position)
        self._first_of_phase = False
        if drafted:
            self._gains.append(emitted)
            self._since_measured += 1
        self._left -= 1
        if self._left <= 0:
            self._decide(position)

    def _decide(self, position: int) -> None:
        if not self._speculating:
            self._enter(speculating=True, cycles=_PROBE)
            return
        plain, cycle = self._costs.get(0, position), self._costs.get(self._drafts, position)
        if cycle is None or not self._gains:
            self._left = 1
        elif plain is None or self._since_measured >= _REFRESH:
            self._since_measured = 0
            self._enter(speculating=False, cycles=_MEASURE)
        elif fmean(self._gains) / cycle < _PATIENCE / plain:
            self._gains.clear()  # the text will be another one after the rest
            self._enter(speculating=False, cycles=self._rest)
            self._rest = min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest, self._left = _REST, _LOOK

    def _enter(self, *, speculating: bool, cycles: int) -> None:
        self._speculating, self._left = speculating, cycles
        self._first_of_phase = True
