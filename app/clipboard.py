"""Copying: the terminal's own way (OSC 52), and the machine's tool for terminals that do not know it (Terminal.app)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

TIMEOUT_S = 2.0


def command(environment: Mapping[str, str], platform: str = sys.platform) -> list[str] | None:
    """The program that fills this machine's clipboard from its stdin, or None.

    Over ssh there is none: the clipboard that the user means is at the other end, where only OSC 52 reaches.
    """
    if environment.get("SSH_CONNECTION") or environment.get("SSH_TTY"):
        return None
    wanted: list[list[str]] = []
    if platform == "darwin":
        wanted.append(["pbcopy"])
    if environment.get("WAYLAND_DISPLAY"):
        wanted.append(["wl-copy"])
    if environment.get("DISPLAY"):
        wanted.append(["xclip", "-selection", "clipboard"])
    return next((line for line in wanted if shutil.which(line[0], path=environment.get("PATH"))), None)


def fill(text: str) -> None:
    """Hand `text` to the machine's clipboard program if there is one. Blocks; OSC 52 was sent already, so its failing
    is not worth a word."""
    line = command(os.environ)
    if line is None:
        return
    try:
        subprocess.run(
            line, input=text.encode(), timeout=TIMEOUT_S, check=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return
