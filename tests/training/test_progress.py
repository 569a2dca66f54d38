"""What a training shows is what its log says: in a panel on a terminal, in lines elsewhere, and to who looks on."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_mlx.training import progress as progress_module
from dflash_mlx.training import watch as watch_module
from dflash_mlx.training.log import Log, LogError
from dflash_mlx.training.panel import duration, sparkline
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.watch import main, watch
from tests.training.logged import evaluation, run, start, step

CHECKPOINT = {"kind": "checkpoint", "step": 280}


def terminal(width: int = 80, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=width, height=24, record=True,
                   **{"color_system": "standard", "legacy_windows": False} | options)  # fmt: skip


def lines_of(records: list[dict[str, Any]], **options: Any) -> list[str]:
    """The panel, drawn once."""
    console = terminal(**options)
    progress = Progress("runs/a/checkpoint", console=console)
    progress.show_past(records)
    console.print(progress.board)
    return console.export_text().splitlines()


def test_the_panel_at_eighty_columns_has_the_numbers_of_the_log() -> None:
    """Whoever looks at the screen sees the run that is logged; a panel of 24 rows is not cut off."""
    lines = lines_of([*run(), CHECKPOINT])
    text = "\n".join(lines)
    assert len(lines) <= 24 and all(len(line) == 80 for line in lines)
    for said in (
        "training a draft for acme/[bold]tiny$1$",
        "step 300 of 400",
        "3 min left",
        "epoch 3.00",
        "32 blocks/s",
        "learning rate 6.00e-04",
        "gradient norm 0.75",
        "3.000 to 5.990",
        "2.02 tokens per cycle at step 300 · best 2.11 at step 200",
        "checkpoint of step 280 in runs/a/checkpoint",
        "Ctrl-C stops after this step and saves it; --resume goes on from there.",
    ):
        assert said in text, said
    rows = {line.strip("│ ").split("  ")[0]: line.strip("│ ").split() for line in lines}
    assert rows["loss"][1] == "3.000"
    assert rows["accuracy, %"][2:] == ["1", "2", "3"]
    assert rows["training"][1:] == ["30", "15", "10"] and rows["held out"][2:] == ["50", "25", "17"]
    assert rows["code"] == ["code", "2.27", "2.36", "chat", "1.77", "1.86"]
    assert any(line.strip("│ ").split() == ["▅▅", "▃▃", "▂▂"] for line in lines)


def test_a_falling_loss_is_drawn_falling() -> None:
    """From the left to the right, all steps together."""
    (line,) = (line for line in lines_of(run()) if "loss" in line)
    bars = [char for char in line if "▁" <= char <= "█"]
    assert bars == sorted(bars, reverse=True) and bars[0] == "█" and bars[-1] == "▁" and len(bars) > 30


@pytest.mark.parametrize("options", [{"no_color": True}, {"color_system": None}])
def test_without_colours_the_panel_says_the_same(options: dict[str, Any]) -> None:
    """NO_COLOR: shapes carry the meaning. What is not done of the bar is empty then."""
    lines, coloured = lines_of(run(), **options), lines_of(run())
    assert lines[2:] == coloured[2:] and lines[1].count("━") == 76 * 300 // 400
    console = terminal(**options)
    console.print(Progress("c", console=console).board)
    assert not [code for code in ("\x1b[3", "\x1b[9", ";3", "38;") if code in console.file.getvalue()]


def test_the_panel_uses_no_colour_that_a_light_or_dark_terminal_hides() -> None:
    """Only magenta of the sixteen, dim, bold, and bright black for what is not done yet."""
    console = terminal(color_system="truecolor")
    progress = Progress("c", console=console)
    progress.show_past(run())
    console.print(progress.board)
    codes = {part for code in console.file.getvalue().split("\x1b[")[1:] for part in code.split("m")[0].split(";")}
    assert codes <= {"0", "1", "2", "35", "90"}


@pytest.mark.parametrize("width", [24, 40, 60, 200])
def test_a_panel_of_any_width_breaks_no_line(width: int) -> None:
    """More positions than there is room for are counted, not silently left out."""
    records = [start(), step(1, positions=15), evaluation(1, 2.5, True, positions=15)]
    lines = lines_of(records, width=width)
    assert all(len(line) == width for line in lines)
    fit = (width - 4 - 13) // 4
    assert any("more" in line for line in lines) == (fit < 15)
    assert len(lines) == 17 + (fit < 15) + (width < 30)  # then the categories are one below the other
    if width >= 40:
        assert "2.50 tokens per cycle" in "\n".join(lines)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [start()],
        [start(), step(1, loss=None, accuracy=None, grad_norm=None, kl=None)],
        [start(), step(1, accuracy=[0.5, None])],
        [start(), {"kind": "evaluation", "step": 0, "accuracy": None, "tokens_per_cycle": None, "categories": None}],
        [{"kind": "start", "step": 0}, {"kind": "step", "step": 1}, {"kind": "news"}],
    ],
)
def test_what_is_not_known_is_a_question_mark_and_stops_no_training(records: list[dict[str, Any]]) -> None:
    """A skipped step has no loss; days of training must not end because of a display."""
    assert "?" in "\n".join(lines_of(records)) or records == [start(), step(1, accuracy=[0.5, None])]
    stream = io.StringIO()
    with Progress("c", console=Console(file=stream)) as progress:
        for record in records:
            progress.show(record)
    assert "None" not in stream.getvalue() and "nan" not in stream.getvalue()


def test_steps_faster_than_the_eye_are_not_drawn_but_the_last_panel_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays on the screen, also after an error."""
    monkeypatch.setattr(progress_module, "_PAUSE", 1e9)
    console = terminal()
    with pytest.raises(ZeroDivisionError), Progress("c", console=console) as progress:
        for record in run():
            progress.show(record)
        progress.say("a [note] above")
        progress.show(step(301))
        _ = 1 // 0
    text = console.export_text()
    assert "a [note] above" in text
    last = text[text.rindex("training a draft for") :]
    assert "step 301 of 400" in last and "2.02 tokens per cycle" in last
    assert "step 300 of" in text and "step 299 of" not in text


def test_without_a_terminal_there_is_a_line_every_n_steps_and_one_per_evaluation() -> None:
    """A log of a CI job has neither escape codes nor a line per step."""
    stream = io.StringIO()
    with Progress("c", console=Console(file=stream), every=100) as progress:
        for record in [*run(), CHECKPOINT, {"kind": "end", "step": 300, "why": "interrupted"}]:
            progress.show(record)
    assert stream.getvalue().splitlines() == [
        "training from step 0 to 400",
        "step 1/400, epoch 0.01, loss 5.990, accuracy 0 0 0 %, learning rate 6.00e-04, 32 blocks/s, 13 min left",
        "evaluation at step 100: 1.50 tokens per cycle, the best so far (code 1.75, chat 1.25), accuracy 50 25 17 %",
        "step 101/400, epoch 1.01, loss 4.990, accuracy 10 5 3 %, learning rate 6.00e-04, 32 blocks/s, 10 min left",
        "evaluation at step 200: 2.11 tokens per cycle, the best so far (code 2.36, chat 1.86), accuracy 50 25 17 %",
        "step 201/400, epoch 2.01, loss 3.990, accuracy 20 10 7 %, learning rate 6.00e-04, 32 blocks/s, 7 min left",
        "evaluation at step 300: 2.02 tokens per cycle (code 2.27, chat 1.77), accuracy 50 25 17 %",
        "ended at step 300: interrupted",
    ]


def test_a_resumed_run_continues_the_curve_without_printing_old_lines() -> None:
    """What was logged before is drawn, and not said again."""
    stream = io.StringIO()
    with Progress("c", console=Console(file=stream)) as progress:
        progress.show_past(run())
        progress.show(start(300))
        progress.show(step(301))
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "training from step 300 to 400",
        "step 301/400",
    ]
    assert len(progress.board.history.steps) == 301


def write_log(folder: Path, records: list[dict[str, Any]]) -> Log:
    log = Log(folder / "log.jsonl")
    for record in records:
        log.append(record)
    return log


def test_who_looks_on_sees_the_panel_of_the_other_process_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New lines, a resumed run that cut its log, and the end, each between two looks."""
    log = write_log(tmp_path, run())
    console = terminal()

    def steps() -> None:
        log.append(step(301))

    def resume() -> None:
        log.cut(100)
        log.append(start(100))
        log.append(step(101, loss=8.5))

    def end() -> None:
        log.append({"kind": "end", "step": 101, "why": "finished"})

    todo = [steps, resume, end]
    monkeypatch.setattr(watch_module, "_EVERY", 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: todo.pop(0)())
    watch(tmp_path, console=console)
    text = console.export_text()
    assert not todo
    for said in ("step 300 of 400", "step 301 of 400", "Ctrl-C stops looking, not the training."):
        assert said in text, said
    last = text[text.rindex("training a draft for") :]
    assert "step 101 of 400" in last and "8.500" in last and "ended at step 101: finished" in last
    assert "step 300" not in last and "best so far" in last


def test_who_looks_on_without_a_terminal_is_not_told_again_what_a_resumed_run_logged_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run replaces its log: read from its beginning, every evaluation of days would be printed once more."""
    log = write_log(tmp_path, run())
    stream = io.StringIO()

    def evaluate() -> None:
        log.append(evaluation(310, 2.25, True))

    def resume() -> None:
        log.cut(300)
        log.append(start(300))

    def end() -> None:
        log.append({"kind": "end", "step": 310, "why": "finished"})

    todo = [evaluate, resume, end]
    monkeypatch.setattr(time, "sleep", lambda seconds: todo.pop(0)())
    watch(tmp_path, console=Console(file=stream))
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "evaluation at step 310",
        "ended at step 310",
    ]


def test_a_run_whose_process_was_killed_is_said_to_be_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never logs an end, and its panel would look alive for ever."""
    log = write_log(tmp_path, run())
    console = terminal()
    looks = iter(range(3))

    def sleep(seconds: float) -> None:
        if next(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    now = log.path.stat().st_mtime + 3600
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.raises(KeyboardInterrupt):
        watch(tmp_path, console=console)
    assert "No line for 1 h 00 min: is the training still running?" in console.export_text()


def test_one_look_prints_the_panel_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also into a pipe."""
    write_log(tmp_path, run())
    assert main([str(tmp_path), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "step 300 of 400" in printed and "\x1b" not in printed


def test_looking_at_a_folder_without_a_log_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error is the usual reason."""
    with pytest.raises(LogError, match=r"There is no .*log\.jsonl"):
        watch(tmp_path)
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "--out" in capsys.readouterr().err


def test_a_sparkline_shows_means_between_the_lowest_and_the_highest() -> None:
    """As many bars as fit; equal values are one height."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 10, 10], 2) == "▁█" and sparkline([3, 3], 9) == "▁▁"
    assert sparkline([0, 8, 1], 3, "_=#") == "_#_"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (89, "89 s"), (150, "2 min"), (3540, "59 min"), (3599, "1 h 00 min"), (3660, "1 h 01 min"),
     (172_000, "47 h 47 min"), (180_000, "2 d 2 h")],
)  # fmt: skip
def test_a_duration_is_said_in_two_units(seconds: float, said: str) -> None:
    """Nobody waits for 172000 seconds."""
    assert duration(seconds) == said


def test_accuracy_in_training_among_few_tokens_says_so() -> None:
    """Beside that of the held-out answers it would look like overfitting."""
    few = {"columns": 64, "vocabulary": 500}
    said = "in training among 64 tokens only"
    assert said in "\n".join(lines_of([start() | few, step(1)]))
    assert said not in "\n".join(lines_of([start() | few | {"columns": 500}, step(1)]))
