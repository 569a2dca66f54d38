"""What a long-lived process sees: memory that stays bounded, one stream, streams that are given back, no compiler."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import make_prompt_cache, stream_generate
from dflash_mlx.layer_state import RecurrentState, WindowState
from dflash_mlx.request import Request
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import prompt_of, reference, tiny
from tests.generating import DRAFT, PROMPT, scripted, stream

__all__ = ["scripted"]  # fixture
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("kind", ["kept", "fresh"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_memory_after_twenty_turns_has_grown_by_the_cache_only(name: str, kind: str, tokenizer) -> None:
    """Captured features, old blocks and log-probabilities do not pile up over a long session."""
    model, cache, said, active = tiny(name), make_prompt_cache(tiny(name), DRAFT), list[int](), list[int]()
    for turn in range(20):
        said = said + prompt_of(4, seed=turn)
        ids = said[cache.reuse(said, max(len(said) - 2, 0)) :] if kind == "kept" else prompt_of(30)
        kept = cache if kind == "kept" else None
        for response in stream_generate(model, tokenizer, ids, 20, DRAFT, mode="dflash", prompt_cache=kept):
            said.append(response.token)
        if kind == "fresh":
            said = []
        response = None
        gc.collect()
        mx.clear_cache()
        active.append(mx.get_active_memory() - (cache.nbytes if kind == "kept" else 0))
    assert active[-1] <= active[4] + 16_000, [a - active[4] for a in active]


def test_nothing_of_a_request_stays_alive_after_it(tokenizer, monkeypatch) -> None:
    """The session holds features and log-probabilities of the last block."""
    sessions = []
    opened = Request.open

    def spy(request, stop):
        session = opened(request, stop)
        sessions.append(weakref.ref(session))
        return session

    monkeypatch.setattr(Request, "open", spy)
    list(stream("qwen3_5", tokenizer, max_tokens=20, block_size=8))
    responses = stream("qwen3_5", tokenizer, max_tokens=20, block_size=8)
    next(responses)
    responses.close()
    del responses
    gc.collect()
    assert [session() for session in sessions] == [None, None]


@pytest.mark.parametrize("name", ["llama-sliding", "qwen3_5"])
def test_draft_verify_and_rollback_run_on_one_stream(name: str, tokenizer, scripted, monkeypatch) -> None:
    """A rollback on another stream than the forward has hung GPUs."""
    seen: dict[str, set[str]] = {"propose": set(), "rollback": set(), "forward": set()}

    def spied(what, function):
        def call(*args, **kwargs):
            seen[what].add(str(mx.default_stream(mx.default_device())))
            return function(*args, **kwargs)

        return call

    scripted(reference(name, PROMPT, 60), "mixed")
    for state in (RecurrentState, WindowState):
        monkeypatch.setattr(state, "keep", spied("rollback", state.keep))
    opened = Request.open

    def spy(request, stop):
        session = opened(request, stop)
        session.proposer.propose = spied("propose", session.proposer.propose)
        session.forward = spied("forward", session.forward)
        return session

    monkeypatch.setattr(Request, "open", spy)
    mine = mx.new_stream(mx.default_device())
    list(stream(name, tokenizer, max_tokens=30, block_size=8, stream=mine))
    assert set.union(*seen.values()) == {str(mine)} and all(seen.values())
    assert mx.default_stream(mx.default_device()) != mine, "the caller's own stream is as it was"


def test_without_a_compiler_the_tokens_are_the_same() -> None:
    """MLX compiles fused operations with g++ on a CPU; a machine without one runs them one by one."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.families import tiny, prompt_of\n"
        "from tests.conftest import byte_tokenizer, tiny_draft\n"
        "from dflash_mlx import stream_generate\n"
        "for name in ('llama', 'qwen3_5', 'gemma3_text'):\n"
        "    args = tiny(name), byte_tokenizer(), prompt_of(21), 40\n"
        "    run = lambda **k: [r.token for r in stream_generate(*args, **k)]\n"
        "    print(run(draft_model=tiny_draft(), mode='dflash') == run())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "MLX_DISABLE_COMPILE": "1"}
    )
    assert done.stdout == "True\n" * 3, done.stderr


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_interrupt_while_waiting_for_the_device_leaves_a_usable_session(name: str, tokenizer, monkeypatch) -> None:
    """Ctrl-C mostly lands in the one read of a cycle. The next turn is warm, and equals a cold run."""
    from dflash_mlx import accept

    cache, got = make_prompt_cache(tiny(name), DRAFT), list[int]()
    read, left = accept._Reader.read, {"calls": 7}

    def interrupted(self, values):
        left["calls"] -= 1
        if left["calls"] == 0:
            raise KeyboardInterrupt
        return read(self, values)

    monkeypatch.setattr(accept._Reader, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for response in stream(name, tokenizer, max_tokens=40, prompt_cache=cache):
            got.append(response.token)
    assert got == reference(name, PROMPT, 60)[: len(got)] and cache.tokens == PROMPT + got
    turn = cache.tokens + [3, 4]
    reused = cache.reuse(turn)
    assert reused >= len(turn) - 4
    again = stream(name, tokenizer, turn[reused:], max_tokens=20, prompt_cache=cache)
    assert [r.token for r in again] == reference(name, turn, 20)


def test_a_thousand_blocks_into_a_window_stay_bounded() -> None:
    """Writes of several rows evict, rejected or not."""
    from mlx_lm.models.cache import RotatingKVCache

    from dflash_mlx.cache import TargetCache

    cache = TargetCache([RotatingKVCache(max_size=16)], 0)
    for count in range(1000):
        width = 1 + count % 8
        cache.begin(width)
        rows = mx.zeros((1, 1, width, 4))
        cache.entries[0].update_and_fetch(rows, rows)
        cache.commit(1 + count % width)
        assert cache.entries[0].keys.shape[2] <= 16 + 8


def test_two_drafts_share_a_target(tokenizer) -> None:
    """Nothing is stored on the target: the pairs do not see each other, request by request or interleaved."""
    other = tiny_draft(9, dflash_config={"target_layer_ids": [1, 3]})
    solo = [[r.token for r in stream("llama", tokenizer, max_tokens=20, draft_model=d)] for d in (DRAFT, other)]
    both = [stream("llama", tokenizer, max_tokens=20, draft_model=d) for d in (DRAFT, other)]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for index, responses in enumerate(both):
            got[index].append(next(responses).token)
    assert got == solo == [reference("llama", PROMPT, 20)] * 2


def test_one_loaded_pair_serves_interleaved_requests(tokenizer) -> None:
    """Two generators on one pair, turn by turn, each equals its solo run: their state is their own."""
    prompts = [prompt_of(9, seed=3), prompt_of(40, seed=4)]
    running = [stream("qwen3_5", byte_tokenizer(), prompt, max_tokens=20) for prompt in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for index, responses in enumerate(running):
            got[index].append(next(responses).token)
    assert got == [reference("qwen3_5", prompt, 20) for prompt in prompts]
