"""Pilots: what a person does at the keyboard, over the production engine thread and a scripted model."""

from __future__ import annotations

import threading
import time

import pytest
from chatting import make_app, running
from scripted import Answer, Script
from textual import events

from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.messages import Chunk, CycleTick, Numbers, PrefillProgress, TurnDone
from dflash_mlx.app.screens.help import HelpScreen
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.widgets.prompt import Prompt

LONG = Answer("many words " * 9000, depths=(3, 0), cycle_s=0.004)


async def test_a_question_is_sent_and_its_answer_appears() -> None:
    async with running(Script([Answer("A **bold** answer.")])) as chat:
        await chat.send("hello")
        assert chat.script.prompts == ["<user>hello</s><assistant>"]
        assert "A bold answer." in chat.screen_text()
        assert chat.prompt.text == ""


async def test_a_second_turn_sends_the_whole_conversation_and_reuses_the_cache() -> None:
    async with running(Script([Answer("One."), Answer("Two.")])) as chat:
        await chat.send("first")
        await chat.send("second")
        assert chat.engine.asked[1].messages == (("user", "first"), ("assistant", "One."), ("user", "second"))
        assert chat.script.prompts[1] == "</s><user>second</s><assistant>"
        assert "from cache" in chat.screen_text()


async def test_escape_stops_and_keeps_the_partial_answer_for_the_next_turn() -> None:
    """History, screen and cache agree about how much was said."""
    async with running(Script([LONG, Answer("ok")])) as chat:
        await chat.send("go", wait=False)
        await chat.until(lambda: len(chat.answers[0].source) > 20)
        await chat.pilot.press("escape")
        await chat.until(lambda: not chat.busy)
        kept = chat.app.chat.session.conversation.turns[0].answer
        assert 0 < len(kept) < len(LONG.text)
        assert chat.answers[0].source == kept
        assert "this much is kept" in chat.screen_text()
        await chat.send("next")
        assert chat.engine.asked[1].messages[1] == ("assistant", kept)
        assert chat.script.prompts[1] == "</s><user>next</s><assistant>"


async def test_stop_and_quit_each_take_less_than_a_second_in_a_long_answer() -> None:
    """A worker that ignores its cancel flag keeps the app from quitting."""
    script = Script([LONG])
    app = make_app(script)
    async with app.run_test(size=(80, 24)) as pilot:
        while "-ready" not in app.chat.query_one("Welcome").classes:
            await pilot.pause(0.01)
        for key in ("h", "i", "enter"):
            await pilot.press(key)
        while not script.prompts:
            await pilot.pause(0.01)
        await pilot.pause(0.1)
        started = time.monotonic()
        await pilot.press("ctrl+q")
    assert app.close_engine(5.0)
    assert time.monotonic() - started < 2.0  # bounds are generous: the machine is shared
    assert script.closed and script.closed[0] < len(LONG.text)
    assert script.streams_cleared == 1
    assert app.return_code == 0


async def test_quitting_while_loading_does_not_wait_for_the_load() -> None:
    script = Script(load_gate=threading.Event())
    app = make_app(script)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.1)
        await pilot.press("ctrl+q")
    assert app.close_engine(5.0)
    assert app.return_code == 0


async def test_regenerating_replaces_the_last_answer() -> None:
    async with running(Script([Answer("First try."), Answer("Second try.")])) as chat:
        await chat.send("tell me")
        await chat.pilot.press("ctrl+r")
        await chat.until(lambda: len(chat.script.prompts) == 2 and not chat.busy)
        assert chat.engine.asked[1].messages == (("user", "tell me"),)
        assert len(chat.questions) == len(chat.answers) == 1
        assert "Second try." in chat.screen_text() and "First try." not in chat.screen_text()


async def test_clearing_in_the_middle_of_an_answer_starts_a_clean_conversation() -> None:
    async with running(Script([LONG, Answer("Clean.")])) as chat:
        await chat.send("go", wait=False)
        await chat.until(lambda: len(chat.answers[0].source) > 20)
        await chat.pilot.press("ctrl+l")
        assert not chat.answers and not chat.busy
        await chat.send("fresh")
        assert chat.engine.asked[1].messages == (("user", "fresh"),)
        assert chat.answers[0].source == "Clean."
        assert "many words" not in chat.screen_text()


async def test_late_events_of_a_cleared_turn_change_nothing() -> None:
    """The engine finishes its cycle after /clear, and the next answer must not begin with the old one's words."""
    gate = threading.Event()
    async with running(Script([Answer("one"), Answer("two", gate=gate)])) as chat:
        await chat.send("first")
        await chat.pilot.press("ctrl+l")
        await chat.send("second", wait=False)
        ghost = Numbers(generation_tokens=99, ttft_s=77.0)
        for event in (
            Chunk(1, "ghost", 1),
            CycleTick(1, ghost),
            TurnDone(1, "stop", ghost),
            PrefillProgress(1, 5, 5, 0),
        ):
            chat.app.post_message(EngineMessage(event))
        await chat.pilot.pause(0.1)
        assert chat.busy and chat.answers[0].source == "" and "77.0" not in chat.screen_text()
        gate.set()
        await chat.until(lambda: not chat.busy)
        assert chat.answers[0].source == "two"
        assert chat.app.chat.session.conversation.turns[-1].answer == "two"


async def test_the_box_can_be_used_while_the_model_loads() -> None:
    """What is sent early waits, and is answered when there is a model."""
    gate = threading.Event()
    script = Script(load_steps=(("Unpacking tensors", 0.42),), load_gate=gate)
    async with running(script, ready=False) as chat:
        await chat.until(lambda: "Unpacking tensors · 42%" in chat.screen_text())
        await chat.send("early", wait=False)
        assert "1 waiting" in chat.screen_text() and "early" in chat.screen_text() and not chat.engine.asked
        gate.set()
        await chat.until(lambda: len(chat.answers) == 1 and not chat.busy)
        assert chat.engine.asked[0].messages == (("user", "early"),)
        assert "fake-draft" in chat.screen_text() and "waiting" not in chat.screen_text()


async def test_the_window_is_painted_before_the_engine_starts() -> None:
    """Importing MLX takes seconds; the user must see something first (D9)."""
    app = make_app(Script())
    painted: list[str] = []
    start = app.engine.start

    def watch() -> None:
        painted.append("".join(strip.text for strip in app.screen._compositor.render_strips()))
        start()

    app.engine.start = watch  # type: ignore[method-assign]
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.1)
    assert len(painted) == 1 and "dflash" in painted[0] and "generation only" in painted[0]


async def test_a_paste_of_three_lines_stays_in_the_box() -> None:
    """Newlines in a paste are text, not Enter."""
    async with running(Script()) as chat:
        chat.app.post_message(events.Paste("one\ntwo\nthree\n"))
        await chat.pilot.pause()
        assert chat.prompt.text == "one\ntwo\nthree\n"
        assert not chat.engine.asked


async def test_ctrl_j_is_a_new_line_and_the_box_grows_to_a_limit() -> None:
    async with running(Script()) as chat:
        await chat.type("one")
        height = chat.prompt.outer_size.height
        await chat.pilot.press("ctrl+j", *"two")
        assert chat.prompt.text == "one\ntwo"
        assert chat.prompt.outer_size.height == height + 1
        for _ in range(20):
            await chat.pilot.press("ctrl+j")
        await chat.pilot.pause()
        assert chat.prompt.outer_size.height == 10
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.engine.asked) == 1)
        assert chat.engine.asked[0].messages[0][1] == "one\ntwo"


async def test_scrolling_up_lets_go_and_the_end_follows_again() -> None:
    """The text under the reader's eyes must not move while an answer grows."""
    words = "many words that fill a line of the window from its left to its right. "
    script = Script([Answer("line\n\n" * 40), Answer((words * 3 + "\n\n") * 200, depths=(3,), cycle_s=0.01)])
    async with running(script) as chat:
        await chat.send("first")
        await chat.send("second", wait=False)
        await chat.until(lambda: len(chat.answers[1].source) > 30)
        assert chat.transcript.scroll_y == chat.transcript.max_scroll_y
        await chat.pilot.press("pageup", "pageup")
        await chat.pilot.pause()
        held, seen = chat.transcript.scroll_y, len(chat.answers[1].source)
        await chat.until(lambda: len(chat.answers[1].source) > seen + 250)
        assert chat.transcript.scroll_y == held < chat.transcript.max_scroll_y
        await chat.pilot.press("ctrl+end")
        seen = len(chat.answers[1].source)
        await chat.until(lambda: len(chat.answers[1].source) > seen + 250)
        await chat.pilot.press("escape")
        await chat.until(lambda: not chat.busy)
        assert chat.transcript.scroll_y == chat.transcript.max_scroll_y
        assert "this much is kept" in chat.screen_text()


@pytest.mark.parametrize("size", [(80, 24), (40, 15)])
async def test_a_small_terminal_keeps_both_clocks_the_box_and_the_answer(size: tuple[int, int]) -> None:
    async with running(Script([Answer("Still readable.", notes=("a note",))]), size=(120, 40)) as chat:
        await chat.send("hello")
        await chat.pilot.resize_terminal(*size)
        await chat.pilot.pause(0.1)
        shown = chat.screen_text()
        for wanted in ("Still readable.", "generation only", "prefill-inclusive", "Enter send"):
            assert wanted in shown, shown
        assert chat.prompt.region.bottom <= size[1] and chat.prompt.region.right <= size[0]
        assert ("a note" in shown) == ("demo + fake-draft" in shown) == (size[1] >= 20), "the short one drops both"
        await chat.send("again")
        assert len(chat.answers) == 2


async def test_every_number_has_a_name_and_unknown_is_a_dash() -> None:
    async with running(Script([Answer("Hello there.")])) as chat:
        assert "generation only – tok/s · prefill-inclusive – tok/s" in chat.screen_text()
        await chat.send("hi")
        shown = chat.screen_text()
        # 12 tokens: 1 from prefill, then 4 + 2 + 1 + 3 + 1; the scripted clock is 0.5 s, then 0.1 s a cycle.
        assert "generation only 22.0 tok/s · prefill-inclusive 12.0 tok/s · TTFT 0.50 s" in shown
        assert "2.20 tokens/cycle · acceptance 40%" in shown
        assert "dflash B=4" in shown
        assert "■■■+ ■□□+ □□□+ ■■□+ □□□+" in shown


async def test_a_missing_draft_is_said_on_the_badge() -> None:
    async with running(Script(draft=None)) as chat:
        assert "plain: no draft" in chat.screen_text()


async def test_warnings_while_loading_are_read_on_the_first_page() -> None:
    """On stderr they would be painted over, and the user would wonder why nothing speculates."""
    async with running(Script(draft=None, load_warnings=("No draft is known for [this] target.",))) as chat:
        assert "No draft is known for [this] target." in chat.screen_text()


async def test_notes_of_the_library_are_shown() -> None:
    """House rule 15: a fallback is visible."""
    async with running(Script([Answer("x y", notes=("reference BLAS", "draft unused"))])) as chat:
        await chat.send("hi")
        assert "reference BLAS · draft unused" in chat.screen_text()


async def test_a_note_that_stood_there_before_is_not_repeated_until_all_numbers_are_wanted() -> None:
    """A machine's note is the same with every answer; the reason of a fallback is said every time."""
    same, slow = Answer("One.", notes=("BLAS: one thread",)), Answer("Two.", mode="plain", notes=("plain decoding: x",))
    async with running(Script([same, same, slow, slow])) as chat:
        for noted in (True, False):
            await chat.send("go")
            assert ("BLAS" in chat.line("#notes")) == noted
        await chat.send("/verbose", wait=False)
        assert "BLAS" in chat.line("#notes")
        await chat.send("/verbose", wait=False)
        for _ in range(2):
            await chat.send("go")
            assert "plain decoding: x" in chat.line("#notes")


async def test_a_tab_that_completes_nothing_leaves_the_suggestions() -> None:
    async with running(Script()) as chat:
        await chat.type("/se")
        await chat.pilot.press("tab")
        await chat.pilot.pause()
        assert chat.prompt.text == "/se" and "/seed" in chat.line("#hint") and "/set" in chat.line("#hint")


async def test_ctrl_d_in_the_empty_box_says_how_to_leave_and_in_text_deletes() -> None:
    """It ends a shell; held down over a text it must not end the chat, and then the shell behind it."""
    async with running(Script()) as chat:
        await chat.pilot.press(*"ab", "home", "ctrl+d")
        assert chat.prompt.text == "b"
        await chat.pilot.press("ctrl+d", "ctrl+d")
        assert chat.prompt.text == "" and "Ctrl+Q" in chat.line("#hint")


async def test_an_empty_chat_is_not_exported() -> None:
    async with running(Script()) as chat:
        await chat.send("/export", wait=False)
        assert "no message to export" in chat.line("#hint")


async def test_slash_commands_act_and_are_not_sent() -> None:
    async with running(Script()) as chat:
        await chat.send("/temp 0.7", wait=False)
        await chat.send("/mode plain", wait=False)
        assert "Mode plain" in chat.screen_text()
        assert not chat.engine.asked
        await chat.send("now")
        settings = chat.engine.asked[0].settings
        assert (settings.temperature, settings.mode) == (0.7, "plain")
        await chat.send("/clear", wait=False)
        assert not chat.questions
        await chat.send("/theme light", wait=False)
        assert chat.app.theme == "dflash-light"


async def test_an_unknown_command_stays_in_the_box_with_a_hint() -> None:
    async with running(Script()) as chat:
        await chat.send("/tmep 0.7", wait=False)
        assert "/tmep is not a command" in chat.screen_text()
        assert chat.prompt.text == "/tmep 0.7" and not chat.engine.asked
        await chat.pilot.press("x")
        assert "not a command" not in chat.screen_text()


@pytest.mark.parametrize("way", ["f1", "?", "/help"])
async def test_help_opens_and_escape_closes_it_without_stopping_anything(way: str) -> None:
    async with running(Script([LONG])) as chat:
        await chat.send("go", wait=False)
        if way == "/help":
            await chat.send("/help", wait=False)
        else:
            await chat.pilot.press(way)
        await chat.pilot.pause()
        assert isinstance(chat.app.screen, HelpScreen)
        assert "Copy the selection, or stop" in chat.screen_text()
        await chat.pilot.press("escape")
        await chat.pilot.pause()
        assert not isinstance(chat.app.screen, HelpScreen) and chat.busy
        assert chat.prompt.has_focus and chat.prompt.text == ""
        await chat.pilot.press("escape")
        await chat.until(lambda: not chat.busy)


async def test_ctrl_c_copies_a_selection_else_stops_else_tells_how_to_quit() -> None:
    """One key, three meanings, never a surprise quit."""
    async with running(Script([LONG, Answer("short")])) as chat:
        await chat.pilot.press("ctrl+c")
        assert "Ctrl+Q quits" in chat.screen_text()
        await chat.send("go", wait=False)
        await chat.until(lambda: len(chat.answers[0].source) > 20)
        chat.app.screen.query_one("UserTurn").text_select_all()
        await chat.pilot.press("ctrl+c")
        assert chat.app.clipboard == "go" and chat.busy
        await chat.pilot.press("ctrl+c")
        await chat.until(lambda: not chat.busy)
        await chat.type("draft of a question")
        chat.prompt.select_all()
        await chat.pilot.press("ctrl+c")
        assert chat.app.clipboard == "draft of a question"


async def test_an_error_is_shown_and_the_next_turn_works() -> None:
    error = ValueError("The context of 8192 tokens is full.")
    script = Script([Answer("abc", fail_after=0, error=error), Answer("Fine.")])
    async with running(script) as chat:
        await chat.send("hi")
        assert "The context of 8192 tokens is full." in chat.screen_text()
        await chat.send("again")
        assert "Fine." in chat.screen_text()
        assert chat.engine.asked[1].messages == (("user", "again"),)


async def test_a_bug_is_shown_in_a_line_and_its_traceback_kept_for_the_end() -> None:
    async with running(Script([Answer("abc", fail_after=1)])) as chat:
        await chat.send("hi")
        assert "RuntimeError: scripted" in chat.screen_text()
        assert "Traceback" not in chat.screen_text()
        assert "Traceback" in chat.app.tracebacks[0]


async def test_a_failed_load_says_what_to_do_and_refuses_questions() -> None:
    script = Script(load_error=ValueError("No model at /nowhere. Check the path."))
    async with running(script, ready=False) as chat:
        await chat.until(lambda: "No model at /nowhere. Check the path." in chat.screen_text())
        await chat.send("hello", wait=False)
        assert "No model is loaded" in chat.screen_text() and chat.prompt.text == "hello"


async def test_a_load_that_failed_is_said_again_after_the_window_has_closed() -> None:
    """The first page goes with the window, and nobody can copy from it what the error said."""
    script = Script(load_error=ValueError("No model at /nowhere."))
    async with running(script, ready=False) as chat:
        await chat.until(lambda: chat.app.failure is not None)
        failure = chat.app.failure
    assert failure is not None and failure.body == "No model at /nowhere."


async def test_a_long_failure_can_be_read_in_a_small_window() -> None:
    body = "\n".join(f"line {number}" for number in range(30))
    async with running(Script(load_error=ValueError(body)), size=(40, 12), ready=False) as chat:
        await chat.until(lambda: "could not be loaded" in chat.screen_text())
        assert "line 29" not in chat.screen_text()
        for _ in range(10):
            await chat.pilot.press("pagedown")
        assert "line 29" in chat.screen_text()


async def test_the_badge_says_that_the_draft_rests_and_the_closing_line_how_often() -> None:
    """Only pluses in the strip while the badge says dflash B=4 reads as a broken draft."""
    answer = Answer("abcdefghijkl", depths=(3, None, None, None, 1, None), cycle_s=0.15)
    async with running(Script([answer])) as chat:
        await chat.send("hi", wait=False)
        await chat.until(lambda: "dflash B=4" in chat.screen_text())
        await chat.until(lambda: "dflash, resting" in chat.screen_text())
        await chat.until(lambda: not chat.busy)
        assert "4 of 7 cycles without drafts" in chat.screen_text()


async def test_the_badge_promises_nothing_before_the_first_turn() -> None:
    """auto may well decode plainly."""
    async with running(Script()) as chat:
        assert "ready" in chat.line("#badge") and "dflash B" not in chat.screen_text()


async def test_the_badge_is_about_the_turn_and_not_about_the_settings_since() -> None:
    async with running(Script([Answer("x y", mode="plain", notes=("BLAS: x",))])) as chat:
        await chat.send("/mode plain", wait=False)
        await chat.send("hi")
        assert "plain: by /mode" in chat.screen_text()
        await chat.send("/mode auto", wait=False)
        await chat.send("/block 8", wait=False)
        assert "plain: by /mode" in chat.screen_text() and "see the note" not in chat.screen_text()


async def test_the_numbers_of_the_last_turn_go_when_the_next_prompt_is_read() -> None:
    """Rates of the last answer beside a prompt that is being read are nobody's rates."""
    gate = threading.Event()

    def wait(chunk: int) -> None:
        if chunk == 1:
            time.sleep(0.2)  # progress is told at most ten times a second
        else:
            gate.wait(10)

    script = Script([Answer("Hello there."), Answer("x", prefill_chunks=2, on_prefill=wait)])
    async with running(script) as chat:
        await chat.send("hi")
        assert "22.0 tok/s" in chat.screen_text()
        await chat.send("more", wait=False)
        await chat.until(lambda: "reading 48%" in chat.line("#badge"))
        assert "22.0 tok/s" not in chat.screen_text() and "generation only – tok/s" in chat.screen_text()
        await chat.pilot.press("escape")
        gate.set()
        await chat.until(lambda: not chat.busy)
        assert "reading" not in chat.line("#badge")


async def test_the_clocks_start_at_enter_even_if_the_engine_is_busy() -> None:
    """After Ctrl+L the new question waits for the old turn's cycle, and help promises: since you pressed Enter."""
    gate = threading.Event()
    async with running(Script([Answer("slow", gate=gate), Answer("ok")])) as chat:
        await chat.send("one", wait=False)
        await chat.until(lambda: len(chat.script.prompts) == 1)
        await chat.pilot.press("ctrl+l")
        before = time.perf_counter()
        await chat.send("two", wait=False)
        after = time.perf_counter()
        await chat.pilot.pause(0.1)
        gate.set()
        await chat.until(lambda: not chat.busy)
        await chat.pilot.press("ctrl+r")
        await chat.until(lambda: len(chat.script.prompts) == 3)
    stamps = [options["requested_at"] for options in chat.script.options]
    assert before < stamps[1] < after < stamps[2]


REASON = (
    "plain decoding: the target runs in bfloat16 on a CPU, where every drafted token costs as much as a decoded one. "
    "Load with dtype='float32', or pass mode='dflash' to speculate anyway."
)


@pytest.mark.parametrize("size", [(80, 24), (80, 18), (60, 15)])
async def test_a_reason_is_read_to_its_end_at_every_size(size: tuple[int, int]) -> None:
    async with running(Script([Answer("x y", mode="plain", notes=(REASON, "BLAS: x"))]), size=size) as chat:
        await chat.send("hi")
        words = " ".join(chat.screen_text().split())
        assert REASON.removesuffix(".") in words, chat.screen_text()
        assert chat.prompt.region.bottom <= size[1]


async def test_an_impossible_block_is_refused_and_changes_nothing() -> None:
    async with running(Script()) as chat:
        await chat.send("/block 64", wait=False)
        assert "1..16" in " ".join(chat.screen_text().split())
        assert chat.app.chat.session.settings.block_size is None and chat.prompt.text == "/block 64"


async def test_an_impossible_block_of_the_command_line_is_said_when_the_draft_is_known() -> None:
    async with running(Script(), settings=Settings(block_size=64)) as chat:
        assert "1..16" in " ".join(chat.screen_text().split())


async def test_a_question_that_waits_for_the_screen_was_asked_when_enter_was_pressed() -> None:
    async with running(Script()) as chat:
        pressed = Prompt.Submitted("hi")
        pressed.pressed_at = 1.0
        chat.prompt.post_message(pressed)
        await chat.until(lambda: len(chat.engine.asked) == 1 and not chat.busy)
        assert chat.engine.asked[0].requested_at == 1.0
