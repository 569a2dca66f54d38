"""Embedding and head of a draft: the target's own functions, or the draft's; rows that are not finite are no tokens.

A scripted draft returns given hidden states, so that a head's tokens and q can be worked out by hand.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.accept import make_decider
from dflash_mlx.config import Selector
from dflash_mlx.decode import decode
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.sampling import Draws, SamplingPolicy, make_sampler
from dflash_mlx.targets import Target, target_for
from tests.conftest import DFLASH2, OWN_PARTS, REDUCED, draft_config, greedy_session, special_draft, tokens_of
from tests.draft_reference import reference_denoise, reference_own_head
from tests.families import BY_NAME, VOCAB, build, reference, tiny
from tests.generating import PROMPT, stream
from tests.markov import chi_square_z
from tests.test_draft import HIDDEN, data

BEST = SamplingPolicy(1.0), Draws(3)


class Scripted(DraftModel):
    """Returns `hidden` [K, H] whatever it is asked, and remembers the embeddings that it was given."""

    def __init__(self, hidden: np.ndarray, **parts: object) -> None:
        super().__init__(replace(draft_config(), **parts))  # type: ignore[arg-type]
        self._hidden, self.given = mx.array(hidden), list[mx.array]()

    def denoise(self, embeddings: mx.array, context: object, *rest: Any) -> mx.array:
        self.given.append(embeddings)
        return self._hidden[None, : embeddings.shape[1] - 1]


def proposer(draft: DraftModel, target: Target, *sampling: object) -> BlockProposer:
    return BlockProposer(draft, target, draft.make_context(), *sampling)  # type: ignore[arg-type]


def one_hot(*rows: int) -> np.ndarray:
    """[K, HIDDEN]: with the identity as head, row i's best token is rows[i]."""
    return np.eye(HIDDEN, dtype=np.float32)[list(rows)] * 5


# --- Shared with the target ---


@lru_cache
def target_with(name: str, tied: bool, bits: int | None) -> Target:
    family = BY_NAME[name]
    model = build(replace(family, config=family.config | {"tie_word_embeddings": tied}))
    if bits:
        packable = [nn.Linear, nn.Embedding]
        nn.quantize(model, 32, bits, class_predicate=lambda _, m: type(m) in packable and m.weight.shape[-1] % 32 == 0)
    return target_for(model)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma4_text", "muse_glimmer"])
def test_block_rows_and_logits_are_those_of_the_targets_own_functions(name: str, tied: bool, bits: int | None) -> None:
    """Gemma's scale left out, or a head that is not the packed one, costs acceptance and nothing else would show it."""
    target = target_with(name, tied, bits)
    hidden = np.random.default_rng(5).normal(size=(3, HIDDEN)).astype(np.float32)
    draft = Scripted(hidden, output_multiplier=0.5)
    proposal = proposer(draft, target, *BEST).propose(7, 3, 10)
    ids = mx.array([[7, 256, 256, 256]])
    # Muse's own forward norms the rows, and its draft was trained on the table as it is.
    given = target.embedding(ids) if name == "muse_glimmer" else target.embed(ids)
    assert mx.array_equal(draft.given[0], given)
    scale = HIDDEN**0.5 if name.startswith("gemma") else 1.0
    np.testing.assert_allclose(np.array(draft.given[0]), np.array(target.embedding(ids)) * scale, rtol=0.01)
    logits = target.head(mx.array(hidden)[None])[0] * 0.5
    np.testing.assert_allclose(np.array(proposal.probs), np.array(mx.softmax(logits, axis=-1)), rtol=1e-4)
    greedy = proposer(draft, target).propose(7, 3, 10).tokens
    assert greedy.tolist() == mx.argmax(logits, axis=-1).tolist()


# --- Its own ---


@pytest.fixture(scope="module")
def target() -> Target:
    return target_for(tiny("llama"))


IDS = mx.array(np.random.default_rng(7).permutation(VOCAB)[:REDUCED], dtype=mx.int32)


def with_head(rows: int, hidden: np.ndarray, ids: mx.array | None, **parts: object) -> Scripted:
    """Its head's row i answers to unit vector i, and rows past the hidden size to nothing."""
    draft = Scripted(hidden, draft_vocab_size=rows, vocab_size=max(rows, VOCAB), **parts)
    draft.lm_head.weight = mx.eye(rows, HIDDEN)
    if ids is not None:
        draft.map_ids(ids)
    return draft


def test_a_small_head_speaks_in_the_targets_ids(target: Target) -> None:
    """Read as target ids, its rows would be other words: correct text, and next to nothing accepted."""
    rows = [63, 0, 17, 40]
    draft = with_head(REDUCED, one_hot(*rows), IDS)
    assert proposer(draft, target).propose(7, 4, 10).tokens.tolist() == [int(IDS[row].item()) for row in rows]


def test_a_head_of_its_own_is_used_and_not_the_targets(target: Target) -> None:
    """Also where it has the full vocabulary."""
    hidden = one_hot(3, 60, 9)
    draft = with_head(VOCAB, hidden, None)
    tokens = proposer(draft, target).propose(7, 3, 10).tokens.tolist()
    assert tokens == [3, 60, 9] != mx.argmax(target.head(mx.array(hidden)[None])[0], axis=-1).tolist()


@pytest.mark.parametrize("rows", [REDUCED, VOCAB, VOCAB + 63])
def test_q_of_an_own_head_lies_on_the_ids_that_it_knows(target: Target, rows: int) -> None:
    """[K, V] of the target, whose verifier subtracts it: 0 where the head has no row, and nothing past V."""
    hidden = np.random.default_rng(2).normal(size=(4, HIDDEN)).astype(np.float32) * 2
    ids = IDS if rows == REDUCED else None
    draft = with_head(rows, hidden, ids, output_multiplier=0.7, final_logit_softcapping=3.0)
    proposal = proposer(draft, target, SamplingPolicy(0.8), Draws(3)).propose(7, 4, 10)
    logits = 3 * np.tanh(hidden @ np.eye(HIDDEN, rows) * 0.7 / 3) / 0.8
    q = np.zeros((4, VOCAB))
    where = np.array(IDS) if ids is not None else np.arange(VOCAB)
    q[:, where] = np.exp(logits[:, : len(where)])
    np.testing.assert_allclose(np.array(proposal.probs), q / q.sum(axis=-1, keepdims=True), atol=1e-5)
    assert proposal.probs.dtype == mx.float32


def test_the_policys_filters_are_applied_to_the_targets_ids(target: Target) -> None:
    """XTC's special tokens are ids of the tokenizer, not rows of the draft's head."""
    hidden = np.zeros((1, HIDDEN), dtype=np.float32)
    hidden[0, [5, 9]] = 8.0, 7.0
    special = int(IDS[5].item())
    draft = with_head(REDUCED, hidden, IDS)
    q = {}
    for name, tokens in (("none", ()), ("special", (special,))):
        policy = make_sampler(
            1.0, top_k=2, xtc_probability=1.0, xtc_threshold=0.1, xtc_special_tokens=list(tokens), seed=1
        )
        assert isinstance(policy, SamplingPolicy)
        q[name] = np.array(proposer(draft, target, policy, Draws(1)).propose(7, 1, 10).probs[0])
    assert q["none"][special] == 0 and q["special"][special] > 0.5
    assert all(np.count_nonzero(row) <= 2 for row in q.values())


def test_tokens_of_a_small_head_are_drawn_from_their_q(target: Target) -> None:
    hidden = one_hot(3, 9)
    mine = proposer(with_head(REDUCED, hidden * 0.8, IDS), target, SamplingPolicy(0.9, top_k=5), Draws(0))
    drawn, q = np.zeros((2, VOCAB)), np.zeros((2, VOCAB))
    for seed in range(300):
        mine.draws = Draws(seed)
        proposal = mine.propose(7, 2, 10)
        q = np.array(proposal.probs, dtype=np.float64)
        drawn[[0, 1], proposal.tokens.tolist()] += 1
    for row in range(2):
        assert abs(chi_square_z(drawn[row], q[row] / q[row].sum())) < 3


def test_an_own_head_is_computed_in_the_drafts_dtype() -> None:
    """Through a bfloat16 target's dtype these two would be equal."""
    hidden = np.zeros((1, HIDDEN), dtype=np.float32)
    hidden[0, [2, 4]] = 1.0, 1.001
    wide = target_for(tiny("llama", mx.bfloat16))
    assert proposer(with_head(REDUCED, hidden, IDS), wide).propose(7, 1, 10).tokens.tolist() == [IDS[4].item()]


def test_a_padded_row_of_a_wide_head_is_no_token(target: Target) -> None:
    """A head may have more rows than the target; what it says there cannot be embedded."""
    draft = with_head(VOCAB + 63, one_hot(3), None)
    draft.lm_head.weight = mx.roll(draft.lm_head.weight, VOCAB, axis=0)
    proposal = proposer(draft, target).propose(7, 1, 10)
    assert proposal.tokens.tolist() == [VOCAB + 3] and proposal.within(VOCAB).tokens.tolist() == [0]
    for seed in range(20):
        assert proposer(draft, target, SamplingPolicy(1.0), Draws(seed)).propose(7, 1, 10).tokens.item() < VOCAB


def test_the_id_table_is_no_parameter(target: Target) -> None:
    """It is not in the weights under its name, and a change of dtype must not touch it."""
    draft = with_head(REDUCED, one_hot(1), IDS)
    draft.set_dtype(mx.bfloat16)
    assert not any("ids" in key for key, _ in tree_flatten(draft.parameters()))
    assert proposer(draft, target).propose(7, 1, 10).tokens.tolist() == [IDS[1].item()]


@pytest.mark.parametrize("parts", [dict(), dict(draft_vocab_size=REDUCED + 1)])
def test_an_id_table_of_another_size_is_refused(parts: dict) -> None:
    draft = DraftModel(replace(draft_config(), **parts))
    with pytest.raises(ValueError, match=rf"`ids` has to have one entry for each row .*, got shape \[{REDUCED}\]"):
        draft.map_ids(IDS)


def test_block_rows_come_from_an_embedding_of_its_own(target: Target) -> None:
    """Whose anchor may be an id that only the target's has a row for."""
    draft = Scripted(one_hot(1, 2), own_embedding=True, vocab_size=250, mask_token_id=249)
    proposer(draft, target).propose(7, 2, 10)
    proposer(draft, target).propose(255, 2, 10)
    table = draft.embed_tokens.weight
    assert mx.array_equal(draft.given[0], table[mx.array([[7, 249, 249]])])
    assert mx.array_equal(draft.given[1], table[mx.array([[249, 249, 249]])])


def test_a_draft_with_own_parts_equals_the_numpy_reference(target: Target) -> None:
    """From its embedding to the target's ids, over a real context."""
    draft = special_draft(OWN_PARTS, output_multiplier=0.7, final_logit_softcapping=20.0)
    features, _ = data(9)
    context = draft.make_context()
    draft.extend(context, mx.array(features)[None])
    proposal = BlockProposer(draft, target, context, *BEST).propose(7, 6, 10)
    block = np.array(draft.embed_tokens.weight)[[7] + [256] * 6]
    logits = reference_own_head(draft, reference_denoise(draft, features, block))
    q = np.zeros((6, VOCAB))
    q[:, draft.target_ids(mx.arange(REDUCED)).tolist()] = np.exp(logits)
    np.testing.assert_allclose(np.array(proposal.probs), q / q.sum(axis=-1, keepdims=True), atol=1e-4)


# --- Text ---

COUNT = 64


@pytest.mark.parametrize("block", [2, 5, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text"])
def test_greedy_text_is_the_targets_own(tokenizer, name: str, block: int) -> None:
    """Its best row is mapped to the text's most frequent token, which is right now and then."""
    text = reference(name, PROMPT, COUNT)
    draft = special_draft(OWN_PARTS, num_target_layers=target_for(tiny(name)).spec.n_layers)
    for layer in draft.layers:  # so that every row is the mask's embedding
        layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight = mx.zeros((HIDDEN, HIDDEN)), mx.zeros((HIDDEN, 96))
    row = draft.denoise(draft.embed(mx.array([[0, 256]])), draft.make_context())[0, 0]
    draft.lm_head.weight[17] = row * 10
    frequent = max(sorted(set(text[2:])), key=text[2:].count)
    draft.map_ids(mx.where(mx.arange(REDUCED) == 17, frequent, (frequent + 1) % VOCAB))
    responses = list(stream(name, tokenizer, draft_model=draft, block_size=block, max_tokens=COUNT))
    assert [r.token for r in responses] == text
    assert 0 < responses[-1].stats.accepted < responses[-1].stats.drafted


# --- Rows that are not finite ---

KINDS = {
    "v1": dict(),
    "DFlash 2": DFLASH2,
    "DFlash 2, few candidates": DFLASH2 | dict(selector=Selector(8, 2)),
    "own head": OWN_PARTS,
}


def broken(kind: str, *rows: int, value: float = float("nan"), **changes: object) -> DraftModel:
    """As it should be, but for one channel of these rows of every block."""

    class Broken(DraftModel):
        def denoise(self, embeddings: mx.array, context: object, *rest: Any) -> mx.array:
            hidden = super().denoise(embeddings, context, *rest)  # type: ignore[arg-type]
            bad = mx.array([row in rows for row in range(hidden.shape[1])])[None, :, None]
            return mx.where(bad & (mx.arange(HIDDEN) == 5), value, hidden)

    sound = special_draft(KINDS[kind], **changes)
    draft = Broken(sound.config)
    draft.load_weights(tree_flatten(sound.parameters()))
    if kind == "own head":
        draft.map_ids(sound.target_ids(mx.arange(REDUCED)))
    return draft


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_no_token(target: Target, kind: str, value: float, sampled: bool) -> None:
    """It is seen without another read: -1 before it is put in range, and a q that rejects whatever stands there."""
    sampling = (SamplingPolicy(1.0), Draws(1)) if sampled else ()
    sound, bad = (proposer(broken(kind, *rows, value=value), target, *sampling) for rows in ((), (1, 3)))
    expected, proposal = sound.propose(7, 5, 10), bad.propose(7, 5, 10)
    assert bad.last is not None and sound.last is not None
    assert [token < 0 for token in bad.last.tolist()] == [False, True, False, True, False]
    assert bad.last[0].item() == sound.last[0].item() >= 0
    within = proposal.within(VOCAB)
    assert within.tokens[mx.array([1, 3])].tolist() == [0, 0] and min(within.tokens.tolist()) >= 0
    if sampled:
        nan = mx.isnan(within.probs)
        assert nan.all(axis=-1).tolist() == nan.any(axis=-1).tolist() == [False, True, False, True, False]
        assert mx.array_equal(within.probs[0], expected.probs[0])
    else:
        assert proposal.probs is None


def test_nothing_proposed_leaves_nothing_to_look_at(target: Target) -> None:
    """A watcher must not count an old block twice."""
    mine = proposer(special_draft(DFLASH2), target)
    assert mine.last is None
    mine.propose(7, 3, 10)
    assert mine.last is not None and mine.last.shape == (3,)
    mine.propose(7, 0, 10)
    assert mine.last is None


def text_with(draft: DraftModel | None, policy: SamplingPolicy, rule: str) -> list[int]:
    """24 tokens of the tiny llama in blocks of 8; nobody watches the draft."""
    draws = Draws(3)
    drawing = (policy, draws) if rule == "rejection" else ()
    session = greedy_session("llama", draft and proposer(draft, target_for(tiny("llama")), *drawing), 8)
    session.decider = make_decider(policy, (), draws, rule=rule)
    return tokens_of(decode(session, PROMPT, max_tokens=24))


@pytest.mark.parametrize("rows", [(0,), (2,), tuple(range(7))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_returns_nan_does_not_change_the_answer(kind: str, rows: tuple[int, ...]) -> None:
    """Greedy, with rule "match", and with rejection where no draft before the bad one can be accepted."""
    draft = broken(kind, *rows)
    greedy, warm = SamplingPolicy(), SamplingPolicy(0.7)
    assert text_with(draft, greedy, "match") == text_with(None, greedy, "match")
    plain = text_with(None, warm, "match")
    assert text_with(draft, warm, "match") == plain
    if rows[0] == 0:
        assert text_with(draft, warm, "rejection") == plain
