"""The race screen: both runs as they go, the replay in true time, and the verdict in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from instruments import LOOKS, PICTURES, PLAIN, READING, RUNNING, Compare, Host, before, pieces, race
from textual.pilot import Pilot

from dflash_mlx.app.envelope import EngineMessage
from dflash_mlx.app.messages import EngineFailed, Event, RaceCancelled, RaceDone, RaceTick
from dflash_mlx.app.outcome import comparison, first_difference, headline, said_after, verdict
from dflash_mlx.app.screens.race import RaceScreen
from dflash_mlx.app.widgets.lane import marked

PLAIN_TEXT = "the quick brown fox jumps over the lazy dog"
OTHER_TEXT = "the quick brown fox jumps above the lazy dog"
QUESTION = "Which sentence has every letter of the alphabet?"
SIZES = [(80, 24), (120, 40), (46, 30), (80, 16)]


class Stopper(Host):
    """Keeps what the screen asks the app to do."""

    def on_race_screen_stop(self, message: RaceScreen.Stop) -> None:
        self.told.append(message.number)


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def staged() -> tuple[Stopper, RaceScreen, Clock]:
    clock = Clock()
    screen = RaceScreen(7, QUESTION, clock)
    return Stopper(screen=screen), screen, clock


async def tell(pilot: Pilot[Any], screen: RaceScreen, *events: Event) -> None:
    for event in events:
        screen.post_message(EngineMessage(event))
        await pilot.pause()


async def at(pilot: Pilot[Any], screen: RaceScreen, clock: Clock, seconds: float) -> None:
    clock.now = 100.0 + seconds
    screen.draw()
    await pilot.pause()


# Words ----------------------------------------------------------------------------------------------------


def test_the_winner_is_named_by_each_clock_with_both_rates() -> None:
    won = race(PLAIN_TEXT, PLAIN_TEXT)
    assert headline(won) == "dflash is faster by both clocks"
    assert comparison(won) == (
        "generation only: dflash 1.38x as fast (dflash 41.3, plain 29.9 tok/s)",
        "prefill-inclusive: dflash 1.40x as fast (dflash 36.6, plain 26.1 tok/s)",
    )


def test_a_lost_race_is_said_as_plainly_as_a_won_one() -> None:
    slow = replace(RUNNING, decode_tps=23.0, request_tps=19.0)
    lost = race(PLAIN_TEXT, PLAIN_TEXT)
    lost = replace(lost, dflash=replace(lost.dflash, numbers=slow))
    assert headline(lost) == "plain is faster by both clocks"
    assert comparison(lost)[0] == "generation only: plain 1.30x as fast (dflash 23.0, plain 29.9 tok/s)"
    split = replace(lost, dflash=replace(lost.dflash, numbers=replace(slow, decode_tps=40.0)))
    assert headline(split) == "The two clocks do not agree on who is faster"


def test_a_hair_is_no_win_and_an_answer_of_one_token_has_no_rate() -> None:
    close = race(PLAIN_TEXT, PLAIN_TEXT)
    close = replace(close, dflash=replace(close.dflash, numbers=replace(RUNNING, decode_tps=30.2, request_tps=26.0)))
    assert headline(close) == "Equally fast by both clocks"
    assert comparison(close)[0].startswith("generation only: equal within 2%")
    short = replace(close, dflash=replace(close.dflash, numbers=replace(RUNNING, decode_tps=None, request_tps=None)))
    assert headline(short) == "No winner: the answers are too short to have a rate"
    assert "too short" in comparison(short)[0]


def test_an_arm_that_fell_back_is_no_measure_of_drafts() -> None:
    """Two plain runs differ by chance, and the difference would pass for the draft's."""
    both = race(PLAIN_TEXT, PLAIN_TEXT)
    both = replace(both, dflash=replace(both.dflash, numbers=PLAIN))
    assert headline(both) == "No winner: both runs were plain"
    assert comparison(both) == ("plain decoding: the target runs in bfloat16 on a CPU. Load with dtype='float32'",)


@pytest.mark.parametrize(
    ("kind", "index", "said"),
    [
        ("identical", None, "✓ identical"),
        ("near-tie", 5, "≈ near-tie at token 6"),
        ("bug", 5, "✗ differs at token 6: a bug in dflash_mlx, please report it"),
        ("bug", None, "✗ a bug in dflash_mlx"),
    ],
)
def test_the_verdict_has_a_shape_and_counts_tokens_from_one(kind: str, index: int | None, said: str) -> None:
    assert verdict(race(PLAIN_TEXT, OTHER_TEXT, kind, index)) == said


def test_the_first_difference_is_marked_without_colour() -> None:
    differs = race(PLAIN_TEXT, OTHER_TEXT, "near-tie", 5)
    where = first_difference(differs)
    assert where == len("the quick brown fox jumps ")
    assert marked(PLAIN_TEXT, where).plain == "the quick brown fox jumps ▶over the lazy dog"
    assert marked(PLAIN_TEXT[:5], where).plain == "the q", "it has not been written yet"
    assert first_difference(race(PLAIN_TEXT, PLAIN_TEXT)) is None
    longer = race("one", "one two", "bug", 1)
    assert marked("one two", first_difference(longer)).plain == "one▶ two"


def test_the_replay_shows_what_had_been_written_by_then() -> None:
    arm = race(PLAIN_TEXT, PLAIN_TEXT).plain
    assert [said_after(arm, seconds) for seconds in (0.0, 0.49, 0.5, 0.71, 60.0)] == [
        "",
        "",
        "the ",
        "the quick ",
        PLAIN_TEXT,
    ]
    assert pieces("a b", 0.2) == ((0.5, "a "), (0.7, "b"))


# The screen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_both_arms_are_shown_while_they_run_one_after_the_other(size: tuple[int, int]) -> None:
    app, screen, _ = staged()
    async with app.run_test(size=size) as pilot:
        await tell(pilot, screen, RaceTick(7, "plain", READING, ""))
        assert "plain · reads the prompt, 25%" in app.text() and "dflash · waits" in app.text()
        await tell(pilot, screen, RaceTick(7, "plain", PLAIN, "the quick"), RaceTick(7, "dflash", RUNNING, "the "))
        text = app.text()
        assert "plain · done" in text and "dflash · runs" in text and "the quick" in text
        assert text.count("generation only") == text.count("prefill-inclusive") == 2
        assert "29.9 tok/s" in text and "41.3 tok/s" in text and "Esc stop" in text


@pytest.mark.parametrize("size", SIZES)
async def test_the_replay_runs_both_arms_in_true_time_side_by_side(size: tuple[int, int]) -> None:
    """A replay at the speed of the screen, or of the faster arm, shows a race that never was."""
    app, screen, clock = staged()
    async with app.run_test(size=size) as pilot:
        await tell(pilot, screen, race(PLAIN_TEXT, PLAIN_TEXT))
        await at(pilot, screen, clock, 0.92)
        assert "plain · 0.9 of 4.8 s" in app.text() and "dflash · 0.9 of 3.5 s" in app.text()
        assert app.text().count("brown") == 2 and app.text().count("fox") == app.text().count("jumps") == 1
        await at(pilot, screen, clock, 3.6)
        assert "dflash · 128 tokens in 3.50 s" in app.text() and "plain · 3.6 of 4.8 s" in app.text()
        await at(pilot, screen, clock, 4.9)
        text = app.text()
        assert "plain · 128 tokens in 4.80 s" in text and text.count("lazy") == 2
        assert "dflash is faster by both clocks" in text and "✓ identical. All 9 tokens" in text
        for clocked in ("41.3", "29.9", "36.6", "26.1"):
            assert clocked in text, "both clocks of each arm"


async def test_space_skips_the_replay_and_r_runs_it_again() -> None:
    app, screen, clock = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(pilot, screen, race(PLAIN_TEXT, PLAIN_TEXT))
        assert "lazy" not in app.text()
        await pilot.press("space")
        await pilot.pause()
        assert app.text().count("dog") >= 2 and "R replay" in app.text()
        clock.now = 500.0
        await pilot.press("r")
        await pilot.pause()
        assert "lazy" not in app.text() and "Space skip" in app.text()


async def test_the_difference_is_scrolled_to_when_it_is_far_down() -> None:
    """A mark that nobody sees marks nothing."""
    start = "word " * 400
    app, screen, _ = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(pilot, screen, race(start + "x" + " y" * 300, start + "z" + " y" * 300, "near-tie", 400))
        await pilot.press("space")
        await pilot.pause()
        await pilot.pause()
        assert app.text().count("▶") == 2


async def test_escape_asks_for_the_race_to_stop_and_closes_when_it_has() -> None:
    app, screen, _ = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(pilot, screen, RaceTick(7, "plain", PLAIN, "the"))
        await pilot.press("escape")
        await pilot.pause()
        assert app.told == [7] and "stopping after this cycle" in app.text() and app.results == []
        await tell(pilot, screen, RaceCancelled(7))
        assert app.results == [None]


async def test_a_second_escape_does_not_wait_for_the_engine() -> None:
    app, _, _ = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("escape", "escape")
        await pilot.pause()
        assert app.told == [7] and app.results == [None]


async def test_escape_hands_over_a_finished_race() -> None:
    """Its plain arm is what the next speed-up is a multiple of."""
    done = race(PLAIN_TEXT, PLAIN_TEXT)
    app, screen, _ = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(pilot, screen, done)
        await pilot.press("escape")
        await pilot.pause()
        assert app.results == [done] and app.told == []


async def test_events_of_another_race_change_nothing() -> None:
    """A race that was closed while it stopped ends later, in the next one's screen."""
    app, screen, _ = staged()
    other = replace(race(PLAIN_TEXT, PLAIN_TEXT), number=6)
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(
            pilot, screen, RaceTick(6, "plain", PLAIN, "old"), other, RaceCancelled(6), EngineFailed("t", "b", False, 6)
        )
        assert "plain · waits" in app.text() and "old" not in app.text() and app.results == []


async def test_a_race_that_fails_says_why_and_can_be_closed() -> None:
    app, screen, _ = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(pilot, screen, EngineFailed("Out of memory", "Try a smaller [model].", False, 7))
        assert "Out of memory" in app.text() and "Try a smaller [model]." in app.text()
        await pilot.press("escape")
        await pilot.pause()
        assert app.results == [None]


async def test_model_and_user_text_is_shown_and_not_obeyed() -> None:
    hostile = "[bold]x[/bold] \x1b[31m [@click=app.quit]y[/]"
    app = Stopper(screen=(screen := RaceScreen(7, hostile)))
    async with app.run_test(size=(120, 24)) as pilot:
        await tell(pilot, screen, RaceTick(7, "plain", PLAIN, hostile))
        assert app.text().count("[bold]x[/bold]") == 2 and "\x1b" not in app.text()
        await tell(pilot, screen, race(hostile + "1", hostile + "2", "bug", 3))
        await pilot.press("space")
        await pilot.pause()
        assert app.text().count("[bold]x[/bold]") == 3 and "\x1b" not in app.text()


async def test_the_same_text_is_not_laid_out_again() -> None:
    """A replay draws ten times a second, most of them with nothing new to say."""
    app, screen, clock = staged()
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(pilot, screen, race(PLAIN_TEXT, PLAIN_TEXT))
        await at(pilot, screen, clock, 0.55)
        said = screen.query(".said").first()
        updates: list[object] = []
        said.update = updates.append  # type: ignore[attr-defined]
        await at(pilot, screen, clock, 0.56)
        assert updates == []
        await at(pilot, screen, clock, 0.75)
        assert len(updates) == 1


# How it looks ---------------------------------------------------------------------------------------------

STAGES: dict[str, tuple[tuple[Event, ...], float | None]] = {
    "running": ((RaceTick(7, "plain", PLAIN, PLAIN_TEXT), RaceTick(7, "dflash", RUNNING, "the quick ")), None),
    "replay": ((race(PLAIN_TEXT, PLAIN_TEXT),), 1.25),
    "identical": ((race(PLAIN_TEXT, PLAIN_TEXT),), 9.0),
    "near-tie": ((race(PLAIN_TEXT, OTHER_TEXT, "near-tie", 5),), 9.0),
    "bug": ((race(PLAIN_TEXT, OTHER_TEXT, "bug", 5),), 9.0),
    "failed": ((EngineFailed("Out of memory", "Try a smaller model.", False, 7),), None),
}


@PICTURES
@pytest.mark.parametrize(("theme", "size"), LOOKS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_race(snap_compare: Compare, theme: str, size: tuple[int, int], stage: str) -> None:
    """Shows the question, the outcome with a bar that warns if the answers differ, and two lanes of the same size."""
    clock = Clock()
    screen = RaceScreen(7, QUESTION, clock)
    events, seconds = STAGES[stage]

    async def act(pilot: Pilot[Any]) -> None:
        await tell(pilot, screen, *events)
        if seconds is not None:
            await at(pilot, screen, clock, seconds)
        await pilot.pause()

    assert snap_compare(Host(theme, screen=screen), terminal_size=size, run_before=before(act))


@PICTURES
@pytest.mark.parametrize(
    ("theme", "size"), [("dflash-dark", (46, 30)), ("dflash-light", (80, 16))], ids=["narrow", "low"]
)
def test_the_race_in_a_small_window(snap_compare: Compare, theme: str, size: tuple[int, int]) -> None:
    """Shows both texts and both clocks of each arm, one lane above the other where it is narrow."""
    screen = RaceScreen(7, QUESTION)
    done: RaceDone = race(PLAIN_TEXT, OTHER_TEXT, "near-tie", 5)

    async def act(pilot: Pilot[Any]) -> None:
        await tell(pilot, screen, done)
        await pilot.press("space")
        await pilot.pause()

    assert snap_compare(Host(theme, screen=screen), terminal_size=size, run_before=before(act))
