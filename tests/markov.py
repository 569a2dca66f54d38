"""A target whose text can be enumerated: 5 tokens, a conditional of its own after each, and a draft that often agrees.

`exact` is the probability of every text of LENGTH tokens, from mlx_lm's filters and processors alone; `sampled_text`
decodes one text with a decider of ours. Whatever the decider, drafts and blocks, the two have to fit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm import sample_utils

from dflash_mlx.accept import Decider
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Draws, LogitsProcessor, SamplingPolicy, log_probs, make_sampler

VOCAB, START, LENGTH = 5, 2, 3
_rng = np.random.default_rng(11)
P_LOGITS = log_probs(mx.array(_rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.2))


def _draft_logits() -> mx.array:
    """[anchor, row, V]: the chain's own marginals one to three steps ahead, disturbed.

    As in a DFlash block, no row knows the drafts before it.
    """
    chain = np.exp(np.array(P_LOGITS, dtype=np.float64))
    ahead = np.stack([np.linalg.matrix_power(chain, step + 1) for step in range(LENGTH)], axis=1)
    return mx.array((np.log(ahead) * 1.5 + _rng.normal(size=ahead.shape) * 0.5).astype(np.float32))


Q_LOGITS = _draft_logits()


@dataclass(frozen=True)
class Case:
    """What a user asks for: arguments of `make_sampler`, and fresh processors for every text."""

    sampler: dict
    processors: Callable[[], Sequence[LogitsProcessor]] = tuple

    @property
    def policy(self) -> SamplingPolicy:
        return make_sampler(**self.sampler, seed=0)  # type: ignore[return-value]


def conditionals(
    logits: mx.array,
    temp: float,
    top_p: float = 0.0,
    min_p: float = 0.0,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] = (),
) -> np.ndarray:
    """[R, V] -> [R, V] float64: what mlx_lm's sampler draws from, its coin of XTC averaged over both outcomes."""
    kept = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if top_p:
        kept = sample_utils.apply_top_p(kept, top_p)
    if min_p:
        kept = sample_utils.apply_min_p(kept, min_p, 1)
    struck = sample_utils.apply_xtc(kept, 1.0, xtc_threshold, list(xtc_special_tokens))
    outcomes = []
    for outcome in (kept, struck):
        outcome = sample_utils.apply_top_k(outcome, top_k) if top_k else outcome
        weights = np.exp(np.array(outcome, dtype=np.float64) / temp)
        outcomes.append(weights / weights.sum(axis=-1, keepdims=True))
    return (1 - xtc_probability) * outcomes[0] + xtc_probability * outcomes[1]


def process(processors: Sequence[LogitsProcessor], history: mx.array, logits: mx.array) -> mx.array:
    """[1, V] -> [1, V]: what plain decoding makes of the logits after `history`."""
    for processor in processors:
        logits = processor(history, logits)
    return logits


def exact(case: Case) -> np.ndarray:
    """[VOCAB] * LENGTH: the probability of every text; processors are shown each history, left to right."""
    texts = list(itertools.product(range(VOCAB), repeat=LENGTH))
    rows = []
    for text in texts:
        processors = case.processors()
        for i in range(LENGTH):
            history = [START, *text[:i]]
            rows.append(process(processors, mx.array(history), P_LOGITS[history[-1]][None]))
    p = conditionals(mx.concatenate(rows), **case.sampler).reshape(len(texts), LENGTH, VOCAB)
    return np.take_along_axis(p, np.array(texts)[:, :, None], axis=-1).prod(axis=(1, 2)).reshape((VOCAB,) * LENGTH)


Drafts = Callable[[SamplingPolicy, Draws, int, int, int], Proposal]


def drawn(policy: SamplingPolicy, draws: Draws, anchor: int, count: int, position: int) -> Proposal:
    """`count` drafts after the anchor, sampled and with their q."""
    weights = policy.log_weights(log_probs(Q_LOGITS[anchor, :count]))
    return Proposal(draws.categorical(weights, "draft", position), mx.softmax(weights, axis=-1))


def guessed(policy: SamplingPolicy, draws: Draws, anchor: int, count: int, position: int) -> Proposal:
    """The draft's best guess per position."""
    return Proposal(mx.argmax(Q_LOGITS[anchor, :count], axis=-1).astype(mx.int32))


def sampled_text(
    decider: Decider, policy: SamplingPolicy, draws: Draws, drafts: Drafts, block: int | None = None
) -> tuple[int, ...]:
    """LENGTH tokens after START, in blocks of `block` or, with None, of mixed sizes that depend on the seed."""
    out, sizes = [START], random.Random(draws.seed)
    nothing = Proposal(mx.array([], dtype=mx.int32))
    decider.observe(out)
    while len(out) <= LENGTH:
        count = min(sizes.choice((0, 1, 2, 3, 3, 3)) if block is None else block - 1, LENGTH + 1 - len(out))
        proposal = drafts(policy, draws, out[-1], count, len(out)) if count else nothing
        rows = P_LOGITS[mx.concatenate([mx.array(out[-1:]), proposal.tokens])]
        verdict = decider.decide(proposal, rows, len(out))
        decider.observe(verdict.tokens)
        out += verdict.tokens
    return tuple(out[1 : LENGTH + 1])


Make = Callable[[SamplingPolicy, Sequence[LogitsProcessor], Draws], Decider]


def counts(case: Case, make: Make, drafts: Drafts, runs: int) -> np.ndarray:
    """[VOCAB] * LENGTH: how often each text came up with seeds 0, 1, ..."""
    table, policy = np.zeros((VOCAB,) * LENGTH), case.policy
    for seed in range(runs):
        draws = Draws(seed)
        table[sampled_text(make(policy, case.processors(), draws), policy, draws, drafts)] += 1
    return table


def chi_square_z(counts: np.ndarray, expected: np.ndarray) -> float:
    """Normal score of the chi-square statistic; cells expecting fewer than 5 are pooled. inf for what cannot be."""
    total = counts.sum()
    want = expected.ravel() * total
    if counts.ravel()[want == 0].any():
        return float("inf")
    big = want >= 5
    cells = [(counts.ravel()[big], want[big])]
    pooled = want[~big].sum()
    if pooled >= 5:
        cells.append((np.array([counts.ravel()[~big].sum()]), np.array([pooled])))
    got, want = (np.concatenate([c[i] for c in cells]) for i in (0, 1))
    degrees = len(want) - 1
    statistic = ((got - want) ** 2 / want).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))
