"""One function turns logits into tokens, with mlx_lm's filters and keyed randomness."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from dflash_mlx.sampling import Draws, SamplingPolicy, as_policy, log_probs, make_sampler


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
)
def test_the_distribution_is_that_of_mlx_lms_sampler(seed, temp, top_p, min_p, top_k) -> None:
    """Same arguments, same support and weights as `mlx_lm.sample_utils.make_sampler`."""
    logits = mx.array(np.random.default_rng(seed).normal(size=(1, 50)).astype(np.float32) * 2)
    kept = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if top_p:
        kept = sample_utils.apply_top_p(kept, top_p)
    if min_p:
        kept = sample_utils.apply_min_p(kept, min_p, 1)
    if top_k:
        kept = sample_utils.apply_top_k(kept, top_k)
    expected = mx.softmax(kept / temp, axis=-1)
    ours = SamplingPolicy(temp, top_p, min_p, top_k=top_k).probs(log_probs(logits))
    assert mx.abs(ours - expected).max().item() < 1e-5
    assert mx.array_equal(ours > 0, expected > 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(temperature=-1), "`temperature` has to be 0 or more"),
        (dict(temperature=float("inf")), "`temperature` .* finite"),
        (dict(temperature=float("nan")), "`temperature`"),
        (dict(top_p=-0.1), "`top_p` has to be 0"),
        (dict(min_p=1.5), r"`min_p` has to be in 0\.\.1"),
        (dict(min_tokens_to_keep=0), "`min_tokens_to_keep` has to be 1 or more"),
        (dict(top_k=-1), "`top_k` has to be 0"),
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


def test_xtc_stays_mlx_lms_own_sampler() -> None:
    sampler = make_sampler(1.0, xtc_probability=0.5, xtc_threshold=0.1)
    assert not isinstance(sampler, SamplingPolicy) and sampler(mx.zeros((1, 4))).shape == (1,)
    with pytest.raises(ValueError, match="`seed` is not honoured with `xtc_probability`"):
        make_sampler(1.0, xtc_probability=0.5, seed=1)
    assert make_sampler(0.0, xtc_probability=0.5) == SamplingPolicy()


def test_mlx_lms_greedy_sampler_is_recognised() -> None:
    assert as_policy(sample_utils.make_sampler(0.0)) == as_policy(None) == SamplingPolicy()
