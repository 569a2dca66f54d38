"""Terminals with fewer colours: 256 of them (Terminal.app), or none by the user's wish."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command import SCRIPTED
from terminal import Terminal

COLOUR = re.compile(rb"[34]8;2;(\d+);(\d+);(\d+)")


def _drawn(folder: Path, **env: str) -> bytes:
    """All that the terminal got for an answer and its numbers."""
    with Terminal([sys.executable, "-c", SCRIPTED], env={"XDG_DATA_HOME": str(folder), **env}, cwd=folder) as terminal:
        terminal.until("ready")
        terminal.type("first")
        terminal.press("enter")
        terminal.until("6 tokens in")
        terminal.press("f6")
        terminal.until("Short.")
        terminal.press("ctrl+q")
        assert terminal.end() == 0
        return terminal.raw


def test_no_color_draws_without_any_hue(tmp_path: Path) -> None:
    """Greys are left, so that a page still stands out from what is below it; shapes and weights say the rest."""
    raw = _drawn(tmp_path, NO_COLOR="1")
    assert all(red == green == blue for red, green, blue in COLOUR.findall(raw))
    assert "■■■".encode() in raw and "□□□".encode() in raw


@pytest.mark.parametrize("theme", ["dflash-dark", "dflash-light"])
def test_256_colours_are_enough(tmp_path: Path, theme: str) -> None:
    """No text gets the colour of its background when both are rounded to the palette."""
    (tmp_path / "dflash-metal").mkdir()
    (tmp_path / "dflash-metal" / "state.json").write_text(f'{{"theme": "{theme}"}}')
    raw = _drawn(tmp_path, TEXTUAL_COLOR_SYSTEM="256")
    assert not COLOUR.findall(raw)
    pairs = set(re.findall(rb"38;5;(\d+);48;5;(\d+)m([^\x1b]*)", raw))
    assert len(pairs) > 5
    assert not [text for fore, back, text in pairs if fore == back and text.strip()]
