"""A log outlives interrupts: what was written whole is read, nothing else, and a resumed run has one history."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dflash_mlx.training import log as log_module
from dflash_mlx.training.log import MOST, History, Log, LogError, Tail
from tests.training.logged import evaluation, run, start, step


def steps_of(log: Log) -> list[int]:
    return [record["step"] for record in log.read()]


def filled(folder: Path, count: int = 3) -> Log:
    log = Log(folder / "log.jsonl")
    for number in range(1, count + 1):
        log.append({"kind": "step", "step": number})
    return log


@pytest.mark.parametrize(
    "torn", [b'{"kind": "st', b'{"kind": "step", "step": 4', b'{"kind": "step", "step": 4}', b"\xe2\x96"]
)
def test_a_line_torn_by_a_kill_is_neither_read_nor_continued(tmp_path: Path, torn: bytes) -> None:
    """A process died while it wrote. Read as it is, or with the next record glued to it, the log is lost from there."""
    log = filled(tmp_path)
    with log.path.open("ab") as file:
        file.write(torn)
    assert steps_of(log) == [1, 2, 3]
    log.append({"kind": "step", "step": 4, "loss": 1.5})
    assert log.read()[-1] == {"kind": "step", "step": 4, "loss": 1.5}
    assert steps_of(log) == [1, 2, 3, 4]
    assert log.path.read_bytes().count(b"\n") == 4 and torn + b"{" not in log.path.read_bytes()


def test_a_log_that_is_torn_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    """There is no line end to go back to."""
    log = Log(tmp_path / "log.jsonl")
    log.path.write_bytes(b'{"kind"')
    assert log.read() == []
    log.append({"step": 1})
    assert log.path.read_bytes() == b'{"step": 1}\n'


def test_what_is_not_finite_is_null_in_the_log(tmp_path: Path) -> None:
    """json.dumps writes NaN, which no other JSON reader takes; float16 has infinities of its own."""
    log = Log(tmp_path / "log.jsonl")
    shares = np.array([0.5, math.nan, math.inf], dtype=np.float32)
    log.append({"loss": math.nan, "all": {"code": (math.inf, 1)}, "shares": shares, "norm": np.float32(-math.inf)})
    assert log.read() == [{"loss": None, "all": {"code": [None, 1]}, "shares": [0.5, None, None], "norm": None}]
    assert b"NaN" not in log.path.read_bytes() and b"Infinity" not in log.path.read_bytes()


def test_a_line_separator_within_a_text_ends_no_line(tmp_path: Path) -> None:
    """U+2028 is a line end to `splitlines`, but not in a log; JSON escapes the real ones."""
    log = Log(tmp_path / "log.jsonl")
    record = {"kind": "end", "step": 1, "why": "a\u2028b\nc\x85d"}
    log.append(record)
    log.append(record)
    assert log.read() == [record, record]


def test_resuming_drops_what_came_after_the_checkpoint_and_keeps_the_rest_as_it_was(tmp_path: Path) -> None:
    """Steps that are repeated would otherwise be in the log twice."""
    log = filled(tmp_path, 2)
    before = log.path.read_bytes()
    log.append({"kind": "step", "step": 3})
    log.append({"kind": "note"})
    log.append({"kind": "evaluation", "step": 3})
    with log.path.open("ab") as file:
        file.write(b'{"kind": "step", "st')
    log.cut(2)
    assert log.path.read_bytes() == before + b'{"kind": "note"}\n'


def test_a_cut_that_fails_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, or the process is killed, in the middle of it: the log of days must not be half of it."""
    log = filled(tmp_path)
    before = log.path.read_bytes()

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        with whole_file(path) as aside:
            yield aside
            assert path.read_bytes() == before
            raise OSError("disk full")

    whole_file = log_module.whole_file
    monkeypatch.setattr(log_module, "whole_file", full)
    with pytest.raises(OSError, match="disk full"):
        log.cut(1)
    assert log.path.read_bytes() == before and list(tmp_path.iterdir()) == [log.path]


def test_cutting_a_log_that_is_not_there_makes_none(tmp_path: Path) -> None:
    """A run can be stopped before its first line."""
    Log(tmp_path / "log.jsonl").cut(0)
    assert not list(tmp_path.iterdir())


def test_a_damaged_line_in_the_middle_is_refused_by_its_text(tmp_path: Path) -> None:
    """To skip it would show curves with a hole as if they were whole."""
    log = filled(tmp_path)
    log.path.write_bytes(log.path.read_bytes().replace(b'"step": 2}', b'"step": '))
    for use in (log.read, lambda: log.cut(1)):
        with pytest.raises(LogError, match=r"no JSON object.*\"step\": '.*Delete that line"):
            use()
    log.path.write_bytes(b"[1]\n")
    with pytest.raises(LogError, match="no JSON object"):
        log.read()


def test_a_follower_sees_each_line_once_and_starts_again_after_a_cut(tmp_path: Path) -> None:
    """The run was stopped and resumed while somebody looked on."""
    log = filled(tmp_path)
    tail = Tail(log)
    assert [r["step"] for r in tail.poll()[0]] == [1, 2, 3]
    assert tail.poll() == ([], False)
    with log.path.open("ab") as file:
        file.write(b'{"step"')
    assert tail.poll() == ([], False)
    log.append({"step": 4})
    assert tail.poll() == ([{"step": 4}], False)
    log.cut(1)
    log.append({"step": 2, "again": True})
    records, replaced = tail.poll()
    assert replaced and [r["step"] for r in records] == [1, 2]


def test_the_history_of_a_resumed_run_has_every_step_once() -> None:
    """The process that resumes logs steps and an evaluation again that the first one had shown already."""
    history = History([start(), step(1), step(2), evaluation(2, 3.0, True), step(3), {"kind": "end", "step": 3}])
    assert history.end and history.best
    for record in (start(1), step(2, loss=9.0)):
        history.add(record)
    assert [(r["step"], r["loss"]) for r in history.steps] == [(1, 5.99), (2, 9.0)]
    assert history.end is None and history.best is None and not history.evaluations
    history.add(step(2, loss=8.0))
    assert [(r["step"], r["loss"]) for r in history.steps] == [(1, 5.99), (2, 8.0)]
    history.add(evaluation(2, 1.5, True))
    history.add(evaluation(2, 1.75, True))
    assert [r["tokens_per_cycle"] for r in history.evaluations] == [1.75]


def test_rates_are_of_the_last_steps_and_need_two_of_them() -> None:
    """A run that got slower says when it ends at its present speed. 64 blocks in 2 s, then in 8 s."""
    history = History([start(), step(1)])
    assert history.rates() == (32.0, 2.0) and history.seconds_left() == 399 * 2.0
    for number in range(2, 101):
        history.add(step(number))
    for number in range(101, 131):
        history.add(step(number, seconds=200.0 + 8.0 * (number - 100)))
    assert history.rates() == (8.0, 8.0) and history.seconds_left() == 270 * 8.0
    assert History([start(), step(1, seconds=None)]).rates() == (None, None)
    assert History([{"kind": "start", "step": 0}, step(1)]).seconds_left() is None


def test_a_long_training_does_not_fill_the_memory_with_its_steps() -> None:
    """Days of steps are shown live; the oldest are thinned out, the first and the recent ones stay."""
    history = History([start(steps=10**6)])
    for number in range(1, 3 * MOST):
        history.add({"kind": "step", "step": number})
    numbers = [record["step"] for record in history.steps]
    assert len(numbers) <= MOST and numbers[0] == 1 and numbers == sorted(set(numbers))
    assert numbers[-20:] == list(range(3 * MOST - 20, 3 * MOST))


def test_the_block_size_and_the_best_evaluation_come_from_the_records() -> None:
    """An anchor and three positions; the evaluation of step 300 is worse than that of 200."""
    history = History(json.loads(json.dumps(run())))
    assert history.block_size == 4 and history.step == 300 and history.total == 400
    assert history.best is history.evaluations[1] and history.best["step"] == 200
    assert History([start(), step(1, accuracy=None)]).block_size is None
    assert History([start() | {"block_size": 8}, step(1)]).block_size == 8
