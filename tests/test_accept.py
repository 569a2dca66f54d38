"""Acceptance by hand-worked cases; by distribution it is tested in `test_distribution.py`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.accept import Matching, Rejection, Stepwise, make_decider
from dflash_mlx.exact import Cautious
from dflash_mlx.kernels.choice import STOCK, references, through
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.sampling import Draws, SamplingPolicy, Xtc
from tests.kernels.checks import runner
from tests.markov import P_LOGITS, START, VOCAB, chi_square_z, guessed, sampled_text


def one_hot_logits(*winners: int, vocab: int = VOCAB) -> mx.array:
    return mx.array([[5.0 if i == w else 0.0 for i in range(vocab)] for w in winners])


def proposal(*tokens: int) -> Proposal:
    return Proposal(mx.array(tokens, dtype=mx.int32))


GREEDY = make_decider(SamplingPolicy(), (), Draws(0))


@pytest.mark.parametrize(
    ("drafts", "target", "accepted", "tokens"),
    [
        ((), (3,), 0, (3,)),
        ((1, 2, 3), (1, 2, 3, 4), 3, (1, 2, 3, 4)),  # all accepted: bonus from the last row
        ((1, 2, 3), (0, 2, 3, 4), 0, (0,)),  # first rejected: correction, later agreement does not count
        ((1, 2, 3), (1, 0, 3, 4), 1, (1, 0)),
        ((1, 2, 3), (1, 2, 4, 3), 2, (1, 2, 4)),
    ],
)
def test_greedy_keeps_the_agreeing_prefix(drafts, target, accepted, tokens) -> None:
    assert GREEDY.decide(proposal(*drafts), one_hot_logits(*target), 0) == Verdict(accepted, tokens)


@pytest.mark.parametrize("who", ["stock", "reference", "kernel"])
@pytest.mark.parametrize("drafts", [(1,), (1, 2, 3), (3, 3, 3, 3, 3, 3)])
def test_what_stays_on_the_device_is_what_the_host_will_read(drafts: tuple[int, ...], who: str) -> None:
    """The pipelined cycle drafts on from count and anchor before anything is read."""
    kernels = through(runner()) if who == "kernel" else references() if who == "reference" else STOCK
    sampling = Proposal(mx.array(drafts), mx.softmax(mx.ones((len(drafts), VOCAB))))
    clear, policy = Cautious(SamplingPolicy(), Draws(0), 1.0, kernels=kernels), SamplingPolicy(1.0)
    greedy = make_decider(SamplingPolicy(), (), Draws(0), kernels=kernels)
    for right in range(len(drafts) + 1):
        wanted = [*drafts[:right], 0, *drafts[right:]][: len(drafts) + 1]
        for decider in (greedy, clear, make_decider(policy, (), Draws(right), kernels=kernels)):
            block = sampling if isinstance(decider, Rejection) else proposal(*drafts)
            judged = decider.judge(block, one_hot_logits(*wanted), 0)
            verdict = decider.decide(block, one_hot_logits(*wanted), 0, judged)
            assert judged.count.tolist() == [len(verdict.tokens)] == [verdict.accepted + 1]
            assert judged.anchor.tolist() == [verdict.tokens[-1]]
            assert judged.count.dtype == judged.anchor.dtype == mx.int32
            if decider is greedy:
                assert verdict == Verdict(right, (*drafts[:right], 0))


def test_ties_go_to_the_lowest_id() -> None:
    """As in mlx_lm: argmax of logits - logsumexp."""
    verdict = GREEDY.decide(proposal(2), mx.zeros((2, VOCAB)), 0)
    assert verdict == Verdict(0, (0,))


def test_greedy_uses_the_rounding_of_the_baseline() -> None:
    """In bf16 log-probabilities tie where raw logits do not; both loops have to break the tie alike."""
    logits = mx.ones((1, 512), dtype=mx.bfloat16)
    logits[0, 100] = 1.0078125  # one bf16 ulp more; the ulp of the log-probability, about -6.2, is four times that
    expected = mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
    assert GREEDY.decide(proposal(), logits, 0).tokens == (expected.item(),) == (0,)
    assert mx.argmax(logits).item() == 100, "the raw argmax is the other token"


def test_a_wrong_row_count_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`logits` has to be \[3, V\] for 2 draft tokens"):
        GREEDY.decide(proposal(1, 2), one_hot_logits(1, 2), 0)


def test_truncation_cuts_at_the_budget_and_after_the_first_stop() -> None:
    verdict = Verdict(3, (7, 8, 9, 7))
    assert verdict.truncate(10, ()) == verdict
    assert verdict.truncate(2, ()) == Verdict(2, (7, 8))
    assert verdict.truncate(10, {8, 9}) == Verdict(2, (7, 8))
    assert verdict.truncate(10, {7}) == Verdict(1, (7,))
    assert Verdict(0, (5,)).truncate(1, {5}) == Verdict(0, (5,))


def test_rejection_by_hand() -> None:
    """p = (.5 .3 .2), q = (.2 .7 .1): token 1 survives with .3/.7; the residual is (.75 0 .25)."""
    policy = SamplingPolicy(1.0)
    logits = mx.log(mx.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]))
    q = mx.array([[0.2, 0.7, 0.1]])
    kept, corrections = 0, np.zeros(3)
    for seed in range(2000):
        verdict = Rejection(policy, Draws(seed)).decide(Proposal(mx.array([1]), q), logits, 5)
        kept += verdict.accepted
        if not verdict.accepted:
            corrections[verdict.tokens[0]] += 1
    assert abs(kept / 2000 - 0.3 / 0.7) < 0.04
    assert corrections[1] == 0
    assert abs(corrections[0] / corrections.sum() - 0.75) < 0.04


def test_identical_distributions_accept_everything() -> None:
    policy = SamplingPolicy(1.0)
    for seed in range(50):
        draws = Draws(seed)
        weights = policy.log_weights(P_LOGITS[:3])
        tokens = draws.categorical(weights, "draft", 0)
        verdict = Rejection(policy, draws).decide(
            Proposal(tokens, mx.softmax(weights, axis=-1)), P_LOGITS[mx.array([0, 1, 2, 3])], 0
        )
        assert verdict.accepted == 3


def test_a_draft_that_returned_nan_is_rejected_and_replaced_from_p() -> None:
    """Acceptance may die, the text may not."""
    policy = SamplingPolicy(1.0)
    counts = np.zeros(VOCAB)
    for seed in range(1500):
        bad = Proposal(mx.array([0, 0]), mx.full((2, VOCAB), mx.nan))
        verdict = Rejection(policy, Draws(seed)).decide(bad, P_LOGITS[mx.array([START, 0, 0])], 0)
        assert verdict.accepted == 0
        counts[verdict.tokens[0]] += 1
    p = np.array(policy.probs(P_LOGITS[START]), dtype=np.float64)
    assert abs(chi_square_z(counts, p / p.sum())) < 3


NAN, MASKED = mx.full((VOCAB,), mx.nan), mx.full((VOCAB,), -mx.inf)


@pytest.mark.parametrize("bad", [NAN, MASKED], ids=["nan", "everything masked"])
@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(1.0, top_p=0.9), SamplingPolicy(1.0, top_k=2)])
def test_a_target_row_without_a_distribution_gives_the_id_that_plain_decoding_gives(policy, bad) -> None:
    """A broken target, or a processor that masks every id: no draft survives such a row, and no id is invented."""
    rows = mx.stack([P_LOGITS[START], bad, P_LOGITS[1]])
    q = mx.full((2, VOCAB), 1 / VOCAB)
    for seed in range(20):
        draws = Draws(seed)
        plain = [make_decider(policy, (), draws).decide(proposal(), rows[i : i + 1], 4 + i).tokens[0] for i in (0, 1)]
        right = proposal(plain[0], 3)
        for processors in ((), (lambda tokens, logits: logits,)):
            decider = make_decider(policy, processors, draws, rule="match")
            decider.observe([START])
            assert decider.decide(right, rows, 4) == Verdict(1, tuple(plain))
        verdict = make_decider(policy, (), draws).decide(Proposal(right.tokens, q), rows, 4)
        assert verdict.accepted <= 1 and set(verdict.tokens) <= set(range(VOCAB))


@pytest.mark.parametrize("policy", [SamplingPolicy(1.0), SamplingPolicy(0.8, 0.95, 0.01, 1, 4, xtc=Xtc(0.5, 0.15))])
def test_matching_at_a_temperature_is_plain_sampling_with_the_same_seed(policy) -> None:
    """Rule B: the draw of a position does not depend on the block it falls into."""
    for seed in range(40):
        draws = Draws(seed)
        decider = make_decider(policy, (), draws, rule="match")
        assert len({sampled_text(decider, policy, draws, guessed, block) for block in (1, 2, 3, 4, None)}) == 1


def test_a_point_mass_proposal_falls_back_to_matching() -> None:
    policy = SamplingPolicy(1.0)
    guess, rows = proposal(1), P_LOGITS[mx.array([START, 1])]
    for seed in range(20):
        draws = Draws(seed)
        assert Rejection(policy, draws).decide(guess, rows, 3) == Matching(policy, draws).decide(guess, rows, 3)


def test_stepwise_calls_sampler_and_processors_once_per_emitted_position() -> None:
    """A stateful processor has to see what plain decoding would show it, and nothing else."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    decider = Stepwise(lambda rows, position: mx.argmax(rows, axis=-1), (processor,), {77})
    decider.observe([9, 8])
    verdict = decider.decide(proposal(1, 4, 3), one_hot_logits(1, 2, 3, 4), 2)
    assert verdict == Verdict(1, (1, 2))
    assert seen == [[9, 8], [9, 8, 1]]
    decider.observe(verdict.tokens)
    decider.decide(proposal(), one_hot_logits(0), 4)
    assert seen[-1] == [9, 8, 1, 2]
