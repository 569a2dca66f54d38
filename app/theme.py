"""Two quiet themes. Weight and shape carry the contrast first, so both survive 256 colours and NO_COLOR.

`$quiet` is the colour of labels and closing lines: a plain colour, since `$text-muted` is a share of the contrast
to the background and has none to take it from inside `Content`.
"""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="dflash-dark",
    dark=True,
    primary="#8FB8DE",
    secondary="#A7A2D6",
    accent="#7FD1AE",
    warning="#E0B86A",
    error="#E58080",
    success="#7FD1AE",
    foreground="#D9DCE3",
    background="#15171C",
    surface="#1B1E25",
    panel="#242833",
    variables={"border": "#3A4050", "quiet": "#868D9C"},
)

LIGHT = Theme(
    name="dflash-light",
    dark=False,
    primary="#2C5F8D",
    secondary="#5B4FA0",
    accent="#1F7A56",
    warning="#8A5A00",
    error="#B03030",
    success="#1F7A56",
    foreground="#22262E",
    background="#FAF9F6",
    surface="#F1EFEA",
    panel="#E6E3DC",
    variables={"border": "#B9B4A8", "quiet": "#6A6F79"},
)
