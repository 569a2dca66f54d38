"""The instruments under the chat: what they say in every state, what stays in little room, how they look."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from instruments import CARD, LOOKS, PICTURES, PLAIN, READING, RUNNING, Compare, Host, before, race
from textual.geometry import Size
from textual.pilot import Pilot
from textual.widgets import Static

from dflash_mlx.app.baseline import ENOUGH_TOKENS, Baseline, speedup
from dflash_mlx.app.messages import ModelCard, Numbers
from dflash_mlx.app.widgets import gauges
from dflash_mlx.app.widgets.cycle_strip import CycleStrip, strip
from dflash_mlx.app.widgets.facts import Fact, Facts, fitting, line, pack
from dflash_mlx.app.widgets.sparkline import LEVELS, rate_history, sparkline
from dflash_mlx.app.widgets.stats_bar import Density

BASELINE = Baseline(29.9, 26.1, "a race", 3000)
STATES = {"ready": Numbers(), "reading": READING, "running": RUNNING, "plain": PLAIN}


def words(facts: tuple[Fact, ...]) -> list[str]:
    return [fact.content().plain for fact in facts]


async def seen(
    size: tuple[int, int],
    numbers: Numbers,
    card: ModelCard | None = CARD,
    baseline: Baseline | None = None,
    density: Density = "calm",
    used: int | None = None,
) -> list[str]:
    """The lines that the bar shows in a window of `size`."""
    app = Host(bar=True)
    async with app.run_test(size=size) as pilot:
        assert app.bar is not None
        app.bar.density = density
        app.bar.show(numbers, card, baseline, used)
        await pilot.pause()
        return app.lines()


# What the numbers say -------------------------------------------------------------------------------------


def test_a_bar_is_only_empty_at_nothing_and_only_full_at_everything() -> None:
    """A full bar at 99.6%, or an empty one at 1%, contradicts the number beside it."""
    assert gauges.gauge(0, 8) == "░░░░░░░░" and gauges.gauge(0.001, 8) == "█░░░░░░░"
    assert gauges.gauge(0.999, 8) == "███████░" and gauges.gauge(1.0, 8) == gauges.gauge(1.7, 8) == "████████"


def test_the_prompt_shows_tokens_time_left_and_what_the_cache_saved() -> None:
    """512 of 2,048 in 0.4 s are 1,280 a second, so the other 1,536 take 1.2 s; 1,024 of 3,072 were cached."""
    assert words(gauges.prefill(READING)) == [
        "512 of 2,048 tokens",
        "1.20 s left",
        "33% from cache",
        "prefill 1280 tok/s",
    ]


def test_nothing_is_promised_about_a_prompt_of_which_nothing_has_been_read() -> None:
    assert words(gauges.prefill(replace(READING, reading=0.0, cached_tokens=0))) == ["0 of 3,072 tokens"]
    assert words(gauges.prefill(replace(READING, prefill_s=None, cached_tokens=0))) == ["768 of 3,072 tokens"]
    assert words(gauges.prefill(Numbers(reading=0.0))) == ["reading the prompt"]


def test_a_limit_that_is_near_is_said_in_words() -> None:
    """Colour alone is lost with NO_COLOR, and a bar alone does not say what to do."""
    assert gauges.warnings(RUNNING, CARD, 3200) == ()
    (memory,) = gauges.warnings(replace(RUNNING, peak_gb=23.0), CARD, 3200)
    assert "23.0 of 24.0 GB" in memory and "/clear" in memory
    (context,) = gauges.warnings(RUNNING, CARD, 8000)
    assert "nearly full: 8,000 of 8,192 tokens" in context and "/clear" in context
    assert "is full" in gauges.warnings(RUNNING, CARD, 8192)[0]


def test_limits_that_are_not_known_are_not_made_up() -> None:
    alone = ModelCard("t", "d", 4, 1.0)
    assert words(gauges.memory(RUNNING, alone)) == ["memory 4.50 GB", "memory peak 4.75 GB"]
    assert words((gauges.context(120, alone),)) == ["context 120 tokens"]
    assert gauges.memory(Numbers(), alone) == () and gauges.warnings(RUNNING, alone, 10**6) == ()


def test_memory_and_context_are_shown_of_their_limits() -> None:
    assert words(gauges.memory(RUNNING, CARD)) == ["memory █░░░░░░░ 4.50 of 24.0 GB", "memory peak 4.75 GB"]
    assert words((gauges.context(4096, CARD),)) == ["context ████░░░░ 4,096 of 8,192 tokens (50%)"]


def test_the_sparkline_spans_its_own_range_and_says_it() -> None:
    assert sparkline([1, 2, 3], 8) == "▁▅█" and sparkline([5, 5, 5], 8) == "▅▅▅"
    assert sparkline([9, 1, 2, 3], 3) == "▁▅█", "the oldest rate is gone, and so is its weight"
    assert sparkline([], 8) == "" and set(sparkline(range(100), 100)) == set(LEVELS)
    assert words(rate_history(RUNNING.rates, 16)) == ["generation rate ▁▅█▆▄▆ 31.0 to 44.2 tok/s"]
    assert rate_history((41.0,), 16) == (), "one stretch is no course"


# What a speed-up is a multiple of -------------------------------------------------------------------------


def test_a_speed_up_is_over_plain_decoding_measured_here_and_says_how() -> None:
    fact = gauges.speed_up(RUNNING, CARD, BASELINE)
    assert fact is not None and words((fact,)) == ["1.38x plain generation, by a race"]
    assert not fact.warning
    slower = gauges.speed_up(replace(RUNNING, decode_tps=20.0), CARD, BASELINE)
    assert slower is not None and slower.value == "0.67x" and slower.warning, "a slow-down is not kept quiet"


def test_without_a_measurement_the_bar_says_how_to_get_one() -> None:
    fact = gauges.speed_up(RUNNING, CARD, None)
    assert fact is not None and words((fact,)) == ["speed-up: /race measures it"]
    assert gauges.speed_up(PLAIN, CARD, BASELINE) is None, "plain decoding is not sped up by anything"
    assert gauges.speed_up(RUNNING, replace(CARD, draft=None), BASELINE) is None


def test_a_baseline_from_a_short_context_is_not_used_for_a_long_one() -> None:
    """Plain decoding slows down with the context: an old rate would make the draft look slow, or fast."""
    long = replace(RUNNING, prompt_tokens=30_000)
    assert speedup(long, BASELINE) is None and speedup(RUNNING, BASELINE) == pytest.approx(41.31 / 29.9)
    fact = gauges.speed_up(long, CARD, BASELINE)
    assert fact is not None and words((fact,)) == ["speed-up: /race measures it here"]
    short = replace(RUNNING, prompt_tokens=20)
    assert speedup(short, Baseline(29.9, None, "a race", 900)) is not None, "a few hundred tokens do not matter"


def test_only_a_plain_turn_of_some_length_becomes_a_baseline() -> None:
    assert Baseline.of_turn(PLAIN) == Baseline(29.9, 26.1, "a plain turn", 3200)
    assert Baseline.of_turn(RUNNING) is None
    assert Baseline.of_turn(replace(PLAIN, generation_tokens=ENOUGH_TOKENS - 1)) is None
    assert Baseline.of_turn(replace(PLAIN, decode_tps=None)) is None
    made = Baseline.of_race(race("a b", "a b"))
    assert made is not None and made.how == "a race" and made.decode_tps == 29.9


# What the bar shows where ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(40, 30), (64, 24), (80, 24), (80, 15), (40, 12), (120, 40)])
@pytest.mark.parametrize("state", STATES)
async def test_both_clocks_and_the_reason_of_a_fallback_are_always_there(size: tuple[int, int], state: str) -> None:
    """One rate without the other is how speculative decoding gets oversold; a silent fallback is the other way."""
    for density in ("calm", "full"):
        text = " ".join(await seen(size, STATES[state], density=density))
        assert "generation only" in text and "prefill-inclusive" in text
        assert ("bfloat16 on a CPU" in text) == (state == "plain")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("state", ["ready", "reading", "running"])
@pytest.mark.parametrize("baseline", [None, BASELINE])
async def test_calm_is_two_lines(size: tuple[int, int], state: str, baseline: Baseline | None) -> None:
    """A bar that grows and shrinks while one reads moves the text."""
    assert len(await seen(size, STATES[state], baseline=baseline)) == 2


@pytest.mark.parametrize("size", [(40, 40), (64, 30), (80, 24), (130, 40)])
async def test_full_shows_every_instrument_with_its_name(size: tuple[int, int]) -> None:
    text = " ".join(await seen(size, RUNNING, baseline=BASELINE, density="full"))
    for shown in (
        "generation only 41.3 tok/s",
        "prefill-inclusive 36.6 tok/s",
        "TTFT 0.42 s",
        "dflash B=6",
        "2.10 tokens/cycle",
        "acceptance 37%",
        "1.38x plain generation, by a race",
        "to 44.2 tok/s",
        "of 24.0 GB",
        "memory peak 4.75 GB",
        "3,200 of 8,192 tokens (39%)",
    ):
        assert shown in text


async def test_a_warning_is_shown_in_calm_and_in_a_low_window_too() -> None:
    for size in ((80, 24), (80, 15), (40, 15)):
        text = " ".join(await seen(size, replace(RUNNING, notes=("BLAS: x",)), used=8000))
        assert "the context is nearly full" in text
        assert ("BLAS: x" in text) == (size[1] >= 20), "a low window keeps what matters"


async def test_the_strip_also_shows_plain_steps() -> None:
    """An empty strip reads as a broken one."""
    assert "+ + + + + +" in (await seen((80, 24), PLAIN))[1]
    assert strip([(0, 0), (2, 3), (0, 0)], 80).plain == "+ ■■□+ +"


async def test_the_strip_gives_way_before_a_number_does() -> None:
    """At 80 columns a measured speed-up leaves the strip a cycle; at 40 there is none; never half a cycle."""
    wide, middle, narrow = [await seen((width, 24), RUNNING, baseline=BASELINE) for width in (120, 80, 40)]
    assert "+ ■■□□□+ ■□□□□+" in wide[1]
    assert middle[1].endswith(" ■□□□□+") and "1.38x plain" in middle[1]
    assert "■" not in " ".join(narrow)


async def test_the_layout_follows_the_window() -> None:
    """A bar that was laid out for another width cuts its numbers off."""
    app = Host(bar=True)
    async with app.run_test(size=(120, 30)) as pilot:
        assert app.bar is not None
        app.bar.density = "full"
        app.bar.show(replace(PLAIN, notes=()), CARD, None)
        await pilot.pause()
        assert "memory peak" in app.text()
        await pilot.resize_terminal(120, 15)
        await pilot.pause()
        assert "memory peak" not in app.text(), "a low window has no room for it"
        await pilot.resize_terminal(40, 30)
        await pilot.pause()
        assert "memory peak 4.75 GB" in app.lines()


async def test_a_number_that_did_not_change_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten ticks a second that each lay out the window would cost more than the two percent that are allowed."""
    drawn: list[str] = []
    for kind in (Facts, CycleStrip):
        render = kind.render

        def spy(self: Any, render: Any = render) -> Any:
            drawn.append(type(self).__name__ + (self.id or ""))
            return render(self)

        monkeypatch.setattr(kind, "render", spy)
    monkeypatch.setattr(Static, "update", lambda self, *_: drawn.append(f"#{self.id}"))
    app = Host(bar=True)
    async with app.run_test(size=(80, 24)) as pilot:
        assert app.bar is not None
        app.bar.show(RUNNING, CARD, BASELINE)
        await pilot.pause()
        drawn.clear()
        for _ in range(20):
            app.bar.show(replace(RUNNING), CARD, BASELINE)
            await pilot.pause()
        assert drawn == []
        app.bar.show(replace(RUNNING, recent=((1, 5),) * 8), CARD, BASELINE)
        await pilot.pause()
        assert set(drawn) == {"CycleStrip"}


def test_facts_are_left_out_whole_and_never_cut() -> None:
    facts = (Fact("a", "1", "s"), Fact("b", "2", "s"), Fact("c", "3", "s"))
    assert words(fitting(facts, line(facts).cell_length)) == ["a 1 s", "b 2 s", "c 3 s"]
    assert words(fitting(facts, line(facts).cell_length - 1)) == ["a 1 s", "b 2 s"]
    assert words(fitting(facts, 1)) == ["a 1 s"]
    assert [content.plain for content in pack(facts, 14)] == ["a 1 s · b 2 s", "c 3 s"]


def test_a_fact_wider_than_the_window_is_wrapped_and_not_cut() -> None:
    facts = Facts()
    facts.set_reactive(Facts.facts, (Fact("generation rate", "▁▅█", "31.0 to 44.2 tok/s"),))
    assert facts.get_content_height(Size(20, 9), Size(20, 9), 20) == 2


@pytest.mark.parametrize("state", STATES)
async def test_no_number_stands_without_its_name_or_unit(state: str) -> None:
    """A bare number is read as whatever is hoped for."""
    for density in ("calm", "full"):
        for size in ((80, 24), (130, 40)):
            for shown in await seen(size, STATES[state], baseline=BASELINE, density=density):
                for part in re.split(r" · |  +", shown):
                    assert not re.fullmatch(r"[\d.,%x–]+", part.strip()), shown


# How it looks ---------------------------------------------------------------------------------------------


@PICTURES
@pytest.mark.parametrize(("theme", "size"), LOOKS)
@pytest.mark.parametrize(("state", "density"), [("reading", "full"), ("running", "calm"), ("running", "full")])
def test_the_bar(snap_compare: Compare, theme: str, size: tuple[int, int], state: str, density: Density) -> None:
    """Shows the two clocks first, the badge in the accent colour, the strip at the right, labels quieter."""
    app = Host(theme, bar=True)

    async def act(pilot: Pilot[Any]) -> None:
        assert app.bar is not None
        app.bar.density = density
        app.bar.show(STATES[state], CARD, BASELINE)

    assert snap_compare(app, terminal_size=size, run_before=before(act))


@PICTURES
@pytest.mark.parametrize(("theme", "size"), LOOKS)
def test_the_bar_of_a_fallback_with_a_limit_near(snap_compare: Compare, theme: str, size: tuple[int, int]) -> None:
    """Shows the badge and the note as warnings, and the memory gauge in the same colour."""
    app = Host(theme, bar=True)

    async def act(pilot: Pilot[Any]) -> None:
        assert app.bar is not None
        app.bar.density = "full"
        app.bar.show(replace(PLAIN, active_gb=21.0, peak_gb=22.5), CARD)

    assert snap_compare(app, terminal_size=size, run_before=before(act))
