"""What races found, remembered between processes: one JSON file in the user's cache folder.

A verdict holds for the conditions that it was found under; under others the race is run again. A file that cannot be
read counts as empty, one that cannot be written leaves the verdicts in memory, and a note says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_mlx.files import whole_file
from dflash_mlx.kernels.operation import Case, Operation
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.race_child import case_of, plain_case, plain_verdict, verdict_of

FORMAT = 1
_RULES = 1  # of `numerics` and `race`; another number has everything raced again
_MOST = 2000  # the newest ones; a model has a few tens


@dataclass(frozen=True)
class Conditions:
    """What a verdict depends on besides the case. source: a digest of the kernel's text."""

    architecture: str
    system: str
    mlx: str
    source: str


@cache
def digest(operation: Operation) -> str:
    """Of everything that a verdict is about: the kernels' text, and the file that launches and races them."""
    text = [repr((_RULES, operation.kernels))]
    with contextlib.suppress(OSError, TypeError, KeyError):  # its Python is not there as text
        text.append(inspect.getsource(sys.modules[operation.launch.__module__]))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


Verdicts = dict[tuple[Conditions, Case], Verdict]


class RaceFile:
    """path: where it is. note: why something of it is not used, or could not be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note: str | None = None

    def read(self) -> Verdicts:
        """Everything that is remembered, oldest first."""
        try:
            return dict(map(_entry, _listed(json.loads(self.path.read_text(encoding="utf-8")))))
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.note = f"{self.path} cannot be read ({error.strerror or error}), so kernels are raced again"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.note = f"{self.path} is damaged ({str(error)[:80]}), so kernels are raced again"
        return {}

    def add(self, verdicts: Mapping[tuple[Conditions, Case], Verdict]) -> None:
        """Write them beside what other processes have written meanwhile."""
        merged = self.read()
        for key, verdict in verdicts.items():
            merged.pop(key, None)
            merged[key] = verdict
        entries = [
            {"conditions": asdict(conditions), "case": plain_case(case), **plain_verdict(verdict)}
            for (conditions, case), verdict in list(merged.items())[-_MOST:]
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as aside:
                aside.write_text(json.dumps({"format": FORMAT, "verdicts": entries}, indent=1), encoding="utf-8")
        except OSError as error:
            self.note = f"races are remembered in this process only: {self.path} cannot be written ({error})"


def _listed(contents: Any) -> list[Any]:
    """Raises ValueError: not a file of this format."""
    if not isinstance(contents, dict) or contents.get("format") != FORMAT or not isinstance(contents["verdicts"], list):
        raise ValueError(f"not format {FORMAT}")
    return contents["verdicts"]


def _entry(plain: dict[str, Any]) -> tuple[tuple[Conditions, Case], Verdict]:
    conditions = Conditions(**{name: str(value) for name, value in plain["conditions"].items()})
    return (conditions, case_of(plain["case"])), verdict_of(plain)
