"""DFlash 2's convolutions and candidate selector equal an independent implementation, and its text is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.config import Convolution, Selector
from dflash_mlx.draft.convolution import DynamicConvolution
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.selector import CandidateSelector
from dflash_mlx.proposal import Proposal
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.sampling import Draws, SamplingPolicy, make_sampler
from dflash_mlx.targets import target_for
from tests.conftest import DFLASH2, OWN_PARTS, draft_config, special_draft, tiny_draft
from tests.draft_reference import reference_denoise, reference_logits, reference_path, reference_walk
from tests.families import VOCAB, reference, tiny
from tests.generating import PROMPT, stream
from tests.markov import chi_square_z
from tests.test_draft import VARIANTS, data, run

SHAPES = {
    "two taps": DFLASH2,
    "three taps, narrow groups": DFLASH2 | dict(convolution=Convolution(3, 4)),
    "more taps than rows": DFLASH2 | dict(convolution=Convolution(7, 16)),
}


def test_tensors_and_parameters_are_as_many_as_published() -> None:
    """Those of Qwen3.8-27B-DFlash2."""
    taps = {"target_layer_ids": [5, 19, 33, 47, 61]}
    config = draft_config(
        hidden_size=5120, num_hidden_layers=5, intermediate_size=17408, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=248320, num_target_layers=64, dflash_config=taps,
    )  # fmt: skip
    config = replace(config, convolution=Convolution(2, 16), selector=Selector(256, 16))
    flat = tree_flatten(DraftModel(config).parameters())  # lazy: nothing is allocated
    assert (len(flat), sum(v.size for _, v in flat)) == (81, 1_924_404_480)


# --- Convolution ---


def test_the_worked_example_of_the_convolution() -> None:
    """Two channels in one group, two taps: D_t * z_t, D_t * z_{t-1} and the base's 1 * z_t, worked out by hand."""
    conv = DynamicConvolution(2, Convolution(2, 2))
    assert conv.base_kernel.tolist() == [[[1, 1], [0, 0]]] * 2
    # The sides' kernels are a function of the rows before the convolution: here [1, 0] -> D = .5 and .25.
    conv.kernel_projection.weight = mx.array([[0.5, 0.0], [0.25, 0.0]] * 2)
    before, after = conv._kernels(mx.array([[[1.0, 0.0], [1.0, 0.0]]]))
    assert before.tolist() == after.tolist() == [[[[1.5, 1.5], [0.25, 0.25]]] * 2]
    z = mx.array([[[2.0, 4.0], [6.0, 8.0]]])
    seen: list[mx.array] = []

    def sublayer(rows: mx.array) -> mx.array:
        seen.append(rows)
        return z

    assert conv.around(sublayer, mx.array([[[1.0, 0.0], [1.0, 0.0]]])).tolist() == [[[3.0, 6.0], [9.5, 13.0]]]
    assert seen[0].tolist() == [[[1.5, 0.0], [1.75, 0.0]]]


def test_sides_taps_and_groups_are_read_in_the_order_of_the_checkpoint() -> None:
    """Another order loads as well and costs acceptance: every (side, tap, group) has a value of its own here."""
    conv = DynamicConvolution(6, Convolution(3, 3))
    conv.kernel_projection.weight = mx.arange(12, dtype=mx.float32)[:, None] * mx.ones((1, 6)) / 6
    conv.base_kernel = mx.zeros((2, 3, 6))
    kernels = conv._kernels(mx.ones((1, 1, 6)))
    expected = [[[group] * 3 + [group + 1] * 3 for group in (0, 2, 4)], [[g] * 3 + [g + 1] * 3 for g in (6, 8, 10)]]
    np.testing.assert_allclose([np.array(side[0, 0]) for side in kernels], expected, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 6, 30])
@pytest.mark.parametrize("variant", ["full", "sliding", "mixed", "sliding-both-ways"])
@pytest.mark.parametrize("shape", SHAPES)
def test_denoise_equals_the_numpy_reference(shape: str, variant: str, length: int) -> None:
    """Kernels from the wrong rows, once too often or on context rows, would cost acceptance and nothing else."""
    draft = special_draft(SHAPES[shape], **VARIANTS[variant])
    features, block = data(length)
    ours, expected = run(draft, [features], block), reference_denoise(draft, features, block)
    np.testing.assert_allclose(ours, expected, atol=5e-4)
    plain = tiny_draft(**VARIANTS[variant])
    plain.load_weights([(k, v) for k, v in tree_flatten(draft.parameters()) if k in dict(tree_flatten(plain))])
    assert np.abs(run(plain, [features], block) - ours).max() > 0.1, "the convolutions do nothing here"


@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_a_block_below_the_trained_one_is_legal(rows: int) -> None:
    draft = special_draft(DFLASH2, **VARIANTS["sliding-both-ways"])
    features, block = data(9, rows)
    np.testing.assert_allclose(run(draft, [features], block), reference_denoise(draft, features, block), atol=5e-4)


def test_a_fresh_convolution_and_selector_change_no_bit_of_v1() -> None:
    """Training starts from a v1 draft in this way; a convolution that rounds otherwise would not be one."""
    plain = tiny_draft(**VARIANTS["mixed"])
    fresh = DraftModel(special_draft(DFLASH2, **VARIANTS["mixed"]).config)
    fresh.load_weights(tree_flatten(plain.parameters()), strict=False)
    features, block = data(9)
    assert np.array_equal(run(fresh, [features], block), run(plain, [features], block))
    assert propose(fresh, 7, 5).tokens.tolist() == propose(plain, 7, 5).tokens.tolist()


@pytest.mark.parametrize("cuts", [[1], [5, 6, 7], [4, 5, 17]])
@pytest.mark.parametrize("variant", ["mixed", "sliding-both-ways"])
def test_feeding_the_context_in_pieces_changes_nothing(variant: str, cuts: list[int]) -> None:
    """A convolution that reached into the context would see other rows at the borders of the pieces."""
    draft = special_draft(DFLASH2, **VARIANTS[variant])
    features, block = data(20)
    whole, pieces = run(draft, [features], block), run(draft, np.split(features, cuts), block)
    np.testing.assert_allclose(pieces, whole, atol=1e-5)


def test_a_feature_a_window_away_changes_nothing() -> None:
    draft = special_draft(DFLASH2, **VARIANTS["sliding-both-ways"])  # window 6
    features, block = data(20)
    changed = features.copy()
    changed[:15] += 5
    np.testing.assert_array_equal(run(draft, [features], block), run(draft, [changed], block))
    changed[15] += 5
    assert np.abs(run(draft, [features], block) - run(draft, [changed], block)).max() > 1e-3


@pytest.mark.parametrize(("variant", "sees"), [("sliding-both-ways", True), ("sliding", False)])
def test_the_last_row_is_seen_only_where_the_config_says_so(variant: str, sees: bool) -> None:
    """DFlash 2's sliding layers are not causal; read as causal they would accept less."""
    draft = special_draft(DFLASH2, **VARIANTS[variant])
    features, block = data(4)
    changed = block.copy()
    changed[-1] += 5
    difference = np.abs(run(draft, [features], block) - run(draft, [features], changed))
    assert difference[:-1].max() > 1e-3 if sees else difference[:-1].max() == 0
    assert difference[-1].max() > 1e-3


# --- Selector ---


def propose(
    draft: DraftModel, anchor: int, count: int, sampling: tuple[SamplingPolicy, Draws] | None = None, length: int = 9
) -> Proposal:
    """Drafts after `length` positions of context, for the tiny llama."""
    return proposer(draft, sampling, length).propose(anchor, count, length + 1)


def proposer(draft: DraftModel, sampling: tuple[SamplingPolicy, Draws] | None = None, length: int = 9) -> BlockProposer:
    context = draft.make_context()
    draft.extend(context, mx.array(data(length)[0])[None])
    return BlockProposer(draft, target_for(tiny("llama")), context, *(sampling or ()))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("parts", [DFLASH2, OWN_PARTS, {}], ids=["dflash2", "own parts", "v1"])
def test_the_first_drafts_of_a_block_are_those_of_the_whole_one(parts: dict[str, object], sampled: bool) -> None:
    """Where `auto` verifies fewer: a walk, a convolution or a q of fewer rows would be another draft."""
    draft = special_draft(parts, **VARIANTS["sliding-both-ways"])
    sampling = (SamplingPolicy(1.0), Draws(5)) if sampled else None
    whole = propose(draft, 7, 8, sampling)
    narrowed = proposer(draft, sampling)
    narrowed.rows = 8
    for limit in (1, 2, 5, 8):
        first = narrowed.propose(7, limit, 10)
        assert first.tokens.tolist() == whole.tokens.tolist()[:limit]
        assert (first.probs is not None) == sampled
        if first.probs is not None and whole.probs is not None:
            assert first.probs.shape == (limit, VOCAB) and mx.allclose(first.probs, whole.probs[:limit], atol=1e-6)
    alone = propose(draft, 7, 1, sampling)
    if alone.probs is not None and whole.probs is not None:
        assert not mx.allclose(alone.probs, whole.probs[:1], atol=1e-6), "a block of one mask is another one"


def hidden_and_logits(draft: DraftModel, anchor: int, count: int, length: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """What the reference makes of the same block: [K, H] and [K, V]."""
    target = target_for(tiny("llama"))
    ids = mx.array([[anchor] + [draft.config.mask_token_id] * count])
    hidden = reference_denoise(draft, data(length)[0], np.array(target.embed(ids)[0]))
    raw = np.array(target.head(mx.array(hidden.astype(np.float32))[None])[0], dtype=np.float64)
    return hidden, reference_logits(draft, raw)


@pytest.mark.parametrize("known", [None, 200])
@pytest.mark.parametrize("selector", [Selector(8, 6), Selector(8, VOCAB), Selector(3, 1)], ids=str)
def test_the_greedy_walk_equals_the_numpy_reference(selector: Selector, known: int | None) -> None:
    """With other scores, other candidates or another predecessor the draft would say something else."""
    parts = DFLASH2 | dict(selector=selector)
    draft = special_draft(parts, output_multiplier=0.7, final_logit_softcapping=20.0, **VARIANTS["sliding-both-ways"])
    draft.known_tokens = known
    for anchor in (0, 7, 199, 256):
        hidden, logits = hidden_and_logits(draft, anchor, 7)
        expected = reference_path(draft, hidden, logits[:, :known], anchor)
        assert propose(draft, anchor, 7).tokens.tolist() == expected
    if selector.top_k > 1:
        assert expected != logits[:, :known].argmax(axis=-1).tolist(), "the selector changes nothing here"


def test_all_candidates_and_no_codebook_are_the_best_token_of_every_row() -> None:
    draft = special_draft(DFLASH2 | dict(selector=Selector(8, VOCAB)))
    draft.candidate_selector.predecessor_codebook = mx.zeros((VOCAB, 8))
    plain = tiny_draft()
    plain.load_weights([(k, v) for k, v in tree_flatten(draft.parameters()) if k in dict(tree_flatten(plain))])
    _, logits = hidden_and_logits(draft, 7, 6)
    assert propose(draft, 7, 6).tokens.tolist() == logits.argmax(axis=-1).tolist()


def pushing() -> CandidateSelector:
    """Of rank 2, over 6 ids: 4 follows 1 and 5, 5 follows 2, by far."""
    selector = CandidateSelector(4, 6, Selector(2, 6))
    selector.hidden_projection.weight = mx.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])
    table = mx.array([[0.0, 0], [9, 0], [0, 9], [0, 0], [0, 0], [9, 0], [0, 9], [0, 9]])
    selector.predecessor_codebook = table[:6]  # a view: who reads past its end gets what stands there
    selector.successor_codebook = mx.array([[0.0, 0], [0, 0], [0, 0], [0, 0], [9, 0], [0, 9]])
    return selector


def greedy(scores: mx.array, row: int) -> mx.array:
    return mx.argmax(scores, axis=-1)


@pytest.mark.parametrize(("first", "second"), [(1, 4), (2, 5), (3, 0)])
def test_a_choice_depends_on_the_choice_before_it(first: int, second: int) -> None:
    """The point of the selector: of two rows that go well together in two ways, both take the same way."""
    logits = mx.zeros((2, 6))
    logits[0, first] = 1.0
    path = pushing().walk(mx.ones((2, 4)), logits, mx.array([0]), greedy)
    assert path.tokens.tolist() == [first, second]


@pytest.mark.parametrize(("anchor", "first"), [(1, 4), (2, 5), (0, 0), (5, 4), (6, 4), (7, 4)])
def test_the_first_choice_depends_on_the_anchor(anchor: int, first: int) -> None:
    """An anchor that the codebook has no row for (the target's may be padded) counts as its last."""
    assert pushing().walk(mx.ones((1, 4)), mx.zeros((1, 6)), mx.array([anchor]), greedy).tokens.tolist() == [first]


def test_equal_scores_go_to_the_lowest_id() -> None:
    """Otherwise a draft would depend on the order in which a sort leaves its candidates."""
    selector = CandidateSelector(4, 300, Selector(2, 16))
    logits = mx.zeros((3, 300))
    logits[:, 299 - mx.arange(0, 32, 2)] = 5.0
    path = selector.walk(mx.ones((3, 4)), logits, mx.array([0]), greedy)
    assert path.tokens.tolist() == [269] * 3
    assert path.candidates.tolist() == [list(range(269, 300, 2))] * 3


def test_no_candidate_is_beyond_what_the_tokenizer_or_the_codebooks_know() -> None:
    """Padded rows of a head may hold anything; the codebooks may have fewer rows than the head."""
    draft = special_draft(DFLASH2 | dict(selector=Selector(8, 40)))
    policy = SamplingPolicy(5.0)
    reached = {}
    for name, known, rows in (("all", None, VOCAB), ("tokenizer", 50, VOCAB), ("codebooks", None, 60)):
        draft.known_tokens = known
        selector = draft.candidate_selector
        selector.predecessor_codebook = selector.predecessor_codebook[:rows]
        selector.successor_codebook = selector.successor_codebook[:rows]
        drawn = [propose(draft, 7, 5, (policy, Draws(seed))) for seed in range(10)]
        reached[name] = max(max(p.tokens.tolist()) for p in drawn)
        assert {p.probs.shape for p in drawn} == {(5, VOCAB)}
        past = known or rows
        assert mx.all(mx.stack([p.probs for p in drawn])[..., past:] == 0).item()
    assert reached["all"] >= 200 and reached["tokenizer"] < 50 and reached["codebooks"] < 60


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_q_is_that_of_the_path_that_was_walked(temperature: float) -> None:
    """Rejection sampling is exact only for the distribution that the tokens were really drawn from."""
    draft = special_draft(DFLASH2, **VARIANTS["sliding-both-ways"])
    hidden, logits = hidden_and_logits(draft, 7, 5)
    paths = set()
    for seed in range(5):
        # The policy's filters belong to p: the selector's candidates are filter enough.
        proposal = propose(draft, 7, 5, (SamplingPolicy(temperature, top_p=0.4, top_k=2), Draws(seed)))
        tokens = proposal.tokens.tolist()
        paths.add(tuple(tokens))
        for row, scores in enumerate(reference_walk(draft, hidden, logits, [7, *tokens])):
            q = np.zeros(VOCAB)
            values = np.array(list(scores.values())) / temperature
            q[list(scores)] = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
            np.testing.assert_allclose(np.array(proposal.probs[row]), q, atol=2e-3)
    assert len(paths) > 1


def test_a_tiny_temperature_is_greedy() -> None:
    draft = special_draft(DFLASH2)
    sampled = propose(draft, 7, 5, (SamplingPolicy(1e-30), Draws(1)))
    assert sampled.tokens.tolist() == propose(draft, 7, 5).tokens.tolist()
    assert mx.isfinite(sampled.probs).all().item()


def test_a_seed_gives_the_same_path_whatever_the_block() -> None:
    """A draw is keyed by its position, so a narrower block is the start of a wider one where the rows are the same."""
    draft = special_draft(DFLASH2, **VARIANTS["sliding"])  # causal: rows do not see those after them
    policy = SamplingPolicy(1.5)
    wide, narrow, other = (
        propose(draft, 7, count, (policy, Draws(seed))).tokens.tolist() for count, seed in ((7, 3), (3, 3), (7, 4))
    )
    assert wide[:3] == narrow and wide != other


def test_drafts_are_drawn_from_the_q_that_is_handed_over() -> None:
    """The second row's q is that after the first row's token: it is collected by that."""
    draft = special_draft(DFLASH2 | dict(selector=Selector(8, 3)))
    mine = proposer(draft)
    mine.policy = SamplingPolicy(3.0)
    drawn, q = {}, {}
    for seed in range(900):
        mine.draws = Draws(seed)
        proposal = mine.propose(7, 2, 10)
        first, second = proposal.tokens.tolist()
        for key, row, token in (((), 0, first), ((first,), 1, second)):
            drawn.setdefault(key, np.zeros(VOCAB))[token] += 1
            q[key] = np.array(proposal.probs[row], dtype=np.float64)
    assert len(q) == 4
    for key, counts in drawn.items():
        assert abs(chi_square_z(counts, q[key] / q[key].sum())) < 3, key
    after = [q[key] for key in q if key]
    assert max(np.abs(a - b).max() for a in after for b in after) > 0.1, "the choice before does not matter here"


def test_nothing_is_read_from_the_device_on_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read in every row would cost a round trip each; the loop reads the verdict and nothing else."""
    draft = special_draft(DFLASH2)
    mine = proposer(draft)
    mx.eval(mine.context.arrays)
    read: list[str] = []
    for name in ("tolist", "item", "__int__", "__bool__", "__float__", "__index__"):
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, lambda self, name=name: read.append(name))
    mine.propose(7, 6, 10)
    mine.policy, mine.draws = SamplingPolicy(1.0), Draws(1)
    mine.propose(7, 6, 10)
    assert read == []


# --- Text ---

COUNT = 64


def taught(name: str, text: Sequence[int]) -> DraftModel:
    """Its selector knows which token came after which in `text`, so that blocks are accepted to mixed depths.

    The layers add nothing, so all rows are the mask's embedding, and every token is a candidate.
    """
    target = target_for(tiny(name))
    draft = special_draft(DFLASH2 | dict(selector=Selector(VOCAB, VOCAB)), num_target_layers=target.spec.n_layers)
    for layer in draft.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight = mx.zeros_like(module.weight)
    row = draft.denoise(target.embed(mx.array([[0, draft.config.mask_token_id]])), draft.make_context())[0, 0]
    selector = draft.candidate_selector
    selector.hidden_projection.weight = mx.ones((VOCAB, 1)) * row / (row @ row)
    selector.predecessor_codebook = mx.eye(VOCAB)
    after = np.zeros((VOCAB, VOCAB), dtype=np.float32)
    for token, following in pairwise(text):
        after[:, token] = 0
        after[following, token] = 1000
    selector.successor_codebook = mx.array(after)
    return draft


@pytest.mark.parametrize("block", [2, 5, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text"])
def test_greedy_text_is_the_targets_own(tokenizer, name: str, block: int) -> None:
    """Accepted to every depth, over a hybrid and over a window that has wrapped."""
    text = reference(name, PROMPT, COUNT)
    draft = taught(name, [*PROMPT, *text])
    responses = list(stream(name, tokenizer, draft_model=draft, block_size=block, max_tokens=COUNT))
    assert [r.token for r in responses] == text
    stats = responses[-1].stats
    assert stats.accepted > 5 and stats.accepted < stats.drafted
    if block == 8:
        assert len(stats.histogram) >= 4, "the depths are not mixed"


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text"])
def test_a_draft_that_guesses_at_random_does_no_harm(tokenizer, name: str) -> None:
    draft = special_draft(
        DFLASH2, num_target_layers=target_for(tiny(name)).spec.n_layers, **VARIANTS["sliding-both-ways"]
    )
    responses = list(stream(name, tokenizer, draft_model=draft, block_size=5, max_tokens=COUNT))
    assert [r.token for r in responses] == reference(name, PROMPT, COUNT)


@pytest.mark.parametrize("options", [dict(rule="match"), dict(rule="rejection"), dict(exact=True)])
def test_every_way_to_decide_takes_a_path(tokenizer, options: dict) -> None:
    """Guesses under rule "match", draws with their q under rejection, and guesses that a near-tie may overrule."""
    sampler = None if "exact" in options else make_sampler(temp=0.1, seed=5)
    plain = list(stream("llama", tokenizer, draft_model=None, max_tokens=COUNT, sampler=sampler))
    draft = taught("llama", [*PROMPT, *(r.token for r in plain)])
    options |= dict(draft_model=draft, block_size=5, max_tokens=COUNT, sampler=sampler)
    drafted = list(stream("llama", tokenizer, **options))
    assert drafted[-1].stats.accepted > 5
    if options.get("rule") != "rejection":
        assert [r.token for r in drafted] == [r.token for r in plain]
