"""`dflash-metal train` as a user has it: from prompts to a served draft, stopped and resumed, refused in words."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dflash_mlx import generate, load, stream_generate
from dflash_mlx.__main__ import main
from dflash_mlx.training.checkpoint import Checkpoints
from tests.conftest import draft_config
from tests.training.following import circle, prompts_file, target_folder
from tests.training.runs import assert_same_bits, lines

BLOCK = 5
QUICK = ["--layers", "1", "--block-size", "4", "--steps", "4", "--threads", "1"]
QUICK += [f"--set={entry}" for entry in ("sequences=4", "anchors=4", "taps=[0,2]", "evaluate_tokens=16")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and prompts."""
    root = tmp_path_factory.mktemp("place")
    target_folder(root / "target")
    prompts_file(root / "prompts.jsonl", 240)
    return root


@pytest.fixture(scope="module")
def learned(place: Path) -> Path:
    """A run to its end, from a file of prompts; its answers are the data set of the other tests."""
    rest = [f"--set={entry}" for entry in ("rate=0.006", "sequences=8", "anchors=16", "evaluate_every=75")]
    sizes = ["--layers", "2", "--block-size", str(BLOCK), "--steps", "150", "--max-tokens", "40", "--threads", "1"]
    assert train(place, place / "prompts.jsonl", place / "run", *sizes, *rest, "--set=evaluate_tokens=40") == 0
    return place / "run"


def train(place: Path, data: Path, out: Path, *rest: str) -> int:
    return main(["train", "--target", str(place / "target"), "--data", str(data), "--out", str(out), *rest])


def logged(run: Path, kind: str) -> dict:
    return lines(run, kind)[-1]


def test_a_target_with_a_rule_is_learned_to_acceptance_near_the_block_size(learned: Path) -> None:
    """Features, anchors, masks or the export one position off, and it stays near 1 token per cycle."""
    found = logged(learned, "acceptance")
    assert found["tokens_per_cycle"] > 0.8 * BLOCK
    assert found["categories"].keys() <= {"words", "names"} and found["stored"] == "bfloat16"
    assert all(each > 0.9 for each in logged(learned, "evaluation")["accuracy"])


def test_the_learned_draft_is_loaded_and_says_what_the_target_says(place: Path, learned: Path) -> None:
    """The whole point: the same text, in fewer cycles."""
    model, tokenizer, draft = load(str(place / "target"), draft=learned / "draft")
    last = None
    for prompt in ("qwert", "Zebra7"):
        plain = generate(model, tokenizer, prompt, max_tokens=60)
        answers = list(stream_generate(model, tokenizer, prompt, max_tokens=60, draft_model=draft, mode="dflash"))
        assert "".join(answer.text for answer in answers) == plain
        last = answers[-1]
        assert last.stats.mean_acceptance_length > 0.7 * BLOCK
    ids = tokenizer.encode(plain)
    assert len(set(ids)) > 50 and set(ids) <= set(circle()), "the text must not be a short loop"


def test_a_run_leaves_what_it_was_made_of(learned: Path) -> None:
    """Card, curves, recipe: without them nobody knows what the weights are."""
    card = (learned / "draft" / "README.md").read_text()
    found = logged(learned, "acceptance")
    assert f"{found['tokens_per_cycle']:.2f}" in card and "before they were stored" not in card
    assert f"block_size = {BLOCK}" in card and "licence" in card.lower()
    assert (learned / "report.svg").exists() and (learned / "best" / "model.safetensors").exists()
    assert json.loads((learned / "run.json").read_text())["recipe"]["layers"] == 2
    assert (learned / "data" / "features-2" / "00000.safetensors").exists()


@pytest.fixture(scope="module")
def whole(place: Path, learned: Path) -> Path:
    """A short run that nothing stopped."""
    assert train(place, learned / "data", place / "whole", *QUICK, "--set=evaluate_every=3") == 0
    return place / "whole"


def hears_a_hang_up() -> None:
    """In a process that is to be started; under nohup the tests, and all that they start, would ignore it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def saved_steps(run: Path) -> int:
    found = Checkpoints(run / "checkpoint").load()
    return found.state.step if found else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["INT", "TERM", "HUP"])
def test_stopped_and_resumed_it_ends_with_the_bits_of_one_that_was_not(
    place: Path, learned: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """By Ctrl-C, `kill`, or a hang-up of a real process, long before its first checkpoint is due: the step is kept, and
    said, and the printed line, and nothing else, goes on with it."""
    words = ["train", "--target", str(place / "target"), "--data", str(learned / "data"), "--json"]
    words += ["--out", str(tmp_path / "the cut one"), *QUICK, "--set=evaluate_every=3"]
    with subprocess.Popen(
        [sys.executable, "-m", "dflash_mlx", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_a_hang_up,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if json.loads(line)["kind"] == "step":
                process.send_signal(number)
                break
        process.stdout.read()
        said = process.stderr.read()
        assert process.wait(60) == 128 + number, said
    assert not (tmp_path / "the cut one" / "draft").exists()
    stopped = re.search(r"Stopped after step (\d) of 4, and nothing is lost", said)
    assert stopped is not None and saved_steps(tmp_path / "the cut one") == int(stopped[1]) >= 1, said
    resume = re.search(r"To go on: dflash-metal (.*)", said)
    assert resume is not None, said
    assert main(shlex.split(resume[1])) == 0
    assert_same_bits(whole, tmp_path / "the cut one")


def in_a_terminal() -> None:
    """In a process that is to be started: its standard input becomes the terminal that can hang it up."""
    hears_a_hang_up()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_closed_terminal_keeps_the_steps_although_nothing_can_be_shown_any_more(
    place: Path, learned: Path, tmp_path: Path
) -> None:
    """Every write to a terminal that is gone is an error, of the panel and of the last words too: each would end the
    training with its steps lost."""
    run = tmp_path / "run"
    words = ["train", "--target", str(place / "target"), "--data", str(learned / "data"), "--out", str(run), *QUICK]
    words[words.index("--steps") + 1] = "2000"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_mlx", *words, "--set=checkpoint_every=2000"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=in_a_terminal,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    try:
        os.close(theirs)
        shown = b""
        while not (run / "log.jsonl").exists() or not lines(run, "step"):
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 1 << 16)  # OSError, if it ended before
        os.close(ours)
        assert process.wait(60) == 128 + signal.SIGHUP, shown
    finally:
        process.kill()
        process.wait()
    assert 1 <= saved_steps(run) < 2000 and saved_steps(run) == lines(run, "end")[-1]["step"]


def test_stopped_while_the_target_answers_it_goes_on_with_the_answers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers can take days; those that are there are kept, and `--resume` needs no other argument."""
    from dflash_mlx.training import supply

    whole = supply.generate

    def stop(*args: object, tell: object, **rest: object) -> object:
        return whole(*args, tell=lambda line: os.kill(os.getpid(), signal.SIGTERM), **rest)

    rest = [*QUICK, "--max-tokens", "12", "--batch", "24", "--answers", "40"]
    monkeypatch.setattr(supply, "generate", stop)
    assert train(place, place / "prompts.jsonl", tmp_path / "run", *rest) == 128 + signal.SIGTERM
    assert "--resume" in capsys.readouterr().err
    there = sorted((tmp_path / "run" / "data" / "shards").iterdir())
    assert len(there) == 1
    monkeypatch.setattr(supply, "generate", whole)
    before = there[0].stat().st_mtime_ns
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert there[0].stat().st_mtime_ns == before
    assert len(list((tmp_path / "run" / "data" / "shards").iterdir())) == 4
    assert (tmp_path / "run" / "draft" / "config.json").exists()


def test_a_reduced_vocabulary_is_exported_and_served(
    place: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """52 tokens are all that the answers have, and the line says so."""
    assert train(place, learned / "data", tmp_path / "run", *QUICK, "--set=vocabulary=70") == 0
    assert "proposes 70 of 257 tokens, 100.00%" in capsys.readouterr().err
    model, tokenizer, draft = load(str(place / "target"), draft=tmp_path / "run" / "draft")
    assert draft.reduced_size == 70 and set(circle()) <= set(draft.vocabulary.tolist())
    answers = list(stream_generate(model, tokenizer, "abc", max_tokens=20, draft_model=draft, mode="dflash"))
    assert "".join(answer.text for answer in answers) == generate(model, tokenizer, "abc", max_tokens=20)


def test_a_dflash_2_draft_is_trained_quantised_and_served(place: Path, learned: Path, tmp_path: Path) -> None:
    second = ["--set=second=true", "--set=rank=8", "--set=candidates=4", "--bits", "8", "--group-size", "32"]
    assert train(place, learned / "data", tmp_path / "run", *QUICK, *second) == 0
    model, tokenizer, draft = load(str(place / "target"), draft=tmp_path / "run" / "draft")
    assert draft.config.selector is not None and draft.config.quantization == {"group_size": 32, "bits": 8}
    assert "8 bits" in (tmp_path / "run" / "draft" / "README.md").read_text()
    answers = list(stream_generate(model, tokenizer, "abc", max_tokens=20, draft_model=draft, mode="dflash"))
    assert "".join(answer.text for answer in answers) == generate(model, tokenizer, "abc", max_tokens=20)


def test_json_is_the_records_of_the_log_and_where_the_draft_is(
    place: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object a line and nothing else on stdout, so that a script can read it."""
    before = {path: path.stat().st_mtime_ns for path in (learned / "data").rglob("*")}
    rest = ["--json", "--features", "computed", "--set=taps=[1,3]"]
    assert train(place, learned / "data", tmp_path / "run", *QUICK, *rest) == 0
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    kinds = [record["kind"] for record in records]
    assert kinds[0] == "start" and kinds[-1] == "result" and kinds.count("step") == 4 and "acceptance" in kinds
    assert records[-1]["draft"] == str(tmp_path / "run" / "draft") and "generate --model" in records[-1]["run"]
    assert records[-1]["tokens_per_cycle"] >= 1
    assert "features are computed in every step" in err, "those of layers 1 and 3 are not stored"
    assert {path: path.stat().st_mtime_ns for path in (learned / "data").rglob("*")} == before


@pytest.mark.parametrize("data", ["prompts.jsonl", "run/data"])
def test_a_dry_run_says_everything_and_writes_nothing(
    place: Path, learned: Path, tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    rest = ["--set=vocabulary=70", "--set=taps=[0,1]", "--dry-run"]
    assert train(place, place / data, tmp_path / "run", *QUICK, *rest) == 0
    assert not (tmp_path / "run").exists()
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
    said = capsys.readouterr().err
    for word in ("target: ", "draft: DFlash, 1 layers", "mask token: 256 ('<pad>')", "data: ", "training: 4 steps"):
        assert word in said
    for word in ("evaluation: ", "held-out answers", "Memory: about", "disk: ", "features: ", "nothing was written"):
        assert word in said
    if data == "run/data":
        assert "vocabulary: proposes 70 of 257 tokens, 100.00%" in said and "computed first" in said


REFUSED = {
    "wrong recipe key": (["--set", "layer=2"], "no entry `layer`"),
    "no recipe": (["--recipe", "nowhere.toml"], "There is no recipe nowhere.toml"),
    "no kind for it": (["--set", "layers=two"], "`layers` of a recipe has to be an integer, got 'two'"),
    "no list": (["--set", "taps=3"], "`taps` of a recipe has to be a list of numbers, got 3"),
    "no token": (["--set", "mask_token_id=pad"], "`mask_token_id` of a recipe has to be the id of a token, got 'pad'"),
    "value out of range": (["--layers", "0"], "`layers` has to be in 1..64"),
    "no prompts": (["--data", "nowhere.jsonl"], "nowhere.jsonl is no file with prompts"),
    "no data set": (["--data", "."], "has no manifest.json, so it is no data set"),
    "no target": (["--target", "./nowhere"], "nowhere does not exist"),
    "taps past the target": (["--set", "taps=[0,9]"], "`taps` have to be in 0..3"),
    "no such temperature": (["--temperature", "0"], "`temperature` has to be more than 0"),
}


@pytest.mark.parametrize("rest, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, rest: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence or three, no traceback, status 1."""
    data = tmp_path / "prompts.txt"
    data.write_text("one\ntwo\n")
    assert train(place, data, tmp_path / "run", *rest) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
    assert sum(line.startswith("Error:") for line in err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_answers_of_another_target_are_refused(
    place: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.folders import target_folder as another

    words = [
        "--target",
        str(another(tmp_path / "other")),
        "--data",
        str(learned / "data"),
        "--out",
        str(tmp_path / "r"),
    ]
    assert main(["train", *words, *QUICK]) == 1
    err = capsys.readouterr().err
    assert "were made by another target" in err and "--target" in err
    assert not (tmp_path / "r").exists()


def test_a_file_is_no_folder_of_a_run(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not to be deleted, as something that is damaged would be."""
    (tmp_path / "notes").write_text("mine")
    assert train(place, place / "prompts.jsonl", tmp_path / "notes", *QUICK) == 1
    assert "notes is a file, and a run needs a folder" in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == "mine"


def test_options_that_answers_which_are_there_ignore_are_named(
    place: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--answers 20` would be taken for a run with 20 prompts."""
    given = ["--answers", "20", "--max-tokens", "9", "--dry-run"]
    assert train(place, learned / "data", tmp_path / "run", *QUICK, *given) == 0
    assert "--answers, --max-tokens changes nothing" in capsys.readouterr().err


def test_rows_that_are_no_prompts_are_counted_before_anything_is_begun(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of which half is in another spelling would train half a draft without a word."""
    rows = [*({"prompt": f"word {number}"} for number in range(40)), {"ask": "x"}, {"ask": "y"}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert train(place, tmp_path / "mixed.jsonl", tmp_path / "run", "--dry-run") == 0
    said = capsys.readouterr().err
    assert "note: 2 of 42 rows of mixed.jsonl were skipped; the first, line 41, has only ask\n" in said
    assert "40 prompts of" in said


def test_long_prompts_count_for_the_disk(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Features of prompts are stored too; 64 tokens for each of these would be 0.00 GB, and a full disk after days."""
    rows = [json.dumps({"prompt": f"{number} " + "wordy " * 250}) for number in range(120)]
    (tmp_path / "long.jsonl").write_text("\n".join(rows))
    rest = ["--max-tokens", "12", "--set=taps=[0,1,2,3]", "--dry-run"]
    assert train(place, tmp_path / "long.jsonl", tmp_path / "run", *rest) == 0
    assert "up to 0.19 GB" in capsys.readouterr().err


def test_a_training_whose_reader_goes_away_does_not_pass_for_a_finished_one(
    place: Path, learned: Path, tmp_path: Path
) -> None:
    """`train --json | head -1` ended with status 0, no word and no draft."""
    words = ["train", "--target", str(place / "target"), "--data", str(learned / "data"), "--json", *QUICK]
    words[words.index("--steps") + 1] = "500"
    words += ["--out", str(tmp_path / "run")]
    with subprocess.Popen(
        [sys.executable, "-m", "dflash_mlx", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(60) == 1, said
    assert "nobody reads the records any more" in said and "--resume" in said and "Traceback" not in said
    assert not (tmp_path / "run" / "draft").exists()


def test_a_full_disk_says_how_to_go_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the target answers: the shards that were written stay."""
    from dflash_mlx.training.dataset import Dataset

    write = Dataset.write

    def full(self: Dataset, number: int, *rest: object) -> None:
        if number:
            raise OSError(28, "No space left on device")
        write(self, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Dataset, "write", full)
    monkeypatch.setattr(os, "dup2", lambda *ends: None)  # stdout is needed for other tests
    rest = [*QUICK, "--max-tokens", "12", "--batch", "24", "--answers", "40"]
    assert train(place, place / "prompts.jsonl", tmp_path / "run", *rest) == 1
    err = capfd.readouterr().err
    assert "shard 0 (1 of 4)" in err and "left" in err and "Ctrl-C stops it and keeps the shards" in err
    assert "No space left" in err and f"--out {tmp_path / 'run'} --resume" in err
    monkeypatch.undo()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0


def test_groups_that_fit_nothing_are_refused_before_the_training() -> None:
    """At the export, hours later, all of it would be lost."""
    from dflash_mlx.training.command import check_groups

    check_groups(32, draft_config())
    with pytest.raises(
        ValueError, match=re.escape("`--group-size` 128 divides no matrix of the draft (rows of [64, 96]")
    ):
        check_groups(128, draft_config())


@pytest.mark.parametrize(
    "words, message",
    [
        (["--out", "r"], "--target is needed"),
        (["--out", "r", "--target", "t"], "--data is needed"),
        (["--out", "r", "--target", "t", "--data", "d", "--set", "layers"], "NAME=VALUE"),
        (["--out", "r", "--target", "t", "--data", "d", "--group-size", "32"], "pass --bits too"),
        (["--out", "r", "--target", "t", "--data", "d", "--samples", "0"], "1 or more"),
    ],
)
def test_wrong_usage_ends_with_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(place: Path, learned: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert train(place, learned / "data", run, *QUICK) == 0
    yield run


@pytest.mark.parametrize(
    "rest, message",
    [
        ([], "holds a run already"),
        (["--resume", "--layers", "2"], "`layers of the recipe` was 1"),
        (["--resume", "--set", "rate=0.1"], "`rate of the recipe` was 0.0006"),
        (["--resume", "--data", "demo"], "`--data` was"),
        (["--resume", "--samples", "3"], "`--samples` was 2"),
    ],
)
def test_a_run_goes_on_as_it_was_begun_or_says_what_differs(
    finished: Path, place: Path, learned: Path, rest: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    given = ["--target", str(place / "target"), "--data", str(learned / "data")]
    assert main(["train", *given, "--out", str(finished), *rest]) == 1
    assert message in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_what_only_decides_when_to_measure_may_change(finished: Path) -> None:
    """And a run that is at its end only says again what it found."""
    assert main(["train", "--out", str(finished), "--resume", "--set", "evaluate_prompts=2"]) == 0


def test_nothing_to_resume_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 1
    assert "holds no run to continue" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_from_another_folder_than_it_was_begun_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths that were given from there would be none, the draft that it begins with among them."""
    from dflash_mlx.train_command import train_parser
    from dflash_mlx.training.asked import asked_of

    for name in ("model", "prompts", "old", "random"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--target", "model", "--data", "prompts", "--out", "run"]
    asked = asked_of(train_parser().parse_args([*words, "--draft", "old"]))
    assert (asked.target, asked.data) == (str(tmp_path / "model"), str(tmp_path / "prompts"))
    assert asked.recipe.initial == str(tmp_path / "old")
    asked.write(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "old")
    assert asked_of(train_parser().parse_args(["--out", str(tmp_path / "run"), "--resume"])) == asked
    assert asked_of(train_parser().parse_args([*words, "--draft", "random"])).recipe.initial == "random"


def test_a_recipe_file_and_settings_come_together(place: Path, tmp_path: Path) -> None:
    """The file first, then --set, then the shortcuts."""
    from dflash_mlx.train_command import train_parser
    from dflash_mlx.training.asked import asked_of

    (tmp_path / "r.toml").write_text("layers = 3\nwindow = 8\nfull = 1\nrate = 0.01\n")
    words = ["--target", "t", "--data", "demo", "--out", str(tmp_path / "run"), "--recipe", str(tmp_path / "r.toml")]
    words += ["--set", "rate=0.02", "--set", "initial=random", "--set", "betas=[0.8, 0.9]", "--layers", "4"]
    recipe = asked_of(train_parser().parse_args([*words, "--draft", "target"])).recipe
    assert (recipe.layers, recipe.window, recipe.rate, recipe.betas) == (4, 8, 0.02, (0.8, 0.9))
    assert recipe.initial == "target"
