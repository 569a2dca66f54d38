"""SVG pictures of the whole window. To accept a change: look at the report first, then `--snapshot-update`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import textual
from chatting import make_app
from scripted import Answer, Script
from textual.pilot import Pilot

from dflash_mlx.app.widgets.prompt import Prompt
from dflash_mlx.app.widgets.turn import AnswerTurn

Compare = Callable[..., bool]

pytestmark = pytest.mark.skipif(
    textual.__version__ != "8.2.8", reason="the pictures were taken with Textual 8.2.8; another one draws otherwise"
)

ANSWER = """Speculative decoding lets a *small* draft propose and the **target** verify.

1. The draft proposes a block.
2. The target checks it in one pass.

```python
def accept(p, q):
    return p == q  # [greedy]
```
"""


async def _settle(pilot: Pilot[Any], css_class: str) -> None:
    pilot.app.screen.query_one(Prompt).cursor_blink = False
    while css_class not in pilot.app.screen.query_one("Welcome").classes:
        await pilot.pause(0.01)


def test_a_finished_answer(snap_compare: Compare) -> None:
    """Shows a question with its bar, Markdown with code, its cost line, the idle box, both clocks, the badge, the
    strip in three shapes, and the note about the matrix library."""

    async def before(pilot: Pilot[Any]) -> None:
        await _settle(pilot, "-ready")
        await pilot.press(*"explain", "enter")
        while not list(pilot.app.screen.query(AnswerTurn)) or pilot.app.screen.query_one(AnswerTurn).has_class(
            "-running"
        ):
            await pilot.pause(0.01)
        await pilot.pause()

    script = Script([Answer(ANSWER, notes=("BLAS: scipy-openblas32, 1 thread",))])
    assert snap_compare(make_app(script), terminal_size=(80, 24), run_before=before)


def test_loading(snap_compare: Compare) -> None:
    """Shows the wordmark, what is being done with its share, the bar, and a box that can be typed into."""
    gate = threading.Event()

    async def before(pilot: Pilot[Any]) -> None:
        await _settle(pilot, "-loading")
        while "42%" not in str(pilot.app.screen.query_one("#doing").render()):
            await pilot.pause(0.01)
        await pilot.press(*"typed ahead")
        await pilot.pause()

    script = Script(load_steps=(("Unpacking 272 tensors", 0.42),), load_gate=gate)
    assert snap_compare(make_app(script), terminal_size=(80, 24), run_before=before)
    gate.set()
