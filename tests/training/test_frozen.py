"""The target's head in training: all of it, the tokens worth proposing, or those that a micro-batch names."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from dflash_mlx.targets import target_for
from dflash_mlx.training.checkpoint import by_name
from dflash_mlx.training.frozen import Frozen, by_frequency
from dflash_mlx.training.losses import named
from dflash_mlx.training.recipe import Recipe, RecipeError
from tests.conftest import tiny_draft
from tests.families import BY_NAME, VOCAB, build, tiny
from tests.training.runs import RECIPE, answers, prepared
from tests.training.test_trainer import passes


def test_frequent_tokens_come_first_and_low_ids_among_equals() -> None:
    assert by_frequency(np.array([3, 7, 3, 0, 7])).tolist() == [1, 4, 0, 2, 3]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-4bit"])
def test_picked_columns_are_those_of_the_whole_head(name: str) -> None:
    """Another row would teach the draft to say one token and mean another."""
    target, draft = target_for(tiny(name)), tiny_draft()
    ids = np.array([0, 3, 50, VOCAB - 1], np.int32)
    hidden = mx.random.normal((6, 64))
    few, all_ = Frozen(target, draft, ids), Frozen(target, draft)
    np.testing.assert_allclose(few.logits(hidden), np.array(all_.logits(hidden))[:, ids], rtol=2e-4, atol=2e-4)
    assert few.target_ids(few.columns[ids]).tolist() == ids.tolist()
    assert few.columns[1] == -1 and few.size == 4 and all_.size == VOCAB


def test_what_is_named_is_among_the_columns_and_the_frequent_fill_up() -> None:
    vocabulary = np.arange(0, VOCAB, 2, dtype=np.int32)  # the even ones
    order = by_frequency(np.arange(VOCAB))  # the highest ids are the most frequent
    frozen = Frozen(target_for(tiny("llama")), tiny_draft(), vocabulary, order)
    few = frozen.among(np.array([3, 8, 20]), 6)
    assert few.vocabulary is not None and few.vocabulary.tolist() == [8, 20, 250, 252, 254, 256]
    many = frozen.among(np.array([2, 4, 6]), 2)  # what is named is never left out
    assert many.vocabulary is not None and many.vocabulary.tolist() == [2, 4, 6]


@pytest.mark.parametrize("vocabulary", [0, 200])
def test_all_columns_learn_what_no_choice_of_columns_learns(vocabulary: int, tmp_path: Path) -> None:
    """The choice leaves out tokens that nothing is learned of, and shifts none."""
    dataset = answers(tmp_path)
    whole = prepared(dataset, RECIPE.changed(vocabulary=vocabulary))
    chosen = prepared(dataset, RECIPE.changed(vocabulary=vocabulary, columns=VOCAB))
    blocks = whole.blocks(0)
    (gradients, totals), (others, found) = passes(whole)(blocks), passes(chosen)(blocks)
    for name, value in totals.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    for name, value in by_name(gradients).items():
        np.testing.assert_allclose(by_name(others)[name], value, atol=2e-5, err_msg=name)


def test_few_columns_make_a_smaller_loss_that_is_learned_all_the_same(tmp_path: Path) -> None:
    """Every label stays; a row is taken for one of fewer tokens, so its loss is less."""
    dataset = answers(tmp_path)
    whole, chosen = prepared(dataset), prepared(dataset, RECIPE.changed(columns=2))
    blocks = whole.blocks(0)
    (_, totals), (_, found) = passes(whole)(blocks), passes(chosen)(blocks)
    assert len(named(blocks)) < VOCAB
    assert np.array_equal(found["count"], totals["count"])
    assert 0 < float(found["loss"]) < float(totals["loss"])


def test_a_recipe_refuses_a_choice_of_columns_for_dflash_2() -> None:
    with pytest.raises(ValueError, match="`columns` has to be 0"):
        Recipe(second=True, columns=4096)


def test_a_head_whose_rows_cannot_be_picked_is_refused_at_once() -> None:
    """An adapter's, say: not at the first step, after the target has answered for days."""
    model = build(BY_NAME["llama"])
    model.lm_head = LoRALinear.from_base(model.lm_head)
    target, draft = target_for(model), tiny_draft()
    some = np.arange(4, dtype=np.int32)
    for vocabulary, order in ((some, None), (None, some)):
        with pytest.raises(RecipeError, match=r"head is a LoRALinear, .*`vocabulary`, `columns`.* Set both to 0"):
            Frozen(target, draft, vocabulary, order)
    assert Frozen(target, draft).logits(mx.zeros((2, 64))).shape == (2, VOCAB)
