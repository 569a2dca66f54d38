"""A record is written whole, read back as it was, and explained; the card of a machine never fails."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx import bench
from dflash_mlx.bench import machine, record
from dflash_mlx.bench.form import BenchError
from dflash_mlx.bench.measure import measure
from dflash_mlx.bench.record import Record, from_json, load, save, to_json
from dflash_mlx.bench.statistics import summarise
from tests.bench import scripted
from tests.bench.scripted import FakeClock, Scripted, dflash, prompt


@pytest.fixture
def made() -> Record:
    clock = FakeClock()
    arms = [Scripted(clock), dflash(clock)]
    prompts = [prompt("a"), prompt("b", "story", 200)]
    found = measure(scripted.record("stock", "dflash"), arms, prompts)
    found.run = replace(found.run, conditions={"before": machine.conditions()}, machine={"chip": "x", "cores": 2})
    return found


def test_a_record_is_read_back_as_it_was_written(made: Record, tmp_path: Path) -> None:
    """Reports are made from files: what a file loses no report can show."""
    save(made, tmp_path / "run.json")
    again = load(tmp_path / "run.json")
    assert again == made
    assert again.measured[0].tokens == made.measured[0].tokens and again.closing == made.closing
    assert summarise(again) == made.summary


def test_an_answer_stands_once_however_often_it_was_given(made: Record) -> None:
    """Eight requests gave one text: a record of a whole benchmark would be too large to commit."""
    value = to_json(made)
    (answer,) = value["answers"].values()
    assert answer == {"tokens": list(range(100, 109)), "text": " a" * 9}
    assert {each["output_sha256"] for each in value["measured"]} == set(value["answers"])
    assert all("tokens" not in each and "text" not in each for each in [*value["measured"], value["closing"]])


def test_what_follows_is_written_for_readers_by_its_name(made: Record) -> None:
    """Somebody else's script reads these keys."""
    row = next(each for each in to_json(made)["measured"] if each["arm"] == "dflash")
    found = row["derived"]
    assert (found["ttft_s"], found["decode_tps"], found["mlx_lm_tps"], found["request_tps"]) == (2.5, 4.0, 6.0, 2.25)
    assert found["cycle_s"] == {"n": 3, "p50": None, "p95": None}
    assert found["acceptance"]["mean_acceptance_length"] == 1 + 5 / 3


def test_prompts_are_told_apart_by_the_hash_of_their_ids(made: Record) -> None:
    """Two runs are on the same input if these agree; the hash is sha256 of "0 1 2 ... 99"."""
    import hashlib

    expected = hashlib.sha256(" ".join(str(i) for i in range(100)).encode()).hexdigest()
    assert to_json(made)["prompts"][0]["sha256"] == expected == made.measured[0].prompt_sha256


def test_unknown_is_null_and_never_infinite(made: Record, tmp_path: Path) -> None:
    """JSON has no NaN: most readers fail on it."""
    made.measured[0] = replace(made.measured[0], peak_memory_gb=float("nan"))
    with pytest.raises(ValueError, match="JSON compliant"):
        save(made, tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_a_newer_record_is_refused(made: Record) -> None:
    """It may mean something else by the same name."""
    with pytest.raises(BenchError, match="has schema 2, and this version of dflash_mlx reads 1 to 1"):
        from_json(to_json(made) | {"schema": record.SCHEMA + 1})


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda v: v | {"kind": "dflash-demo-2"}, "no record of a benchmark: `kind` is 'dflash-demo-2'"),
        (lambda v: [], "`kind` is 'list'"),
        (lambda v: v | {"schema": None}, "has schema None"),
        (lambda v: v | {"run": {k: w for k, w in v["run"].items() if k != "pair"}}, "`record.run` .* has no `pair`"),
        (lambda v: v | {"complete": "yes"}, "`record.complete` of the record holds 'yes', where bool belongs"),
        (lambda v: v | {"measured": [v["measured"][0] | {"end_s": "6"}]}, r"`record.measured\[0\].end_s`"),
    ],
    ids=["kind", "list", "schema", "missing", "type", "deep"],
)
def test_a_damaged_record_is_refused_with_the_place(made: Record, spoil: Any, message: str) -> None:
    """Rather than shown with what is left of it."""
    with pytest.raises(BenchError, match=message):
        from_json(spoil(to_json(made)))


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    """A truncated download, say."""
    (tmp_path / "run.json").write_text('{"kind": "dflash-ben')
    with pytest.raises(BenchError, match=r"run\.json is not JSON"):
        load(tmp_path / "run.json")


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_key_of_the_schema_is_explained(made: Record) -> None:
    """README.md of the folder is the schema: a key that is not in it is not for others to rely on."""
    text = (Path(bench.__file__).parent / "README.md").read_text()
    explained = set(re.findall(r"`([\w.-]+)`", text))
    value = to_json(made)
    data = {*value["answers"], *value["run"]["arms"], "code", "story", "before", *value["run"]["machine"]}
    numbers = {str(i) for i in range(16)}
    assert keys_of(value) - data - numbers <= explained
    assert {*machine.card(), *machine.conditions()} <= explained
    assert f"schema {record.SCHEMA}" in text


# The card of the machine.

BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=22806627)\t81%; discharging; 5:03 remaining present: true
"""
SETTINGS = """System-wide power settings:
Currently in use:
 standby              1
 {}
 womp                 1
"""
COOL = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
HOT = """2026-04-11 10:00:00 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 62
"""


def test_what_a_mac_says_of_its_power_is_read() -> None:
    """A run on battery, or in low-power mode, is not comparable."""
    assert machine.power_source(BATTERY) == "Battery Power"
    assert machine.power_source(BATTERY.replace("Battery Power", "AC Power")) == "AC Power"
    assert machine.low_power_mode(SETTINGS.format("lowpowermode         1")) is True
    assert machine.low_power_mode(SETTINGS.format("powermode            2")) is False
    assert machine.thermal_pressure(COOL) == "nominal"
    assert machine.thermal_pressure(HOT) == "CPU_Speed_Limit 62%"
    assert machine.thermal_pressure("Thermal Warning Level = 2") == "warning level 2"
    displays = {"SPDisplaysDataType": [{"_name": "Apple M5 Max", "sppci_cores": "40"}]}
    assert machine.gpu_cores(json.dumps(displays)) == 40


def test_what_a_mac_does_not_say_is_null() -> None:
    """A wording that Apple changes must not look like good news."""
    readers = (machine.power_source, machine.low_power_mode, machine.thermal_pressure, machine.gpu_cores)
    assert all(reader(text) is None for reader in readers for text in (None, ""))
    assert machine.power_source("something else") is None and machine.gpu_cores("{}") is None
    assert machine.low_power_mode(SETTINGS.format("sleep 1")) is None


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), subprocess.TimeoutExpired("pmset", 10)])
def test_a_card_is_made_where_nothing_can_be_asked(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sandbox of a Mac, or without git: a benchmark does not end because of its card."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(machine.subprocess, "run", refuse)
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    card, conditions = machine.card(), machine.conditions()
    assert card["chip"] is None and card["commit"] is None and card["gpu_cores"] is None and card["mlx"]
    assert [conditions[k] for k in ("power_source", "low_power_mode", "thermal_pressure")] == [None] * 3


def test_elsewhere_only_a_mac_s_lines_are_null() -> None:
    """What the README's tables show is there on any machine."""
    card, conditions = machine.card(), machine.conditions()
    shown = ("date", "cores", "memory_gb", "system", "device", "python", "mlx", "mlx-lm", "commit")
    assert all(card[key] for key in shown)
    if machine.sys.platform != "darwin":
        assert card["gpu_cores"] is None and conditions["power_source"] is None
