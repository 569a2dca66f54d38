"""Acceptance is exact: by hand-worked cases, and by distribution against exact enumeration."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm.models import llama

from dflash_mlx.accept import Matching, Rejection, Stepwise, make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import Session, decode
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.sampling import Draws, SamplingPolicy, log_probs
from dflash_mlx.targets import target_for
from tests.conftest import tiny_draft
from tests.families import tiny

VOCAB = 5


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


# A Markov target and draft over 5 tokens: every conditional differs, so a slip in rows or residuals shows.
_rng = np.random.default_rng(11)
P_LOGITS = log_probs(mx.array(_rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.2))
Q_LOGITS = log_probs(mx.array(_rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.2))
START, LENGTH = 2, 3


def run(decider, policy: SamplingPolicy, draws: Draws, sampled_draft: bool, block: int = 4) -> tuple[int, ...]:
    """LENGTH tokens after START from blocks of up to block - 1 drafts; the draft guesses a walk of its own."""
    out = [START]
    while len(out) <= LENGTH:
        position = len(out)
        drafts, qs, last = [], [], out[-1]
        for i in range(min(block - 1, LENGTH + 1 - len(out))):
            weights = policy.log_weights(Q_LOGITS[last : last + 1])
            if sampled_draft:
                last = int(draws.categorical(weights, "draft", position + i)[0].item())
                qs.append(mx.softmax(weights, axis=-1))
            else:
                last = int(mx.argmax(Q_LOGITS[last]).item())
            drafts.append(last)
        probs = mx.concatenate(qs) if qs else None
        rows = P_LOGITS[mx.array([out[-1], *drafts])]
        out += decider.decide(Proposal(mx.array(drafts, dtype=mx.int32), probs), rows, position).tokens
    return tuple(out[1 : LENGTH + 1])


def exact(policy: SamplingPolicy) -> np.ndarray:
    """Probability of every sequence of LENGTH tokens under plain sampling, [VOCAB] * LENGTH."""
    p = np.array(policy.probs(P_LOGITS), dtype=np.float64)
    table = np.zeros((VOCAB,) * LENGTH)
    for seq in itertools.product(range(VOCAB), repeat=LENGTH):
        chain = (START, *seq)
        table[seq] = np.prod([p[a, b] for a, b in itertools.pairwise(chain)])
    return table / table.sum()


def chi_square_z(counts: np.ndarray, expected: np.ndarray) -> float:
    """Normal score of the chi-square statistic; cells expecting fewer than 5 are pooled."""
    total = counts.sum()
    want = expected.ravel() * total
    assert counts.ravel()[expected.ravel() == 0].sum() == 0, "a filtered token was emitted"
    big = want >= 5
    cells = [(counts.ravel()[big], want[big])]
    pooled = want[~big].sum()
    if pooled >= 5:
        cells.append((np.array([counts.ravel()[~big].sum()]), np.array([pooled])))
    got, want = (np.concatenate([c[i] for c in cells]) for i in (0, 1))
    degrees = len(want) - 1
    statistic = ((got - want) ** 2 / want).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))


POLICIES = {
    "t1": SamplingPolicy(1.0),
    "t0.7": SamplingPolicy(0.7),
    "top-p": SamplingPolicy(1.0, top_p=0.9),
    "top-k": SamplingPolicy(0.8, top_k=3),
    "min-p": SamplingPolicy(1.3, min_p=0.2),
}


def sample_counts(policy: SamplingPolicy, rule: str, runs: int, spoil=lambda decider: decider) -> np.ndarray:
    counts = np.zeros((VOCAB,) * LENGTH)
    for seed in range(runs):
        draws = Draws(seed)
        decider = spoil(make_decider(policy, (), draws, rule=rule))
        counts[run(decider, policy, draws, sampled_draft=rule == "rejection")] += 1
    return counts


@pytest.mark.parametrize("rule", ["rejection", "match"])
@pytest.mark.parametrize("name", ["t1", "top-p"])
def test_sampled_text_has_the_targets_own_distribution(name: str, rule: str) -> None:
    """Chi-square against exact enumeration of 125 sequences; seeds are fixed, so the test is deterministic."""
    policy = POLICIES[name]
    assert abs(chi_square_z(sample_counts(policy, rule, 1200), exact(policy))) < 3


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "match"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_sampled_text_has_the_targets_own_distribution_in_20000_runs(name: str, rule: str) -> None:
    policy = POLICIES[name]
    assert abs(chi_square_z(sample_counts(policy, rule, 20_000), exact(policy))) < 3.5


def test_the_chi_square_test_notices_a_classic_mistake() -> None:
    """Ratio test against an argmax draft as if it had been sampled: not exact."""
    policy = POLICIES["t1"]
    counts = np.zeros((VOCAB,) * LENGTH)
    for seed in range(1200):
        draws = Draws(seed)
        decider = Rejection(policy, draws)
        out = [START]
        while len(out) <= LENGTH:
            guess = int(mx.argmax(Q_LOGITS[out[-1]]).item())
            q = policy.probs(Q_LOGITS[out[-1]])[None]
            rows = P_LOGITS[mx.array([out[-1], guess])]
            out += decider.decide(Proposal(mx.array([guess], dtype=mx.int32), q), rows, len(out)).tokens
        counts[tuple(out[1 : LENGTH + 1])] += 1
    assert chi_square_z(counts, exact(policy)) > 10


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


def test_matching_at_a_temperature_is_plain_sampling_with_the_same_seed() -> None:
    """Rule B: the draw of a position does not depend on the block it falls into."""
    policy = SamplingPolicy(1.0, seed=5)
    for seed in range(40):
        draws = Draws(seed)
        decider = make_decider(policy, (), draws, rule="match")
        texts = {run(decider, policy, draws, sampled_draft=False, block=block) for block in (1, 2, 3, 4)}
        assert len(texts) == 1


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


def test_decoding_with_a_real_draft_has_the_targets_own_distribution() -> None:
    """The whole path: draft, q, rejection, cache, context; 256 sequences of a 4-word target against enumeration."""
    vocab, length, prompt = 4, 4, [0, 1, 2]
    mx.random.seed(1)
    sizes = dict(hidden_size=64, num_hidden_layers=4, intermediate_size=64, num_attention_heads=4, head_dim=16)
    args = dict(sizes, model_type="llama", num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=vocab)
    model = llama.Model(llama.ModelArgs.from_dict(dict(args, rope_theta=1000.0, tie_word_embeddings=False)))
    model.update(tree_map_with_path(lambda key, a: a * 2 if a.ndim >= 2 else a, model.parameters()))
    model.eval()
    draft = tiny_draft(vocab_size=vocab, dflash_config={"mask_token_id": 3})
    draft.norm.weight = draft.norm.weight * 1.5  # a decided q: a wrong one would show
    target, policy = target_for(model), SamplingPolicy(1.0)
    table = np.zeros((vocab,) * length)
    sequences = np.array(list(itertools.product(range(vocab), repeat=length)))
    ids = mx.array(np.concatenate([np.tile(prompt, (len(sequences), 1)), sequences], axis=1))
    p = np.array(policy.probs(log_probs(model(ids)[:, len(prompt) - 1 : -1])), dtype=np.float64)
    for row, sequence in zip(p, sequences, strict=True):
        table[tuple(sequence)] = np.prod(row[np.arange(length), sequence])
    counts, accepted = np.zeros_like(table), 0
    for seed in range(900):
        draws = Draws(seed)
        session = Session(
            target,
            TargetCache(target.make_entries(), 0),
            BlockProposer(draft, target, draft.make_context(), policy, draws),
            make_decider(policy, (), draws),
            FixedBlock(3),
        )
        counts[tuple(t for commit in decode(session, prompt, max_tokens=length) for t in commit.tokens)] += 1
        accepted += session.stats.accepted
    assert accepted > 200
    assert abs(chi_square_z(counts, table / table.sum())) < 3


def test_drafts_are_drawn_from_the_q_that_is_handed_over() -> None:
    """Rejection sampling is exact for the recorded q only if the drafts really come from it."""
    policy, target = SamplingPolicy(0.8, top_k=6), target_for(tiny("llama"))
    draft = tiny_draft()
    draft.norm.weight = draft.norm.weight * 4
    context = draft.make_context()
    counts, q = np.zeros((2, target.spec.vocab_size)), None
    for seed in range(500):
        proposal = BlockProposer(draft, target, context, policy, Draws(seed)).propose(7, 2, 11)
        q = np.array(proposal.probs, dtype=np.float64)
        for row, token in enumerate(proposal.tokens.tolist()):
            counts[row, token] += 1
    for row in range(2):
        assert abs(chi_square_z(counts[row], q[row] / q[row].sum())) < 3
