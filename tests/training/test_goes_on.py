"""A run goes on with what it was begun with: its shards, its draft, its folder for itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_mlx.__main__ import main
from dflash_mlx.errors import FetchError
from dflash_mlx.training.architecture import draft_config
from dflash_mlx.training.asked import FILE, Asked
from dflash_mlx.training.checkpoint import TrainingError
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.interrupts import Stopped
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.run_folder import RunFolder
from dflash_mlx.training.supply import CACHED, Gaps, Loaded, fill
from tests import checkpoints
from tests.conftest import byte_tokenizer
from tests.families import tiny
from tests.training.following import prompts_file, target_folder
from tests.training.runs import RECIPE, TAPS, TOP, Seen, answers, assert_same_bits, learn, lines, target
from tests.training.test_trainer import ctrl_c

SHORT = RECIPE.changed(steps=1, evaluate_every=0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return answers(tmp_path_factory.mktemp("answers") / "data")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command, one step long."""
    root = tmp_path_factory.mktemp("finished")
    words = ["train", "--target", str(target_folder(root / "target")), "--out", str(root / "run"), "--max-tokens", "8"]
    words += [
        "--data",
        str(prompts_file(root / "prompts.jsonl", 24)),
        "--layers",
        "1",
        "--steps",
        "1",
        "--threads",
        "1",
    ]
    words += [f"--set={entry}" for entry in ("taps=[0,2]", "sequences=2", "anchors=2", "block_size=4", "longest=12")]
    assert main(words) == 0
    return root / "run"


def test_a_data_set_that_has_grown_is_completed_for_the_shards_of_the_run_only(tmp_path: Path) -> None:
    """The others may be days of the target's work, and nothing of them is learned from."""
    dataset, aside = answers(tmp_path / "data"), tmp_path / "aside"
    first, *_, last = dataset.numbers()
    dataset.tokens_path(last).rename(aside)
    learn(dataset, tmp_path / "run", SHORT)
    aside.rename(dataset.tokens_path(last))
    for beside in (dataset.features_path(first, TAPS), dataset.features_path(last, TAPS), dataset.soft_path(last, TOP)):
        beside.unlink()
    asked = Asked("tiny", str(dataset.folder), SHORT, features=CACHED)
    loaded = Loaded(tiny("llama"), byte_tokenizer(), target(), draft_config(target(), byte_tokenizer(), SHORT))
    begun, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    gaps, more = (Gaps.of(dataset, asked, TAPS, run) for run in (begun, other))
    assert (gaps.features, gaps.soft, gaps.top) == (1, 0, TOP) and (more.features, more.soft) == (2, 1)
    fill(asked, loaded, dataset, begun, lambda line: None)
    assert dataset.features_path(first, TAPS).exists()
    assert not dataset.features_path(last, TAPS).exists() and not dataset.soft_path(last, TOP).exists()
    learn(dataset, tmp_path / "run", SHORT, resume=True)


def test_a_second_resume_that_is_refused_changes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it asks for would else be what the next resume of the first one goes on with."""
    before = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in finished.rglob("*")}
    with RunFolder(finished).held():
        assert main(["train", "--out", str(finished), "--resume", "--set", "evaluate_prompts=2"]) == 1
    assert "Another process is training in" in capsys.readouterr().err
    assert {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in finished.rglob("*")} == before
    assert json.loads((finished / FILE).read_text())["recipe"]["evaluate_prompts"] == 8


def test_the_card_counts_what_the_steps_of_a_short_run_reached(finished: Path) -> None:
    """Two answers, cut at 12 tokens, of all that it was given."""
    card = (finished / "draft" / "README.md").read_text()
    assert "nothing else: 2 answers, " in card and "Those are the ones that its steps reached, of " in card
    tokens = int(card.partition("nothing else: 2 answers, ")[2].partition(" tokens")[0])
    assert 0 < tokens <= 2 * (12 - 3)  # a prompt has three letters or more


@pytest.fixture
def begun(dataset: Dataset, tmp_path: Path) -> tuple[Path, Recipe]:
    """A run that began with a draft, and was stopped."""
    recipe = RECIPE.changed(initial=str(checkpoints.v1(tmp_path / "old")), block_size=4, evaluate_every=0)
    learn(dataset, tmp_path / "whole", recipe)
    with pytest.raises(Stopped):
        learn(dataset, tmp_path / "run", recipe, Seen(at={("step", 2): ctrl_c}))
    return tmp_path / "run", recipe


def test_a_run_goes_on_with_the_draft_that_it_began_with_or_not_at_all(
    begun: tuple[Path, Recipe], dataset: Dataset, tmp_path: Path
) -> None:
    """Its config and its list decide what is trained, and a record that names it would be wrong."""
    run, recipe = begun
    old = tmp_path / "old"
    old.rename(tmp_path / "kept")
    with pytest.raises(FetchError, match=r"The draft .*old that the training begins with cannot be had\..*restore it"):
        learn(dataset, run, recipe, resume=True)
    checkpoints.v1(old, seed=4)
    with pytest.raises(TrainingError, match=r"The draft .*old is another one than the run .* was begun with"):
        learn(dataset, run, recipe, resume=True)
    shutil.rmtree(old)
    (tmp_path / "kept").rename(old)
    learn(dataset, run, recipe, resume=True)
    assert_same_bits(run, tmp_path / "whole")


def test_a_run_of_before_the_draft_was_noted_goes_on(begun: tuple[Path, Recipe], dataset: Dataset) -> None:
    run, recipe = begun
    record = json.loads((run / "run.json").read_text())
    assert len(record.pop("initial_sha256")) == 64
    (run / "run.json").write_text(json.dumps(record))
    learn(dataset, run, recipe, resume=True)


def test_the_start_record_says_among_how_many_tokens_steps_are_measured(dataset: Dataset, tmp_path: Path) -> None:
    """Accuracy among a few columns is higher than among what the draft proposes from."""
    for name, columns in (("few", 64), ("all", 0)):
        learn(dataset, tmp_path / name, SHORT.changed(vocabulary=200, columns=columns))
        record = lines(tmp_path / name, "start")[-1]
        assert (record["columns"], record["vocabulary"]) == (columns or 200, 200)
