"""The engine thread over a scripted library: cancelling, coalescing, errors, reuse. No MLX, no Textual."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import cast

import pytest
from listening import Listener, engine_with_clock
from scripted import LARGEST_BLOCK, PREFILL_STEP_SIZE, Answer, FakeTokenizer, Script

from dflash_mlx.app.backend import Response
from dflash_mlx.app.chat_engine import ChatEngine
from dflash_mlx.app.failures import out_of_memory
from dflash_mlx.app.jobs import Ask, LoadModel
from dflash_mlx.app.library import mlx_backend
from dflash_mlx.app.messages import (
    Chunk,
    CycleTick,
    EngineFailed,
    Event,
    LoadCancelled,
    ModelCard,
    ModelLoading,
    ModelReady,
    PrefillProgress,
    TurnDone,
)
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.tally import Tally
from dflash_mlx.errors import CheckpointError


def test_everything_of_the_library_happens_in_one_thread_and_its_streams_are_cleared_last() -> None:
    """Arrays belong to the thread that made them; without the clearing the process aborts."""
    script = Script()
    listener = Listener(script)
    listener.start()
    listener.answer(1, "hi")
    assert script.streams_cleared == 0
    listener.close()
    assert script.streams_cleared == 1
    assert len(script.threads) == 1 and threading.get_ident() not in script.threads


def test_all_text_arrives_and_token_counts_add_up() -> None:
    text = "Any text at all, in cycles of mixed depths. " * 3
    listener = Listener(Script([Answer(text)]))
    listener.start()
    done = listener.answer(1, "hi")
    assert listener.text(1) == text
    chunks = [event for event in listener.seen if isinstance(event, Chunk)]
    assert sum(chunk.n_tokens for chunk in chunks) == done.numbers.generation_tokens == len(text)
    assert done.reason == "stop"
    assert done.numbers.tokens_per_cycle == 1 + (len(text) - 1 - done.numbers.cycles) / done.numbers.cycles
    listener.close()


@pytest.mark.parametrize(("cycle_s", "most"), [(1 / 300, 22), (0.2, 251)])
def test_text_is_posted_at_most_twenty_times_a_second(cycle_s: float, most: int) -> None:
    """300 blocks a second must not become 300 layouts a second; slow cycles are posted one by one."""
    text = "x" * 1001
    engine, events = engine_with_clock(Script([Answer(text, depths=(3,))]), cycle_s)
    engine.answer(Ask(1, (("user", "hi"),), Settings()))
    chunks = [event for event in events if isinstance(event, Chunk)]
    ticks = [event for event in events if isinstance(event, CycleTick) and event.numbers.generation_tokens]
    assert "".join(chunk.text for chunk in chunks) == text
    assert most * 0.6 <= len(chunks) <= most  # 250 cycles: 0.83 s of them, or one at a time
    assert len(ticks) <= len(chunks)


def test_a_cycle_is_posted_whole_not_its_first_token_early() -> None:
    """Otherwise the reader is always one cycle behind when cycles are slow."""
    engine, events = engine_with_clock(Script([Answer("abcdefghi", depths=(3,))]), 0.2)
    engine.answer(Ask(1, (("user", "hi"),), Settings()))
    assert [event.text for event in events if isinstance(event, Chunk)] == ["a", "bcde", "fghi"]


def test_no_rate_is_given_before_two_tokens() -> None:
    """One token over microseconds reads as thousands of tokens per second."""
    engine, events = engine_with_clock(Script([Answer("ab", depths=(0,))]), 0.2)
    engine.answer(Ask(1, (("user", "hi"),), Settings()))
    told = [event.numbers for event in events if isinstance(event, CycleTick | TurnDone)]
    first, *_, last = [numbers for numbers in told if numbers.generation_tokens]
    assert (first.generation_tokens, first.decode_tps, first.request_tps) == (1, None, None)
    assert last.decode_tps is not None and last.request_tps is not None
    assert last.decode_tps != last.request_tps


def test_cancelling_takes_effect_within_a_cycle_and_keeps_what_was_said() -> None:
    """The text on the screen and the cache agree after a stop."""
    script = Script([Answer("y" * 10_000, depths=(3,), cycle_s=0.002)])
    listener = Listener(script)
    listener.start()
    listener.ask(1, "hi")
    listener.until(Chunk)
    listener.engine.cancel(1)
    done = listener.until(TurnDone)
    assert isinstance(done, TurnDone) and done.reason == "cancelled"
    said = listener.text(1)
    assert 0 < len(said) < 5_000
    assert script.closed == [len(said)]
    assert "".join(map(chr, script.caches[0].tokens)).endswith("<assistant>" + said)
    script.answers.append(Answer("Next."))
    listener.answer(2, "hi", said, "and now?")
    assert script.prompts[1] == "</s><user>and now?</s><assistant>"
    listener.close()


def test_cancelling_in_the_prefill_stops_before_the_next_chunk() -> None:
    """A long prompt must not be read to its end after Esc."""
    chunks: list[int] = []
    listener = Listener(Script())

    def on_prefill(chunk: int) -> None:
        chunks.append(chunk)
        if chunk == 2:
            listener.engine.cancel(1)

    listener.engine.script.answers[:] = [Answer(prefill_chunks=50, on_prefill=on_prefill), Answer("Fresh.")]
    listener.start()
    done = listener.answer(1, "a long prompt")
    assert done.reason == "cancelled" and chunks == [1, 2]
    assert listener.text(1) == ""
    assert listener.answer(2, "another").reason == "stop"
    assert listener.text(2) == "Fresh."
    listener.close()


def test_a_cancelled_turn_that_still_waits_never_starts_and_the_next_one_is_not_hit() -> None:
    """/clear while the engine is busy, then a new question: a shared flag would stop the wrong one."""
    gate = threading.Event()
    script = Script([Answer("slow", gate=gate), Answer("third")])  # turn 2 never gets to the script
    listener = Listener(script)
    listener.start()
    listener.ask(1, "one")
    listener.until(PrefillProgress)
    listener.ask(2, "two")
    listener.engine.cancel(2)
    listener.ask(3, "three")
    gate.set()
    reasons = {}
    while len(reasons) < 3:
        done = listener.until(TurnDone)
        assert isinstance(done, TurnDone)
        reasons[done.turn] = done.reason
    assert reasons == {1: "cancelled", 2: "cancelled", 3: "stop"}
    assert not any("two" in prompt for prompt in script.prompts)
    assert listener.text(3) == "third"
    listener.close()


def test_a_second_turn_recomputes_only_what_is_new() -> None:
    script = Script([Answer("Hello."), Answer("Again.")])
    listener = Listener(script)
    listener.start()
    listener.answer(1, "hi")
    done = listener.answer(2, "hi", "Hello.", "more")
    assert script.prompts[1] == "</s><user>more</s><assistant>"
    assert done.numbers.cached_tokens == len("<user>hi</s><assistant>Hello.")
    assert done.numbers.prompt_tokens == done.numbers.cached_tokens + len(script.prompts[1])
    reports = [event for event in listener.seen if isinstance(event, PrefillProgress) and event.turn == 2]
    assert reports[-1].done == reports[-1].total == len(script.prompts[1])
    listener.close()


def test_an_error_in_a_turn_drops_the_cache_and_the_next_turn_works() -> None:
    script = Script([Answer("abcdef", fail_after=2), Answer("Fine.")])
    listener = Listener(script)
    listener.start()
    listener.ask(1, "hi")
    failed = listener.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert (failed.turn, failed.fatal) == (1, False)
    assert "RuntimeError: scripted" in failed.body and "Traceback" in failed.details
    assert listener.answer(2, "again").reason == "stop"
    assert len(script.caches) == 2 and script.reused == [0, 0]
    listener.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("block_size has to be in 2..16, got 64."), "got 64."),
        (MemoryError(), "/clear"),
        (RuntimeError("[metal::malloc] Attempting to allocate 9 bytes, more than the maximum buffer size"), "/clear"),
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), "/clear"),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)"), "/clear"),
    ],
)
def test_errors_for_the_user_have_no_traceback(error: Exception, expected: str) -> None:
    listener = Listener(Script([Answer("abc", fail_after=0, error=error)]))
    listener.start()
    listener.ask(1, "hi")
    failed = listener.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert expected in failed.body and failed.details == ""
    listener.close()


def test_a_failed_load_is_fatal_and_says_why() -> None:
    script = Script(load_error=ValueError("no such folder: /nowhere"))
    listener = Listener(script)
    listener.engine.start()
    listener.engine.submit(LoadModel(number=7))
    failed = listener.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert failed.fatal and failed.turn == 7 and "/nowhere" in failed.body
    listener.close()
    assert script.streams_cleared == 1


def test_shutting_down_stops_a_load_at_its_next_step() -> None:
    script = Script(load_gate=threading.Event())
    listener = Listener(script)
    listener.engine.start()
    listener.engine.submit(LoadModel())
    listener.until(ModelLoading)
    listener.close()
    assert script.streams_cleared == 1


def test_a_load_that_is_cancelled_says_so_and_the_next_one_works() -> None:
    """Otherwise the picker waits for a model that never comes."""
    script = Script(load_gate=threading.Event())
    listener = Listener(script)
    listener.engine.start()
    listener.engine.submit(LoadModel("first", number=3))
    listener.until(ModelLoading)
    while not script.loads:
        listener.until(ModelLoading)
    listener.engine.cancel(3)
    cancelled = listener.until(LoadCancelled, EngineFailed, ModelReady)
    assert cancelled == LoadCancelled(3)
    script.load_gate = None
    listener.engine.submit(LoadModel("second", number=4))
    ready = listener.until(LoadCancelled, EngineFailed, ModelReady)
    assert isinstance(ready, ModelReady) and ready.card.model == "second"
    assert listener.answer(5, "hi").reason == "stop"
    listener.close()


def test_a_load_that_was_cancelled_while_it_waited_never_begins() -> None:
    script = Script()
    listener = Listener(script)
    listener.engine.cancel(2)
    listener.engine.start()
    listener.engine.submit(LoadModel(number=2))
    assert listener.until(LoadCancelled) == LoadCancelled(2)
    assert not script.loads
    listener.close()


def test_what_the_library_makes_of_a_cancelled_download_is_no_failure() -> None:
    """A downloader may turn the exception that stopped it into its own error."""
    script = Script(load_gate=threading.Event(), load_error=CheckpointError("the download broke off"))
    listener = Listener(script)
    script.load_steps = (("Fetching", 0.1),)

    class Wrapping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            listener.engine.cancel(1)
            raise CheckpointError("the download broke off")

    script.load_gate = Wrapping()
    listener.engine.start()
    listener.engine.submit(LoadModel(number=1))
    assert listener.until(LoadCancelled, EngineFailed) == LoadCancelled(1)
    listener.close()


def test_the_first_pair_is_gone_before_the_second_is_read() -> None:
    """Two large models at once do not fit; the second would fail, or the machine would swap."""
    alive: list[bool] = []
    tokenizers: list[weakref.ref[FakeTokenizer]] = []

    def tokenizer() -> FakeTokenizer:
        made = FakeTokenizer()
        tokenizers.append(weakref.ref(made))
        return made

    script = Script(tokenizer=tokenizer)
    engine, _ = engine_with_clock(script, 0.01)
    engine.answer(Ask(1, (("user", "hi"),), Settings()))
    load, freed = script._load, script.freed

    def second(*arguments):  # type: ignore[no-untyped-def]
        gc.collect()
        alive.append(tokenizers[0]() is not None)
        assert script.freed > freed, "MLX keeps freed buffers for itself until its cache is cleared"
        return load(*arguments)

    engine._backend = replace(engine._backend, load=second)
    engine.load(LoadModel("other", number=2))
    assert alive == [False]
    engine.answer(Ask(3, (("user", "hi"),), Settings()))
    assert len(script.caches) == 2 and script.reused == [0, 0]


def test_the_card_says_what_was_loaded() -> None:
    script = Script(tokenizer=lambda: FakeTokenizer(switch=True))
    _, events = engine_with_clock(script, 0.0)
    ready = events[-1]
    assert isinstance(ready, ModelReady)
    assert ready.card == ModelCard(
        "demo", "fake-draft", 4, 0.0, (), LARGEST_BLOCK, "demo", 8192, 0.2, 0.05, 16.0, True, from_launch=False
    )
    _, events = engine_with_clock(Script(draft=None), 0.0)
    ready = events[-1]
    assert isinstance(ready, ModelReady)
    assert (ready.card.draft, ready.card.draft_gb, ready.card.thinks) == (None, None, False)


def test_no_memory_for_a_model_is_said_as_that_and_not_as_a_damaged_file() -> None:
    """Loaders take MLX's RuntimeError for a broken checkpoint, and "download it again" would not help."""
    error = CheckpointError("m could not be loaded by mlx_lm: the download is damaged.")
    error.__cause__ = RuntimeError("[malloc] Unable to allocate 99 bytes.")
    listener = Listener(Script(load_error=error))
    listener.engine.start()
    listener.engine.submit(LoadModel("large", number=1))
    failed = listener.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert (failed.title, failed.fatal, failed.details) == ("Out of memory", True, "")
    assert "damaged" not in failed.body and "smaller model" in failed.body
    listener.close()


def test_the_engine_lives_on_without_memory_and_frees_what_the_failed_turn_held() -> None:
    script = Script([Answer("abcdef", fail_after=2, error=RuntimeError("[metal::malloc] too much")), Answer("Fine.")])
    listener = Listener(script)
    listener.start()
    freed = script.freed
    listener.ask(1, "hi")
    failed = listener.until(EngineFailed)
    assert isinstance(failed, EngineFailed) and failed.title == "Out of memory" and not failed.fatal
    assert script.freed > freed
    assert listener.answer(2, "hi").reason == "stop"
    assert len(script.caches) == 2
    listener.close()


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    assert not out_of_memory(RuntimeError("[matmul] Last dimension of first input must match"))
    assert not out_of_memory(ValueError("block_size has to be in 2..16"))


def test_after_a_failed_load_another_model_can_be_loaded() -> None:
    script = Script(load_error=ValueError("no such folder: /nowhere"))
    listener = Listener(script)
    listener.engine.start()
    listener.engine.submit(LoadModel(number=1))
    listener.until(EngineFailed)
    listener.ask(2, "hi")
    failed = listener.until(EngineFailed)
    assert isinstance(failed, EngineFailed) and "No model is loaded" in failed.body and not failed.fatal
    script.load_error = None
    listener.engine.submit(LoadModel(number=3))
    assert isinstance(listener.until(ModelReady, EngineFailed), ModelReady)
    listener.close()


def test_load_progress_is_thinned_but_every_new_step_is_told() -> None:
    steps = tuple((f"step {n // 100}", n / 1000) for n in range(1000))
    engine, events = engine_with_clock(Script(load_steps=steps), 0.001)
    loading = [event for event in events if isinstance(event, ModelLoading)]
    assert {event.text for event in loading} == {f"step {n}" for n in range(10)}
    assert len(loading) <= 22
    assert engine is not None


def test_settings_reach_the_sampler_and_the_library() -> None:
    script = Script()
    listener = Listener(script)
    listener.start()
    wanted = replace(Settings(), temperature=0.7, top_p=0.9, min_p=0.1, top_k=5, seed=3)
    wanted = replace(wanted, block_size=4, mode="dflash", max_tokens=4)
    done = listener.answer(1, "hi", settings=wanted)
    assert script.samplers == [{"temp": 0.7, "top_p": 0.9, "min_p": 0.1, "top_k": 5, "seed": 3}]
    assert (script.options[0]["block_size"], script.options[0]["mode"]) == (4, "dflash")
    assert done.reason == "length" and listener.text(1) == "Hell"
    listener.close()


def test_a_model_without_a_chat_template_is_refused_in_words() -> None:
    engine, _ = engine_with_clock(Script(), 0.01)
    assert engine._pair is not None
    engine._pair.tokenizer.has_chat_template = False  # type: ignore[misc]
    with pytest.raises(ValueError, match="no chat template"):
        engine.answer(Ask(1, (("user", "hi"),), Settings()))


def test_settings_that_the_library_refuses_leave_the_cache_as_it_was() -> None:
    """A typo in a command must not cost the next turn the whole conversation's prefill."""
    script = Script([Answer("Hello."), Answer(refuse=ValueError("`block_size` has to be in 2..16")), Answer("Fine.")])
    listener = Listener(script)
    listener.start()
    listener.answer(1, "hi")
    listener.ask(2, "hi", "Hello.", "more")
    failed = listener.until(EngineFailed)
    assert isinstance(failed, EngineFailed) and failed.title == "No answer" and "2..16" in failed.body
    done = listener.answer(3, "hi", "Hello.", "more")
    assert len(script.caches) == 1
    assert done.numbers.cached_tokens == len("<user>hi</s><assistant>Hello.")
    listener.close()


def test_a_broken_cache_is_dropped_although_nothing_ran() -> None:
    script = Script([Answer("Hello."), Answer(refuse=RuntimeError("closed")), Answer("Fine.")])
    listener = Listener(script)
    listener.start()
    listener.answer(1, "hi")
    listener.ask(2, "hi", "Hello.", "more")
    listener.until(EngineFailed)
    listener.answer(3, "hi", "Hello.", "more")
    assert len(script.caches) == 2
    listener.close()


def test_the_prompt_is_read_in_the_steps_of_the_device_and_the_clock_starts_when_it_was_asked() -> None:
    """Esc waits for one step, and 2048 tokens take a CPU 23 s."""
    script = Script()
    engine, _ = engine_with_clock(script, 0.01)
    engine.answer(Ask(1, (("user", "hi"),), Settings(), 12.5))
    assert (script.options[0]["prefill_step_size"], script.options[0]["requested_at"]) == (PREFILL_STEP_SIZE, 12.5)


def test_plain_steps_are_told() -> None:
    """Without them a rest looks like a draft that never hits."""
    engine, events = engine_with_clock(Script([Answer("abcdefgh", depths=(3, None, None))]), 0.2)
    engine.answer(Ask(1, (("user", "hi"),), Settings()))
    ticks = [event.numbers for event in events if isinstance(event, CycleTick)]
    ticks = [numbers.resting for numbers in ticks if numbers.generation_tokens]
    assert ticks == [False, False, True, True, False]
    done = events[-1]
    assert isinstance(done, TurnDone)
    assert (done.numbers.cycles, done.numbers.plain_steps, done.numbers.tokens_per_cycle) == (4, 2, 2.5)


def test_a_last_cycle_that_the_limit_left_no_room_for_is_no_rest() -> None:
    engine, events = engine_with_clock(Script([Answer("abcdefgh", depths=(3, None))]), 0.2)
    engine.answer(Ask(1, (("user", "hi"),), Settings(max_tokens=6)))
    done = events[-1]
    assert isinstance(done, TurnDone) and done.reason == "length"
    assert (done.numbers.plain_steps, done.numbers.resting) == (1, False)


def test_the_block_that_is_shown_is_that_of_the_newest_cycle_that_drafted() -> None:
    """In mode auto it changes; a rest does not hide it."""
    tally = Tally("auto", 0.0, lambda: 1.0, lambda: None)
    shown = []
    for cycle, drafted in enumerate((5, 2, 0), start=1):
        response = SimpleNamespace(
            cycle=cycle, accepted=0, drafted=drafted, timings=None, stats=None, finish_reason=None, mode="dflash",
            block_size=6, recomputed_tokens=0, generation_tokens=cycle, peak_memory=1.0, notes=(),
        )  # fmt: skip
        tally.add(cast(Response, response))
        shown.append((tally.numbers().newest_block, tally.numbers().resting))
    assert shown == [(6, False), (3, False), (3, True)]


def test_the_time_until_ready_counts_from_the_launch() -> None:
    """Imports take longer than the weights; a card that leaves them out is not believed."""
    events: list[Event] = []
    ChatEngine(Script().backend(), events.append, clock=lambda: 20.0).load(LoadModel(launched_at=7.5))
    ready = events[-1]
    assert isinstance(ready, ModelReady) and ready.card.ready_s == 12.5
    assert ready.card.largest_block == LARGEST_BLOCK


def test_the_real_library_refuses_before_the_generator_runs() -> None:
    """What the two tests above rest on: `stream` checks its arguments when it is called."""
    pytest.importorskip("mlx.core")
    backend = mlx_backend()
    assert not inspect.isgeneratorfunction(backend.stream)
    assert backend.prefill_step_size >= 1
    wanted = {"requested_at", "prefill_step_size", "prompt_cache", "block_size", "mode", "sampler"}
    assert wanted <= set(inspect.signature(backend.stream).parameters)


def test_every_option_of_a_load_is_one_of_the_real_library() -> None:
    """The scripted library takes anything; the real one would end the chat with a TypeError."""
    pytest.importorskip("mlx.core")
    from dflash_mlx import load

    script = Script()
    engine_with_clock(script, 0.0)
    [(_, options)] = script.loads
    assert {field.name for field in fields(LoadModel)} - options.keys() == {"model", "launched_at", "number", "insist"}
    known = inspect.signature(load).parameters
    assert options.keys() <= known.keys()
    assert all(known[name].default == getattr(LoadModel(), name) for name in options.keys() - {"draft"})
