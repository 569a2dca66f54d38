"""The parts that draw numbers: the cycle strip, the facts, the words for them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path

import pytest
from textual.content import Content
from textual.screen import Screen

import dflash_mlx.app
from dflash_mlx.app.messages import ModelCard, Numbers, PrefillProgress, TurnDone
from dflash_mlx.app.text import closing_line, fitting_notes, mode_badge, prefill_line, rate, seconds, statistics_line
from dflash_mlx.app.widgets.cycle_strip import strip
from dflash_mlx.app.widgets.facts import Fact, pack
from dflash_mlx.app.widgets.stats_bar import clocks


def test_the_strip_tells_accepted_rejected_and_own_apart_without_colour() -> None:
    assert strip([(2, 3), (3, 3), (0, 3), (0, 0)], 80).plain == "■■□+ ■■■+ □□□+ +"


@pytest.mark.parametrize("width", range(30))
def test_the_strip_shows_whole_cycles_the_newest_first_to_stay(width: int) -> None:
    drawn = strip([(1, 3), (2, 3), (3, 3)], width).plain
    assert len(drawn) <= width
    assert drawn in ("", "■■■+", "■■□+ ■■■+", "■□□+ ■■□+ ■■■+")
    assert bool(drawn) == (width >= 4)


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 200])
def test_a_fact_is_never_broken_across_lines(width: int) -> None:
    numbers = Numbers(generation_tokens=9, decode_tps=41.31, request_tps=30.2, ttft_s=0.416)
    lines = [line.plain for line in pack(clocks(numbers), width)]
    facts = ["generation only 41.3 tok/s", "prefill-inclusive 30.2 tok/s", "TTFT 0.42 s"]
    assert " · ".join(lines).split(" · ") == facts
    assert all(len(line) <= width or line in facts for line in lines)


def test_facts_have_name_value_and_unit() -> None:
    assert Fact("TTFT", "0.42", "s").content().plain == "TTFT 0.42 s"
    assert isinstance(Fact("", "2.10", "tokens/cycle").content(), Content)


def test_unknown_numbers_are_dashes() -> None:
    assert (rate(None), seconds(None)) == ("–", "–")
    assert "–" in statistics_line(Numbers()) and "nan" not in statistics_line(Numbers())


def test_the_badge_says_what_runs_and_why_not_dflash() -> None:
    pair, alone = ModelCard("t", "d", 4, 1.0), ModelCard("t", None, None, 1.0)
    dflash, plain = Numbers(mode="dflash", block_size=3), Numbers(mode="plain")
    assert mode_badge(Numbers(), None) == "no model"
    assert mode_badge(Numbers(), pair) == "ready"
    assert mode_badge(Numbers(reading=0.25), pair) == "reading 25%"
    assert mode_badge(dflash, pair) == "dflash B=3"
    assert mode_badge(replace(dflash, resting=True), pair) == "dflash, resting"
    assert mode_badge(plain, alone) == "plain: no draft"
    assert mode_badge(replace(plain, asked_mode="plain", notes=("BLAS: x",)), pair) == "plain: by /mode"
    assert mode_badge(replace(plain, notes=("plain decoding: slow",)), pair) == "plain: see the note"
    assert mode_badge(plain, pair) == "plain", "no note is promised that is not there"


def test_notes_are_dropped_whole_and_the_first_one_last() -> None:
    reason = "plain decoding: the target runs in bfloat16 on a CPU. Load with dtype='float32'."
    notes = (reason, "BLAS: scipy-openblas32, 1 thread")
    assert fitting_notes(notes, 200, 4) == f"{reason[:-1]} · {notes[1]}"
    assert fitting_notes(notes, 30, 4) == reason[:-1]
    assert fitting_notes(notes, 30, 2) == "plain decoding: the target runs in bfloat16 on a CPU"
    assert fitting_notes((), 30, 2) == ""


def test_the_lines_under_an_answer_say_how_it_ended() -> None:
    numbers = Numbers(generation_tokens=1, prompt_tokens=1200, cached_tokens=1000, total_s=3.14159)
    assert closing_line(TurnDone(1, "stop", numbers), empty=False) == (
        "1 token in 3.14 s · prompt 1,200 tokens, 1,000 from cache"
    )
    rested = replace(numbers, mode="dflash", cycles=40, plain_steps=12)
    assert closing_line(TurnDone(1, "stop", rested), empty=False).endswith(" · 12 of 40 cycles without drafts")
    assert "12 of 40 cycles without drafts" in statistics_line(rested)
    assert "cycles without" not in statistics_line(replace(rested, mode="plain")), "they all are"
    assert "/max raises it" in closing_line(TurnDone(1, "length", numbers), empty=False)
    assert "not part of the conversation" in closing_line(TurnDone(1, "cancelled", numbers), empty=True)
    assert prefill_line(PrefillProgress(1, 12, 200, 1000)) == (
        "reading the prompt · 12 of 200 tokens · 1,000 from cache"
    )


def test_every_stylesheet_is_used() -> None:
    """A .tcss that no screen lists does nothing, and nobody notices."""
    root = Path(dflash_mlx.app.__path__[0])
    listed = set()
    for module in pkgutil.iter_modules([str(root / "screens")], "dflash_mlx.app.screens."):
        for found in vars(importlib.import_module(module.name)).values():
            if isinstance(found, type) and issubclass(found, Screen) and found.CSS_PATH:
                paths = found.CSS_PATH if isinstance(found.CSS_PATH, list) else [found.CSS_PATH]
                listed |= {(root / "screens" / path).resolve() for path in paths}
    assert listed == {path.resolve() for path in root.rglob("*.tcss")}
