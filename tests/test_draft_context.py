"""The draft's context: what each layer keeps, in which order, and that a window costs nothing but quality."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx import load_prompt_cache, make_prompt_cache, save_prompt_cache, stream_generate
from dflash_mlx.draft.context import DraftContext, FullLayer
from dflash_mlx.draft.model import DraftModel
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import prompt_of, reference, tiny
from tests.test_prompt_snapshots import same_context

TOKENIZER = byte_tokenizer()
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DRAFTS = {"full": tiny_draft(), "mixed": tiny_draft(**SLIDING), "causal": tiny_draft(**SLIDING, is_causal=True)}
WINDOWS = [1, 2, 4, 5, 6, 9]


def features(rows: int, seed: int = 0) -> mx.array:
    mx.random.seed(seed)
    return mx.random.normal((1, rows, 128)) * 3


def fed(draft: DraftModel, given: mx.array, cuts: Sequence[int], window: int | None, start: int = 0) -> DraftContext:
    """A context that was given these features in pieces that end at `cuts`."""
    context = DraftContext(draft.config, start, window)
    for first, last in itertools.pairwise([0, *cuts, given.shape[1]]):
        draft.extend(context, given[:, first:last])
    return context


def context_of(draft: DraftModel, window: int | None) -> DraftContext:
    return DraftContext(draft.config, 0, window)


def block(draft: DraftModel, context: DraftContext) -> np.ndarray:
    return np.array(draft.denoise(features(4, seed=1)[..., :64], context))


def check_equal(ours: DraftContext, expected: DraftContext) -> None:
    """The same newest rows in the same order, and as many as the expected context has."""
    assert ours.length == expected.length
    for a, b in zip(ours.layers, expected.layers, strict=True):
        assert a.rows == b.rows
        for rows, others in zip(a.held or (), b.held or (), strict=True):
            np.testing.assert_allclose(np.array(rows), np.array(others), atol=1e-5)


def one_by_one(rows: int) -> list[int]:
    return list(range(1, rows))


def halved(rows: int) -> list[int]:
    return sorted({rows // 2, rows - 1} - {0, rows})


@pytest.mark.parametrize("name", sorted(DRAFTS))
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_gives_what_a_context_of_only_the_last_rows_gives(name: str, window: int) -> None:
    """Same positions, same masks: a shifted position or a row too many would cost acceptance and show nowhere else."""
    draft = DRAFTS[name]
    for rows, cut in itertools.product([window, window + 1, 2 * window + 1, 30], (one_by_one, halved)):
        given = features(rows)
        context = fed(draft, given, cut(rows), window)
        last = min(window, rows)
        expected = fed(draft, given[:, rows - last :], [], None, start=rows - last)
        check_equal(context, expected)
        np.testing.assert_allclose(block(draft, context), block(draft, expected), atol=1e-5)


def test_a_full_layer_under_a_window_hides_nothing_of_what_it_holds() -> None:
    """Every row of the block sees the oldest row that is kept; older ones nobody sees."""
    draft, given = DRAFTS["full"], features(12)
    changed = mx.concatenate([given[:, :7], given[:, 7:8] + 5, given[:, 8:]], axis=1)
    plain, seen, unseen = (block(draft, fed(draft, g, [], w)) for g, w in [(given, 5), (changed, 5), (changed, 4)])
    assert (np.abs(seen - plain).max(axis=-1) > 1e-3).all()
    np.testing.assert_array_equal(unseen, block(draft, fed(draft, given, [], 4)))


def test_what_each_layer_keeps() -> None:
    """All; W - 1; the window; the smaller of the two."""
    draft, given = DRAFTS["mixed"], features(40)  # W = 6
    kept = {w: [layer.rows for layer in fed(draft, given, [3, 4, 39], w).layers] for w in (None, 3, 5, 20)}
    assert kept == {None: [5, 40], 3: [3, 3], 5: [5, 5], 20: [5, 20]}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(DRAFTS)),
    st.sampled_from([None, *WINDOWS]),
    st.lists(st.sampled_from([1, 1, 1, 2, 3, 7, 20]), min_size=1, max_size=25),
)
def test_pieces_and_one_shot_hold_the_same_rows_in_the_same_order(name: str, window: int | None, sizes: list) -> None:
    """A ring that one row at a time had rotated would show an expired row and hide the newest."""
    draft, given = DRAFTS[name], features(sum(sizes))
    context = fed(draft, given, list(itertools.accumulate(sizes))[:-1], window)
    expected = fed(draft, given, [], window)
    check_equal(context, expected)
    np.testing.assert_allclose(block(draft, context), block(draft, expected), atol=1e-5)


@pytest.mark.parametrize("window", [1, 40])
def test_memory_stays_within_the_window_however_long_the_answer(window: int) -> None:
    draft, given = DRAFTS["mixed"], features(1)
    context, most = DraftContext(draft.config, 0, window), [0, 0]
    for row in range(700):
        draft.extend(context, given)
        context.evaluate()
        if row % 40 == 0:
            block(draft, context)
        most = [max(m, layer.arrays[0].shape[2]) for m, layer in zip(most, context.layers, strict=True)]
    assert [layer.rows for layer in context.layers] == [min(5, window), window]
    assert most[1] <= 2 * window + 2 * 256  # what is written behind the window comes in steps of 256 rows
    assert most[0] <= 2 * 5 + 2 * 256


@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 12])
def test_dropped_rows_are_replaced_by_those_that_follow(window: int | None, count: int) -> None:
    """A sliding layer does not get older rows back; what it holds is right."""
    draft, given, other = DRAFTS["mixed"], features(12), features(12, seed=9)
    context = fed(draft, given, one_by_one(12), window)
    held = [layer.rows for layer in context.layers]
    context.drop(count)
    assert context.length == 12 - count
    assert [layer.rows for layer in context.layers] == [max(rows - count, 0) for rows in held]
    draft.extend(context, other[:, :3])
    expected = fed(draft, mx.concatenate([given[:, : 12 - count], other[:, :3]], axis=1), [], window)
    for ours, theirs in zip(context.layers, expected.layers, strict=True):
        for a, b in zip(ours.held or (), theirs.held or (), strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b[:, :, -ours.rows :]), atol=1e-5)


@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_a_snapshot_comes_back_as_often_as_it_is_asked_for(window: int | None, length: int) -> None:
    """The store is written in place: a snapshot that shared it would change under our feet."""
    draft, given = DRAFTS["mixed"], features(30)
    context = fed(draft, given[:, :length], one_by_one(length), window)
    place, expected = context.snapshot(), fed(draft, given[:, :length], [], window)
    for seed in range(2):
        for row in range(9):
            draft.extend(context, features(20, seed=5 + seed)[:, row : row + 1])
            block(draft, context)
        context.restore(place)
        check_equal(context, expected)
        np.testing.assert_allclose(block(draft, context), block(draft, expected), atol=1e-5)


AHEAD = 7  # rows of a block


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("name", sorted(DRAFTS))
def test_a_draft_ahead_sees_only_what_is_final_and_settling_leaves_only_that(name: str, window: int | None) -> None:
    """Rows that are dropped afterwards must neither be seen, nor push final ones out of a window."""
    draft = DRAFTS[name]
    for rows, count in itertools.product((0, 4, 30), (0, 1, 3, AHEAD)):
        given = features(rows + AHEAD)
        expected = fed(draft, given[:, : rows + count], [], window) if rows + count else context_of(draft, window)
        for cuts in ([], one_by_one(rows)):
            context = fed(draft, given[:, :rows], cuts, window) if rows else context_of(draft, window)
            draft.extend(context, given[:, rows:], mx.array([count]))
            np.testing.assert_allclose(block(draft, context), block(draft, expected), atol=1e-5)
            check_seen(context, expected)
            context.settle(count)
            check_equal(context, expected)
            assert context.ahead is None and context.position == rows + count
            np.testing.assert_allclose(block(draft, context), block(draft, expected), atol=1e-5)


def check_seen(context: DraftContext, expected: DraftContext) -> None:
    """What a kernel is told: the buffers, and which of their rows the block sees."""
    assert context.position.tolist() == [expected.length]
    for layer, other in zip(context.layers, expected.layers, strict=True):
        seen, held = layer.seen, other.held or ()
        if seen is None:
            assert not held
            continue
        first, stop = seen.first.item(), seen.stop.item()
        assert seen.keys is layer.arrays[0] and seen.values is layer.arrays[1]
        assert stop - first == other.rows
        for rows, theirs in zip((seen.keys, seen.values), held, strict=bool(held)):
            np.testing.assert_allclose(np.array(rows[:, :, first:stop]), np.array(theirs), atol=1e-5)


def test_a_window_goes_on_for_long_while_blocks_are_settled_at_every_depth() -> None:
    """Over several copies of the store: each has to keep what the dropped rows had pushed out."""
    draft = DRAFTS["mixed"]
    given, done = features(400), 0
    context, expected = (DraftContext(draft.config, 0, 9) for _ in range(2))
    for cycle in range(60):
        count = 1 + cycle * 5 % AHEAD
        draft.extend(context, given[:, done : done + AHEAD], mx.array([count]))
        draft.extend(expected, given[:, done : done + count])
        done += count
        np.testing.assert_allclose(block(draft, context), block(draft, expected), atol=1e-5)
        context.settle(count)
        check_equal(context, expected)
    assert context.layers[0].arrays[0].shape[2] <= 2 * 5 + 2 * 256


def test_a_dropped_row_that_is_not_finite_is_not_noticed() -> None:
    """Times a weight of 0 it would still be NaN, and the draft be blamed."""
    draft, given = DRAFTS["mixed"], features(12)
    spoiled = mx.concatenate([given[:, :8], mx.full((1, 4, 128), mx.nan)], axis=1)
    context, expected = DraftContext(draft.config), fed(draft, given[:, :8], [], None)
    draft.extend(context, given[:, :6])
    draft.extend(context, spoiled[:, 6:], mx.array([2]))
    np.testing.assert_allclose(block(draft, context), block(draft, expected), atol=1e-5)


def test_an_interrupt_while_settling_leaves_a_context_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer has dropped its rows and the other one has not."""
    draft = DRAFTS["mixed"]
    context = fed(draft, features(30), [], None)
    draft.extend(context, features(4), mx.array([2]))

    def interrupted(kept):
        raise KeyboardInterrupt

    monkeypatch.setattr(context.layers[1], "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        context.settle(2)
    monkeypatch.undo()
    context.settle(0)
    assert not any(context.covers(length) for length in range(40))


def test_a_window_makes_a_context_one_that_forgets() -> None:
    """Prompt caches take snapshots of those."""
    draft = DRAFTS["full"]
    assert not DraftContext(draft.config).slides and DraftContext(draft.config, window=9).slides
    assert all(isinstance(layer, FullLayer) for layer in DraftContext(draft.config).layers)
    assert fed(draft, features(30), [], 9).covers(30) and not fed(draft, features(30), [], 9).covers(29)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("given", [mx.float32, mx.bfloat16, mx.float16])
def test_the_context_keeps_the_drafts_dtype(dtype: mx.Dtype, given: mx.Dtype) -> None:
    """A float32 feature must not double a bfloat16 context, nor a bfloat16 one coarsen a float32 draft."""
    draft = tiny_draft(**SLIDING)
    draft.set_dtype(dtype)
    context = fed(draft, features(9).astype(given), [1, 2, 8], 7)
    assert {array.dtype for array in context.arrays} == {dtype}
    assert draft.denoise(features(4)[..., :64].astype(given), context).dtype == dtype


@pytest.fixture(params=[3, 16])
def windowed(request) -> Iterator[DraftModel]:
    """A draft with a sliding and a full layer, whose full layer keeps so many rows."""
    draft = tiny_draft(5, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    draft.context_window = request.param
    yield draft


def ask(cache, name: str, ids: list[int], draft: DraftModel, count: int = 20) -> list:
    rest = ids[cache.reuse(ids) :]
    kwargs = dict(prompt_cache=cache, mode="dflash", block_size=6)
    return list(stream_generate(tiny(name), TOKENIZER, rest, count, draft, **kwargs))


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_turns_with_a_window_give_the_text_of_plain_decoding(name: str, windowed: DraftModel) -> None:
    """Going on, going back to a snapshot, and the same prompt again; what the draft sees then is what it saw before."""
    cache, cold = (make_prompt_cache(tiny(name), windowed) for _ in range(2))
    prompt = prompt_of(30)
    said = prompt + [r.token for r in ask(cache, name, prompt, windowed)]
    assert said[30:] == reference(name, prompt, 20)
    for turn in (said + [1, 2, 3], prompt + [7, 8, 9], prompt + [7, 8, 9]):
        assert [r.token for r in ask(cache, name, turn, windowed)] == reference(name, turn, 20)
        assert cache.last_reuse.reused >= 29
        assert cache.context.window == windowed.context_window and cache.context.slides
    ask(cold, name, prompt + [7, 8, 9], windowed)
    same_context(cache, cold)


@pytest.mark.parametrize(
    ("name", "saved", "used"), [("qwen3_5", 5, None), ("qwen3_5", None, 5), ("llama", 9, 5), ("llama", 5, 5)]
)
def test_a_file_of_another_window_serves_and_the_draft_joins_late(
    name: str, saved: int | None, used: int | None, tmp_path: Path
) -> None:
    """Its rows are not those that this context would hold; snapshots in the file are of the other window too."""
    draft = tiny_draft(5)
    draft.context_window = saved
    cache = make_prompt_cache(tiny(name), draft)
    said = prompt_of(30) + [r.token for r in ask(cache, name, prompt_of(30), draft)]
    save_prompt_cache(tmp_path / "c.safetensors", cache)
    draft.context_window = used
    for turn in (said + [5], prompt_of(30) + [7, 8]):
        loaded = load_prompt_cache(tmp_path / "c.safetensors", tiny(name), draft)
        responses = ask(loaded, name, turn, draft)
        assert [r.token for r in responses] == reference(name, turn, 20)
        late = any("has not seen all" in note for note in responses[-1].notes)
        assert late == (saved != used)
        assert loaded.context.covers(loaded.cache.length) and loaded.context.window == used


def test_an_interrupt_between_two_layers_leaves_a_context_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers cannot be told apart by how many rows they hold; a row ahead would cost acceptance for good."""
    draft = tiny_draft(layer_types=["sliding_attention"] * 2, sliding_window=6)
    context = fed(draft, features(30), [], None)
    before = context.snapshot()

    def interrupted(*rows):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(context.layers[1], "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            draft.extend(context, features(1))
    assert not any(context.covers(length) for length in range(33))
    context.restore(before)
    assert context.covers(30)
