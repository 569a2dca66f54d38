"""`dflash-metal doctor`: one place that says what runs on this machine, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_mlx import blas, cpu
from dflash_mlx.__main__ import main
from dflash_mlx.doctor_command import examine, lines
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.race_watch import Raced
from tests.kernels.fake_operation import CASE, M5, Double

README = (Path(__file__).parent.parent / "dflash_mlx" / "README.md").read_text()


@pytest.fixture(autouse=True)
def own_blas_again() -> Iterator[None]:
    """The doctor binds a BLAS as `load` does, and tests of equal bits in the same process run without one."""
    yield
    blas.release()


def _texts(value: object) -> list[str]:
    """All keys of a JSON value, but those that name a size of a case or a number of rows."""
    if isinstance(value, dict):
        return [key for name, part in value.items() for key in (name, *([] if name == "races" else _texts(part)))]
    return [key for part in value for key in _texts(part)] if isinstance(value, list) else []


def test_the_doctor_names_everything_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who reports a problem pastes this."""
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "dflash_mlx 0.",
        "mlx 0.",
        "mlx-lm 0.",
        "MLX computes on",
        "qmm_small_m",
        "kernels.json",
        "problem    none",
    ):
        assert text in shown


def test_json_is_one_object_whose_keys_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    documented = README.split("## Keys of `doctor --json`")[1].split("## ")[0]
    assert {key for key in _texts(found) if f"`{key}`" not in documented} == set()
    assert found["problems"] == [] and found["versions"]["mlx"]
    assert {operation["name"] for operation in found["kernels"]["operations"]} > {"accept", "sdpa_rows"}


def _operation(path: Path, double: Double, wish: str = "auto", **gate: object) -> tuple[dict, str]:
    made = double.gate(path, **gate)
    found = examine(wish, made)
    (operation,) = found["kernels"]["operations"]
    return operation, "\n".join(lines(found))


def test_every_operation_says_what_it_uses_and_why(tmp_path: Path) -> None:
    path, narrow = tmp_path / "kernels.json", replace(CASE, dtype="float16")
    operation, shown = _operation(path, Double())
    assert operation["uses"] == "stock" and "not raced here yet" in operation["reason"]
    Double().gate(path).prepare([CASE])
    operation, shown = _operation(path, Double())
    assert operation["uses"] == "kernel" and operation["reason"] is None
    assert (
        "double        kernel (1 of 1 raced shapes)" in shown and "bfloat16 width 32: 2.00x at 8, 2.00x at 16" in shown
    )
    Double(kernel_s=lambda rows: 1e-3).gate(path).prepare([narrow])
    operation, shown = _operation(path, Double())
    assert "kernel (1 of 2 raced shapes)" in shown and "1.00 times as fast as stock at 8 rows, below 1.15" in shown


def test_a_kernel_that_hung_once_is_on_stock_with_all_its_shapes(tmp_path: Path) -> None:
    """Those that won are not what runs."""
    path = tmp_path / "kernels.json"
    Double().gate(path).prepare([CASE])
    wide = replace(CASE, sizes=(("width", 64),))
    hung = Verdict("its work took more than 1 s", scope="kernel")
    Double().gate(path, race=lambda cases: (Raced(case, hung) for case in cases)).prepare([wide])
    operation, shown = _operation(path, Double())
    assert (operation["uses"], operation["reason"]) == ("stock", hung.reason)
    assert "kernel (" not in shown and {race["reason"] for race in operation["races"]} == {hung.reason}


def test_shapes_that_are_not_for_this_chip_are_left_out(tmp_path: Path) -> None:
    """As in the notes: they were raced by an older version, and no request uses what they won."""
    path = tmp_path / "kernels.json"
    Double().gate(path).prepare([CASE])
    newer = {"double": replace(Double().operation, newest=lambda case: 14)}
    operation, shown = _operation(path, Double(), operations=newer)
    assert operation["uses"] == "stock" and operation["races"] == []
    assert "not raced here yet: `generate` and `chat` do it" in shown


def test_rules_are_said_before_races(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    operation, shown = _operation(path, Double(matrix=True), chip=M5)
    assert operation["reason"] == "matrix kernels start closed on generation 17 (M5) and newer" in shown
    operation, _ = _operation(path, Double(), "off")
    assert (operation["uses"], operation["reason"]) == ("stock", "kernels are off")


def test_a_damaged_file_of_races_is_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    path.write_text("{")
    _, shown = _operation(path, Double())
    assert "is damaged" in shown and "problem    none" in shown


def test_what_has_to_be_repaired_is_a_problem_and_sets_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that installs this asks the status."""
    monkeypatch.delenv("DFLASH_BLAS", raising=False)
    slow = replace(blas.status(), active=False, fast=False, note="MLX keeps its own BLAS: none was found.")
    monkeypatch.setattr(blas, "bind", lambda: slow)
    monkeypatch.setattr(cpu, "ensure_compile", lambda: "mx.compile is off, its C++ compiler does not work here.")
    monkeypatch.setattr(
        "mlx.core.default_device", lambda: __import__("mlx.core").core.Device(__import__("mlx.core").core.cpu)
    )
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "problem    mx.compile is off" in shown and "problem    drafts cannot pay on this CPU" in shown


def test_a_name_that_is_no_kernel_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--kernels", "nope"])
    assert "has to be 'auto', 'off', or one or more of accept" in capsys.readouterr().err
