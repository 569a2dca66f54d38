"""One request as the harness saw it, on its own clock, and the rates that follow.

Seconds count from the request (t0). With t1, when the first token became visible, te, when the last one did, and n
tokens:

    ttft_s             t1 - t0
    decode_s           te - t1, and the draft's work on the prompt, which an engine does before t1: generation only
    decode_tps         (n - f)/decode_s, f tokens having become visible with the first: 1, but for engines whose first
                       cycle drafts already
    mlx_lm_tps         n/(te - t1): mlx_lm's `generation_tps`, which many READMEs print; beside ours and never instead
    request_tps        n/(te - t0): prefill included
    prompt_tps         prompt tokens that were processed/(t1 - t0 without the draft's work)
    cycle_s            gaps between the bursts in which tokens become visible

There is no rate before two tokens. Unknown is None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Cycles:
    """Columns over a request's bursts without the token that prefill gives.

    at_s: when the last token of each was visible. emitted, drafted, accepted: tokens; None where an engine does not
    show them.
    """

    at_s: tuple[float, ...]
    emitted: tuple[int, ...] | None = None
    drafted: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reported:
    """What the engine says of the same request, to be held against what was seen. None: it does not say.

    decode_s is te - t1 with the draft's work on the prompt; generation_tps is by mlx_lm's formula.
    """

    generated: int | None = None
    cycles: int | None = None
    plain_steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    histogram: dict[int, int] | None = None
    ttft_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    decode_tps: float | None = None
    request_tps: float | None = None
    generation_tps: float | None = None


@dataclass(frozen=True)
class Measured:
    """One prompt, one arm, one trial.

    trial: of this prompt and arm, from 0; order: of all requests of the run, from 0, warm-ups included.
    block_size: anchor and drafts; 1 for plain decoding; None where it is not known.
    first_s, end_s: when the first and the last token were visible.
    draft_prefill_s: the draft's work on the prompt, done before the first token.
    tokens: generated ids, stop tokens included; empty where an engine gives text only.
    output_sha256: of the ids, or of the text where there are none; what makes two answers the same.
    """

    prompt: str
    arm: str
    prompt_tokens: int
    prompt_sha256: str
    generated: int
    output_sha256: str
    first_s: float
    end_s: float
    tokens: tuple[int, ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    trial: int = 0
    order: int = 0
    finish_reason: str | None = None
    cached_tokens: int = 0
    block_size: int | None = None
    draft_prefill_s: float = 0.0
    cycles: Cycles | None = field(default=None, repr=False)
    reported: Reported = Reported()
    peak_memory_gb: float | None = None
    mode: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def prefill_tokens(self) -> int | None:
        """Tokens outside of all cycles: 1, or 0 where the first cycle drafts already."""
        if self.cycles is None or self.cycles.emitted is None:
            return None
        return self.generated - sum(self.cycles.emitted)

    @property
    def first_burst(self) -> tuple[int, float]:
        """Tokens that became visible with the first one, and when they had."""
        cycles = self.cycles
        if cycles is not None and cycles.emitted and self.prefill_tokens == 0:
            return cycles.emitted[0], cycles.at_s[0]
        return 1, self.first_s

    @property
    def ttft_s(self) -> float:
        return self.first_s

    @property
    def decode_s(self) -> float:
        return self.end_s - self.first_burst[1] + self.draft_prefill_s

    @property
    def decode_tokens(self) -> int:
        """Those that `decode_s` is the time of."""
        return self.generated - self.first_burst[0]

    @property
    def decode_tps(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None

    @property
    def mlx_lm_tps(self) -> float | None:
        seconds = self.end_s - self.first_s
        return self.generated / seconds if self.generated > 1 and seconds > 0 else None

    @property
    def request_tps(self) -> float | None:
        return self.generated / self.end_s if self.generated > 1 and self.end_s > 0 else None

    @property
    def prompt_tps(self) -> float | None:
        seconds = self.first_s - self.draft_prefill_s
        return (self.prompt_tokens - self.cached_tokens) / seconds if self.prompt_tokens and seconds > 0 else None

    @property
    def cycle_s(self) -> tuple[float, ...]:
        """Gaps; the first is the one behind the first burst."""
        if self.cycles is None:
            return ()
        times = self.cycles.at_s if self.prefill_tokens == 0 else (self.first_s, *self.cycles.at_s)
        return tuple(after - before for before, after in pairwise(times))


def percentile(values: Sequence[float], share: float, least: int = 20) -> float | None:
    """By linear interpolation; None of fewer than `least` values, of which a tail says nothing."""
    return float(np.percentile(values, share)) if len(values) >= least else None


def ids_sha256(ids: Sequence[int]) -> str:
    """Of ids as decimal numbers with a space between: `1 2 3`."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
