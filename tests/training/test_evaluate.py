"""What an evaluation counts is what the decode loop does, on prompts that no draft learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from dflash_mlx.config import SLIDING
from dflash_mlx.decode import decode
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.options import Options
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.request import plan
from dflash_mlx.targets import Target, target_for
from dflash_mlx.training import matches as matches_module
from dflash_mlx.training.about import Stored
from dflash_mlx.training.dataset import Dataset, DatasetError, Shard
from dflash_mlx.training.decoder import decoder_for
from dflash_mlx.training.evaluate import Count, Evaluation, accepted, teacher_forced, walked
from dflash_mlx.training.frozen import Frozen
from dflash_mlx.training.generate import Settings, generate
from dflash_mlx.training.held_out import HeldOut, NothingHeldOut, StoredRows, held_out
from dflash_mlx.training.matches import Matches
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.scales import FeatureScales
from dflash_mlx.training.twin import as_stored, twin
from tests.conftest import DFLASH2, byte_tokenizer, special_draft
from tests.families import BY_NAME, VOCAB, build

LAYERS = (0, 2)
WORDS, END = (17, 80, 140), 201  # what the target says: so few that a random draft is often right
BLOCK, LIMIT = 6, 24  # proposals and one; tokens of a stored answer
PROMPTS = [
    Prompt(f"say {n * n} {'x' * (n % 5)}", "code" if n % 3 else "story", f"t{n}", held_out=n % 2 == 0)
    for n in range(24)
]
KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "sliding": dict(layer_types=(SLIDING, SLIDING), sliding_window=9),
    "scaled and capped": dict(output_multiplier=0.5, final_logit_softcapping=20.0, input_embedding_scale=3.0),
    "second": DFLASH2,
    "whole": dict(whole_block=True),
}


@lru_cache
def model() -> nn.Module:
    """A target that says three words, and sometimes ends."""
    made = build(BY_NAME["llama"], seed=8)
    kept = mx.zeros((VOCAB, 1))
    kept[mx.array(WORDS)] = 4.0
    kept[END] = 2.0
    made.lm_head.weight = made.lm_head.weight * kept
    mx.eval(made.parameters())
    return made


def target() -> Target:
    return target_for(model())


def data(folder: Path, batch: int = 7, prompts: Sequence[Prompt] = PROMPTS, features: bool = True) -> Dataset:
    settings = Settings(seed=1, samples=2, batch=batch, max_tokens=LIMIT, top=0, features=LAYERS if features else ())
    return generate(model(), byte_tokenizer([END]), prompts, folder, settings, target={}, source="test")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def answers(dataset: Dataset) -> list[HeldOut]:
    """At most 20 tokens of each: some ended before, some are cut off."""
    found = held_out(dataset, per_category=9, max_tokens=20, layers=LAYERS)
    assert len(found) == 12 and 2 <= sum(one.said == 20 for one in found) <= 6
    said = np.concatenate([one.tokens[one.prompt_length :] for one in found])
    assert len(set(zip(said, said[1:], said[2:], strict=False))) > 25  # it does not only repeat itself
    return found


def served(
    draft: DraftModel,
    scales: FeatureScales | None = None,
    vocabulary: np.ndarray | None = None,
    stored: Stored = Stored("float32"),  # noqa: B008
) -> DraftModel:
    """A copy as it will be loaded."""
    made = twin(draft if scales is None else scales.out_of(draft))
    if vocabulary is not None:
        made.vocabulary, made.largest_id = vocabulary, int(vocabulary[-1])
    return as_stored(made, stored)


def draft_of(kind: str) -> DraftModel:
    """With weights so large that what it proposes depends on what it reads."""
    made = special_draft(KINDS[kind], block_size=BLOCK)
    wide = lambda name, value: value * 4 if value.ndim == 2 and "codebook" not in name else value  # noqa: E731
    made.update(tree_map_with_path(wide, made.parameters()))
    mx.eval(made.parameters())
    return made


def of(draft: DraftModel, vocabulary: np.ndarray | None = None, scales: FeatureScales | None = None) -> Matches:
    return Matches(draft, Frozen(target(), draft, vocabulary), scales)


def live(draft: DraftModel, answers: Sequence[HeldOut], block_size: int = BLOCK, limit: int = 20) -> dict[str, Count]:
    return accepted(target(), draft, answers, stop=[END], block_size=block_size, max_tokens=limit)


@pytest.mark.parametrize(
    ("kind", "block_size"), [*((kind, BLOCK) for kind in KINDS), ("full", 4), ("second", 2), ("whole", 3)]
)
def test_the_walk_counts_the_cycles_that_the_loop_takes(kind: str, block_size: int, answers: list[HeldOut]) -> None:
    """Answer by answer; also those cut off at the limit, before which the loop asks for fewer proposals."""
    draft = draft_of(kind)
    found, whole = of(draft), Count()
    for one in answers:
        counted = walked(found, [one], block_size=block_size).categories
        assert counted == live(served(draft), [one], block_size)
        assert counted[one.category].tokens == one.said - 1
        whole += counted[one.category]
    together = walked(found, answers, block_size=block_size)
    assert together.overall == whole and list(together.categories) == ["code", "story"]
    assert together.categories == live(served(draft), answers, block_size)
    assert 1.05 < (together.tokens_per_cycle or 0) < block_size


def test_an_answer_that_the_data_set_cut_off_is_walked_to_its_end(dataset: Dataset) -> None:
    """More tokens are asked for than were stored: the loop would go on, and nobody knows where to."""
    found = held_out(dataset, per_category=9, max_tokens=LIMIT + 9, layers=LAYERS)
    cut = [one for one in found if one.tokens[-1] != END]
    assert cut and all(one.limit == one.said == LIMIT for one in cut)
    assert all(one.limit == LIMIT + 9 > one.said for one in found if one.tokens[-1] == END)
    draft = draft_of("full")
    assert walked(of(draft), cut, block_size=BLOCK).categories == live(served(draft), cut, limit=LIMIT)
    ended = [one for one in found if one.tokens[-1] == END]
    assert walked(of(draft), ended, block_size=BLOCK).categories == live(served(draft), ended, limit=LIMIT + 9)


def test_the_loop_says_what_the_data_set_holds(answers: list[HeldOut]) -> None:
    """Else its cycles could not be told from the stored answers."""
    request = plan(model(), served(draft_of("full")), Options(max_tokens=20, block_size=BLOCK, mode="dflash"))
    for one in answers:
        session = request.open([END])
        said = [token for each in decode(session, one.prompt, max_tokens=20, stop=[END]) for token in each.tokens]
        request.close(session)
        assert said == one.tokens[one.prompt_length :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_of_blocks_that_are_proposed_one_by_one(kind: str, answers: list[HeldOut]) -> None:
    """Accuracy counts each position for itself, the expected length only what comes before the first mistake."""
    draft = draft_of(kind)
    right, seen, reached = np.zeros(BLOCK - 1), np.zeros(BLOCK - 1), np.zeros(BLOCK - 1)
    different = set()
    for one in answers:
        proposer = BlockProposer(draft, target(), draft.make_context())
        before = 0
        for anchor in one.anchors.tolist():
            assert one.features is not None
            proposer.observe(mx.array(one.features[None, before:anchor]))
            before = anchor
            proposed = proposer.propose(int(one.tokens[anchor]), BLOCK - 1, anchor + 1).tokens.tolist()
            different.add(tuple(proposed))
            truth = one.tokens[anchor + 1 : anchor + BLOCK].tolist()
            hits = [guess == token for guess, token in zip(proposed, truth, strict=False)]
            seen[: len(hits)] += 1
            right[: len(hits)] += hits
            reached[: len(hits)] += np.cumprod(hits)
    for found in (
        teacher_forced(of(draft), answers, block_size=BLOCK),
        walked(of(draft), answers, block_size=BLOCK),
    ):
        np.testing.assert_allclose(found.accuracy, right / seen)
        assert found.expected_length == pytest.approx(1 + (reached / seen).sum())
    assert len(different) > 30 and (right > reached).any()


def test_anchors_are_drawn_by_the_seed(answers: list[HeldOut]) -> None:
    """A sample of blocks is the same one each time, so that evaluations can be compared."""
    found = of(draft_of("full"))

    def shares(anchors: int | None, seed: int) -> tuple[float, ...]:
        return teacher_forced(found, answers, block_size=BLOCK, anchors=anchors, seed=seed).accuracy

    assert shares(3, 1) == shares(3, 1) != shares(3, 2)
    assert shares(99, 1) == shares(None, 0)
    assert not teacher_forced(found, answers, block_size=BLOCK).categories


def test_pieces_of_a_forward_give_what_the_whole_gives(answers: list[HeldOut], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by pieces of answers, and of logits."""
    for kind in ("full", "second"):
        found, places = of(draft_of(kind)), [one.anchors for one in answers]
        whole = found.of(answers, places, BLOCK)
        with monkeypatch.context() as patch:
            patch.setattr(matches_module, "_SCORES", 4 * BLOCK * 100 * 4)  # four blocks
            patch.setattr(matches_module, "_LOGITS", 3 * VOCAB * (BLOCK - 1))
            sizes = [sum(len(piece.anchors) for piece in batch) for batch in found._batches(places, BLOCK)]
            assert max(sizes) <= 8 and len(sizes) > 20
            parts = found.of(answers, places, BLOCK)
        for one, other in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(one, other)
        assert any(each.any() for each in whole)


def test_a_spoiled_draft_gives_what_plain_decoding_gives(answers: list[HeldOut]) -> None:
    """One token per cycle: proposals of NaN, and proposals that the target never says."""
    broken, silent = draft_of("full"), draft_of("full")
    broken.norm.weight = broken.norm.weight * mx.nan
    unsaid = np.array([3, 4, 250], np.int32)
    # A row of NaN is verified as id 0 once, before the loop finds it out.
    without = [one for one in answers if 0 not in one.tokens[one.prompt_length :]]
    for draft, vocabulary, given in ((broken, None, without), (silent, unsaid, answers)):
        found = walked(of(draft, vocabulary), answers, block_size=BLOCK)
        assert found.accuracy == (0.0,) * (BLOCK - 1)
        assert found.score == found.tokens_per_cycle == found.expected_length == 1.0
        counts = live(served(draft, vocabulary=vocabulary), given)
        assert counts == walked(of(draft, vocabulary), given, block_size=BLOCK).categories
        assert counts["code"].tokens > 15


def test_a_reduced_vocabulary_is_evaluated_as_it_is_served(answers: list[HeldOut]) -> None:
    """The loop proposes only what is listed, as training does."""
    draft, listed = draft_of("full"), np.array([5, WORDS[0], WORDS[1], 222], np.int32)
    chosen = draft_of("full")
    chosen.vocabulary = listed
    found = walked(of(draft, listed), answers, block_size=BLOCK).categories
    assert found == live(served(draft, vocabulary=listed), answers) == live(served(chosen), answers)
    assert found != walked(of(draft), answers, block_size=BLOCK).categories


def test_features_are_divided_in_training_and_not_where_it_is_served(answers: list[HeldOut]) -> None:
    """The scales are folded into the copy, and the draft in training stays as it is."""
    plain, scales = draft_of("full"), FeatureScales(np.array([0.5, 8.0], np.float32))
    draft = scales.into(plain)
    before = dict(tree_flatten(draft.parameters()))
    copy = served(draft, scales)
    assert all(value is before[name] for name, value in tree_flatten(draft.parameters()))
    np.testing.assert_array_equal(np.array(copy.fc.weight), np.array(plain.fc.weight))  # powers of two
    expected = walked(of(plain), answers, block_size=BLOCK)
    assert walked(of(draft, scales=scales), answers, block_size=BLOCK).categories == expected.categories
    assert walked(of(draft), answers, block_size=BLOCK).accuracy != expected.accuracy
    assert live(copy, answers) == expected.categories


def test_a_quantised_copy_is_packed_and_the_draft_is_not(answers: list[HeldOut]) -> None:
    """What `load` would make of it with `draft_bits`."""
    draft = draft_of("full")
    copy = served(draft, stored=Stored("bfloat16", bits=4, group_size=32))
    assert isinstance(copy.layers[0].mlp.up_proj, nn.QuantizedLinear) and type(copy.fc) is nn.Linear
    assert type(draft.layers[0].mlp.up_proj) is nn.Linear
    assert (copy.dtype, draft.dtype) == (mx.bfloat16, mx.float32)
    counts = live(copy, answers)
    assert sum(counts.values(), Count()).tokens == sum(one.said - 1 for one in answers)
    assert counts != live(served(draft), answers)


def test_which_prompts_are_used_does_not_depend_on_shards(dataset: Dataset, tmp_path: Path) -> None:
    """Another batch size puts the same answers elsewhere; the seed alone chooses, and never what is trained on."""
    other = data(tmp_path, batch=4)
    assert len(other.numbers()) != len(dataset.numbers())

    def chosen(where: Dataset, count: int = 3, seed: int = 0) -> list[tuple[str, list[int]]]:
        found = held_out(where, per_category=count, max_tokens=20, seed=seed)
        return [(one.category, one.tokens.tolist()) for one in found]

    assert chosen(dataset) == chosen(other) != chosen(dataset, seed=1)
    assert [category for category, _ in chosen(dataset)] == ["code"] * 3 + ["story"] * 3
    assert all(one in chosen(dataset, 99) for one in chosen(dataset))
    tokenizer = byte_tokenizer()
    asked = {tokenizer.decode(one.prompt) for one in held_out(dataset, per_category=99, max_tokens=20)}
    assert asked == {f"user: {prompt.text}\nassistant: " for prompt in PROMPTS if prompt.held_out}
    numbers = dataset.numbers()
    backwards = held_out(dataset, per_category=3, max_tokens=20, numbers=numbers[::-1], layers=LAYERS)
    assert [(one.category, one.tokens.tolist()) for one in backwards] == chosen(dataset)
    fewer = held_out(dataset, per_category=99, max_tokens=20, numbers=numbers[:2])
    assert 0 < len(fewer) < 12


def test_features_that_are_not_stored_are_computed(answers: list[HeldOut], tmp_path: Path) -> None:
    """A data set from a repository has tokens alone; without a target that is an error."""
    bare = data(tmp_path, features=False)
    given = held_out(bare, per_category=9, max_tokens=20, layers=LAYERS, decoder=decoder_for(model(), LAYERS))
    for stored, computed in zip(answers, given, strict=True):
        assert stored.features is not None and computed.features is not None
        assert len(stored.features) == len(stored.tokens) - 1 and computed.features.dtype == np.float16
        np.testing.assert_array_equal(stored.tokens, computed.tokens)
        np.testing.assert_allclose(stored.features, computed.features, rtol=2e-3, atol=2e-3)
    for decoder in (None, decoder_for(model(), LAYERS[::-1])):
        with pytest.raises(DatasetError, match=r"12 held-out answers .* no features of the layers \[0, 2\]"):
            held_out(bare, per_category=9, max_tokens=20, layers=LAYERS, decoder=decoder)


def test_stored_features_are_read_when_they_are_needed_and_not_kept(tmp_path: Path) -> None:
    """Of a thousand long answers they are gigabytes, for the whole training."""
    made = data(tmp_path)
    found = held_out(made, per_category=9, max_tokens=20, layers=LAYERS)
    assert found and all(isinstance(one.rows, StoredRows) for one in found)
    for one in found:
        shard = next(s for s in made.shards(layers=LAYERS) if one.tokens.tolist() in starts(s, len(one.tokens)))
        index = starts(shard, len(one.tokens)).index(one.tokens.tolist())
        assert shard.features is not None
        np.testing.assert_array_equal(
            one.sample().features, shard.features[shard.feature_offsets[index] :][: len(one.tokens) - 1]
        )
    made.features_path(made.numbers()[0], LAYERS).unlink()
    with pytest.raises(DatasetError, match=r"is not there\. To have it, complete the data set"):
        [one.features for one in found]


def starts(shard: Shard, length: int) -> list[list[int]]:
    """The first tokens of each answer."""
    return [shard.sequence(index)[:length].tolist() for index in range(len(shard))]


def test_features_of_other_answers_are_refused(tmp_path: Path) -> None:
    """A shard that was made again leaves what lies beside it behind."""
    made = data(tmp_path)
    first, second, *_ = (made.features_path(number, LAYERS) for number in made.numbers())
    first.write_bytes(second.read_bytes())
    with pytest.raises(DatasetError, match=r"rows for .* tokens, so they are of other answers"):
        held_out(made, per_category=99, max_tokens=20, layers=LAYERS)
    first.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(DatasetError, match="is damaged"):
        held_out(made, per_category=99, max_tokens=20, layers=LAYERS)


def test_a_data_set_without_held_out_answers_says_how_to_get_some(tmp_path: Path) -> None:
    """A handful of prompts may have none."""
    made = data(tmp_path, prompts=[replace(prompt, held_out=False) for prompt in PROMPTS[:3]])
    with pytest.raises(NothingHeldOut, match=r"among its 6 answers of 3 topics.*One topic of 20 .* 100 different"):
        held_out(made, per_category=9, max_tokens=20)


def test_a_block_that_the_draft_cannot_make_is_refused(answers: list[HeldOut]) -> None:
    """By name, before anything is computed."""
    draft = draft_of("full")
    for size in (1, BLOCK + 1):
        for run in (
            lambda size=size: teacher_forced(of(draft), answers, block_size=size),
            lambda size=size: walked(of(draft), answers, block_size=size),
            lambda size=size: live(draft, answers, size),
        ):
            with pytest.raises(ValueError, match=rf"`block_size` has to be in 2\.\.{BLOCK} .* got {size}"):
                run()


def test_an_interrupted_evaluation_leaves_the_draft_as_it_was(answers: list[HeldOut]) -> None:
    """The copy is thrown away; the same evaluation afterwards counts the same."""
    draft = draft_of("full")
    copy = served(draft)
    expected = live(copy, answers)

    class Interrupted(HeldOut):
        @property
        def prompt(self) -> list[int]:
            raise KeyboardInterrupt

    one = answers[0]
    with pytest.raises(KeyboardInterrupt):
        live(copy, [one, Interrupted(one.category, one.tokens, one.prompt_length, one.limit)])
    assert live(copy, answers) == expected == live(served(draft), answers)


def test_the_record_has_what_the_log_needs() -> None:
    """Pooled over tokens, not a mean of means; what is not known is null."""
    counts = {"code": Count(2, 30, 10), "story": Count(1, 10, 10), "none": Count(1, 0, 0)}
    found = Evaluation(70, (0.5, math.nan), 1.5, counts, seconds=2.5)
    assert found.tokens_per_cycle == found.score == 2.0
    assert found.record(best=True) == {
        "kind": "evaluation",
        "step": 70,
        "accuracy": [0.5, None],
        "expected_length": 1.5,
        "tokens_per_cycle": 2.0,
        "categories": {
            "code": {"prompts": 2, "tokens": 30, "cycles": 10, "tokens_per_cycle": 3.0},
            "story": {"prompts": 1, "tokens": 10, "cycles": 10, "tokens_per_cycle": 1.0},
            "none": {"prompts": 1, "tokens": 0, "cycles": 0, "tokens_per_cycle": None},
        },
        "best": True,
        "seconds": 2.5,
    }
    assert Evaluation(70, (0.5,), 1.5).score == 1.5
    assert Evaluation(70, (0.5,), 1.5).record(best=False)["tokens_per_cycle"] is None


def test_answers_of_one_token_have_no_cycle(answers: list[HeldOut]) -> None:
    """Reading the prompt already gives the first token; nothing is divided by zero."""
    short = [replace(one, tokens=one.tokens[: one.prompt_length + 1], limit=1) for one in answers[:2]]
    draft = draft_of("full")
    found = walked(of(draft), short, block_size=BLOCK)
    assert found.categories == {"code": Count(2, 0, 0)} == live(served(draft), short, limit=1)
    assert found.tokens_per_cycle is None and found.score == 1.0
    assert found.record(best=False)["accuracy"] == [None] * (BLOCK - 1)
