"""One turn as a JSON object: the keys of `generate --json`, and what a line of the metrics file needs besides.

Keys on top of those (dflash_mlx/README.md): `schema`, `timestamp` (UTC, when the turn ended), `target`, `draft`,
`settings` (as they were asked for; what ran is `mode` and `block_size`), `versions`. What was said is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from dflash_mlx.app.backend import Response
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.settings import Settings
from dflash_mlx.report import Answer, as_json

SCHEMA = "dflash-chat-1"
_SAID = ("text", "reasoning", "answer", "tool_calls", "tokens")


def utc_now() -> datetime:
    return datetime.now(UTC)


def json_object(newest: Response, answer: Answer, card: ModelCard) -> dict[str, Any]:
    """What `generate --json` prints, of a turn that gave at least one token."""
    last: Any = newest  # a GenerationResponse, or one that has what is read of it
    found = as_json(last, answer)
    return {**found, "notes": [*card.notes, *found["notes"]]}


def metrics(
    found: Mapping[str, Any],
    card: ModelCard,
    settings: Settings,
    versions: Mapping[str, str | None],
    ended: datetime,
) -> dict[str, Any]:
    """The line of the metrics file, from what `json_object` found."""
    return {
        "schema": SCHEMA,
        "timestamp": ended.isoformat(timespec="seconds"),
        "target": card.model or card.target,
        "draft": card.draft,
        "settings": {name: value for name, value in asdict(settings).items() if name != "system"},
        **{name: value for name, value in found.items() if name not in _SAID},
        "versions": dict(versions),
    }
