"""Stop strings: streamed text equals the text cut at the first match, however it arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.stops import StopStrings

LETTERS = st.text("ab ", max_size=12)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The reference: the match that completes first wins, of those the one that starts first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(st.lists(LETTERS, max_size=10), st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3))
def test_any_split_gives_the_reference_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    expected, matched = cut("".join(pieces), stops)
    if not matched:
        assert expected.startswith(shown)
        shown += matcher.flush()
    assert (shown, matcher.matched is not None) == (expected, matched)


def test_only_an_ambiguous_tail_is_held_back() -> None:
    matcher = StopStrings(["beta gamma"])
    assert matcher.feed("alpha b") == "alpha "
    assert matcher.feed("eta") == ""
    assert matcher.feed("x") == "betax"
    assert matcher.feed("beta gamma delta") == ""
    assert matcher.matched == "beta gamma"
    assert matcher.feed("more") == "" and matcher.flush() == ""


def test_what_stands_behind_the_match_is_not_lost() -> None:
    """Segments go on with it in another state."""
    matcher = StopStrings(["</b>", "</i>"])
    assert matcher.feed("bold</") == "bold" and matcher.rest == ""
    assert matcher.feed("b> and </i> more") == ""
    assert (matcher.matched, matcher.rest) == ("</b>", " and </i> more")


def test_without_stops_everything_passes_at_once() -> None:
    assert StopStrings([]).feed("text") == "text"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(["x", ""])
