"""`exact`: plain decoding's tokens although a forward over a block rounds differently."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from dflash_mlx import make_sampler, stream_generate
from dflash_mlx.accept import make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import Session, decode
from dflash_mlx.exact import Cautious
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.targets import target_for
from tests.conftest import tokens_of
from tests.families import BY_NAME, ScriptedProposer, build, prompt_of, tiny
from tests.generating import DRAFT, PROMPT, scripted

__all__ = ["scripted"]  # fixture
COUNT = 80


class NoisyHead(nn.Module):
    """Adds up to `size` to every logit of a forward over several rows: another kernel's rounding, much enlarged."""

    def __init__(self, head: nn.Module, size: float) -> None:
        super().__init__()
        self.head, self.size = head, size

    def __call__(self, hidden: mx.array) -> mx.array:
        logits = self.head(hidden)
        if logits.shape[1] == 1:
            return logits
        noise = mx.sin(mx.arange(logits.size).reshape(logits.shape) * 12.9898 + logits.sum() * 1e3)
        return logits + (noise * self.size).astype(logits.dtype)


def noisy(name: str, size: float, dtype: mx.Dtype) -> tuple[nn.Module, list[int]]:
    """A target whose blocks round differently, and its plain greedy tokens."""
    model = build(BY_NAME[name], dtype)
    text = model.get("language_model", model)
    text.lm_head = NoisyHead(text.lm_head, size)
    truth = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=COUNT)]
    assert len(set(truth)) > 15
    return model, truth


def run(model: nn.Module, tokenizer, exact: bool | float, **kwargs):
    responses = list(
        stream_generate(model, tokenizer, PROMPT, COUNT, DRAFT, mode="dflash", block_size=8, exact=exact, **kwargs)
    )
    return [r.token for r in responses], responses[-1]


@pytest.mark.parametrize("script", ["all", "mixed", "wide"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_near_ties_come_out_as_in_plain_decoding(name, dtype, script, tokenizer, scripted) -> None:
    """The answer would change with the width of the forward; without `exact` it does."""
    size = 0.3
    model, truth = noisy(name, size, dtype)
    scripted(truth, script)
    loose, _ = run(model, tokenizer, False)
    scripted(truth, script)
    exact, last = run(model, tokenizer, 2 * size + 0.1)
    assert exact == truth
    assert loose != truth, "the noise would have to be larger for this test to mean something"
    assert last.stats.rechecked > 0
    assert last.stats.accepted > 5, "most positions are clear, and blocks still decide them"
    assert last.stats.emitted == COUNT == last.generation_tokens


def test_rounding_that_states_and_keys_carry_on_needs_a_wider_margin() -> None:
    """Real rounding, not made up: Mamba-2 in bfloat16 computes blocks and single rows in different forms."""
    model = tiny("nemotron_h", mx.bfloat16)
    target, same = target_for(model), {0.0: 0, 2.0: 0}
    for prompt in (prompt_of(21, seed=seed) for seed in range(3)):
        truth = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=COUNT)]
        for margin in same:
            cache, proposer = TargetCache(target.make_entries(), 0), ScriptedProposer(truth, ["all"])
            decider = Cautious(SamplingPolicy(), Draws(0), margin)
            session = Session(target, cache, proposer, decider, FixedBlock(8))
            same[margin] += tokens_of(decode(session, prompt, max_tokens=COUNT)) == truth
    assert same[0.0] < same[2.0] == 3


def test_a_margin_narrower_than_the_rounding_is_not_enough(tokenizer, scripted) -> None:
    """The test above can fail: it is the margin that does it."""
    model, truth = noisy("llama", 0.3, mx.float32)
    scripted(truth, "all")
    tokens, _ = run(model, tokenizer, 1e-6)
    assert tokens != truth


def test_clear_positions_cost_no_further_forward(tokenizer, scripted) -> None:
    """Without rounding and at the default margin of float32 there is next to nothing to decide again."""
    model, truth = noisy("llama", 0.0, mx.float32)
    scripted(truth, "all")
    tokens, last = run(model, tokenizer, True)
    assert tokens == truth
    assert last.stats.rechecked <= 2 and last.stats.cycles <= COUNT // 8 + 4


def test_nothing_is_emitted_twice_when_every_position_is_close(tokenizer, scripted) -> None:
    """A margin that nothing passes is plain decoding with wasted drafts: same tokens, counts and cache."""
    model, truth = noisy("qwen3", 0.0, mx.float32)
    scripted(truth, "mixed")
    tokens, last = run(model, tokenizer, 1e9)
    assert tokens == truth
    assert last.stats.accepted == 0 and last.stats.rechecked >= COUNT // 2


LOGITS = mx.log(mx.array([[0.70, 0.20, 0.10], [0.41, 0.39, 0.20], [0.10, 0.20, 0.70]]))


@pytest.mark.parametrize(
    ("drafts", "margin", "tokens", "accepted", "uncertain"),
    [
        ([0, 0], 0.01, (0, 0, 2), 2, False),  # all clear
        ([0, 0], 0.10, (0,), 1, True),  # row 1 is close: what row 0 said stays
        ([1, 0], 0.10, (0,), 0, False),  # the close row is behind the correction
        ([0, 1], 0.10, (0,), 1, True),
        ([0, 0], 2.00, (), 0, True),  # not even row 0 is clear
    ],
)
def test_a_block_decides_only_up_to_its_first_near_tie(drafts, margin, tokens, accepted, uncertain) -> None:
    decider = Cautious(SamplingPolicy(), Draws(0), margin)
    verdict = decider.decide(Proposal(mx.array(drafts, dtype=mx.int32)), LOGITS, 0)
    assert (verdict.tokens, verdict.accepted, verdict.uncertain) == (tokens, accepted, uncertain)
    assert decider.host_reads == 1


def test_a_single_row_always_decides() -> None:
    nothing = Proposal(mx.array([], dtype=mx.int32))
    for decider in (Cautious(SamplingPolicy(), Draws(0), 1e9), make_decider(SamplingPolicy(), (), Draws(0))):
        assert decider.decide(nothing, LOGITS[1:2], 0).tokens == (0,)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(exact=-1.0), r"`exact` has to be True, False, or a margin above 0 in log-probability, got -1\.0"),
        (dict(exact=0), "`exact` has to be True, False, or a margin above 0 in log-probability, got 0"),
        (dict(exact="yes"), "`exact` has to be True, False, or a margin above 0 in log-probability, got 'yes'"),
        (dict(exact=float("nan")), "`exact` has to be True, False, or a margin above 0"),
        (dict(exact=True, sampler=make_sampler(1.0)), "`exact` is for greedy decoding"),
        (dict(exact=True, logits_processors=[lambda tokens, logits: logits]), "`exact` is for greedy decoding"),
    ],
)
def test_exact_is_refused_where_it_would_promise_nothing(kwargs, message, tokenizer) -> None:
    with pytest.raises(ValueError, match=message):
        stream_generate(build(BY_NAME["llama"]), tokenizer, PROMPT, 5, DRAFT, mode="dflash", **kwargs)
