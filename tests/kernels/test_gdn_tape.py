"""A taped block's rollback costs nothing until somebody needs the state; then it is there, wherever it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import make_prompt_cache as make_kept_cache
from dflash_mlx.cache import RecurrentState, TargetCache
from dflash_mlx.kernels import gdn_verify
from dflash_mlx.kernels.choice import Kernels, references
from dflash_mlx.kernels.modules.gated_delta import TapedGatedDelta, swap
from dflash_mlx.targets import Target, target_for
from tests.conftest import draft_for
from tests.families import BY_NAME, SCRIPTS, VOCAB, build, prompt_of, reference, tiny
from tests.generating import scripted as scripted
from tests.generating import stream
from tests.plain import visible

TAPED = ("qwen3_5", "qwen3_5-shell", "qwen3_next", "qwen3_5_moe")
PROMPT = prompt_of(21)
KERNELS = references()


class Pair:
    """A target with taped layers, its cache, and mlx_lm's model over its own, fed with what is kept."""

    def __init__(self, name: str = "qwen3_5", kernels: Kernels = KERNELS, dtype: mx.Dtype = mx.float32) -> None:
        self.model = tiny(name, dtype)
        self.target: Target = target_for(self.model, kernels)
        self.cache = TargetCache(self.target.make_entries(), 0)
        self.oracle = make_prompt_cache(self.model)
        self.count = 0

    def block(self, width: int, keep: int) -> mx.array:
        """Logits of the kept rows; asserted to be mlx_lm's."""
        ids = [(self.count * 31 + 7 * i * i) % VOCAB for i in range(width)]
        self.count += 1
        self.cache.begin(width)
        logits = self.target.logits(self.target.forward(mx.array([ids]), self.cache).hidden)
        mx.eval(logits)
        self.cache.commit(keep)
        expected = self.model(mx.array([ids[:keep]]), cache=self.oracle)
        assert mx.array_equal(logits[:, :keep], expected)
        mx.eval([entry.state for entry in self.oracle])
        return logits

    @property
    def recurrent(self) -> list[RecurrentState]:
        return [state for state in self.cache.states if isinstance(state, RecurrentState)]

    def same(self) -> None:
        for ours, theirs in zip(self.cache.entries, self.oracle, strict=True):
            for a, b in zip(visible(ours), visible(theirs), strict=True):
                assert a.dtype == b.dtype and mx.array_equal(a, b)


def in_a_thread(work: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("name", TAPED)
def test_only_gated_delta_layers_of_known_classes_are_swapped(name: str) -> None:
    """A subclass that computes something else would be computed as if it did not."""
    layers = [layer for layer in target_for(tiny(name), KERNELS).layers if "linear_attn" in layer]
    assert layers and all(isinstance(layer.linear_attn, TapedGatedDelta) for layer in layers)
    original = build(BY_NAME[name])
    text = original.get("language_model", original)
    mixer = text.model.layers[0].linear_attn

    class Other(type(mixer)):  # type: ignore[misc]
        pass

    mixer.__class__ = Other
    assert swap(mixer, KERNELS) is None
    assert swap(text.model.layers[3].self_attn, KERNELS) is None


@pytest.mark.parametrize("name", TAPED)
def test_every_width_and_count_is_what_mlx_lm_computes(name: str) -> None:
    """In bfloat16 too, where mixtures of experts have no CPU operation; single rows and prompts in between."""
    for dtype in BY_NAME[name].dtypes:
        pair = Pair(name, dtype=dtype)
        pair.block(25, 25)
        for width in (2, 3, 5, 8, 16, 17):
            for keep in sorted({1, 2, width // 2, width - 1, width} - {0}):
                pair.block(width, keep)
            pair.same()
            pair.block(1, 1)
        pair.same()


def test_a_fresh_cache_may_begin_with_a_block() -> None:
    """Without a prompt there is neither state nor window."""
    pair = Pair()
    pair.block(4, 2)
    pair.block(3, 1)
    pair.same()


def graph(arrays: list[mx.array], folder: Path) -> int:
    """Lines that it takes to draw what has to be computed for these arrays."""
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), arrays)
    return len(path.read_text().splitlines())


def test_the_replay_is_not_computed_where_the_next_block_follows(tmp_path: Path) -> None:
    """It would read and write every state once more per cycle."""
    pair = Pair()
    pair.block(20, 20)
    pair.block(5, 2)
    assert pair.cache.pending == [] and all(state.deferred for state in pair.recurrent)
    states = [state.entry.cache[1] for state in pair.recurrent]
    pair.block(4, 3)
    waiting = graph(states, tmp_path)
    mx.eval(states)
    assert waiting > graph(states, tmp_path) + 10


def test_two_hundred_blocks_hold_no_more_than_five(tmp_path: Path) -> None:
    """A state that waits for the state before it, which waits for the one before: memory and time without end."""
    pair, sizes, graphs = Pair(), [], []
    pair.block(20, 20)
    for index in range(200):
        pair.block(5, 1 + index % 5)
        if index in (4, 199):
            mx.synchronize()
            mx.clear_cache()
            sizes.append(mx.get_active_memory() - sum(e.nbytes for e in [*pair.cache.entries, *pair.oracle]))
            graphs.append(graph([array for state in pair.recurrent for array in state.entry.cache], tmp_path))
    assert graphs[0] == graphs[1] > 10
    assert sizes[1] <= sizes[0] + 64 * 1024  # a state of one layer is 4 KiB, so that 200 would be 2.4 MiB


def test_a_single_row_a_snapshot_or_the_end_finds_the_state() -> None:
    """Each reads the entries, as mlx_lm's code does."""
    for keep in range(1, 6):
        pair = Pair()
        pair.block(20, 20)
        pair.block(5, keep)
        pair.block(1, 1)
        pair.same()
        pair.block(5, keep)
        snapshot = pair.cache.snapshot()
        for layer, theirs in zip(snapshot.layers, pair.oracle, strict=True):
            assert layer is None or all(map(mx.array_equal, layer.cache, theirs.cache))
        pair.block(4, 2)
        pair.cache.evaluate()
        assert not any(state.deferred for state in pair.recurrent)
        pair.same()


def test_a_restored_state_is_what_the_next_block_starts_from() -> None:
    """The tape is of another place."""
    pair, again = Pair(), Pair()
    for side in (pair, again):
        side.block(20, 20)
        side.block(5, 2)
    snapshot = pair.cache.snapshot()
    pair.block(4, 3)
    pair.cache.restore(snapshot)
    pair.oracle, pair.count = again.oracle, again.count
    pair.block(4, 3)
    pair.block(4, 1)
    pair.same()


def test_what_somebody_puts_into_an_entry_is_what_the_next_block_starts_from() -> None:
    """The entries are mlx_lm's and the caller may have them: another state, however it came there."""
    pair = Pair()
    pair.block(20, 20)
    pair.block(5, 2)
    for ours, theirs in zip(pair.cache.entries, pair.oracle, strict=True):
        if hasattr(ours, "cache"):
            changed = [ours.cache[0], ours.cache[1] * 0.5]
            ours.cache, theirs.cache = list(changed), list(changed)
    pair.block(4, 3)
    pair.block(4, 1)
    pair.same()


def test_another_thread_may_go_on_after_a_block() -> None:
    """It can compute nothing that this thread left undone: with a block, a single row, fewer rows, or at the end."""
    ways: dict[str, Callable[[Pair], object]] = {
        "block": lambda pair: pair.block(4, 2),
        "row": lambda pair: pair.block(1, 1),
        "end": lambda pair: pair.cache.evaluate(),
        "fewer": lambda pair: (pair.cache.shrink(2), pair.cache.evaluate()),
    }
    for way, work in ways.items():
        pair = Pair()
        pair.block(20, 20)
        pair.block(5, 3)
        in_a_thread(lambda pair=pair, work=work: (work(pair), pair.cache.evaluate()))  # type: ignore[misc]
        assert pair.cache.length == {"block": 25, "row": 24, "end": 23, "fewer": 22}[way]
        if way != "fewer":
            pair.same()


def test_a_state_of_another_type_or_a_padded_batch_goes_through_mlx_lm() -> None:
    """Nothing of ours knows about them."""
    mixer = next(layer.linear_attn for layer in target_for(tiny("qwen3_5"), KERNELS).layers if "linear_attn" in layer)
    entry = make_prompt_cache(tiny("qwen3_5"))[0]
    state = RecurrentState(entry)
    state.begin(3)
    rows = mx.random.normal((1, 3, 64))
    assert mixer.taped(rows, mx.ones((1, 3), mx.bool_), state) is None
    assert mixer.taped(mx.concatenate([rows, rows]), None, state) is None
    assert mixer.taped(rows[:, :1], None, state) is None
    assert mixer.taped(mx.concatenate([rows] * 6, axis=1), None, state) is None
    assert entry.cache == [None, None]
    assert mixer(rows, None, None).shape == (1, 3, 64)


def test_on_a_gpu_without_the_kernel_mlx_lms_own_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's loop of small operations would be slower there than what it replaces."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    layer = build(BY_NAME["qwen3_5"]).language_model.model.layers[0]
    mixer = swap(layer.linear_attn, references())
    state = RecurrentState(make_prompt_cache(tiny("qwen3_5"))[0])
    state.begin(3)
    assert mixer is not None and mixer.taped(mx.zeros((1, 3, 64)), None, state) is None


def test_the_layers_name_what_has_to_be_raced() -> None:
    layer = build(BY_NAME["qwen3_5"], mx.bfloat16).language_model.model.layers[0]
    mixer = swap(layer.linear_attn, KERNELS)
    assert isinstance(mixer, TapedGatedDelta)
    verify, prework = mixer.cases()
    assert verify == gdn_verify.case_of(mx.bfloat16, 2, 4, 16, 16)
    assert (prework.operation, prework.dtype) == ("gdn_prework", "bfloat16")


@pytest.mark.parametrize("name", TAPED)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_gives_mlx_lms_tokens(name: str, script: str, tokenizer, scripted, monkeypatch) -> None:
    """And a caller who leaves after any of them has a cache that goes on as mlx_lm's would."""
    truth, taped = reference(name, PROMPT, 60), []
    compute = gdn_verify.reference
    monkeypatch.setattr(gdn_verify, "reference", lambda *block: taped.append(1) or compute(*block))
    scripted(truth, script)
    how = dict(draft_model=draft_for(name), max_tokens=60, block_size=7, kernels=KERNELS)
    assert [r.token for r in stream(name, tokenizer, PROMPT, **how)] == truth
    assert len(taped) >= 3 * 4
    for left in (1, 4, 9, 10):
        scripted(truth, script)
        cache = make_prompt_cache(tiny(name))
        answer = stream(name, tokenizer, PROMPT, prompt_cache=cache, **how)
        got = [next(answer).token for _ in range(left)]
        answer.close()
        oracle = make_prompt_cache(tiny(name))
        for ids in (PROMPT, got):
            tiny(name)(mx.array([ids]), cache=oracle)
        following = [tiny(name)(mx.array([[5]]), cache=entries) for entries in (cache, oracle)]
        assert mx.array_equal(*following), left


def test_a_draft_that_runs_ahead_of_the_read_gives_the_same_tokens(tokenizer) -> None:
    """The pipelined cycle commits after the read, too."""
    how = dict(draft_model=draft_for("qwen3_5"), max_tokens=60, block_size=7, kernels=KERNELS)
    for pipelined in (False, True):
        *_, last = answer = list(stream("qwen3_5", tokenizer, PROMPT, pipelined=pipelined, **how))
        assert [r.token for r in answer] == reference("qwen3_5", PROMPT, 60) and last.pipelined == pipelined


def test_a_kept_conversation_continues_from_snapshots_as_without_tapes(tokenizer) -> None:
    """Turn by turn, edited ones too."""
    answers = []
    for kernels in ("off", KERNELS):
        held, texts = make_kept_cache(tiny("qwen3_5"), draft_for("qwen3_5")), []
        ids: list[int] = []  # of the user; the answers are never repeated, so each turn goes back to a snapshot
        for turn, count in ((prompt_of(20), 12), (prompt_of(9, seed=4), 15), (prompt_of(11, seed=7), 9)):
            ids = [*ids, *turn]
            kept = held.reuse(ids, stable=len(ids) - 2)
            how = dict(draft_model=held.draft, prompt_cache=held, max_tokens=count, kernels=kernels)
            texts.append([r.token for r in stream("qwen3_5", tokenizer, ids[kept:], **how)])
        answers.append(texts)
    assert answers[0] == answers[1]
