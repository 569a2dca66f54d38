"""Names of repositories, without asking the hub."""

from __future__ import annotations

import re


def cached_repository(path: str) -> str | None:
    """ "org/name" of `.../models--org--name/snapshots/<hash>`, None for any other path."""
    found = re.search(r"(?:^|[/\\])models--([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]*$", path)
    return found[1].replace("--", "/", 1) if found else None
