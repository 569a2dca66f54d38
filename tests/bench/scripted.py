"""An engine that does what a script says, on a clock that only it moves: its numbers can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dflash_mlx.bench.arms import Sighting
from dflash_mlx.bench.record import Limits, Measured, Pair, Prompt, Record, Reported, Run

STOCK = ((0, 0),) * 8
"""(drafted, accepted) per cycle: eight plain steps."""
DFLASH = ((3, 3), (3, 0), (3, 2))
"""Four tokens, one and three: eight as well."""
Spoil = Callable[[Measured], Measured]


@dataclass
class FakeClock:
    now: float = 1024.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Scripted:
    """prefill_s and draft_prefill_s, then one cycle of cycle_s after the other. Token i of an answer is `first` + i.

    spoil: what is wrong with its report. asked: (prompt, most tokens) of every request. fails: raised at the request
    with that number.
    """

    clock: FakeClock
    name: str = "stock"
    script: Sequence[tuple[int, int]] = STOCK
    prefill_s: float = 2.0
    draft_prefill_s: float = 0.0
    cycle_s: float = 0.5
    block_size: int = 1
    exact: bool = True
    first: int = 100
    slower: float = 1.0  # each request takes so many times the one before it
    spoil: Spoil = lambda measured: measured
    fails: dict[int, BaseException] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)

    def run(self, prompt: Prompt, limits: Limits) -> Measured:
        pace = self.slower ** len(self.asked)
        self.asked.append((prompt.name, limits.max_tokens))
        self.log.append((prompt.name, self.name))
        if len(self.asked) in self.fails:
            raise self.fails[len(self.asked)]
        seen = Sighting(self.clock)
        seen.begin()
        self.clock.work((self.prefill_s + self.draft_prefill_s) * pace)
        seen.see(self.first, " a", cycle=0)
        for number, (drafted, accepted) in enumerate(self.script, 1):
            self.clock.work(self.cycle_s * pace)
            for index in range(accepted + 1):
                token = self.first + len(seen.tokens)
                seen.see(token, " a", cycle=number, drafted=drafted, from_draft=index < accepted)
        measured = seen.measured(
            prompt, self.name, block_size=self.block_size, draft_prefill_s=self.draft_prefill_s * pace, mode=self.name
        )
        return self.spoil(replace(measured, reported=self.report(measured)))

    def report(self, seen: Measured) -> Reported:
        """The truth, by sums of its own."""
        cycles, accepted = len(self.script), sum(accepted for _, accepted in self.script)
        decode = seen.end_s - seen.first_s + seen.draft_prefill_s
        return Reported(
            generated=1 + cycles + accepted,
            cycles=cycles,
            plain_steps=sum(drafted == 0 for drafted, _ in self.script),
            drafted=sum(drafted for drafted, _ in self.script),
            accepted=accepted,
            histogram=dict(sorted(Counter(accepted for drafted, accepted in self.script if drafted).items())),
            ttft_s=seen.first_s,
            decode_s=decode,
            total_s=seen.end_s,
            decode_tps=(cycles + accepted) / decode,
            request_tps=(1 + cycles + accepted) / seen.end_s,
        )


def dflash(clock: FakeClock, **changes: object) -> Scripted:
    given = dict(name="dflash", script=DFLASH, draft_prefill_s=0.5, block_size=4) | changes
    return Scripted(clock, **given)  # type: ignore[arg-type]


def prompt(name: str, category: str = "code", length: int = 100) -> Prompt:
    return Prompt(name, category, tuple(range(length)), text=name)


def record(*arms: str, pairs: int = 1, **limits: object) -> Record:
    given = Limits(**{"max_tokens": 9, **limits})  # type: ignore[arg-type]
    run = Run("python -m bench.x", Pair("tiny"), given, {name: name for name in arms}, pairs=pairs)
    return Record(run)
