"""The tour takes no picture that hides a number or shows whose machine it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from chatting import running
from scripted import Answer, Script

from bench import tour_steps
from bench.tour_steps import Tour


async def test_a_picture_has_the_numbers_of_the_bar_and_its_digest(tmp_path: Path) -> None:
    """tour.json would otherwise name numbers that nobody can see."""
    async with running(Script([Answer("An answer of some length, so that there is a rate.")]), size=(100, 30)) as chat:
        await chat.send("go")
        tour = Tour(chat.app, chat.pilot, tmp_path, private=["/home/somebody"])
        await tour.take("answer", "An answer.")
        (taken,) = tour.pictures
        assert any(text.startswith("generation only ") for text in taken["numbers"])
        assert any(text.endswith(" tokens/cycle") for text in taken["numbers"])
        assert hashlib.sha256((tmp_path / "answer.svg").read_bytes()).hexdigest() == taken["sha256"]


async def test_what_is_covered_by_a_window_is_not_said_to_be_shown(tmp_path: Path) -> None:
    async with running(Script([Answer("An answer of some length, so that there is a rate.")]), size=(100, 30)) as chat:
        await chat.send("go")
        tour = Tour(chat.app, chat.pilot, tmp_path, private=[])
        behind = tour.facts(chat.app.chat)
        await chat.pilot.press("f1")
        await chat.until(lambda: chat.app.screen.is_modal)
        await tour.take("help", "Help.")
        assert set(tour.pictures[0]["numbers"]) <= set(behind)
        await chat.pilot.press("escape")


@pytest.mark.parametrize(
    ("private", "said", "why"), [(["Ask anything"], [], "machine's own"), ([], ["7 tok/s"], "cannot be read")]
)
async def test_a_picture_that_says_too_much_or_too_little_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, private: list[str], said: list[str], why: str
) -> None:
    monkeypatch.setattr(tour_steps, "TRIES", 2)
    async with running(Script(), size=(100, 30)) as chat:
        tour = Tour(chat.app, chat.pilot, tmp_path, private)
        with pytest.raises(RuntimeError, match=why):
            await tour.take("ready", "Loaded.", *said)
        assert not list(tmp_path.glob("*.svg")) and not tour.pictures
