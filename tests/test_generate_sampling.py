"""Samplers, processors and seeds: what plain decoding would do, at every position."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

from dflash_mlx import make_sampler
from dflash_mlx.proposers import block as block_module
from tests.conftest import byte_tokenizer
from tests.families import SCRIPTS, reference, tiny
from tests.generating import PROMPT, paying, scripted, stream

__all__ = ["paying", "scripted"]  # fixtures


def test_mlx_lms_sampler_gives_mlx_lms_text_with_the_same_global_seed(tokenizer, scripted) -> None:
    """Applied left to right to the emitted positions only, so the global random state moves as in mlx_lm."""
    sampler = mlx_lm_sampler(temp=0.9, top_p=0.95)
    mx.random.seed(4)
    theirs = [r.token for r in mlx_lm.stream_generate(tiny("qwen3"), tokenizer, PROMPT, 40, sampler=sampler)]
    scripted(theirs, "mixed")
    mx.random.seed(4)
    ours = list(stream("qwen3", tokenizer, max_tokens=40, sampler=sampler, block_size=8))
    assert [r.token for r in ours] == theirs
    assert ours[-1].stats.accepted > 10


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_penalties_see_the_history_of_each_position(script: str, tokenizer, scripted) -> None:
    """Repetition, presence, frequency and bias."""
    processors = make_logits_processors({5: 2.0, 9: -4.0}, 1.3, 12, 0.5, 12, 0.3, 12)
    theirs = list(mlx_lm.stream_generate(tiny("llama"), tokenizer, PROMPT, 50, logits_processors=processors))
    scripted([r.token for r in theirs], script)
    ours = list(stream("llama", tokenizer, max_tokens=50, logits_processors=processors, block_size=8))
    assert [r.token for r in ours] == [r.token for r in theirs] != reference("llama", PROMPT, 50)
    for a, b in zip(ours, theirs, strict=True):
        assert mx.array_equal(a.logprobs, b.logprobs)


def test_a_processor_with_state_is_called_as_in_plain_decoding(tokenizer, scripted) -> None:
    def counting():
        calls = []

        def processor(tokens, logits):
            calls.append(len(tokens))
            return mx.where(mx.arange(logits.shape[-1]) % 3 == len(calls) % 3, -mx.inf, logits)

        return processor, calls

    processor, calls = counting()
    plain = list(stream("llama", tokenizer, max_tokens=40, draft_model=None, logits_processors=[processor]))
    scripted([r.token for r in plain], "wide")
    processor, ours = counting()
    block = list(stream("llama", tokenizer, max_tokens=40, logits_processors=[processor], block_size=8))
    assert [r.token for r in block] == [r.token for r in plain]
    assert ours == calls


def sampled(seed: int | None, **kwargs) -> list[int]:
    sampler = make_sampler(1.0, top_p=0.95, seed=seed)
    return [r.token for r in stream("qwen3", byte_tokenizer(), max_tokens=30, sampler=sampler, **kwargs)]


def test_a_seed_fixes_the_text_whatever_ran_before(tokenizer) -> None:
    """The key of a draw is explicit; the global random state does not matter."""
    first = sampled(7)
    mx.random.seed(123)
    sampled(8)
    assert sampled(7) == first != sampled(8)
    assert sampled(7, prefill_step_size=5) == first


def test_without_a_seed_mlxs_global_state_decides(tokenizer) -> None:
    mx.random.seed(1)
    a, b = sampled(None), sampled(None)
    mx.random.seed(1)
    assert sampled(None) == a != b


def test_the_match_rule_gives_the_text_of_plain_sampling(tokenizer) -> None:
    """A second exact rule, selectable; draft and block size cannot be seen in the text."""
    plain = sampled(7, draft_model=None)
    assert sampled(7, rule="match") == sampled(7, rule="match", block_size=3) == plain


def test_filters_that_leave_one_token_are_greedy(tokenizer) -> None:
    """Temperature and filters are honoured, and ignored where they do not matter."""
    truth = reference("qwen3", PROMPT, 30)
    for sampler in (make_sampler(1.0, top_k=1), make_sampler(0.7, top_p=1e-6), make_sampler(2.0, min_p=1.0)):
        assert [r.token for r in stream("qwen3", tokenizer, max_tokens=30, sampler=sampler)] == truth
    greedy = make_sampler(0.0, top_p=0.5, seed=99)
    assert [r.token for r in stream("qwen3", tokenizer, max_tokens=30, sampler=greedy)] == truth


def test_rejection_sampling_hands_over_the_distribution_it_drew_from(tokenizer, monkeypatch) -> None:
    """One generic check of every proposer in sampled mode: q sums to one and holds the drawn tokens."""
    seen = []
    propose = block_module.BlockProposer.propose

    def spy(self, *args):
        proposal = propose(self, *args)
        seen.append(proposal)
        return proposal

    monkeypatch.setattr(block_module.BlockProposer, "propose", spy)
    sampled(3)
    drafts = [p for p in seen if len(p)]
    assert drafts
    for proposal in drafts:
        sums = proposal.probs.sum(axis=-1)
        assert mx.abs(sums - 1).max().item() < 1e-4
        assert mx.take_along_axis(proposal.probs, proposal.tokens[:, None], axis=-1).min().item() > 0
