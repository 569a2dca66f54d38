"""What a record comes to. Every number of a report is made here, from the raw values, the same way each time.

speed-up     sum of the baseline's times over sum of the arm's, over prompts whose tokens are the same; where there are
             none, per token: sums of time over sums of tokens. Once with prefill ("request") and once without
             ("decode"; per token too, where an engine's first burst has several tokens, since the time behind it is of
             fewer). A prompt's time is the sum over its trials, which all arms have equally many of.
interval     95%, percentile bootstrap of the logarithm: prompts are drawn with replacement, arm and baseline
             together, 10,000 times, from a fixed seed
percentiles  linear interpolation, of 20 values and more
acceptance   counts summed first (micro); beside it the mean of the requests' mean acceptance lengths (macro)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from .acceptance import Acceptance
from .measured import Measured, percentile
from .record import Asked, Compared, Record
from .summary import ArmSummary, Drift, Lengths, Speedup, Spread, Summary

T = TypeVar("T", int, float)
RESAMPLES = 10_000
SEED = 0
STEADY = 0.95
CLOCKS: dict[str, Callable[[Measured], float]] = {
    "request": lambda measured: measured.end_s,
    "decode": lambda measured: measured.decode_s,
}
TOKENS: dict[str, Callable[[Measured], int]] = {
    "request": lambda measured: measured.generated,
    "decode": lambda measured: measured.decode_tokens,
}
"""That the time of each clock is of."""
LOOP, LONG = 4, 32
"""An answer of `LONG` tokens or more repeats itself if fewer than half of its runs of `LOOP` tokens are different."""


def summarise(record: Record) -> Summary:
    """Over the prompts that every arm has finished."""
    done = [prompt for prompt in record.prompts if _finished(record, prompt.name)]
    categories = list(dict.fromkeys(prompt.category for prompt in done))
    in_category = {name: [prompt for prompt in done if prompt.category == name] for name in categories}
    by_category = {name: _arms(record, some) for name, some in in_category.items()}
    longest = max(done, key=lambda prompt: prompt.tokens, default=None)
    arms, drift = _arms(record, done), _drift(record, done)
    return Summary(
        baseline=record.baseline,
        prompts=len(done),
        left_out=tuple(prompt.name for prompt in record.prompts if prompt not in done),
        arms=arms,
        categories=by_category,
        worst_category=_worst(by_category),
        longest_prompt=longest.name if longest else None,
        longest_prompt_tokens=longest.tokens if longest else None,
        longest=_arms(record, [longest]) if longest else {},
        drift=drift,
        notes=tuple(_notes(record, arms, drift)),
    )


def speedup(rows: Sequence[tuple[float, float]], basis: Sequence[tuple[int, int]] | None = None) -> Speedup | None:
    """Of (baseline's, arm's) seconds per prompt; basis: (baseline's, arm's) tokens, which makes it one per token."""
    times = np.array(rows, dtype=np.float64).reshape(-1, 2)
    tokens = np.ones_like(times) if basis is None else np.array(basis, dtype=np.float64).reshape(-1, 2)
    known = (times > 0).all(-1) & (tokens > 0).all(-1)  # an answer of one token has no time of decoding
    times, tokens = times[known], tokens[known]
    if not len(times):
        return None
    single, whole = _ratio(times, tokens), _ratio(times.sum(0), tokens.sum(0))
    low = high = None
    if len(times) > 1:
        drawn = np.random.default_rng(SEED).integers(0, len(times), (RESAMPLES, len(times)))
        ratios = np.log(_ratio(times[drawn].sum(1), tokens[drawn].sum(1)))
        low, high = (float(np.exp(np.percentile(ratios, share))) for share in (2.5, 97.5))
    kind: Literal["total time", "per token"] = "total time" if basis is None else "per token"
    return Speedup(kind, len(times), float(whole), low, high, float(single.min()), float(single.max()))


def _ratio(times: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[..., 2] seconds and tokens -> [...] the first's time per token over the second's."""
    ratio: np.ndarray = times[..., 0] / tokens[..., 0] / (times[..., 1] / tokens[..., 1])
    return ratio


def _finished(record: Record, prompt: str) -> bool:
    return all(len(record.of(prompt, arm)) >= 2 * record.run.pairs for arm in record.run.arms)


def _arms(record: Record, prompts: Sequence[Asked]) -> dict[str, ArmSummary]:
    if not prompts:
        return {}
    return {name: _Arm.of(record, name, prompts).summary() for name in record.run.arms}


@dataclass(frozen=True)
class _Arm:
    """One arm over some prompts. trials, baseline: of each prompt; compared: in the same order, None where not yet."""

    name: str
    trials: list[list[Measured]]
    baseline: list[list[Measured]] | None
    compared: list[Compared | None]
    limit: int

    @classmethod
    def of(cls, record: Record, name: str, prompts: Sequence[Asked]) -> _Arm:
        found = {(row.prompt, row.arm): row for row in record.compared}
        return cls(
            name=name,
            trials=[record.of(prompt.name, name) for prompt in prompts],
            baseline=None if name == record.baseline else [record.of(p.name, record.baseline) for p in prompts],
            compared=[found.get((prompt.name, name)) for prompt in prompts],
            limit=record.run.limits.max_tokens,
        )

    @property
    def requests(self) -> list[Measured]:
        return [each for trials in self.trials for each in trials]

    def summary(self) -> ArmSummary:
        every, rows = self.requests, [row for row in self.compared if row is not None]
        accepted = [found for found in map(Acceptance.of, every) if found is not None and found.drafted]
        pooled = Acceptance.pool(accepted)
        lengths = [found.mean_acceptance_length for found in accepted if found.mean_acceptance_length is not None]
        peaks = [each.peak_memory_gb for each in every if each.peak_memory_gb is not None]
        return ArmSummary(
            arm=self.name,
            prompts=len(self.trials),
            requests=len(every),
            generated=sum(each.generated for each in every),
            same_tokens=sum(row.tokens_match for row in rows),
            common_share=_mean([row.common_share for row in rows]),
            near_ties=sum(row.divergence == "near-tie" for row in rows),
            bugs=sum(row.divergence == "bug" for row in rows),
            same_answers=sum(row.answer_match is True for row in rows),
            answers=sum(row.answer_match is not None for row in rows),
            right=sum(row.right is True for row in rows),
            right_known=sum(row.right is not None for row in rows),
            ttft_s=_spread(each.ttft_s for each in every),
            request_s=_spread(each.end_s for each in every),
            cycle_s=_spread(gap for each in every for gap in each.cycle_s),
            decode_tps=_rate(sum(each.decode_tokens for each in every), sum(each.decode_s for each in every)),
            mlx_lm_tps=_rate(sum(e.generated for e in every), sum(e.end_s - e.first_s for e in every)),
            request_tps=_rate(sum(each.generated for each in every), sum(each.end_s for each in every)),
            speedup=self._speedups(),
            speedup_all=self._speedups_of_all(),
            acceptance=None if pooled is None else pooled.as_json(),
            of_requests=_mean(lengths),
            lengths=_lengths([trials[0] for trials in self.trials], self.limit),
            peak_memory_gb=max(peaks, default=None),
        )

    @property
    def _matching(self) -> list[int]:
        return [index for index, row in enumerate(self.compared) if row is not None and row.tokens_match]

    def _speedups(self) -> dict[str, Speedup | None] | None:
        if self.baseline is None:
            return None
        if not self._matching:
            return self._per_token()
        return {clock: self._of_matching(clock) for clock in CLOCKS}

    def _of_matching(self, clock: str) -> Speedup | None:
        times, counts, whole = self._sums(CLOCKS[clock]), self._sums(TOKENS[clock]), self._sums(TOKENS["request"])
        same = self._matching
        cut = any(len(set(counts[index])) > 1 and len(set(whole[index])) == 1 for index in same)
        return speedup([times[index] for index in same], [counts[index] for index in same] if cut else None)

    def _speedups_of_all(self) -> dict[str, Speedup | None] | None:
        if self.baseline is None or len(self._matching) in (0, len(self.trials)):
            return None
        return self._per_token()

    def _sums(self, read: Callable[[Measured], T]) -> list[tuple[T, T]]:
        """(baseline's, this arm's), summed over the trials of each prompt."""
        pairs = zip(self.baseline or [], self.trials, strict=True)
        return [(_sum(map(read, base)), _sum(map(read, own))) for base, own in pairs]

    def _per_token(self) -> dict[str, Speedup | None]:
        return {clock: speedup(self._sums(CLOCKS[clock]), self._sums(TOKENS[clock])) for clock in CLOCKS}


def _worst(categories: dict[str, dict[str, ArmSummary]]) -> dict[str, str]:
    """By arm: the category with the lowest speed-up with prefill."""
    ratios: dict[str, dict[str, float]] = {}
    for category, arms in categories.items():
        for name, arm in arms.items():
            if arm.speedup is not None and (found := arm.speedup["request"]) is not None:
                ratios.setdefault(name, {})[category] = found.ratio
    return {name: min(by_category, key=by_category.__getitem__) for name, by_category in ratios.items()}


def _drift(record: Record, prompts: Sequence[Asked]) -> Drift:
    trials = [record.of(prompt.name, record.baseline) for prompt in prompts]
    first, last = [each[0] for each in trials], [each[-1] for each in trials]
    within = _rate_ratio(last, first)
    begun = [] if record.closing is None else record.of(record.closing.prompt, record.baseline)[:1]
    whole = None if record.closing is None or not begun else _rate_ratio([record.closing], begun)
    return Drift(within, whole, any(each is not None and not STEADY <= each <= 1 / STEADY for each in (within, whole)))


def _rate_ratio(later: Sequence[Measured], earlier: Sequence[Measured]) -> float | None:
    rates = [_rate(sum(m.decode_tokens for m in some), sum(m.decode_s for m in some)) for some in (later, earlier)]
    return rates[0] / rates[1] if rates[0] and rates[1] else None


def _notes(record: Record, arms: dict[str, ArmSummary], drift: Drift) -> Iterable[str]:
    """What a reader has to know beside the numbers."""
    if not record.complete and record.ended:
        yield f"the run is not complete: {record.ended}"
    if drift.flagged:
        shares = {"per prompt": drift.within, "over the run": drift.whole}
        said = ", ".join(f"{share:.2f} {name}" for name, share in shares.items() if share is not None)
        yield f"the machine did not stay the same: the baseline's later rate over its earlier one is {said}"
    base = arms.get(record.baseline)
    answers = [trials[0] for asked in record.prompts if (trials := record.of(asked.name, record.baseline))]
    if loops := sum(map(_repeats, answers)):
        yield (
            f"{record.baseline}: {loops} of {len(answers)} answers repeat themselves, which drafts guess more easily "
            "than any text that says something"
        )
    for name, arm in arms.items():
        if base is None or arm.speedup is None:
            continue
        if arm.same_tokens < arm.prompts:
            yield (
                f"{name}: the tokens of {arm.same_tokens} of {arm.prompts} prompts are the baseline's; "
                + ("times are compared on those, and per token on all" if arm.same_tokens else "compared per token")
            )
        dropped = sum(m.mode == "plain" and bool(m.reported.drafted) for m in record.measured if m.arm == name)
        if dropped:
            yield f"{name}: {dropped} of its requests gave up drafting, whose notes say why"
        if arm.lengths != base.lengths:
            means = (arm.lengths.mean, base.lengths.mean)
            yield "{}: its answers have {:.1f} tokens on average, the baseline's {:.1f}".format(name, *means)
    for when, found in record.run.conditions.items():
        if found.get("power_source") not in (None, "AC Power"):
            yield f"{when} the run the machine ran on {found['power_source']}"
        if found.get("low_power_mode"):
            yield f"{when} the run low-power mode was on"
        if found.get("thermal_pressure") not in (None, "nominal"):
            yield f"{when} the run the system reported thermal pressure: {found['thermal_pressure']}"


def _repeats(answer: Measured) -> bool:
    """Whether an answer is a loop, as models write them that may not end."""
    pieces: Sequence[int | str] = answer.tokens or answer.text.split()
    runs = list(zip(*(pieces[start:] for start in range(LOOP)), strict=False))
    return len(pieces) >= LONG and 2 * len(set(runs)) < len(runs)


def _lengths(answers: Sequence[Measured], limit: int) -> Lengths:
    counts = [each.generated for each in answers]
    at_limit = sum(each.generated >= limit and each.finish_reason != "stop" for each in answers)
    return Lengths(min(counts), float(np.median(counts)), float(np.mean(counts)), max(counts), at_limit)


def _spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(len(found), percentile(found, 50), percentile(found, 95))


def _sum(values: Iterable[T]) -> T:
    found = list(values)
    return sum(found[1:], found[0])


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
