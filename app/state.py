"""What the app remembers from one start to the next. Losing it costs nothing but a few keys."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dflash_mlx.app.lines import StoreError, reason
from dflash_mlx.app.places import Places
from dflash_mlx.files import whole_file


@dataclass(frozen=True)
class State:
    """Plain values, changed with `dataclasses.replace`."""

    model: str | None = None
    """The last target, as it was asked for."""
    draft: str | None = "auto"
    """Its draft, as `load` takes it."""
    theme: str | None = None
    """Name of the theme; None is the app's own choice."""
    fold_thinking: bool = True
    """Show reasoning folded."""
    origins: bool = False
    """Mark which tokens the draft proposed."""
    verbose: bool = False
    """Show all numbers of a turn under it."""
    chat: str | None = None
    """Id of the chat that was open last."""
    note: str = field(default="", compare=False)
    """What was wrong with the file, for the user; not saved."""

    @classmethod
    def load(cls, places: Places) -> State:
        """The saved state. What cannot be read or used is left at its default, with a `note`."""
        try:
            record = json.loads(places.state.read_bytes())
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is damaged"
            return cls(note=f"{places.state} was not used ({why}); the app starts as if it were new.")
        defaults = asdict(cls())
        good = {name: record[name] for name in defaults if name in record and _fits(record[name], defaults[name])}
        bad = sorted(name for name in defaults if name in record and name not in good and name != "note")
        note = f"{places.state}: {', '.join(bad)} cannot be used and was left at the default." if bad else ""
        return replace(cls(**good), note=note)

    def save(self, places: Places) -> None:
        """Write it, whole or not at all.

        Raises:
            StoreError: it cannot be written.
        """
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "note"}
        try:
            places.data.mkdir(parents=True, exist_ok=True, mode=0o700)
            with whole_file(places.state) as aside:
                aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise StoreError(
                f"{places.state} cannot be written ({reason(error)}), so the next start will not know the model and "
                "the view of this one."
            ) from error


def _fits(value: object, default: object) -> bool:
    """A switch takes a switch; everything else is a text or nothing."""
    return isinstance(value, bool) if isinstance(default, bool) else value is None or isinstance(value, str)
