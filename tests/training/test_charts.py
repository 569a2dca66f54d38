"""The report shows the log, all of it and nothing else: the same log is drawn to the same bytes."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.training import charts
from dflash_mlx.training.figure import figure
from dflash_mlx.training.log import History, Log
from tests.training.logged import evaluation, run, start, step


@pytest.fixture
def drawing() -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")


def chart(records: list[dict[str, Any]], title: str) -> Any:
    """The one whose title begins so."""
    (axes,) = (axes for axes in figure(History(records)).axes if axes.get_title(loc="left").startswith(title))
    return axes


def lines(records: list[dict[str, Any]], title: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each line of a chart, by the line's label or number."""
    found: dict[str, list[tuple[float, float]]] = {}
    for number, line in enumerate(chart(records, title).lines):
        label = str(line.get_label())
        points = [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
        found[f"{number}" if label.startswith("_") else label] = points
    return found


@pytest.mark.usefixtures("drawing")
def test_the_report_has_labelled_axes_every_series_and_the_best_evaluation(tmp_path: Path) -> None:
    """Read from the SVG, in which text is text. Names with dollars and brackets are not typeset."""
    written = charts.write(run(), tmp_path)
    assert written == [tmp_path / "report.svg", tmp_path / "report.png"]
    svg = written[0].read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert "a draft for acme/[bold]tiny$1$, block size 4, best evaluation at step 200: 2.11 tokens per cycle" in texts
    for said in ("step", "loss", "learning rate", "share of right tokens", "tokens per cycle (block size 4)"):
        assert said in texts, said
    for series in ("each step", "smoothed", "1", "2", "3", "code", "chat", "all"):
        assert series in texts, series
    assert written[1].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("drawing")
def test_the_lines_are_the_numbers_of_the_log() -> None:
    """What a chart shows is looked up in the records."""
    records = run()
    (smoothed, raw) = (lines(records, "loss")[name] for name in ("smoothed", "each step"))
    assert raw == [(r["step"], r["loss"]) for r in records if r["kind"] == "step"]
    assert smoothed[0] == raw[0] and smoothed[150][1] == pytest.approx(raw[150][1])  # a straight line stays one
    acceptance = list(lines(records, "acceptance").values())
    assert acceptance[:4] == [
        [(100, 1.25), (200, pytest.approx(1.86)), (300, pytest.approx(1.77))],
        [(100, 1.75), (200, pytest.approx(2.36)), (300, pytest.approx(2.27))],
        [(100, 1.50), (200, 2.11), (300, 2.02)],
        [(200, 2.11)],
    ]
    assert [text.get_text() for text in chart(records, "acceptance").texts] == ["chat", "all", "code"]
    assert list(lines(records, "accuracy").values())[1] == [(100, 0.5), (200, 0.5), (300, 0.5)]
    assert {y for _, y in lines(records, "learning rate")["0"]} == {6e-4}
    for title in ("loss", "accuracy", "acceptance", "learning rate"):
        assert [(200, 0), (200, 1)] in lines(records, title).values(), "the best evaluation is marked in every chart"


@pytest.mark.usefixtures("drawing")
def test_the_same_log_is_drawn_to_the_same_bytes_on_another_day_in_another_style(tmp_path: Path) -> None:
    """A report under version control changes only if the log does: no dates, no random ids, no style of the user."""
    folders = [tmp_path / "a", tmp_path / "b"]
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 7\nsvg.fonttype: path\nfont.size: 20\n")
    for number, folder in enumerate(folders):
        folder.mkdir()
        log = Log(folder / "log.jsonl")
        for record in run():
            log.append(record)
        environment = {"PYTHONHASHSEED": str(number + 1), "SOURCE_DATE_EPOCH": str(number * 10**9)}
        environment |= {"MATPLOTLIBRC": str(tmp_path)} if number else {}
        code = f"from dflash_mlx.training.charts import main; raise SystemExit(main([{str(folder)!r}]))"
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | environment, capture_output=True)
    for name in ("report.svg", "report.png"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


@pytest.mark.usefixtures("drawing")
def test_drawing_leaves_the_settings_of_the_process_alone_and_opens_no_window(tmp_path: Path) -> None:
    """Also for somebody who draws in the same notebook; pyplot would look for a display."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    charts.write(run(), tmp_path)
    assert dict(matplotlib.rcParams) == before
    code = (
        f"from dflash_mlx.training.charts import write; import sys, pathlib; write([], pathlib.Path({str(tmp_path)!r}))"
    )
    code += "; assert 'matplotlib.pyplot' not in sys.modules and 'tkinter' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"DISPLAY": "", "MPLBACKEND": "TkAgg"})


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize(
    "records",
    [
        [],
        [start()],
        [start(), step(1, loss=None, accuracy=None, lr=None)],
        [start(), step(1, accuracy=[None, 0.5, None])],
        [start(), evaluation(0, 1.0, True)],
        [start(), {**evaluation(0, 1.0, True), "tokens_per_cycle": None, "accuracy": None, "categories": {}}],
        [start(), evaluation(5, 1.0, True) | {"categories": {"code": {"tokens_per_cycle": None}}}],
    ],
)
def test_a_short_or_unfinished_run_is_drawn_as_far_as_it_is_known(
    tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    """A run that was stopped after one step has a report as well."""
    assert len(charts.write(records, tmp_path)) == 2


@pytest.mark.usefixtures("drawing")
def test_a_step_without_a_loss_is_a_gap_and_not_a_zero() -> None:
    """Its neighbours are drawn, and their mean does not count it."""
    records = [start(), *(step(n, loss=None if n == 5 else 4.0) for n in range(1, 10))]
    (smoothed, raw) = (lines(records, "loss")[name] for name in ("smoothed", "each step"))
    assert math.isnan(raw[4][1]) and [y for _, y in raw if y == y] == [4.0] * 8
    assert {round(y, 9) for _, y in smoothed} == {4.0}


@pytest.mark.usefixtures("drawing")
def test_a_long_run_is_drawn_with_few_points_and_to_its_end(tmp_path: Path) -> None:
    """An SVG with every number of a million would not open."""
    records = [start(), *(step(n, positions=15) for n in range(1, 4001))]
    charts.write(records, tmp_path)
    assert (tmp_path / "report.svg").stat().st_size < 600_000
    raw = lines(records, "loss")["each step"]
    assert len(raw) <= 1001 and raw[-1][0] == 4000


@pytest.mark.usefixtures("drawing")
def test_names_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    """Categories that end at the same value are both named, inside the chart."""
    records = [start(), evaluation(1, 2.0, True)]
    for number, each in enumerate(sorted("abcdefgh")):
        records[1]["categories"][each] = {"tokens_per_cycle": (2.25, 1.75)[number % 2] + number / 1000}
    axes = chart(records, "acceptance")
    low, high = axes.get_ylim()
    places = sorted(text.xy[1] for text in axes.texts)
    assert len(places) == 11 and low <= places[0] and places[-1] <= high
    assert all(b - a > (high - low) * 0.05 for a, b in pairwise(places))


def test_without_matplotlib_a_line_says_what_to_install_and_nothing_else_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training of days ends well without its pictures, and they can be drawn later."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told: list[str] = []
    assert charts.write(run(), tmp_path, tell=told.append) == [] and not list(tmp_path.iterdir())
    (line,) = told
    assert "pip install 'dflash-metal[report]'" in line and f"dflash_mlx.training.charts {tmp_path}" in line
    assert charts.write(run(), tmp_path) == [] and capsys.readouterr().err == line + "\n"


def test_a_folder_without_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty report would look like a training that did nothing."""
    assert charts.main([str(tmp_path)]) == 1
    assert "There is no" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_training_does_not_import_matplotlib() -> None:
    """It is an extra, and takes a second."""
    code = (
        "import sys, dflash_mlx.training.charts, dflash_mlx.training.progress; assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("drawing")
def test_accuracy_among_few_tokens_says_so() -> None:
    """It is higher than that of a draft that chooses among all."""
    few = {"columns": 64, "vocabulary": 500}
    title = "accuracy by position, teacher-forced (faint: in training"
    assert chart([start() | few, step(1)], "accuracy").get_title(loc="left") == f"{title}, among 64 tokens)"
    for whole in ({}, {"columns": 500, "vocabulary": 500}):
        assert chart([start() | whole, step(1)], "accuracy").get_title(loc="left") == f"{title})"
