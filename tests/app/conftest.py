"""Golden config of the app tests: the pictures and timings must not depend on the terminal they run in."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same colours and no animation, whatever the developer's environment says."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
