"""Sampled text has the distribution of plain sampling: chi-square against exact enumeration.

Every sampler argument and kind of processor, with both rules; seeds are fixed, so the tests are deterministic. The
second half makes classic mistakes on purpose: the chi-square test has to see each of them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import sample_utils
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_logits_processors

from dflash_mlx.accept import Matching, Rejection, Stepwise, _choose, make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.config import Convolution, Selector
from dflash_mlx.decode import decode
from dflash_mlx.draft.context import DraftContext
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.options import Options
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.request import plan
from dflash_mlx.sampling import Draws, SamplingPolicy, log_probs
from dflash_mlx.targets import target_for
from tests.conftest import KERNELS, special_draft, tiny_draft
from tests.families import tiny
from tests.markov import VOCAB, Case, Make, chi_square_z, conditionals, counts, drawn, exact, guessed, process


class Moody:
    """Bans another token at every call, and dislikes a token the more often it came last: two kinds of own state."""

    def __init__(self) -> None:
        self.calls, self.tally = 0, np.zeros(VOCAB, dtype=np.float32)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        self.tally[tokens[-1].item()] += 1
        return mx.where(mx.arange(VOCAB) == self.calls % VOCAB, -mx.inf, logits - 1.5 * mx.array(self.tally))


XTC = dict(xtc_probability=0.5, xtc_threshold=0.15)
FILTERS = {
    "temperature": Case(dict(temp=0.7)),
    "top-k": Case(dict(temp=0.8, top_k=3)),
    "top-p": Case(dict(temp=1.0, top_p=0.9)),
    "min-p": Case(dict(temp=1.3, min_p=0.2)),
    "xtc": Case(dict(temp=1.0, **XTC)),
    "all filters": Case(dict(temp=0.8, top_p=0.97, min_p=0.02, top_k=3, **XTC, xtc_special_tokens=(3,))),
}
PROCESSORS = {
    "repetition": Case(dict(temp=1.0), lambda: make_logits_processors(repetition_penalty=1.8)),
    "presence and frequency": Case(
        dict(temp=1.0, top_p=0.95), lambda: make_logits_processors(presence_penalty=1.0, frequency_penalty=0.7)
    ),
    "bias": Case(dict(temp=1.0), lambda: make_logits_processors({1: 1.5, 4: -2.0})),
    "with state": Case(dict(temp=1.0), lambda: [Moody()]),
    "with state and xtc": Case(dict(temp=1.0, **XTC), lambda: [Moody()]),
}


RULES = {"rejection": drawn, "match": guessed}


def z_of(case: Case, rule: str, runs: int) -> float:
    return chi_square_z(counts(case, partial(make_decider, rule=rule), RULES[rule], runs), exact(case))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FILTERS)
def test_sampled_text_has_the_targets_own_distribution(name: str, rule: str) -> None:
    """125 texts in blocks of mixed sizes; drafts come with their q under rejection, and are guesses under match."""
    assert abs(z_of(FILTERS[name], rule, 1200)) < 3


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_applied_to_the_history_of_each_position(name: str) -> None:
    """Their conditionals depend on the whole text. Whatever the rule, drafts and their q cannot be seen in it."""
    case = PROCESSORS[name]
    assert abs(z_of(case, "rejection", 1000)) < 3
    drawn_texts, guessed_texts = (
        counts(case, partial(make_decider, rule=rule), drafts, 100) for rule, drafts in RULES.items()
    )
    assert np.array_equal(drawn_texts, guessed_texts)


@pytest.mark.parametrize("rule", RULES)
def test_with_the_reference_of_acceptance_every_text_is_drawn_as_without(rule: str) -> None:
    """The same distribution from the same draws: not one text of a hundred changes."""
    case = FILTERS["all filters"]
    stock, wired = (
        counts(case, partial(make_decider, rule=rule, kernels=kernels), guessed, 100) for kernels in KERNELS.values()
    )
    assert np.array_equal(stock, wired)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*FILTERS, *PROCESSORS])
def test_sampled_text_has_the_targets_own_distribution_in_20000_runs(name: str, rule: str) -> None:
    assert abs(z_of((FILTERS | PROCESSORS)[name], rule, 20_000)) < 3.5


# Classic mistakes. Every decider and draft is as it should be but for the one thing that its name says.


def guessed_and_called_drawn(policy: SamplingPolicy, draws: Draws, anchor: int, count: int, position: int) -> Proposal:
    q = drawn(policy, draws, anchor, count, position).probs
    return Proposal(guessed(policy, draws, anchor, count, position).tokens, q)


class AcceptsTheArgmax(Matching):
    def decide(self, proposal: Proposal, logits: mx.array, position: int, judgement: object = None) -> Verdict:
        want, best = (
            _choose(policy, self.draws, log_probs(logits), position).tolist()
            for policy in (self.policy, SamplingPolicy())
        )
        drafts = proposal.tokens.tolist()
        kept = next((i for i, token in enumerate(drafts) if token not in (want[i], best[i])), len(drafts))
        return Verdict(kept, (*drafts[:kept], want[kept]))


class ForgetsTheResidual(Rejection):
    def decide(self, proposal: Proposal, logits: mx.array, position: int, judgement: object = None) -> Verdict:
        verdict = super().decide(proposal, logits, position)
        row = verdict.accepted
        redrawn = _choose(self.policy, self.draws, log_probs(logits[row : row + 1]), position + row)
        return Verdict(row, (*verdict.tokens[:row], *redrawn.tolist()))


class TossesOneCoinPerBlock(Matching):
    """What mlx_lm's `apply_xtc` does with several rows."""

    def decide(self, proposal: Proposal, logits: mx.array, position: int, judgement: object = None) -> Verdict:
        rows = sample_utils.apply_xtc(log_probs(logits), XTC["xtc_probability"], XTC["xtc_threshold"], [])
        return Matching(SamplingPolicy(1.0), self.draws).decide(proposal, rows, position)


class ShowsTheBlocksStart(Stepwise):
    def _next(self, logits: mx.array, position: int) -> tuple[mx.array, mx.array]:
        history = self._history
        self._history = history[: history.size - self._chosen]
        rows, token = super()._next(logits, position)
        self._history = mx.concatenate([history, token])
        return rows, token


class CallsForRejectedRows(Stepwise):
    def decide(self, proposal: Proposal, logits: mx.array, position: int, judgement: object = None) -> Verdict:
        verdict = super().decide(proposal, logits, position)
        for row in range(len(verdict.tokens), len(logits)):
            for processor in self.processors:
                processor(self._history, logits[row : row + 1])
        return verdict


def stepwise(cls: type[Stepwise]) -> Make:
    return lambda policy, processors, draws: cls(partial(_choose, policy, draws), processors)


def row_wise(cls: type[Matching]) -> Make:
    return lambda policy, processors, draws: cls(policy, draws)


MISTAKES = {
    "a guess is taken for a draw": ("temperature", row_wise(Rejection), guessed_and_called_drawn),
    "the target's argmax is accepted": ("temperature", row_wise(AcceptsTheArgmax), guessed),
    "the correction is drawn from p": ("temperature", row_wise(ForgetsTheResidual), drawn),
    "one coin per block": ("xtc", row_wise(TossesOneCoinPerBlock), guessed),
    "the history of the block's start": ("repetition", stepwise(ShowsTheBlocksStart), guessed),
    "a processor called for rejected rows": ("with state", stepwise(CallsForRejectedRows), guessed),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_chi_square_test_notices(name: str) -> None:
    """As many runs as above are enough to see each mistake."""
    of, make, drafts = MISTAKES[name]
    case = (FILTERS | PROCESSORS)[of]
    mx.random.seed(1)  # the global state, from which only mlx_lm's own functions draw
    z = chi_square_z(counts(case, make, drafts, 1000), exact(case))
    assert z > 6


# End to end: a real draft and target, prefill, q, cache and context.

WORDS, PROMPT, TOKENS = 4, [0, 1], 3


class Flickering(DraftModel):
    """Its second row is NaN."""

    def denoise(self, embeddings: mx.array, context: DraftContext, *rest: Any) -> mx.array:
        hidden = super().denoise(embeddings, context, *rest)
        return mx.where(mx.arange(hidden.shape[1])[None, :, None] == 1, mx.nan, hidden)


PARTS = {
    "v1": {},
    "DFlash 2": dict(convolution=Convolution(2, 16), selector=Selector(4, 3)),  # one word is no candidate
    "three words": dict(draft_vocab_size=3),
    "flickering": {},
}


@lru_cache
def pair(kind: str = "v1") -> tuple[llama.Model, DraftModel]:
    """A target of 4 words and a draft that often agrees and has a decided q: a wrong one would show."""
    mx.random.seed(1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    sizes = dict(hidden_size=32, intermediate_size=32, vocab_size=WORDS, **heads)
    rest = dict(
        model_type="llama", num_hidden_layers=2, rms_norm_eps=1e-5, rope_theta=1000.0, tie_word_embeddings=False
    )
    model = llama.Model(llama.ModelArgs.from_dict({**sizes, **rest}))
    model.update(tree_map_with_path(lambda key, a: a * 2 if a.ndim >= 2 else a, model.parameters()))
    model.eval()
    taps = {"target_layer_ids": [0, 1], "mask_token_id": 3}
    draft = special_draft(PARTS[kind], 6, **sizes, num_target_layers=2, num_hidden_layers=1, dflash_config=taps)
    draft.norm.weight = draft.norm.weight * (0.6 if kind == "DFlash 2" else 2.5)
    if kind == "DFlash 2":  # less decided: a best guess that is called a draw has to show
        selector = draft.candidate_selector
        selector.predecessor_codebook = selector.predecessor_codebook * 0.6
    if kind == "three words":
        draft.map_ids(mx.array([3, 0, 2]))
        draft.lm_head.weight = model.lm_head.weight[mx.array([3, 0, 2])]
    if kind == "flickering":
        broken = Flickering(draft.config)
        broken.load_weights(tree_flatten(draft.parameters()))
        return model, broken
    return model, draft


def enumerated(model: llama.Model, case: Case) -> np.ndarray:
    """[WORDS] * TOKENS: the probability of every text after PROMPT."""
    texts = np.array(list(itertools.product(range(WORDS), repeat=TOKENS)))
    ids = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1)
    logits = model(mx.array(ids))[:, len(PROMPT) - 1 : -1]
    rows = [
        process(case.processors(), mx.array(line[: len(PROMPT) + i]), logits[text, i][None])
        for text, line in enumerate(ids)
        for i in range(TOKENS)
    ]
    p = conditionals(mx.concatenate(rows), **case.sampler).reshape(*texts.shape, WORDS)
    return np.take_along_axis(p, texts[:, :, None], axis=-1).prod(axis=(1, 2)).reshape((WORDS,) * TOKENS)


@pytest.mark.parametrize(
    ("rule", "case", "kind"),
    [
        ("rejection", FILTERS["top-p"], "v1"),
        ("match", FILTERS["top-p"], "v1"),
        ("rejection", FILTERS["xtc"], "v1"),
        ("rejection", PROCESSORS["repetition"], "v1"),
        ("rejection", FILTERS["top-p"], "DFlash 2"),
        ("match", FILTERS["top-p"], "DFlash 2"),
        ("rejection", FILTERS["top-p"], "three words"),
        ("rejection", FILTERS["temperature"], "flickering"),
    ],
    ids=["rejection", "match", "xtc", "repetition", "dflash2", "dflash2-match", "three-words", "flickering"],
)
def test_decoding_with_a_real_draft_has_the_targets_own_distribution(rule: str, case: Case, kind: str) -> None:
    """A q that lies on some of the words only, that depends on the path, or that is NaN in one row, among them.

    A text has one token more than is compared, so that the block after the one of prefill has two drafts.
    """
    model, draft = pair(kind)
    table, accepted = np.zeros((WORDS,) * TOKENS), 0
    for seed in range(400):
        policy, processors = replace(case.policy, seed=seed), tuple(case.processors())
        options = Options(block_size=3, mode="dflash", rule=rule, policy=policy, processors=processors)
        session = plan(model, draft, options).open(stop=())
        session.schedule = FixedBlock(3)  # nobody stops a draft that returns NaN
        text = [token for commit in decode(session, PROMPT, max_tokens=TOKENS + 1) for token in commit.tokens]
        table[tuple(text[:TOKENS])] += 1
        accepted += session.stats.accepted
    assert accepted > 100
    assert abs(chi_square_z(table, enumerated(model, case))) < 3


def test_drafts_are_drawn_from_the_q_that_is_handed_over() -> None:
    """Rejection sampling is exact for the recorded q only if the drafts really come from it."""
    policy, target = SamplingPolicy(0.8, top_k=6), target_for(tiny("llama"))
    draft = tiny_draft()
    draft.norm.weight = draft.norm.weight * 4
    context = draft.make_context()
    drawn, q = np.zeros((2, target.spec.vocab_size)), None
    for seed in range(500):
        proposal = BlockProposer(draft, target, context, policy, Draws(seed)).propose(7, 2, 11)
        q = np.array(proposal.probs, dtype=np.float64)
        for row, token in enumerate(proposal.tokens.tolist()):
            drawn[row, token] += 1
    for row in range(2):
        assert abs(chi_square_z(drawn[row], q[row] / q[row].sum())) < 3
