"""Worker threads: load and generate there, twice, and the process ends with status 0."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.layer_state import Deferred

ROOT = Path(__file__).parent.parent

PRELUDE = """
import sys, threading
sys.path.insert(0, {root!r})

def in_thread(work, *args):
    box = []
    def run():
        try:
            box.append(work(*args))
        except BaseException as error:
            box.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]

def make():
    from tests.conftest import byte_tokenizer, tiny_draft
    from tests.families import BY_NAME, build
    return build(BY_NAME["llama"]), byte_tokenizer(), tiny_draft()

def answer(pair, prompt, seed=None):
    from dflash_mlx import make_sampler, stream_generate
    model, tokenizer, draft = pair
    sampler = make_sampler(1.0, seed=seed) if seed is not None else None
    return [r.token for r in stream_generate(model, tokenizer, prompt, 30, draft, mode="dflash", sampler=sampler)]
"""


def run(body: str) -> str:
    code = PRELUDE.format(root=str(ROOT)) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_load_and_generate_in_a_thread_twice() -> None:
    out = run(
        """
        def work():
            return answer(make(), [5, 6, 7])
        print(in_thread(work) == in_thread(work))
        """
    )
    assert out == "True\n"


def test_one_thread_may_load_and_generate_several_times(tmp_path: Path) -> None:
    """Its streams are cleared when it ends, not between its requests."""
    out = run(
        f"""
        from pathlib import Path
        def work():
            from dflash_mlx import load
            from tests.folders import draft_folder, target_folder
            target, draft = target_folder(Path({str(tmp_path)!r}) / "t"), draft_folder(Path({str(tmp_path)!r}) / "d")
            pair = load(str(target), draft=str(draft), blas="off")
            first = answer(pair, [5, 6, 7])
            pair = load(str(target), draft=str(draft), blas="off")
            return first == answer(pair, [5, 6, 7]) == answer(pair, [5, 6, 7])
        print(in_thread(work))
        """
    )
    assert out == "True\n"


def test_load_in_the_main_thread_and_generate_in_others() -> None:
    """Evaluated weights may be used elsewhere; a seed gives the same text in any thread."""
    out = run(
        """
        pair = make()
        greedy = in_thread(answer, pair, [5, 6, 7])
        print(greedy == in_thread(answer, pair, [5, 6, 7]) == answer(pair, [5, 6, 7]))
        print(in_thread(answer, pair, [5], 3) == answer(pair, [5], 3))
        """
    )
    assert out == "True\nTrue\n"


def test_a_target_with_scaled_rope_may_be_used_where_it_was_not_loaded(tmp_path: Path) -> None:
    """Its frequencies are no parameters: what is not computed by the loading thread, no other one can compute."""
    out = run(
        f"""
        import json
        from pathlib import Path
        from dflash_mlx import load
        from tests.folders import draft_folder, target_folder
        target, draft = target_folder(Path({str(tmp_path)!r}) / "t"), draft_folder(Path({str(tmp_path)!r}) / "d")
        path = target / "config.json"
        scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
        scaling["original_max_position_embeddings"] = 64
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(rope_scaling=scaling)))
        pair = load(str(target), draft=str(draft), blas="off")
        print(in_thread(answer, pair, [5, 6, 7]) == answer(pair, [5, 6, 7]))
        """
    )
    assert out == "True\n"


def test_a_cache_kept_by_one_thread_serves_the_next() -> None:
    """Nothing lazy is left behind."""
    out = run(
        """
        pair = make()
        from dflash_mlx import make_prompt_cache, stream_generate
        model, tokenizer, draft = pair
        cache = make_prompt_cache(model, draft)
        def turn(ids):
            reused = cache.reuse(ids)
            return [r.token for r in stream_generate(
                model, tokenizer, ids[reused:], 20, draft, mode="dflash", prompt_cache=cache)]
        first = in_thread(turn, [1, 2, 3])
        second = in_thread(turn, [1, 2, 3, *first, 4])
        print(second == answer(pair, [1, 2, 3, *first, 4])[:20])
        """
    )
    assert out == "True\n"


def test_two_requests_at_once_equal_their_solo_runs() -> None:
    out = run(
        """
        pair = make()
        solo = [answer(pair, [5, 6, 7]), answer(pair, [9] * 20)]
        both = [None, None]
        def work(i, prompt):
            for _ in range(3):
                both[i] = answer(pair, prompt)
        threads = [threading.Thread(target=work, args=(i, p)) for i, p in enumerate(([5, 6, 7], [9] * 20))]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(both == solo)
        """
    )
    assert out == "True\n"


@pytest.mark.parametrize("kind", ["cache", "list"])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_generator_may_be_left_in_any_thread(name: str, kind: str) -> None:
    """Made in one thread and closed or collected in another: the caches stay usable, and the process ends well."""
    out = run(
        f"""
        from itertools import islice
        from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache as mlx_lm_cache
        from tests.conftest import byte_tokenizer, tiny_draft
        from tests.families import BY_NAME, build, prompt_of, reference
        from dflash_mlx import make_prompt_cache, stream_generate
        model, tokenizer, draft = build(BY_NAME[{name!r}]), byte_tokenizer(), tiny_draft()
        truth = reference({name!r}, prompt_of(21), 40)
        def start(cache, prompt=prompt_of(21)):
            return stream_generate(model, tokenizer, prompt, 40, draft, mode="dflash", block_size=4, prompt_cache=cache)
        def some(cache):
            responses = start(cache)
            return responses, [r.token for r in islice(responses, 5)]
        def end(responses, how):
            if how == "close":
                responses.close()
        for how in ("close", "collect"):
            for here in (True, False):
                cache = make_prompt_cache(model, draft) if {kind!r} == "cache" else mlx_lm_cache(model)
                responses, got = some(cache) if here else in_thread(some, cache)
                assert got == truth[:5], got
                box = [responses]
                del responses
                (in_thread if here else lambda work: work())(lambda: end(box.pop(), how))
                new = [7, 8, 9]
                if {kind!r} == "cache":
                    turn = prompt_of(21) + got + new
                    new = turn[cache.reuse(turn):]
                    assert len(new) == 4, new
                again = [r.token for r in start(cache, new)]
                assert again == reference({name!r}, prompt_of(21) + got + [7, 8, 9], 40), (how, here)
        print("fine")
        """
    )
    assert out == "fine\n"


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_cache_that_was_cut_back_saved_or_loaded_in_one_thread_serves_another(name: str, tmp_path: Path) -> None:
    """A server looks the cache up in one thread and generates in a worker."""
    out = run(
        f"""
        from dflash_mlx import load_prompt_cache, make_prompt_cache, save_prompt_cache, stream_generate
        from tests.conftest import byte_tokenizer, tiny_draft
        from tests.families import BY_NAME, build, prompt_of, reference
        model, tokenizer = build(BY_NAME[{name!r}]), byte_tokenizer()
        draft = tiny_draft(5, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
        path, turn = {str(tmp_path / "c")!r}, prompt_of(30) + [7, 8]
        def ask(cache, ids):
            return [r.token for r in stream_generate(
                model, tokenizer, ids, 20, draft, mode="dflash", prompt_cache=cache)]
        def again(cache):
            rest = turn[cache.reuse(turn):]
            got = in_thread(ask, cache, rest)
            in_thread(save_prompt_cache, path, cache)
            return got
        cache = make_prompt_cache(model, draft)
        in_thread(ask, cache, prompt_of(30))
        expected = reference({name!r}, turn, 20)
        print(again(cache) == expected, again(load_prompt_cache(path, model, draft)) == expected)
        cache = in_thread(load_prompt_cache, path, model, draft)
        print(turn[cache.reuse(turn):] and ask(cache, turn[cache.reuse(turn):]) == expected)
        """
    )
    assert out == "True True\nTrue\n"


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_a_generator_may_move_to_another_thread_at_any_token(name: str) -> None:
    """An event loop that runs each step in a pool does this. Nothing of a step is left for the next thread."""
    out = run(
        f"""
        from tests.conftest import byte_tokenizer, tiny_draft
        from tests.families import BY_NAME, build, prompt_of, reference
        from dflash_mlx import stream_generate
        model, tokenizer, draft = build(BY_NAME[{name!r}]), byte_tokenizer(), tiny_draft()
        truth = reference({name!r}, prompt_of(21), 40)
        for mode in ("dflash", "plain"):
            responses = stream_generate(model, tokenizer, prompt_of(21), 40, draft, mode=mode)
            got = [in_thread(next, responses).token for _ in range(40)]
            responses.close()
            print(got == truth)
        """
    )
    assert out == "True\nTrue\n"


def test_a_thread_with_the_number_of_one_that_ended_is_another_one() -> None:
    """It could compute nothing of what that one had put off, and the system gives numbers again at once."""

    class Nothing:
        def after(self, count: int) -> list:
            return []

    def in_thread(work: Callable[[], Any]) -> tuple[int, Any]:
        box: list[tuple[int, Any]] = []
        thread = threading.Thread(target=lambda: box.append((threading.get_ident(), work())))
        thread.start()
        thread.join()
        return box[0]

    number, deferred = in_thread(lambda: Deferred(Nothing(), 1))
    for _ in range(100):
        other, here = in_thread(deferred.here)
        assert here is not deferred
        if other == number:
            return
    pytest.skip("no number was given again")


def test_with_kernels_wired_in_nothing_of_a_step_is_left_for_another_thread() -> None:
    """A tape, a count or a constant that is still to be computed belongs to the thread that wrote it down."""
    out = run(
        """
        from tests.conftest import byte_tokenizer, draft_for
        from tests.families import prompt_of, reference, tiny
        from dflash_mlx import make_prompt_cache, stream_generate
        from dflash_mlx.kernels.choice import references
        def check(name, pipelined):
            model, draft, kernels = tiny(name), draft_for(name), references()
            cache = make_prompt_cache(model, draft)
            def start(ids):
                return stream_generate(model, byte_tokenizer(), ids, 30, draft, mode="dflash", block_size=6,
                                       prompt_cache=cache, kernels=kernels, pipelined=pipelined)
            responses = start(prompt_of(21))
            got = [in_thread(next, responses).token for _ in range(26)]
            in_thread(responses.close)
            turn = prompt_of(21) + got[:25] + [7, 8]
            rest = turn[in_thread(cache.reuse, turn):]
            again = in_thread(lambda: [r.token for r in start(rest)])
            assert got == reference(name, prompt_of(21), 26) and again == reference(name, turn, 30)
            assert kernels.reasons, "no operation was asked for"
        for name in ("llama-4bit", "qwen3_5"):
            check(name, False)
            check(name, True)
        print("fine")
        """
    )
    assert out == "fine\n"


@pytest.mark.slow
def test_ten_processes_in_a_row_end_with_status_0() -> None:
    for _ in range(10):
        run("in_thread(lambda: answer(make(), [5, 6, 7]))")
