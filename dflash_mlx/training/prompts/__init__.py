"""Prompts to train on: a file, a data set of the Hugging Face hub, or the built-in set `demo`.

Whole topics are held out, never single prompts of a topic that is trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

HELD_OUT_SHARE = 20  # one topic of so many


@dataclass(frozen=True)
class Prompt:
    """text: of the user; or `messages`, whose last one is the user's. topic: what decides about holding it out."""

    text: str
    category: str = "other"
    topic: str = ""
    system: str | None = None
    held_out: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.text}]

    @property
    def key(self) -> int:
        """A 32-bit name of what is asked."""
        return digest(f"{self.system or ''}\0{self.text}") % 2**32


def digest(text: str) -> int:
    """A 64-bit number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def holds_out(topic: str) -> bool:
    """Whether a topic is one of the `1 / HELD_OUT_SHARE` that are never trained on."""
    return digest("held out by topic: " + topic) % HELD_OUT_SHARE == 0


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """SHA-256 over everything that is asked, in order."""
    whole = hashlib.sha256()
    for prompt in prompts:
        asked = [prompt.category, prompt.topic, prompt.system, prompt.text, prompt.held_out]
        whole.update(json.dumps(asked).encode() + b"\n")
    return whole.hexdigest()
