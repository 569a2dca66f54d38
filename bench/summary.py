"""What a run comes to: the numbers that a report shows, and nothing that it would have to work out.

Made by `statistics.summarise`, which says how. Unknown is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Clock = Literal["request", "decode"]


@dataclass(frozen=True)
class Speedup:
    """The baseline's time over the arm's.

    basis: "total time" (sums over prompts whose tokens are the same) or "per token" (sums of time over sums of tokens).
    low, high: 95% interval, by resampling prompts; None of fewer than two.
    worst, best: of single prompts, never to be shown without the other.
    """

    basis: Literal["total time", "per token"]
    prompts: int
    ratio: float
    low: float | None
    high: float | None
    worst: float
    best: float


@dataclass(frozen=True)
class Spread:
    """Percentiles in seconds over n values; None where n < 20."""

    n: int
    p50: float | None
    p95: float | None


@dataclass(frozen=True)
class Lengths:
    """Tokens of the answers, one per prompt; at_limit: those that the budget ended."""

    shortest: int
    median: float
    mean: float
    longest: int
    at_limit: int


@dataclass(frozen=True)
class ArmSummary:
    """One arm over some prompts; times are sums, rates tokens over time.

    near_ties, bugs: prompts whose first difference is one (`dflash_mlx.divergence`).
    same_answers, right: prompts whose extracted answer is the baseline's, and is right; of `answers` and
        `right_known`, those where it is known.
    speedup: by clock; None for the baseline. speedup_all: per token over all prompts, where some have other tokens.
    acceptance: as `Acceptance.as_json`, pooled; of_requests: the mean of the requests' mean acceptance lengths.
    cycle_s: of all cycles.
    """

    arm: str
    prompts: int
    requests: int
    generated: int
    same_tokens: int
    common_share: float | None
    near_ties: int
    bugs: int
    same_answers: int
    answers: int
    right: int
    right_known: int
    ttft_s: Spread
    request_s: Spread
    cycle_s: Spread
    decode_tps: float | None
    mlx_lm_tps: float | None
    request_tps: float | None
    speedup: dict[str, Speedup | None] | None
    speedup_all: dict[str, Speedup | None] | None
    acceptance: dict[str, Any] | None
    of_requests: float | None
    lengths: Lengths
    peak_memory_gb: float | None


@dataclass(frozen=True)
class Drift:
    """Whether the machine changed: the baseline's rate of decoding later over earlier, below 1 where it got slower.

    within: last over first trial of each prompt, pooled. whole: of the first prompt, at the end of the run over at its
    beginning. flagged: one of them is below 0.95 or above 1/0.95.
    """

    within: float | None
    whole: float | None
    flagged: bool


@dataclass(frozen=True)
class Summary:
    """left_out: prompts that not every arm finished. worst_category: by arm, by the request clock.

    longest: the category of arms' summaries of the prompt with the most tokens, whose name is longest_prompt.
    """

    baseline: str
    prompts: int
    left_out: tuple[str, ...]
    arms: dict[str, ArmSummary]
    categories: dict[str, dict[str, ArmSummary]]
    worst_category: dict[str, str]
    longest_prompt: str | None
    longest_prompt_tokens: int | None
    longest: dict[str, ArmSummary]
    drift: Drift
    notes: tuple[str, ...]
