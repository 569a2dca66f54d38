"""One function turns logits into tokens, with mlx_lm's filters and keyed randomness."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from dflash_mlx.sampling import Draws, SamplingPolicy, Xtc, as_policy, log_probs, make_sampler
from tests.markov import chi_square_z


def probs(policy: SamplingPolicy, p: list[float]) -> list[float]:
    return np.array(policy.probs(mx.log(mx.array([p]))))[0].tolist()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (SamplingPolicy(1.0), [0.5, 0.3, 0.15, 0.05]),
        (SamplingPolicy(1.0, top_p=0.75), [0.625, 0.375, 0, 0]),
        (SamplingPolicy(1.0, top_p=0.85), [0.5263, 0.3158, 0.1579, 0]),
        (SamplingPolicy(1.0, top_p=0.1), [1, 0, 0, 0]),
        (SamplingPolicy(1.0, top_p=1.0), [0.5, 0.3, 0.15, 0.05]),
        (SamplingPolicy(1.0, top_k=2), [0.625, 0.375, 0, 0]),
        (SamplingPolicy(1.0, top_k=9), [0.5, 0.3, 0.15, 0.05]),
        (SamplingPolicy(1.0, min_p=0.4), [0.625, 0.375, 0, 0]),
        (SamplingPolicy(1.0, min_p=0.9, min_tokens_to_keep=3), [0.5263, 0.3158, 0.1579, 0]),
        (SamplingPolicy(0.5), [0.6849, 0.2466, 0.0616, 0.0068]),
    ],
)
def test_filters_by_hand(policy: SamplingPolicy, expected: list[float]) -> None:
    """Small distributions whose filtered form is known."""
    assert probs(policy, [0.5, 0.3, 0.15, 0.05]) == pytest.approx(expected, abs=6e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.1, 3.0),
    st.sampled_from([0.0, 0.3, 0.9, 0.99]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0, 1, 7, 40]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    st.sampled_from([(), (3,), (0, 49, 77)]),
)
def test_the_distribution_is_that_of_mlx_lms_filters(seed, temp, top_p, min_p, top_k, xtc, threshold, special) -> None:
    """Same arguments, same support and weights as the filters of `mlx_lm.sample_utils.make_sampler`, in its order.

    `apply_xtc` with probability 1 always excludes, since its coin is below 1.
    """
    logits = mx.array(np.random.default_rng(seed).normal(size=(1, 50)).astype(np.float32) * 2)
    kept = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if top_p:
        kept = sample_utils.apply_top_p(kept, top_p)
    if min_p:
        kept = sample_utils.apply_min_p(kept, min_p, 1)
    expected = mx.zeros_like(kept)
    within = [token for token in special if token < 50]
    for share, outcome in ((1 - xtc, kept), (xtc, sample_utils.apply_xtc(kept, 1.0, threshold, within))):
        outcome = sample_utils.apply_top_k(outcome, top_k) if top_k else outcome
        expected = expected + share * mx.softmax(outcome / temp, axis=-1)
    ours = make_sampler(temp, top_p, min_p, 1, top_k, xtc, threshold, special, seed=0).probs(log_probs(logits))
    assert mx.abs(ours - expected).max().item() < 1e-5
    assert mx.array_equal(ours > 0, expected > 0)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(temp=1.0, xtc_probability=0.4, xtc_threshold=0.1),
        dict(temp=0.7, top_p=0.95, min_p=0.1, xtc_probability=0.6, xtc_threshold=0.12, xtc_special_tokens=[1]),
        dict(temp=1.0, top_k=2, xtc_probability=0.5, xtc_threshold=0.1),
    ],
)
def test_mlx_lms_own_sampler_draws_from_this_distribution(arguments: dict) -> None:
    """Chi-square of mlx_lm's sampler, coin and draw from the global state, against ours."""
    logprobs = log_probs(mx.log(mx.array([[0.35, 0.25, 0.2, 0.12, 0.06, 0.02]])))
    theirs = sample_utils.make_sampler(**arguments)
    mx.random.seed(3)
    counts = np.bincount([theirs(logprobs).item() for _ in range(1500)], minlength=6)
    expected = np.array(make_sampler(**arguments, seed=0).probs(logprobs), dtype=np.float64)[0]
    assert abs(chi_square_z(counts, expected / expected.sum())) < 3


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "policy",
    [
        SamplingPolicy(0.7, top_k=5),
        SamplingPolicy(0.7, top_p=0.9),
        SamplingPolicy(0.7, min_p=0.1, min_tokens_to_keep=3),
        SamplingPolicy(0.7, 0.95, 0.01, 1, 40, xtc=Xtc(0.5, 0.05)),
    ],
)
def test_a_row_is_filtered_in_a_block_as_alone(policy: SamplingPolicy, dtype: mx.Dtype) -> None:
    """Also where ids tie, as in bfloat16 they do: else a seed would give another text in blocks."""
    rows = log_probs((mx.random.normal((9, 500), key=mx.random.key(1)) * 3).astype(dtype))
    alone = [policy.log_weights(rows[i : i + 1]) for i in range(9)]
    assert mx.array_equal(policy.log_weights(rows), mx.concatenate(alone))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    """Log-weights that overflow would all be -inf, and every token id 0."""
    flat = [0.19, 0.21, 0.2, 0.2, 0.2]  # so that no log-probability is near 0
    assert probs(SamplingPolicy(temperature), flat) == [0, 1, 0, 0, 0]
    assert Draws(1).categorical(SamplingPolicy(temperature).log_weights(mx.log(mx.array([flat]))), "target", 0) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(temperature=-1), "`temperature` has to be 0 or more"),
        (dict(temperature=float("inf")), "`temperature` .* finite"),
        (dict(temperature=float("nan")), "`temperature`"),
        (dict(top_p=-0.1), "`top_p` has to be 0"),
        (dict(min_p=1.5), r"`min_p` has to be in 0\.\.1"),
        (dict(min_tokens_to_keep=0), "`min_tokens_to_keep` has to be an integer, 1 or more, got 0"),
        (dict(min_tokens_to_keep=1.5), "`min_tokens_to_keep` has to be an integer"),
        (dict(top_k=-1), r"`top_k` has to be an integer, 0 \(off\) or more, got -1"),
        (dict(top_k=2.5), "`top_k` has to be an integer"),
        (dict(seed=-1), "`seed` has to be in"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingPolicy(**arguments)


def test_draws_depend_on_seed_purpose_and_position_only() -> None:
    weights = mx.zeros((6, 1000))
    a = Draws(3).categorical(weights, "target", 10)
    mx.random.seed(99)
    assert mx.array_equal(a, Draws(3).categorical(weights, "target", 10))
    assert mx.array_equal(a[2:], Draws(3).categorical(weights[2:], "target", 12)), "row i is position + i"
    others = [Draws(4).categorical(weights, "target", 10), Draws(3).categorical(weights, "draft", 10)]
    for other in others:
        assert (a == other).sum().item() <= 1
    assert len(set(a.tolist())) > 4


def test_draws_of_neighbouring_positions_are_uniform_and_uncorrelated() -> None:
    u = np.concatenate([np.array(Draws(1).uniform("accept", p, 2)) for p in range(2000)]).reshape(-1, 2)
    assert abs(u.mean() - 0.5) < 0.02 and abs(u.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.07
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.07


def test_a_policy_is_an_mlx_lm_sampler() -> None:
    logits = mx.array([[0.0, 9.0, 0.0]])
    assert SamplingPolicy()(logits).item() == 1
    mx.random.seed(0)
    assert {make_sampler(1.0, top_k=2)(mx.array([[0.0, 0.1, -9.0]])).item() for _ in range(50)} == {0, 1}
    with pytest.raises(ValueError, match=r"carries seed 4.*mx\.random\.seed"):
        make_sampler(1.0, seed=4)(logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(xtc_probability=1.5), r"`xtc_probability` has to be 0 \(off\) or in \(0, 1\], got 1\.5"),
        (dict(xtc_probability=-0.1), "`xtc_probability`"),
        (dict(xtc_probability=0.5, xtc_threshold=0.6), r"`xtc_threshold` has to be in 0\.\.0\.5, got 0\.6"),
        (dict(xtc_probability=0.5, xtc_special_tokens=[4, -1]), "`xtc_special_tokens` have to be ids, .* got -1"),
    ],
)
def test_xtc_arguments_out_of_range_are_named(arguments: dict, message: str) -> None:
    """Before anything runs; with or without a seed."""
    for seed in (None, 3):
        with pytest.raises(ValueError, match=message):
            make_sampler(1.0, **arguments, seed=seed)


def test_xtc_by_hand() -> None:
    """Of .5 .3 .15 .05 the first two go (the third is the least above .1): .75 .25 for the rest. Half of the time."""
    assert probs(SamplingPolicy(1.0, xtc=Xtc(1.0, 0.1)), [0.5, 0.3, 0.15, 0.05]) == pytest.approx([0, 0, 0.75, 0.25])
    half = [0.25, 0.15, 0.45, 0.15]
    assert probs(SamplingPolicy(1.0, xtc=Xtc(0.5, 0.1)), [0.5, 0.3, 0.15, 0.05]) == pytest.approx(half)
    one_left = SamplingPolicy(1.0, top_k=1, xtc=Xtc(1.0, 0.1))
    assert probs(one_left, [0.5, 0.3, 0.15, 0.05]) == [0, 0, 1, 0], "XTC comes before top-k"
    alone = SamplingPolicy(1.0, xtc=Xtc(1.0, 0.5))
    assert probs(alone, [0.6, 0.3, 0.1]) == pytest.approx([0.6, 0.3, 0.1]), "the only likely token stays"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.01, 0.1]), st.lists(st.integers(0, 49), min_size=1, max_size=5))
def test_xtc_never_excludes_special_tokens(seed: int, threshold: float, special: list[int]) -> None:
    """Their weight can only grow, whatever else is excluded: an end-of-text token stays reachable."""
    logits = mx.array(np.random.default_rng(seed).normal(size=(3, 50)).astype(np.float32) * 2)
    without = SamplingPolicy(1.0).probs(log_probs(logits))[:, special]
    policy = make_sampler(1.0, xtc_probability=1.0, xtc_threshold=threshold, xtc_special_tokens=special, seed=0)
    assert (policy.probs(log_probs(logits))[:, special] > without * 0.999).all().item()


def test_xtc_without_a_seed_stays_mlx_lms_own_sampler() -> None:
    """So that MLX's global seed gives the text that it gives in mlx_lm."""
    sampler = make_sampler(1.0, xtc_probability=0.5, xtc_threshold=0.1)
    assert not isinstance(sampler, SamplingPolicy) and sampler(mx.zeros((1, 4))).shape == (1,)
    assert make_sampler(0.0, xtc_probability=0.5).greedy, "temperature 0 ignores it"
    assert make_sampler(1.0, xtc_threshold=0.3) == SamplingPolicy(1.0), "probability 0 is off"


def test_mlx_lms_greedy_sampler_is_recognised() -> None:
    assert as_policy(sample_utils.make_sampler(0.0)) == as_policy(None) == SamplingPolicy()
