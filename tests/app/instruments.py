"""What the tests of the instruments share: numbers of a made-up pair, and an app that shows one widget or screen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import textual
from textual.app import App, ComposeResult
from textual.containers import Vertical
from textual.pilot import Pilot
from textual.screen import Screen

from dflash_mlx.app.messages import Arm, ModelCard, Numbers, RaceDone
from dflash_mlx.app.theme import DARK, LIGHT
from dflash_mlx.app.widgets.stats_bar import StatsBar

Compare = Callable[..., bool]

PICTURES = pytest.mark.skipif(
    textual.__version__ != "8.2.8", reason="the pictures were taken with Textual 8.2.8; another one draws otherwise"
)
LOOKS = [pytest.param(DARK.name, (80, 24), id="dark-80"), pytest.param(LIGHT.name, (120, 30), id="light-wide")]
"""Theme and terminal of the pictures: each state in both themes and both widths."""

CARD = ModelCard("target-8B", "draft-8B", 6, 1.0, largest_block=16, context_length=8192, memory_gb=24.0, thinks=True)

READING = Numbers(
    reading=0.25, prompt_tokens=3072, cached_tokens=1024, prefill_s=0.4, asked_mode="auto", active_gb=4.5, peak_gb=4.75
)
RUNNING = Numbers(
    mode="dflash",
    block_size=6,
    prompt_tokens=3072,
    cached_tokens=1024,
    generation_tokens=128,
    ttft_s=0.416,
    total_s=3.5,
    prompt_tps=1280.0,
    decode_tps=41.31,
    request_tps=36.57,
    cycles=61,
    tokens_per_cycle=2.1,
    acceptance_rate=0.37,
    recent=((3, 5), (5, 5), (0, 5), (0, 0), (2, 5), (1, 5)) * 4,
    rates=(31.0, 38.5, 44.2, 41.0, 36.0, 40.5),
    active_gb=4.5,
    peak_gb=4.75,
)
PLAIN = replace(
    RUNNING,
    mode="plain",
    block_size=1,
    tokens_per_cycle=None,
    acceptance_rate=None,
    decode_tps=29.9,
    request_tps=26.1,
    recent=((0, 0),) * 30,
    notes=("plain decoding: the target runs in bfloat16 on a CPU. Load with dtype='float32'.",),
)


def race(plain_text: str, dflash_text: str, verdict: Any = "identical", index: int | None = None) -> RaceDone:
    """A race whose plain arm gives a word every 0.2 s after 0.5 s, the dflash arm every 0.1 s."""
    said = {
        "identical": "All 9 tokens are the same.",
        "near-tie": "After 5 equal tokens 31 was expected and 47 got: they are equally likely, so rounding decides.",
        "bug": "After 5 equal tokens 31 was expected and 47 got: they are 2.1 apart, which is too little.",
    }[verdict]
    return RaceDone(
        7,
        Arm("plain", replace(PLAIN, notes=(), total_s=4.8), pieces(plain_text, 0.2)),
        Arm("dflash", RUNNING, pieces(dflash_text, 0.1)),
        verdict,
        index,
        said,
    )


def pieces(text: str, step_s: float) -> tuple[tuple[float, str], ...]:
    """(time, word) for every word of `text`."""
    words = text.split(" ")
    texts = [word + " " for word in words[:-1]] + words[-1:]
    return tuple((0.5 + step_s * i, word) for i, word in enumerate(texts))


class Host(App[None]):
    """Shows one thing in the chat's themes, and keeps what it was told."""

    CSS_PATH = "../../app/widgets/stats_bar.tcss"

    def __init__(self, theme: str = DARK.name, *, bar: bool = False, screen: Screen[Any] | None = None) -> None:
        super().__init__()
        self.animation_level = "none"
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = theme
        self.bar = StatsBar() if bar else None
        self.shown = screen
        self.results: list[Any] = []
        self.told: list[Any] = []

    def compose(self) -> ComposeResult:
        if self.bar is not None:
            yield Vertical()
            yield self.bar

    def on_mount(self) -> None:
        if self.shown is not None:
            self.push_screen(self.shown, self.results.append)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {"quiet": DARK.variables["quiet"]}

    def text(self) -> str:
        """What a reader sees, line by line."""
        return "\n".join(strip.text.rstrip() for strip in self.screen._compositor.render_strips()).rstrip()

    def lines(self) -> list[str]:
        return [stripped for line in self.text().splitlines() if (stripped := line.strip())]


def before(act: Callable[[Pilot[Any]], Awaitable[None]]) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """`act`, then wait for what it changed to be drawn."""

    async def run(pilot: Pilot[Any]) -> None:
        await pilot.pause()
        await act(pilot)
        await pilot.pause()

    return run
