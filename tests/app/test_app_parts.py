"""What the engine says of an answer: its parts by kind and origin, its rates, what is read of a prompt, its record."""

from __future__ import annotations

import json

import pytest
from listening import ENDED, Listener, engine_with_clock, parts_of
from scripted import CALLED, THINK, THOUGHT, TOOL_CALL, Answer, FakeTokenizer, Script, responses

from dflash_mlx.app.jobs import Ask
from dflash_mlx.app.messages import Chunk, CycleTick, EngineFailed, Part, TurnDone
from dflash_mlx.app.parts import Origins, merged
from dflash_mlx.app.settings import Settings
from dflash_mlx.report import Answer as Collected
from dflash_mlx.report import as_json
from dflash_mlx.segments import Markers, Segments

HI = (("user", "hi"),)
DEPTHS = ((3, 1, 0, 2), (3,), (0,), (None,), (3, None, 2))
TEXTS = {
    "an answer": Answer("Plain <b>text</b> & more."),
    "thinking": Answer("So: 4.", reasoning="Two and two."),
    "a tool call": Answer(f'Look. {TOOL_CALL}{{"name": "sum"}}{CALLED} Done.', reasoning="Hm."),
    "almost a marker": Answer("a < b, <thin", reasoning="x </thi y"),
    "an open marker at the end": Answer(f"Look. {TOOL_CALL}half"),
}


def by_character(parts: list[Part]) -> list[tuple[str, str]]:
    return [(part.origin, character) for part in parts for character in part.text]


def whose(answer: Answer) -> list[tuple[str, str]]:
    """(origin, character) as the responses say it."""
    return [("draft" if each.from_draft else "target", each.text) for each in responses(answer, -1)]


@pytest.mark.parametrize("depths", DEPTHS)
@pytest.mark.parametrize("name", TEXTS)
def test_every_character_keeps_its_origin_however_long_it_is_held_back(name: str, depths: tuple[int | None]) -> None:
    """Markers and calls are held back over many tokens; shifted by one, the colours would lie about the draft."""
    answer = Answer(TEXTS[name].text, reasoning=TEXTS[name].reasoning, depths=depths)
    engine, events = engine_with_clock(Script([answer]), 0.03)
    engine.answer(Ask(1, HI, Settings()))
    parts = parts_of(events)
    assert "".join(part.text for part in parts) == answer.written()
    assert by_character(parts) == whose(answer)


def test_parts_have_the_kinds_that_the_markers_say() -> None:
    answer = Answer(f"Look. {TOOL_CALL}sum{CALLED}", reasoning="Hm.", depths=(0,))
    engine, events = engine_with_clock(Script([answer]), 0.0)
    engine.answer(Ask(1, HI, Settings()))
    assert [(part.kind, part.text) for part in merged(parts_of(events))] == [
        ("marker", THINK),
        ("reasoning", "Hm."),
        ("marker", THOUGHT),
        ("answer", "Look. "),
        ("marker", TOOL_CALL),
        ("tool_call", "sum"),
        ("marker", CALLED),
    ]


def test_reasoning_that_the_prompt_opened_is_reasoning_from_the_first_character() -> None:
    """Such a model never writes the opening marker; its thinking would be shown as the answer."""
    answers = [Answer("4.", reasoning="Two and two."), Answer("4.")]
    script = Script(answers, tokenizer=lambda: FakeTokenizer(switch=True, opens=True))
    engine, events = engine_with_clock(script, 0.0)
    engine.answer(Ask(1, HI, Settings()))
    kinds = dict.fromkeys(("reasoning", "marker", "answer"), "")
    for part in parts_of(events):
        kinds[part.kind] += part.text
    assert kinds == {"reasoning": "Two and two.", "marker": THOUGHT, "answer": "4."}
    engine.answer(Ask(2, HI, Settings(thinking=False)))
    assert {part.kind for part in parts_of(events, 2)} == {"answer"}


def test_neighbours_of_one_kind_and_origin_are_one_part() -> None:
    """300 blocks a second must not become a widget for every token."""
    engine, events = engine_with_clock(Script([Answer("abcdefghi", depths=(3,))]), 0.2)
    engine.answer(Ask(1, HI, Settings()))
    chunks = [event.parts for event in events if isinstance(event, Chunk)]
    assert chunks[1] == (Part("answer", "draft", "bcd"), Part("answer", "target", "e"))


def test_what_was_held_back_comes_when_a_turn_is_stopped() -> None:
    """The cache holds those tokens, so the text on the screen has to have them too."""
    answer = Answer(f"Look. {TOOL_CALL}a call that never ends" + "." * 5000, depths=(3,), cycle_s=0.001)
    script = Script([answer])
    listener = Listener(script)
    listener.start()
    listener.ask(1, "hi")
    listener.until(Chunk)
    listener.until(CycleTick)
    listener.engine.cancel(1)
    done = listener.until(TurnDone)
    assert isinstance(done, TurnDone) and done.reason == "cancelled"
    said = listener.text(1)
    assert len(said) == done.numbers.generation_tokens and answer.written().startswith(said)
    assert "".join(map(chr, script.caches[0].tokens)).endswith(said)
    listener.close()


def test_what_was_said_before_an_error_arrives_before_it() -> None:
    listener = Listener(Script([Answer(f"Look. {TOOL_CALL}half", fail_after=10)]))
    listener.start()
    listener.ask(1, "hi")
    assert isinstance(listener.until(EngineFailed, TurnDone), EngineFailed)
    assert listener.text(1) == f"Look. {TOOL_CALL}half"[:10]
    listener.close()


def test_text_that_completes_with_a_later_token_belongs_to_that_one() -> None:
    """A character of several bytes comes with its last token; the ones before bring no text."""
    origins, segments = Origins(), Segments(Markers())
    parts: list[Part] = []
    for origin, text in (("draft", ""), ("draft", ""), ("target", "é"), ("draft", "ab"), ("target", "")):
        origins.came(origin, len(text))  # type: ignore[arg-type]
        parts += origins.cut(segments.feed(text))
    assert parts == [Part("answer", "target", "é"), Part("answer", "draft", "ab")]


def test_a_token_that_spans_a_marker_gives_each_side_its_characters() -> None:
    origins, segments = Origins(), Segments(Markers(think_start=THINK, think_end=THOUGHT))
    parts: list[Part] = []
    for origin, text in (("draft", f"{THINK}ab{THOUGHT[:3]}"), ("target", f"{THOUGHT[3:]}cd"), ("draft", "ef")):
        origins.came(origin, len(text))  # type: ignore[arg-type]
        parts += origins.cut(segments.feed(text))
    assert parts == [
        Part("marker", "draft", THINK),
        Part("reasoning", "draft", "ab"),
        Part("marker", "draft", THOUGHT[:3]),
        Part("marker", "target", THOUGHT[3:]),
        Part("answer", "target", "cd"),
        Part("answer", "draft", "ef"),
    ]


def test_the_rates_are_those_of_the_engines_clock_in_stretches_of_half_a_second() -> None:
    """The UI's clock sees bursts: a chunk that waited in its queue would show as a fast one."""
    engine, events = engine_with_clock(Script([Answer("x" * 101, depths=(3,))]), 0.001)
    engine.answer(Ask(1, HI, Settings()))
    done = events[-1]
    assert isinstance(done, TurnDone)
    assert done.numbers.rates == pytest.approx((40.0,) * 5)  # 25 cycles of 0.1 s, 4 tokens each
    assert done.numbers.active_gb == 0.25


def test_while_a_prompt_is_read_the_numbers_say_how_far_and_how_long() -> None:
    """What an ETA is made of; the wait in the queue belongs to it, because the user waited."""
    engine, events = engine_with_clock(Script([Answer(prefill_chunks=4)]), 1.0)
    engine.answer(Ask(1, HI, Settings(), requested_at=-100.0))
    reading = [event.numbers for event in events if isinstance(event, CycleTick) and event.numbers.reading is not None]
    assert [numbers.reading for numbers in reading] == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.05)
    waits = [numbers.prefill_s or 0.0 for numbers in reading]
    assert waits == sorted(waits) and waits[0] > 100
    done = events[-1]
    assert isinstance(done, TurnDone) and (done.numbers.reading, done.numbers.prefill_s) == (None, None)


def test_a_turn_that_was_stopped_while_it_was_read_is_not_being_read_any_more() -> None:
    engine, events = engine_with_clock(Script([Answer(prefill_chunks=4)]), 1.0)
    engine._cancelled = lambda number: len(events) > 6
    engine.answer(Ask(1, HI, Settings()))
    done = events[-1]
    assert isinstance(done, TurnDone) and done.reason == "cancelled"
    assert done.numbers.reading is None and done.record == {}


def test_the_record_is_generates_json_without_what_was_said() -> None:
    """The metrics file must not keep a copy of every conversation, and tools read one schema."""
    script = Script([Answer("So: 4.", reasoning="Two and two.", notes=("a fact",))], load_warnings=("from loading",))
    engine, events = engine_with_clock(script, 0.0)
    settings = Settings(max_tokens=10, system="secret", mode="dflash")
    engine.answer(Ask(1, (("system", "secret"), *HI), settings))
    done = events[-1]
    assert isinstance(done, TurnDone)
    record = dict(done.record)
    assert json.loads(json.dumps(record)) == record
    said = {"text", "reasoning", "answer", "tool_calls", "tokens"}
    assert said <= set(engine.answered)
    own = {"schema", "timestamp", "target", "draft", "settings", "versions"}
    assert set(record) - own == set(engine.answered) - said
    assert "secret" not in json.dumps(record) and "Two" not in json.dumps(record)
    assert (record["target"], record["draft"], record["timestamp"]) == ("demo", "fake-draft", ENDED.isoformat())
    assert record["settings"]["max_tokens"] == 10 and record["settings"]["mode"] == "dflash"
    assert record["finish_reason"] == "length" and record["unfinished"] == "reasoning"
    assert record["notes"] == ["from loading", "a fact"]
    assert record["generation_tokens"] == 10 and record["cycles"] == done.numbers.cycles


def test_the_keys_of_the_answer_are_those_of_the_real_report() -> None:
    """`--json` of the chat and of `generate` are read by the same tools."""
    engine, _ = engine_with_clock(Script([Answer("Hello.")]), 0.0)
    engine.answer(Ask(1, HI, Settings()))
    collected = Collected(Segments(Markers()))
    for last in responses(Answer("Hello."), -1):
        collected.add(last)
    collected.finish("stop")
    assert set(engine.answered) == set(as_json(last, collected))
    assert engine.answered["text"] == "Hello." and engine.answered["tokens"] == [ord(c) for c in "Hello."]


def test_a_cancelled_turn_says_so_in_its_record() -> None:
    script = Script([Answer("y" * 10_000, depths=(3,), cycle_s=0.001)])
    listener = Listener(script)
    listener.start()
    listener.ask(1, "hi")
    listener.until(Chunk)
    listener.engine.cancel(1)
    done = listener.until(TurnDone)
    assert isinstance(done, TurnDone) and done.record["finish_reason"] == "cancelled"
    listener.close()
