"""Golden config of the app tests: the pictures and timings must not depend on the terminal they run in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dflash_mlx.app import clipboard


@pytest.fixture(autouse=True)
def golden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same colours and no animation, whatever the developer's environment says; files in the test's own folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TEXTUAL_COLOR_SYSTEM", raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(clipboard, "fill", lambda text: None)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
