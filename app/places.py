"""Where the chat keeps its files. Nothing is made or read here."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

NAME = "dflash-metal"


@dataclass(frozen=True)
class Places:
    """Two folders, which need not exist yet."""

    data: Path
    """What the chat writes."""
    config: Path
    """What the user writes."""

    @classmethod
    def default(cls) -> Places:
        """`$XDG_DATA_HOME` and `$XDG_CONFIG_HOME`; without them ~/Library/Application Support on macOS, else
        ~/.local/share and ~/.config. In each of them a folder dflash-metal."""
        mac = sys.platform == "darwin"
        data = "Library/Application Support" if mac else ".local/share"
        config = "Library/Application Support" if mac else ".config"
        return cls(_root("XDG_DATA_HOME", data) / NAME, _root("XDG_CONFIG_HOME", config) / NAME)

    @property
    def chats(self) -> Path:
        """Folder of the saved chats, a file each."""
        return self.data / "chats"

    @property
    def metrics(self) -> Path:
        """One JSON line for every turn."""
        return self.data / "metrics.jsonl"

    @property
    def state(self) -> Path:
        """What the app remembers from one start to the next."""
        return self.data / "state.json"

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"


def _root(variable: str, below_home: str) -> Path:
    """The XDG standard says that a relative path is to be ignored."""
    named = os.environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~")) / below_home
