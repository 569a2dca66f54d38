"""The kernels' benchmark, on one operation: it checks first, counts, and says what it could not measure."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from bench import kernels, overhead
from dflash_mlx.kernels.registry import OPERATIONS
from tests.kernels.checks import SLACK, simulator


def test_every_operation_has_a_size_to_count_and_one_to_time():
    """A new kernel without them would be missing from the table, and nobody would see it."""
    assert kernels.SMALL.keys() == kernels.LAYER.keys() == OPERATIONS.keys()


@pytest.mark.skipif(mx.metal.is_available(), reason="on Metal it times, which is for the bench and not for a test")
def test_bytes_are_counted_and_times_are_not_invented(tmp_path, capsys):
    """Without Metal there is no time; a number from a CPU would be taken for one of the kernel."""
    simulator()
    path = tmp_path / "kernels.json"
    assert kernels.main(["accept", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert kernels.NO_METAL in printed
    assert printed.count("accept ") == 2
    result = json.loads(path.read_text())
    assert result["notes"] == [kernels.NO_METAL]
    assert [row["rows"] for row in result["rows"]] == list(OPERATIONS["accept"].widths(kernels.SMALL["accept"]))
    for row in result["rows"]:
        assert row["wrong"] is None
        assert row["timed"] is None
        assert 0 < row["counted"]["times_floor"] <= SLACK


def test_the_clock_compares_kernel_and_stock_step_by_step(monkeypatch):
    """The code that only a Mac runs, with the simulator in place of Metal: what it says is per step, and a ratio."""
    monkeypatch.setattr(kernels, "on_metal", simulator())
    monkeypatch.setattr(kernels, "ROUNDS", 1)
    seconds = iter(range(100))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: float(next(seconds)))
    row = kernels.timed(OPERATIONS["accept"], kernels.SMALL["accept"], 8)
    assert row["speedup"] == 1.0
    per_step = 1e6 / row["copies"]
    assert row["us"] == {"stock": per_step, "kernel": per_step}
    assert row["range_us"]["kernel"] == [per_step, per_step]


def test_every_class_of_rows_has_its_lines(monkeypatch):
    """An operation that opens by classes is not described by one of them."""
    monkeypatch.setattr(kernels, "_wrong", lambda *arguments: None)
    monkeypatch.setattr(kernels, "counted", lambda *arguments: None)
    monkeypatch.setattr(kernels, "timed", lambda *arguments: None)
    for name in ("qmm_small_m", "lm_head_topk"):
        assert [row["rows"] for row in kernels.measure(OPERATIONS[name])] == [2, 4, 5, 8, 9, 16]


def test_a_name_that_is_none_is_said(capsys):
    """A typing mistake must not look like a bench of nothing that passed."""
    with pytest.raises(SystemExit) as caught:
        kernels.main(["sdpa"])
    assert caught.value.code == 2
    assert "sdpa_rows" in capsys.readouterr().err


def test_a_wrong_kernel_fails_the_bench(monkeypatch, capsys):
    """The check comes first: how fast a wrong kernel is does not matter."""
    monkeypatch.setattr(kernels, "why_wrong", lambda *arguments: "it is wrong")
    monkeypatch.setattr(kernels, "counted", lambda *arguments: None)
    monkeypatch.setattr(kernels, "_simulator", lambda: kernels.on_metal)  # which is not called
    assert kernels.main(["accept", "accept"]) == 1
    assert capsys.readouterr().out.count("it is wrong") == 2, "one line per width"


def test_a_kernel_is_named_before_it_runs(monkeypatch, capsys):
    """Nothing here ends one that hangs: who interrupts it has to know which it was."""

    def measure(operation):
        assert capsys.readouterr().err == f"{operation.name} ...\n"
        return []

    monkeypatch.setattr(kernels, "measure", measure)
    assert kernels.main(["accept", "sdpa_rows"]) == 0


def test_a_bench_of_no_rounds_is_refused(capsys):
    """It would warm up for a minute, and then have no medians."""
    with pytest.raises(SystemExit, match="2"):
        overhead.main(["--rounds", "0"])
    assert "--rounds has to be 1 or more, got 0" in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_does_not_hide_the_others(monkeypatch, capsys):
    """Likely on the first Mac: Apple's compiler has not seen these sources."""

    def refused(operation, *arguments):
        if operation.name == "accept":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")

    monkeypatch.setattr(kernels, "why_wrong", refused)
    monkeypatch.setattr(kernels, "counted", lambda *arguments: None)
    monkeypatch.setattr(kernels, "timed", lambda *arguments: None)
    monkeypatch.setattr(kernels, "_simulator", lambda: kernels.on_metal)
    assert kernels.main(["accept", "sdpa_rows"]) == 1
    printed = capsys.readouterr().out
    assert (
        "it failed here (RuntimeError: [metal::Device] Unable" in printed
        and "sdpa_rows       8 rows | right" in printed
    )


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    """On a Mac minutes would be lost."""
    monkeypatch.setattr(kernels, "measure", lambda operation: pytest.fail("it measured first"))
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["accept", "--json", str(tmp_path / "none" / "kernels.json")])
    assert "cannot be written: No such file" in capsys.readouterr().err
