"""Which answers and anchors a micro-batch has, and what its blocks hold: against loops over all of them."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mlx.training.blocks import Plan, Sample, assemble
from dflash_mlx.training.recipe import Recipe

RANDOM = np.random.default_rng(4)
LENGTHS = RANDOM.integers(8, 60, 41)
PROMPTS = np.minimum(RANDOM.integers(2, 30, 41), LENGTHS - 1)
RECIPE = Recipe(block_size=4, sequences=3, anchors=6, longest=50, seed=9)


def answer(index: int) -> Sample:
    random = np.random.default_rng(index)
    length, prompt = int(LENGTHS[index]), int(PROMPTS[index])
    return Sample(
        random.integers(0, 1000, length).astype(np.int32),
        prompt,
        random.normal(size=(length - 1, 3)).astype(np.float16),
        random.integers(0, 1000, (length - prompt, 2)).astype(np.int32),
        random.normal(size=(length - prompt, 2)).astype(np.float32),
    )


def plan(recipe: Recipe = RECIPE) -> Plan:
    return Plan(LENGTHS, PROMPTS, recipe)


def test_a_micro_batch_depends_on_its_number_alone() -> None:
    """A training that goes on has to see what it would have seen."""
    first, again = plan(), plan()
    for _ in range(30):
        first.draws(_)
    for number in (29, 3, 14):
        one, other = first.draws(number), again.draws(number)
        assert [draw.sample for draw in one] == [draw.sample for draw in other]
        assert all(np.array_equal(a.anchors, b.anchors) for a, b in zip(one, other, strict=True))


def test_an_epoch_has_every_answer_at_most_once_and_nearly_all() -> None:
    made = plan()
    seen = [draw.sample for number in range(made.micro_batches) for draw in made.draws(number)]
    assert len(seen) == len(set(seen)) == made.micro_batches * 3
    assert len(made.samples) - len(seen) < 3
    assert set(seen) <= set(made.samples.tolist())


def test_epochs_differ_in_order_and_in_anchors() -> None:
    made = plan()
    epochs = [
        {
            d.sample: d.anchors.tolist()
            for n in range(made.micro_batches)
            for d in made.draws(epoch * made.micro_batches + n)
        }
        for epoch in (0, 1)
    ]
    assert list(epochs[0]) != list(epochs[1])
    both = [sample for sample in epochs[0].keys() & epochs[1].keys() if len(epochs[0][sample]) == 6]
    assert any(epochs[0][sample] != epochs[1][sample] for sample in both)


def test_anchors_are_answer_tokens_that_have_one_after_them() -> None:
    """An anchor in the prompt would train on what the target never says, one at the end on nothing."""
    made = plan()
    reached = {sample: set() for sample in made.samples.tolist()}
    for number in range(80 * made.micro_batches):
        for draw in made.draws(number):
            end = min(LENGTHS[draw.sample], RECIPE.longest)
            assert (np.diff(draw.anchors) > 0).all() and len(draw.anchors) <= 6
            assert draw.anchors[0] >= PROMPTS[draw.sample] and draw.anchors[-1] <= end - 2
            reached[draw.sample] |= set(draw.anchors.tolist())
    for sample, anchors in reached.items():
        end = min(LENGTHS[sample], RECIPE.longest)
        assert anchors == set(range(PROMPTS[sample], end - 1)), sample


def test_answers_without_two_tokens_are_left_out() -> None:
    made = Plan(np.array([10, 11, 12]), np.array([9, 9, 9]), RECIPE)
    assert made.samples.tolist() == [1, 2]
    with pytest.raises(ValueError, match="None of the 1 answers has two tokens"):
        Plan(np.array([10]), np.array([9]), RECIPE)


@pytest.mark.parametrize("pack", [0, 60, 120])
def test_blocks_hold_what_the_answers_hold(pack: int) -> None:
    """Every feature, token and distribution is looked up again, place by place."""
    recipe = RECIPE.changed(pack=pack)
    made, checked = plan(recipe), 0
    for number in range(6):
        draws = made.draws(number)
        blocks = assemble(draws, answer, recipe)
        found = {}
        for row, at in np.argwhere(blocks.anchor_segments >= 0):
            segment, anchor = blocks.anchor_segments[row, at], int(blocks.anchor_positions[row, at])
            found[row, segment, anchor] = at
        assert len(found) == sum(len(draw.anchors) for draw in draws)
        places = sorted({key[:2] for key in found})
        assert len(places) == len(draws)
        for (row, segment), draw in zip(places, draws, strict=True):
            sample, context = answer(draw.sample), int(draw.anchors[-1])
            here = np.flatnonzero(blocks.segments[row] == segment)
            np.testing.assert_array_equal(blocks.positions[row, here], np.arange(context))
            np.testing.assert_array_equal(blocks.features[row, here], sample.features[:context])
            for anchor in draw.anchors:
                at = found[row, segment, int(anchor)]
                for offset in range(4):
                    place, inside = anchor + offset, anchor + offset < len(sample.tokens)
                    assert blocks.tokens[row, at, offset] == (sample.tokens[place] if inside else -1)
                    if not offset:
                        continue
                    logprobs = blocks.soft_logprobs[row, at, offset - 1]
                    if inside:
                        np.testing.assert_array_equal(logprobs, sample.soft_logprobs[place - sample.prompt_length])
                        ids = blocks.soft_ids[row, at, offset - 1]
                        np.testing.assert_array_equal(ids, sample.soft_ids[place - sample.prompt_length])
                    else:
                        assert np.isneginf(logprobs).all()
                    checked += inside
        if pack:
            used = (blocks.segments >= 0).sum(axis=1)
            assert used.max() <= pack and len(used) <= len(draws)
    assert checked > 100


def test_packing_puts_answers_into_one_row() -> None:
    recipe = RECIPE.changed(pack=200)
    assert len(assemble(plan(recipe).draws(0), answer, recipe).features) == 1


def test_what_a_training_reached_is_what_its_micro_batches_had() -> None:
    """The card counts it: a short training saw some of the answers only, and none of what is cut off."""
    made = plan()
    for count in (0, 1, 4, made.micro_batches, 2 * made.micro_batches + 3, 40 * made.micro_batches):
        seen = {draw.sample for number in range(count) for draw in made.draws(number)}
        assert made.reached(count).tolist() == sorted(seen)
    assert made.reached(40 * made.micro_batches).tolist() == made.samples.tolist()
    longer = [index for index in range(41) if LENGTHS[index] > 50]
    assert longer and made.tokens(np.array(longer)) == sum(50 - int(PROMPTS[index]) for index in longer)
