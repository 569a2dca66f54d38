"""Answers do not depend on who they were decoded with, and say what they were chosen from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dflash_mlx.targets import target_for
from dflash_mlx.training.batching import Answer, Choosing, Sample, batches, chunks, decode, samples
from dflash_mlx.training.decoder import Decoder, MlxDecoder, Rows
from dflash_mlx.training.prompts import Prompt
from tests.families import prompt_of, reference, tiny

LENGTHS = (5, 9, 6, 14, 5)


def decoder(taps: tuple[int, ...] = ()) -> Decoder:
    return MlxDecoder(target_for(tiny("llama")), taps)


def batch(number: int = 0) -> list[tuple[Sample, list[int]]]:
    return [
        (Sample(Prompt(f"prompt {row}"), number), prompt_of(length, seed=row + 1)) for row, length in enumerate(LENGTHS)
    ]


def answers(
    asked: list, choosing: Choosing | None = None, stops: tuple[int, ...] = (), limit: int = 20
) -> list[Answer]:
    choosing = choosing or Choosing(temperature=0.8, min_p=0.02, top=5)
    return decode(decoder((0, 2)), asked, choosing=choosing, stops=frozenset(stops), max_tokens=limit, seed=3)


def test_prompts_of_unequal_length_are_answered_as_mlx_lm_answers_each() -> None:
    """The longer ones are read token by token beside answers; a token too early or late would show at once."""
    for (_, prompt), answer in zip(batch(), answers(batch()), strict=True):
        assert answer.tokens.tolist() == [*prompt, *reference("llama", prompt, 20)]
        assert answer.prompt_length == len(prompt) and not answer.stopped


def test_a_stop_token_ends_its_own_row_only() -> None:
    """A row that ends early must not shift what its neighbours read."""
    stop = reference("llama", batch()[1][1], 20)[4]
    for (_, prompt), answer in zip(batch(), answers(batch(), stops=(stop,)), strict=True):
        expected = reference("llama", prompt, 20)
        end = expected.index(stop) + 1 if stop in expected else 20
        assert answer.tokens.tolist() == [*prompt, *expected[:end]]
        assert answer.stopped == (stop in expected)


def test_what_is_drawn_does_not_depend_on_the_batch() -> None:
    """Otherwise a resumed run would have other answers than one that was never stopped."""
    together = answers(batch(1))
    for asked, answer in zip(batch(1), together, strict=True):
        (alone,) = answers([asked])
        assert np.array_equal(alone.tokens, answer.tokens)
        assert np.array_equal(alone.top_ids, answer.top_ids)
    greedy = [answer.tokens.tolist() for answer in answers(batch())]
    assert greedy != [answer.tokens.tolist() for answer in together]
    assert answers(batch(2))[0].tokens.tolist() != together[0].tokens.tolist()


def test_the_likeliest_tokens_are_those_of_the_target() -> None:
    """Against a log-softmax over the whole vocabulary, at every position of an answer that was read in one piece."""
    for answer in answers(batch()):
        target = decoder()
        for index in range(len(answer.tokens) - answer.prompt_length):
            prefix = answer.tokens[None, : answer.prompt_length + index]
            logits = target.start(prefix, 64).logits[0].astype(np.float64)
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            order = np.argsort(-logprobs, kind="stable")[:5]
            stored = answer.top_logprobs[index].astype(np.float64)
            fine = np.isfinite(stored)
            assert fine[0] and answer.top_ids[index][fine].tolist() == order[fine].tolist()
            np.testing.assert_allclose(stored[fine], logprobs[order][fine], rtol=2e-3, atol=2e-3)
            assert (logprobs[order][~fine] < logprobs.max() - 11).all()


def test_features_belong_to_the_positions_of_the_tokens() -> None:
    """All but the last token's, in order: rows that wait for longer prompts, or leave, must not lose any."""
    stop = reference("llama", batch()[1][1], 20)[4]
    for answer in answers(batch(), stops=(stop,)):
        whole = decoder((0, 2)).start(answer.tokens[None, :-1], 64).features
        assert whole is not None and answer.features is not None
        assert answer.features.shape == whole[0].shape
        np.testing.assert_allclose(answer.features, whole[0], rtol=1e-3, atol=1e-3)


class _Fixed:
    """A decoder that always gives the same distribution."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits, self.rows = logits, 0

    def start(self, ids: np.ndarray, capacity: int) -> Rows:
        self.rows = len(ids)
        return self.extend(ids[:, 0])

    def extend(self, ids: np.ndarray) -> Rows:
        return Rows(np.tile(self.logits, (len(ids), 1)), None)

    def keep(self, rows: list[int]) -> None:
        pass


@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_draws_have_the_distribution_that_was_asked_for(min_p: float) -> None:
    """Temperature after min-p, as mlx_lm: chi-square below the 0.999 quantile of 4 degrees, and nothing below min-p."""
    probabilities = np.array([0.4, 0.3, 0.15, 0.08, 0.05, 0.02])
    asked = [(Sample(Prompt(f"{row}"), 1), [0]) for row in range(200)]
    choosing = Choosing(temperature=0.7, min_p=min_p)
    made = decode(
        _Fixed(np.log(probabilities).astype(np.float32)),
        asked,
        choosing=choosing,
        stops=frozenset(),
        max_tokens=20,
        seed=0,
    )
    counts = Counter(token for answer in made for token in answer.tokens[1:].tolist())
    weights = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0) ** (1 / 0.7)
    expected = 4000 * weights / weights.sum()
    assert all(counts[token] == 0 for token in np.flatnonzero(expected == 0))
    kept = np.flatnonzero(expected)
    assert sum((counts[token] - expected[token]) ** 2 / expected[token] for token in kept) < 20.5


def test_a_batch_has_prompts_of_like_length_and_every_sample_once() -> None:
    """Sorting may not lose or repeat samples, whatever the sizes."""
    planned = samples([Prompt(f"{n}", held_out=n % 10 == 0) for n in range(1000)], 2)
    assert len(planned) == 1900  # held-out prompts are answered greedily only
    seen: Counter[Sample] = Counter()
    for chunk in chunks(planned, 7, seed=5):
        lengths = [len(sample.prompt.text) for sample in chunk]
        for rows in batches(lengths, 7, seed=5):
            assert 1 <= len(rows) <= 7
            seen.update(chunk[index] for index in rows)
    assert len(seen) == 1900 and set(seen.values()) == {1}
