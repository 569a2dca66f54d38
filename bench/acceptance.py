"""What drafts gave: the four numbers that go by the name of acceptance, each under its own, and what they come from.

Counts are taken after the answer was cut at its end. With R cycles that drafted, P tokens drafted, A accepted, N tokens
of all cycles (without the one that prefill gives):

    mean_acceptance_length   1 + A/R   tokens per cycle that drafted, the correction or bonus included
    draft_acceptance_rate    A/P       vLLM, llama.cpp
    accepted_share           A/N       the answer's tokens that came from drafts; 1 - 1/length if every cycle drafted
    cycle_efficiency         (A + R)/(P + R)   of what was verified; (1 + A/R)/B if all blocks have B tokens

Pooled over requests the counts are added first (a micro mean). Unknown is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measured import Measured


@dataclass(frozen=True)
class Position:
    """The i-th draft of a block: cycles that had one, those in which all before it were accepted, and it as well."""

    drafted: int
    reached: int
    accepted: int

    @property
    def unconditional(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def conditional(self) -> float | None:
        """Given that all before it were accepted."""
        return self.accepted / self.reached if self.reached else None


@dataclass(frozen=True)
class Acceptance:
    """Counts of one or of many requests.

    histogram: accepted drafts -> cycles that drafted. positions: of the first draft, the second, ...
    Both are empty where only totals are known.
    """

    cycles: int
    plain_steps: int
    drafted: int
    accepted: int
    emitted: int
    histogram: dict[int, int]
    positions: tuple[Position, ...]

    @classmethod
    def seen(cls, measured: Measured) -> Acceptance | None:
        """Counted from the cycles of a request; None where the engine does not show them."""
        cycles = measured.cycles
        if cycles is None or cycles.emitted is None or cycles.drafted is None or cycles.accepted is None:
            return None
        pairs = [(d, a) for d, a in zip(cycles.drafted, cycles.accepted, strict=True) if d]
        deepest = max((drafted for drafted, _ in pairs), default=0)
        return cls(
            cycles=len(cycles.at_s),
            plain_steps=len(cycles.at_s) - len(pairs),
            drafted=sum(cycles.drafted),
            accepted=sum(cycles.accepted),
            emitted=sum(cycles.emitted),
            histogram=dict(sorted(Counter(accepted for _, accepted in pairs).items())),
            positions=tuple(
                Position(
                    drafted=sum(drafted > i for drafted, _ in pairs),
                    reached=sum(drafted > i and accepted >= i for drafted, accepted in pairs),
                    accepted=sum(accepted > i for _, accepted in pairs),
                )
                for i in range(deepest)
            ),
        )

    @classmethod
    def of(cls, measured: Measured) -> Acceptance | None:
        """`seen`, or else the totals that the engine reports."""
        found, said = cls.seen(measured), measured.reported
        if found or said.cycles is None or said.drafted is None or said.accepted is None:
            return found
        plain = said.plain_steps or 0
        emitted = said.accepted + said.cycles
        return cls(said.cycles, plain, said.drafted, said.accepted, emitted, said.histogram or {}, ())

    @classmethod
    def pool(cls, many: Iterable[Acceptance]) -> Acceptance | None:
        """Of several requests; None if there are none."""
        parts = list(many)
        if not parts:
            return None
        histogram = sum((Counter(part.histogram) for part in parts), Counter[int]())
        depth = max(len(part.positions) for part in parts)
        columns = [[part.positions[i] for part in parts if i < len(part.positions)] for i in range(depth)]
        return cls(
            cycles=sum(part.cycles for part in parts),
            plain_steps=sum(part.plain_steps for part in parts),
            drafted=sum(part.drafted for part in parts),
            accepted=sum(part.accepted for part in parts),
            emitted=sum(part.emitted for part in parts),
            histogram=dict(sorted(histogram.items())),
            positions=tuple(
                Position(sum(p.drafted for p in c), sum(p.reached for p in c), sum(p.accepted for p in c))
                for c in columns
            ),
        )

    @property
    def drafting_cycles(self) -> int:
        return self.cycles - self.plain_steps

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.drafting_cycles if self.drafting_cycles else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accepted_share(self) -> float | None:
        return self.accepted / self.emitted if self.drafted and self.emitted else None

    @property
    def cycle_efficiency(self) -> float | None:
        verified = self.drafted + self.drafting_cycles
        return (self.accepted + self.drafting_cycles) / verified if self.drafted else None

    def as_json(self) -> dict[str, Any]:
        """The numbers by name; positions as two lists of shares."""
        return {
            "cycles": self.cycles,
            "plain_steps": self.plain_steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "accepted_share": self.accepted_share,
            "cycle_efficiency": self.cycle_efficiency,
            "histogram": {str(accepted): cycles for accepted, cycles in self.histogram.items()},
            "position_conditional": [position.conditional for position in self.positions],
            "position_unconditional": [position.unconditional for position in self.positions],
        }
