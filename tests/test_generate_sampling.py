"""Samplers, processors and seeds: what plain decoding would do, at every position."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

from dflash_mlx import make_sampler, stream_generate
from dflash_mlx.proposers import block as block_module
from tests.conftest import KERNELS, byte_tokenizer
from tests.families import SCRIPTS, reference, tiny
from tests.generating import DRAFT, PROMPT, scripted, stream
from tests.test_threads import run as run_in_a_process

__all__ = ["scripted"]  # a fixture


class Counting:
    """A processor with a state of its own: every call bans another third of the vocabulary."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls.append(len(tokens))
        return mx.where(mx.arange(logits.shape[-1]) % 3 == len(self.calls) % 3, -mx.inf, logits)


XTC = dict(xtc_probability=0.5, xtc_threshold=0.01, xtc_special_tokens=[7])
VARIANTS = {
    "temperature": (dict(temp=0.8), tuple),
    "top-p": (dict(temp=1.0, top_p=0.95), tuple),
    "top-k": (dict(temp=1.0, top_k=20), tuple),
    "min-p": (dict(temp=1.0, min_p=0.05), tuple),
    "xtc": (dict(temp=1.0, **XTC), tuple),
    "all filters": (dict(temp=0.9, top_p=0.98, min_p=0.01, top_k=40, **XTC), tuple),
    "penalties": (dict(temp=1.0), lambda: make_logits_processors({5: 2.0, 9: -4.0}, 1.3, 12, 0.5, 12, 0.3, 12)),
    "a processor with state, and xtc": (dict(temp=1.0, **XTC), lambda: [Counting()]),
}


def sampled(variant: str, seed: int | None = 7, max_tokens: int = 24, **kwargs) -> list[int]:
    """Tokens of one request."""
    arguments, processors = VARIANTS[variant]
    kwargs |= dict(sampler=make_sampler(**arguments, seed=seed), logits_processors=processors())
    return [r.token for r in stream("qwen3", byte_tokenizer(), max_tokens=max_tokens, **kwargs)]


def global_state() -> list:
    return [part.tolist() for part in mx.random.state]


@pytest.mark.parametrize(
    "sampler",
    [mlx_lm_sampler(temp=0.9, top_p=0.95), make_sampler(0.9, xtc_probability=0.5, xtc_threshold=0.01)],
    ids=["mlx_lm's", "ours with xtc and no seed"],
)
def test_mlx_lms_sampler_gives_mlx_lms_text_with_the_same_global_seed(sampler, tokenizer, scripted) -> None:
    """Applied left to right to the emitted positions only, so the global random state moves as in mlx_lm."""
    model = tiny("qwen3")  # built before the seed is set: weights are drawn from the global state, too
    mx.random.seed(4)
    theirs = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, 40, sampler=sampler)]
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
    plain_calls, block_calls = Counting(), Counting()
    plain = list(stream("llama", tokenizer, max_tokens=40, draft_model=None, logits_processors=[plain_calls]))
    scripted([r.token for r in plain], "wide")
    block = list(stream("llama", tokenizer, max_tokens=40, logits_processors=[block_calls], block_size=8))
    assert [r.token for r in block] == [r.token for r in plain]
    assert block_calls.calls == plain_calls.calls


@pytest.mark.parametrize("rule", ["rejection", "match"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_fixes_the_text_whatever_ran_before(variant: str, rule: str) -> None:
    """The key of a draw is explicit: the global random state neither matters nor moves."""
    first = sampled(variant, rule=rule)
    mx.random.seed(123)
    before = global_state()
    other = sampled(variant, seed=8, rule=rule)
    assert sampled(variant, rule=rule) == first != other
    assert sampled(variant, rule=rule, prefill_step_size=5) == first
    assert global_state() == before


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_match_rule_gives_the_text_of_plain_sampling(variant: str, scripted) -> None:
    """A second exact rule, selectable: draft, block size and acceptance cannot be seen in the text."""
    plain = sampled(variant, draft_model=None)
    assert sampled(variant, rule="match") == sampled(variant, rule="match", block_size=3) == plain
    assert sampled(variant, rule="match", block_size=5, kernels=KERNELS["references"]) == plain
    for script in SCRIPTS:
        scripted(plain, script)
        assert sampled(variant, rule="match", block_size=8) == plain


@pytest.mark.parametrize("variant", ["all filters", "penalties"])
def test_the_match_rule_holds_in_bfloat16(variant: str, tokenizer, scripted) -> None:
    """Where log-probabilities tie, filters and draws have to break the ties in a block as alone."""
    arguments, processors = VARIANTS[variant]

    def text(**kwargs) -> list[int]:
        kwargs |= dict(sampler=make_sampler(**arguments, seed=7), logits_processors=processors(), rule="match")
        return [r.token for r in stream_generate(tiny("qwen3", mx.bfloat16), tokenizer, PROMPT, 40, **kwargs)]

    plain = text()
    scripted(plain, "mixed")
    assert text(draft_model=DRAFT, mode="dflash", block_size=8) == plain


def test_a_seed_gives_the_same_text_in_a_worker_thread() -> None:
    """Also when two requests run at once: MLX's random state belongs to a thread, mlx_lm's compiled filters read it."""
    out = run_in_a_process(
        """
        from tests.test_generate_sampling import VARIANTS, sampled
        here = {variant: sampled(variant) for variant in VARIANTS}
        def there():
            return {variant: sampled(variant) for variant in VARIANTS}
        print(in_thread(there) == here)
        both = [None, None]
        def work(i):
            both[i] = there()
        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(both == [here, here])
        """
    )
    assert out == "True\nTrue\n"


@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_xtc_with_a_seed_costs_one_host_read_per_cycle(rule: str, tokenizer, scripted) -> None:
    """The verifier knows its distribution, so it needs no read per token as mlx_lm's own sampler does."""
    plain = sampled("xtc", max_tokens=40, draft_model=None)
    scripted(plain, "mixed")
    sampler = make_sampler(**VARIANTS["xtc"][0], seed=7)
    *_, last = stream("qwen3", tokenizer, max_tokens=40, sampler=sampler, rule=rule, block_size=8)
    assert last.stats.host_syncs == last.stats.cycles
    assert last.stats.accepted > 10
    assert plain != sampled("temperature", max_tokens=40, draft_model=None)


def test_without_a_seed_mlxs_global_state_decides(tokenizer) -> None:
    mx.random.seed(1)
    a, b = sampled("top-p", None), sampled("top-p", None)
    mx.random.seed(1)
    assert sampled("top-p", None) == a != b


def test_filters_that_leave_one_token_are_greedy(tokenizer) -> None:
    """Temperature and filters are honoured, and ignored where they do not matter."""
    truth = reference("qwen3", PROMPT, 30)
    for sampler in (make_sampler(1.0, top_k=1), make_sampler(0.7, top_p=1e-6), make_sampler(2.0, min_p=1.0)):
        assert [r.token for r in stream("qwen3", tokenizer, max_tokens=30, sampler=sampler)] == truth
    for greedy in (make_sampler(0.0, top_p=0.5, seed=99), make_sampler(0.0, xtc_probability=1.0, seed=99)):
        assert [r.token for r in stream("qwen3", tokenizer, max_tokens=30, sampler=greedy)] == truth


@pytest.mark.parametrize("variant", ["top-p", "all filters"])
def test_rejection_sampling_hands_over_the_distribution_it_drew_from(variant: str, monkeypatch) -> None:
    """One generic check of every proposer in sampled mode: q sums to one and holds the drawn tokens."""
    seen = []
    propose = block_module.BlockProposer.propose

    def spy(self, *args):
        proposal = propose(self, *args)
        seen.append(proposal)
        return proposal

    monkeypatch.setattr(block_module.BlockProposer, "propose", spy)
    sampled(variant, 3)
    drafts = [p for p in seen if len(p)]
    assert drafts
    for proposal in drafts:
        sums = proposal.probs.sum(axis=-1)
        assert mx.abs(sums - 1).max().item() < 1e-4
        assert mx.take_along_axis(proposal.probs, proposal.tokens[:, None], axis=-1).min().item() > 0
