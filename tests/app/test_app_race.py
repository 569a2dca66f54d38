"""The race: two arms, one request; scripted for what it tells, and over real tiny models for what it finds."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from listening import Listener, engine_with_clock
from scripted import Answer, Script, Verdict

from dflash_mlx.app.chat_engine import ChatEngine
from dflash_mlx.app.jobs import Ask, LoadModel, Race
from dflash_mlx.app.messages import EngineFailed, Event, RaceCancelled, RaceDone, RaceTick, TurnDone
from dflash_mlx.app.settings import Settings

HI = (("user", "hi"),)


def raced(script: Script, settings: Settings | None = None, step_s: float = 0.05) -> tuple[RaceDone, list[Event]]:
    engine, events = engine_with_clock(script, step_s)
    engine.race(Race(2, HI, settings or Settings()))
    done = events[-1]
    assert isinstance(done, RaceDone), done
    return done, events


def test_both_arms_answer_the_same_request_and_are_compared() -> None:
    script = Script([Answer("one two", depths=(3,)), Answer("one too", depths=(3,))])
    script.verdict = Verdict("near-tie", 5, "two tokens are equally likely")
    done, _ = raced(script, Settings(mode="plain", block_size=4, max_tokens=99))
    assert [options["mode"] for options in script.options] == ["plain", "dflash"]
    assert script.prompts == ["<user>hi</s><assistant>"] * 2
    assert (done.number, done.verdict, done.index) == (2, "near-tie", 5)
    assert (done.plain.name, done.plain.text, done.dflash.name, done.dflash.text) == (
        "plain", "one two", "dflash", "one too",
    )  # fmt: skip
    [compared] = script.compared
    assert compared["expected"] == [ord(c) for c in "one two"] and compared["got"] == [ord(c) for c in "one too"]
    assert compared["prompt"] == "<user>hi</s><assistant>"


def test_the_arms_keep_their_own_clocks_and_can_be_replayed() -> None:
    done, _ = raced(Script([Answer("abcdefghi", depths=(3,))]))
    assert done.plain.numbers.mode == "plain" and done.dflash.numbers.mode == "dflash"
    assert done.plain.numbers.total_s == pytest.approx(1.3) and done.dflash.numbers.total_s == pytest.approx(0.7)
    assert done.dflash.pieces == ((0.5, "a"), (0.6, "bcde"), (0.7, "fghi"))
    assert [text for _, text in done.plain.pieces] == list("abcdefghi")
    assert (done.plain.numbers.reading, done.plain.numbers.tokens_per_cycle) == (None, None)


def test_at_a_temperature_both_arms_draw_with_one_seed_and_the_rule_that_must_agree() -> None:
    """With rejection sampling equal text cannot be demanded, and a difference would be called a bug."""
    script = Script()
    raced(script, Settings(temperature=0.8, top_p=0.9))
    [drawn] = script.samplers
    assert isinstance(drawn["seed"], int) and (drawn["temp"], drawn["top_p"]) == (0.8, 0.9)
    assert [options["rule"] for options in script.options] == ["match", "match"]
    assert script.options[0]["sampler"] is script.options[1]["sampler"] is script.compared[0]["policy"]
    script = Script()
    raced(script, Settings(temperature=0.8, seed=7))
    assert script.samplers[0]["seed"] == 7
    script = Script()
    raced(script)
    assert script.samplers[0]["seed"] is None


def test_the_conversation_and_its_cache_stay_as_they_are() -> None:
    """The turn after a race would read the whole conversation again."""
    script = Script([Answer("Hello."), Answer("x"), Answer("x"), Answer("Again.")])
    listener = Listener(script)
    listener.start()
    listener.answer(1, "hi")
    held = list(script.caches[0].tokens)
    listener.engine.submit(Race(2, HI, Settings()))
    assert isinstance(listener.until(RaceDone, EngineFailed), RaceDone)
    assert script.caches[0].tokens == held and len(script.caches) == 1
    assert "prompt_cache" not in script.options[1]
    done = listener.answer(3, "hi", "Hello.", "more")
    assert done.numbers.cached_tokens == len("<user>hi</s><assistant>Hello.")
    listener.close()


def test_ticks_tell_the_arm_its_numbers_and_all_its_text() -> None:
    _, events = raced(Script([Answer("abcdefghi", depths=(3,))]), step_s=0.2)
    ticks = [event for event in events if isinstance(event, RaceTick)]
    assert [tick.arm for tick in ticks] == sorted((tick.arm for tick in ticks), reverse=True)
    dflash = [tick for tick in ticks if tick.arm == "dflash"]
    assert [tick.text for tick in dflash][-3:] == ["a", "abcde", "abcdefghi"]
    assert dflash[0].numbers.reading is not None and dflash[-1].numbers.tokens_per_cycle == 4


def test_ticks_come_at_most_ten_times_a_second() -> None:
    _, events = raced(Script([Answer("x" * 400, depths=(3,))]), step_s=1 / 300)
    arms = [event.arm for event in events if isinstance(event, RaceTick)]
    assert arms.count("plain") <= 2 + 10 * 400 / 300 * 2 and arms.count("dflash") <= 2 + 10 * 100 / 300 * 2


def test_a_race_can_be_stopped_in_either_arm_and_nothing_is_said_about_who_is_faster() -> None:
    for arm in ("plain", "dflash"):
        engine, events = engine_with_clock(Script([Answer("x" * 400, depths=(3,))]), 0.05)
        engine._cancelled = lambda number, arm=arm, events=events: any(  # type: ignore[misc]
            isinstance(event, RaceTick) and event.arm == arm and event.numbers.generation_tokens > 20
            for event in events
        )  # fmt: skip
        engine.race(Race(2, HI, Settings()))
        said = [event.text for event in events if isinstance(event, RaceTick) and event.arm == arm]
        assert max(map(len, said)) < 60, "it went on after it was stopped"
        assert events[-1] == RaceCancelled(2) and not any(isinstance(event, RaceDone) for event in events)


def test_stopping_a_race_does_not_hit_the_question_behind_it() -> None:
    gate = threading.Event()
    script = Script([Answer("slow", gate=gate), Answer("next")])
    listener = Listener(script)
    listener.start()
    listener.engine.submit(Race(1, HI, Settings()))
    listener.until(RaceTick)
    listener.ask(2, "hi")
    listener.engine.cancel(1)
    gate.set()
    assert listener.until(RaceCancelled, RaceDone) == RaceCancelled(1)
    done = listener.until(TurnDone)
    assert isinstance(done, TurnDone) and done.reason == "stop" and listener.text(2) == "next"
    listener.close()


def test_without_a_draft_there_is_no_race_and_the_text_says_what_to_do() -> None:
    listener = Listener(Script(draft=None))
    listener.start()
    listener.engine.submit(Race(1, HI, Settings()))
    failed = listener.until(EngineFailed, RaceDone)
    assert isinstance(failed, EngineFailed)
    assert (failed.title, failed.fatal, failed.turn, failed.details) == ("No race", False, 1, "")
    assert "without a draft" in failed.body and "Load a model" in failed.body
    assert listener.answer(2, "hi").reason == "stop"
    listener.close()


def test_a_pair_is_warmed_up_once() -> None:
    """Whoever runs first pays for compilation; the plain arm always runs first."""
    script = Script()
    engine, _ = engine_with_clock(script, 0.05)
    engine.race(Race(1, HI, Settings()))
    engine.race(Race(2, HI, Settings()))
    assert script.warmed_up == 1
    engine.load(LoadModel(number=3))
    engine.race(Race(4, HI, Settings()))
    assert script.warmed_up == 2


def test_a_block_of_one_does_not_make_the_race_plain_against_plain() -> None:
    script = Script()
    raced(script, Settings(block_size=1))
    assert [options["block_size"] for options in script.options] == [None, None]


# Over real models ------------------------------------------------------------------------------------------


def real_engine() -> tuple[ChatEngine, list[Event]]:
    """The real library behind the engine, but for the load, which gives a tiny pair of random weights."""
    pytest.importorskip("mlx.core")
    from dflash_mlx.app.backend import Pair
    from dflash_mlx.app.library import mlx_backend
    from tests.conftest import byte_tokenizer, draft_for
    from tests.families import tiny

    pair = Pair(tiny("llama"), byte_tokenizer(), draft_for("llama"))
    events: list[Event] = []
    engine = ChatEngine(replace(mlx_backend(), load=lambda *arguments: pair), events.append)
    engine.load(LoadModel())
    return engine, events


@pytest.mark.parametrize("settings", [Settings(max_tokens=40), Settings(max_tokens=40, temperature=0.9, seed=5)])
def test_over_a_real_model_both_arms_give_the_same_tokens(settings: Settings) -> None:
    """The verdict is the library's own comparison, over what really ran."""
    engine, events = real_engine()
    engine.answer(Ask(1, HI, settings))
    engine.race(Race(2, HI, settings))
    done = events[-1]
    assert isinstance(done, RaceDone)
    assert (done.verdict, done.index) == ("identical", None), done.explanation
    assert done.plain.text == done.dflash.text and len(set(done.plain.text)) > 5
    assert done.dflash.numbers.mode == "dflash" and done.dflash.numbers.cycles > 0
    assert done.plain.numbers.generation_tokens == done.dflash.numbers.generation_tokens == 40


def test_over_a_real_model_a_turn_after_a_race_is_as_warm_as_without_one() -> None:
    engine, events = real_engine()
    settings = Settings(max_tokens=12)
    engine.answer(Ask(1, HI, settings))
    said = engine.answered["text"]
    more = (*HI, ("assistant", said), ("user", "more"))
    engine.race(Race(2, HI, settings))
    engine.answer(Ask(3, more, settings))
    done = events[-1]
    assert isinstance(done, TurnDone) and done.numbers.cached_tokens > 0
    warm = engine.answered["tokens"]
    cold, _ = real_engine()
    cold.answer(Ask(1, more, settings))
    assert cold.answered["tokens"] == warm
    assert done.record["versions"]["mlx"] and done.record["cached_tokens"] == done.numbers.cached_tokens


def test_a_difference_is_found_and_placed() -> None:
    """A race that compared nothing would call everything identical."""
    engine, events = real_engine()
    stream = engine._backend.stream

    def wrong(*arguments, **options):  # type: ignore[no-untyped-def]
        for response in stream(*arguments, **options):
            if options["mode"] == "dflash" and response.generation_tokens == 7:
                response = replace(response, token=(response.token + 1) % 200)  # type: ignore[type-var]
            yield response

    engine._backend = replace(engine._backend, stream=wrong)
    engine.race(Race(2, HI, Settings(max_tokens=20)))
    done = events[-1]
    assert isinstance(done, RaceDone) and (done.verdict, done.index) == ("bug", 6)
