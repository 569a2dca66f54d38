"""`dflash-metal doctor`: one place that says what runs on this machine, and why."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_mlx import blas, cpu, demo, environment
from dflash_mlx.__main__ import main
from dflash_mlx.decode import decode
from dflash_mlx.doctor_command import examine, lines
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.race_watch import Raced
from dflash_mlx.layer_state import AppendState
from dflash_mlx.options import Options
from dflash_mlx.request import plan
from dflash_mlx.self_test import TOKENS, answer, random_trial, self_test
from tests.kernels.fake_operation import CASE, M5, Double

ROOT = Path(__file__).parent.parent
README = (ROOT / "dflash_mlx" / "README.md").read_text()


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
    assert main(["doctor", "--no-self-test"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "a model may use",
        "cache      hub: ",
        "cache      dflash-metal: ",
        "dflash_mlx 0.",
        "mlx 0.",
        "mlx-lm 0.",
        "MLX computes on",
        "qmm_small_m",
        "kernels.json",
        "problem    none",
    ):
        assert text in shown


def test_json_is_one_object_whose_keys_are_documented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "converted_folder", lambda: None)
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
    assert main(["doctor", "--no-self-test"]) == 1
    shown = capsys.readouterr().out
    assert "problem    mx.compile is off" in shown and "problem    drafts cannot pay on this CPU" in shown


# The self-test --------------------------------------------------------------------------------------------


def test_twenty_tokens_are_decoded_with_and_without_drafts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the demo is not here, a random pair shows that the engine works; nothing is fetched."""
    monkeypatch.setattr(demo, "converted_folder", lambda: None)
    monkeypatch.setattr(demo, "target_folder", lambda **_: pytest.fail("nothing is to be fetched"))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "self-test  a random pair, with and without drafts: All 20 tokens are the same." in shown


def test_the_random_pair_says_something_and_rejects_what_its_draft_says() -> None:
    """A loop, or a draft that is always right, would hide a broken rollback."""
    trial = random_trial()
    tokens = answer(trial, "plain", "off")
    assert len(tokens) == TOKENS and len(set(tokens)) >= 15
    options = Options(max_tokens=TOKENS, mode="dflash")
    session = plan(trial.model, trial.draft, options).open(())
    for _ in decode(session, trial.ids, max_tokens=TOKENS):
        pass
    assert session.stats.cycles >= 10 and session.stats.drafted > session.stats.accepted


def test_drafts_that_change_the_answer_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one thing that this package promises."""
    monkeypatch.setattr(demo, "converted_folder", lambda: None)
    keep = AppendState.keep
    monkeypatch.setattr(AppendState, "keep", lambda self, count: keep(self, count + (count < 3)))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "problem    decoding with drafts gave other tokens than without" in shown and "--mode plain" in shown


def test_a_self_test_that_cannot_run_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("[metal] out of luck")

    monkeypatch.setattr("dflash_mlx.self_test.demo_trial", broken)
    problems: list[str] = []
    found = self_test("auto", problems)
    assert found["kind"] is None and found["tokens"] == 0
    assert "[metal] out of luck" in problems[0] and "--kernels off" in problems[0]


# Around the models ----------------------------------------------------------------------------------------


def test_the_supported_versions_are_those_that_are_installed_with_the_package() -> None:
    """One table; another in pyproject.toml would drift from it."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, (oldest, newest) in environment.TESTED.items():
        (stated,) = {
            each.split(";")[0].strip().replace("[cpu]", "") for each in required["dependencies"] if _of(each, name)
        }
        assert stated == f"{name}>={oldest}" and environment._parts(oldest) <= environment._parts(newest)
    assert required["requires-python"] == ">=" + ".".join(map(str, environment.PYTHON))


def _of(requirement: str, name: str) -> bool:
    return re.match(r"[\w-]+", requirement)[0] == name  # type: ignore[index]


def test_an_old_version_is_a_problem_and_a_newer_one_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"python": "3.12.1", "mlx": "0.9.12", "mlx-lm": "0.32.2", "transformers": "99.0.1rc2"}
    problems: list[str] = []
    states = {row["name"]: row["state"] for row in environment.tested(made, problems)}
    assert states == {"mlx": "older", "mlx-lm": "tested", "transformers": "newer"}
    assert len(problems) == 1 and "pip install --upgrade 'mlx>=0.32.2'" in problems[0]
    monkeypatch.setattr(environment, "versions", lambda: made)
    monkeypatch.setattr("dflash_mlx.doctor_command.versions", lambda: made)
    shown = "\n".join(lines(examine()))
    assert "transformers 99.0.1rc2 is newer than 5.24.0, with which this version was tested" in shown


def test_another_package_of_our_name_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's dflash-mlx is imported as dflash_mlx too: files of both would be mixed."""
    other = tmp_path / "site"
    for name in ("dflash_mlx/__init__.py", "dflash_mlx-0.2.dist-info/METADATA", "dflash_mlx-0.2.dist-info/RECORD"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
    (other / "dflash_mlx" / "__init__.py").touch()
    (other / "dflash_mlx-0.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dflash-mlx\nVersion: 0.2\n"
    )
    (other / "dflash_mlx-0.2.dist-info" / "RECORD").write_text("dflash_mlx/__init__.py,,\n")
    problems: list[str] = []
    assert environment.foreign(problems) == [] == problems
    monkeypatch.syspath_prepend(str(other))
    (found,) = environment.foreign(problems)
    assert (found["name"], found["version"]) == ("dflash-mlx", "0.2")
    (problem,) = problems
    assert problem.startswith("dflash-mlx 0.2 is installed here too") and "pip uninstall -y dflash-mlx" in problem


def test_a_second_checkout_on_the_path_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dflash_mlx").mkdir()
    (tmp_path / "dflash_mlx" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    problems: list[str] = []
    (found,) = environment.foreign(problems)
    assert found["path"] == str((tmp_path / "dflash_mlx").resolve()) and found["name"] is None
    assert "remove one of the two from the path" in problems[0]


def test_a_full_disk_is_a_problem_where_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that does not exist yet is on the disk of the nearest one that does."""
    monkeypatch.setattr(environment.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(environment, "default_cache_dir", lambda: tmp_path / "ours" / "models")
    (tmp_path / "ours" / "models").mkdir(parents=True)
    (tmp_path / "ours" / "models" / "weights").write_bytes(bytes(1000))
    (tmp_path / "ours" / "models" / "again").symlink_to("weights")
    problems: list[str] = []
    hub, own = environment.caches(problems)
    assert hub["bytes"] == 0 and own["bytes"] == 1000 and own["writable"] and not problems
    full = SimpleNamespace(free=10**9)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda place: full if "ours" in str(place) else hub_free)
    hub_free = SimpleNamespace(free=10**12)
    environment.caches(problems)
    assert len(problems) == 1 and "1.0 GB are free in" in problems[0] and "XDG_CACHE_HOME" in problems[0]


def test_a_name_that_is_no_kernel_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--kernels", "nope"])
    assert "has to be 'auto', 'off', or one or more of accept" in capsys.readouterr().err
