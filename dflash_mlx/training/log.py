"""What happened in a training: one JSON object per line, and the curves that they make.

Kinds, which `History` reads: "start" (once per process: `step`, `steps` in all, `target`, ...), "step", "evaluation",
"checkpoint" (`step` of what was saved) and "end" (`why`). Loss, `kl` and `accuracy` of a "step" are those among the
`columns` of "start", of the `vocabulary` that is proposed; an "evaluation" is among all of that. Others are kept and
not read. null is a number that was NaN or infinite, or that is not known.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dflash_mlx.errors import DFlashError
from dflash_mlx.files import whole_file

LOG = "log.jsonl"
MOST = 4096  # step records that are kept: a long training has more, and no screen shows them
RECENT = 20  # step records, from which rates are taken: steps differ, the last one alone says little

Record = dict[str, Any]


class LogError(DFlashError):
    """A log is missing, or damaged elsewhere than in its last line."""


class Log:
    """The log in the file `path`, which one process at a time writes.

    A process that is killed leaves at most its last line torn: that line is not read, and gives way to the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, which is on the disk when this returns.

        Args:
            record: numbers, texts, lists and mappings; arrays become lists, NaN and infinity null.
        Raises:
            OSError: it cannot be written. What was written of the line counts as torn.
        """
        line = json.dumps(plain(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        with self.path.open("ab+") as file:
            whole, size = _whole(file)
            if whole < size:
                file.truncate(whole)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    @property
    def finished(self) -> bool:
        """Whether the training ended, and was not only stopped. Raises LogError as `read`."""
        last = self.read()[-1:]
        return bool(last) and (last[0].get("kind"), last[0].get("why")) == ("end", "finished")

    def read(self) -> list[Record]:
        """All whole lines; none if there is no file.

        Raises:
            LogError: a whole line is no JSON object.
        """
        return self.read_from(0)[0] if self.path.exists() else []

    def read_from(self, offset: int) -> tuple[list[Record], int]:
        """The whole lines from byte `offset` on, and the offset behind them.

        Raises:
            OSError: there is no file.
            LogError: a whole line is no JSON object.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            *lines, _ = file.read().split(b"\n")
        return [self._record(line) for line in lines], offset + sum(len(line) + 1 for line in lines)

    def cut(self, step: int) -> None:
        """Drop the lines of later steps than `step`, all of them or, after an error, none.

        Raises:
            OSError: it cannot be written.
            LogError: a whole line is no JSON object.
        """
        if not self.path.exists():
            return
        lines = self.path.read_bytes().split(b"\n")[:-1]
        kept = [line for line in lines if self._record(line).get("step", 0) <= step]
        if len(kept) < len(lines):
            with whole_file(self.path) as aside:
                aside.write_bytes(b"".join(line + b"\n" for line in kept))

    def _record(self, line: bytes) -> Record:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise LogError(
                f"{self.path} has a line that is no JSON object: {line[:60]!r}. Only the last line can be torn by an "
                "interrupt, so the file was changed or the disk is damaged. Delete that line to go on without it."
            )
        return record


class Tail:
    """Reads a log that another process writes, also if that process cuts it."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._offset = 0
        self._inode: int | None = None

    def poll(self) -> tuple[list[Record], bool]:
        """The lines since the last call, and whether the log was replaced, so that earlier ones do not hold.

        Raises:
            OSError, LogError: as `Log.read_from`.
        """
        found = self.log.path.stat()
        replaced = self._inode not in (None, found.st_ino) or found.st_size < self._offset
        self._inode = found.st_ino
        records, self._offset = self.log.read_from(0 if replaced else self._offset)
        return records, replaced


class History:
    """What the records say together: a record of a step that was seen already replaces what came from there on."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.start: Record = {}
        self.steps: list[Record] = []
        self.evaluations: list[Record] = []
        self.checkpoint: Record | None = None
        self.end: Record | None = None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take the next record."""
        match record.get("kind"):
            case "start":
                self.start, self.end = record, None
                _drop(self.steps, record["step"] + 1)
                _drop(self.evaluations, record["step"] + 1)
            case "step":
                _drop(self.steps, record["step"])
                self.steps.append(record)
                if len(self.steps) > MOST:  # every other one of those that are not recent
                    self.steps[: -RECENT - 1] = self.steps[: -RECENT - 1 : 2]
            case "evaluation":
                _drop(self.evaluations, record["step"])
                self.evaluations.append(record)
            case "checkpoint":
                self.checkpoint = record
            case "end":
                self.end = record

    @property
    def step(self) -> int:
        """The last one that is known of."""
        return self.steps[-1]["step"] if self.steps else self.start.get("step", 0)

    @property
    def total(self) -> int | None:
        """Steps of the whole training."""
        return self.start.get("steps")

    @property
    def block_size(self) -> int | None:
        """As the training says it, or else the anchor and the positions whose accuracy is known."""
        if "block_size" in self.start:
            return self.start["block_size"]
        accuracy = next((r["accuracy"] for r in (*self.evaluations[-1:], *self.steps[-1:]) if r.get("accuracy")), None)
        return len(accuracy) + 1 if accuracy else None

    @property
    def columns(self) -> int | None:
        """Tokens that steps are measured among, if that is fewer than are proposed: then they find more right."""
        columns = self.start.get("columns")
        return columns if columns is not None and columns < self.start.get("vocabulary", 0) else None

    @property
    def best(self) -> Record | None:
        """The last evaluation that was the best until then."""
        return next((record for record in reversed(self.evaluations) if record.get("best")), None)

    def rates(self) -> tuple[float | None, float | None]:
        """Blocks per second and seconds per step, of the last `RECENT` records and without evaluations."""
        known = [record for record in self.steps[-RECENT - 1 :] if record.get("seconds") is not None]
        if len(known) < 2:  # then since the beginning
            known.insert(0, {"step": 0, "blocks": 0, "seconds": 0.0})
        first, last = known[0], known[-1]
        seconds, steps = last["seconds"] - first["seconds"], last["step"] - first["step"]
        if seconds <= 0 or steps <= 0:
            return None, None
        blocks = (last.get("blocks") or 0) - (first.get("blocks") or 0)
        return (blocks / seconds if blocks > 0 else None), seconds / steps

    def seconds_left(self) -> float | None:
        """Of training, without evaluations."""
        each = self.rates()[1]
        return None if each is None or self.total is None else max(0, self.total - self.step) * each


def _drop(records: list[Record], step: int) -> None:
    """Those at `step` and later, which are the last ones."""
    while records and records[-1]["step"] >= step:
        records.pop()


def _whole(file: BinaryIO) -> tuple[int, int]:
    """Bytes of the whole lines, and of all."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0, 0
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return size, size
    file.seek(0)
    return file.read().rfind(b"\n") + 1, size


def plain(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value
