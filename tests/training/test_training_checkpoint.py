"""A checkpoint is there whole, or the one before it is; what is damaged or does not fit is said."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import files
from dflash_mlx.training.checkpoint import Checkpoint, Checkpoints, State, TrainingError
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.run_folder import FREE, RunFolder, Start
from tests.training.runs import RECIPE, Seen, answers, learn

DRAFT = {"a.weight": mx.array([[0.1, -2.5], [1e-30, 3e38]]), "b": mx.array([1.0])}
MOMENTS = {"states.0.step": mx.array(2**40, mx.uint64), "states.0.a.weight.m": mx.array([[1.5]])}


def checkpoint(step: int) -> Checkpoint:
    state = State(step, 10, 1.25, 3, {"score": 1 / 3, "record": {"step": 3}}, 1, 0, {"loss": 0.1}, [0.5, 16.0])
    return Checkpoint(state, DRAFT, MOMENTS)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every bit of weights, moments and the count of updates, which is no float; none is None."""
    there = Checkpoints(tmp_path / "checkpoint")
    assert there.load() is None and there.load_best() is None and not there.has_best
    there.save(checkpoint(5))
    there.save_best(DRAFT, 5)
    found = there.load()
    assert found is not None and found.state == checkpoint(5).state
    best = there.load_best()
    assert best is not None
    for expected, got in ((DRAFT, found.draft), (MOMENTS, found.optimiser), (DRAFT, best)):
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert got[name].dtype == value.dtype
            np.testing.assert_array_equal(np.array(got[name]), np.array(value))


KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
import mlx.core as mx
from dflash_mlx import files
from dflash_mlx.training.checkpoint import Checkpoint, Checkpoints, State

def save(folder, step):
    Checkpoints(folder).save(Checkpoint(State(step=step), {"a": mx.full((3,), float(step))}, {"m": mx.zeros(2)}))

def killed_at(place, folder):
    # In a child, since nothing of this process may clean up after it: no `finally` runs.
    child = os.fork()
    if child == 0:
        left = [place]
        def counted(real):
            def call(*args, **rest):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return real(*args, **rest)
            return call
        save(folder, 1)
        for module, name in ((tempfile, "mkstemp"), (os, "close"), (mx, "save_safetensors"), (files, "check_written"),
                             (files, "_flush"), (os, "fsync"), (os, "replace")):
            setattr(module, name, counted(getattr(module, name)))
        save(folder, 2)
        os._exit(0)
    return os.waitpid(child, 0)[1]

folder, place, steps = Path(sys.argv[1]), 0, []
while True:
    here = folder / str(place)
    ended = killed_at(place, here)
    if os.fork() == 0:
        there = Checkpoints(here)
        found = there.load()
        assert found is not None and found.draft["a"].tolist() == [float(found.state.step)] * 3
        there.clear_leftovers()
        assert sorted(path.name for path in here.iterdir()) == ["state.safetensors"], list(here.iterdir())
        os._exit(found.state.step)
    steps.append(os.wait()[1] >> 8)
    if ended == 0:
        break
    place += 1
print(*steps)
"""


def test_a_kill_between_any_two_writes_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL before each call that touches the disk: the last one or the one before, never none or half of one."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *killed, whole = (int(step) for step in done.stdout.split())
    assert whole == 2 and set(killed) <= {1, 2} and killed[0] == 1
    assert len(killed) >= 7


def test_a_full_disk_is_one_clear_error_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX says "could not write"; the user hears how much is needed and how to go on."""
    there = Checkpoints(tmp_path)
    there.save(checkpoint(5))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "check_written", full)
    with pytest.raises(TrainingError, match=r"step 6 could not be written .* the disk is full .*GB needed.*as it was"):
        there.save(checkpoint(6))
    with pytest.raises(TrainingError, match=r"The best weights, of step 6, could not .*There is none before it"):
        there.save_best(DRAFT, 6)
    monkeypatch.undo()
    found = there.load()
    assert found is not None and found.state.step == 5
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_training_on_a_full_disk_ends_with_that_error_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with a traceback from the depth of a library."""
    dataset, recipe = answers(tmp_path / "data"), RECIPE.changed(evaluate_every=0)
    real, left = files.check_written, [2]

    def full(path: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path)

    monkeypatch.setattr(files, "check_written", full)
    with pytest.raises(TrainingError, match=r"The checkpoint of step 3 .*Free some space, and go on with `--resume`"):
        learn(dataset, tmp_path / "run", recipe)
    monkeypatch.undo()
    learn(dataset, tmp_path / "run", recipe, seen := Seen(), resume=True)
    assert [record["step"] for record in seen.records if record["kind"] == "step"] == [3, 4]


def test_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    """Cut short by a copy, or of another version."""
    there = Checkpoints(tmp_path)
    there.save(checkpoint(5))
    path = tmp_path / "state.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(TrainingError, match=r"cannot be read.*Restore it from a copy, or delete the folder"):
        there.load()
    path.write_bytes(whole.replace(b'\\"format\\": \\"1\\"', b'\\"format\\": \\"9\\"'))
    with pytest.raises(TrainingError, match="format 9, this version reads 1"):
        there.load()


def test_every_entry_of_a_recipe_is_compared_but_those_that_change_nothing(tmp_path: Path) -> None:
    """An entry that is forgotten here could be changed in the middle of a run."""
    run, dataset = RunFolder(tmp_path / "run"), Dataset(tmp_path, {"target": {}})
    run.path.mkdir()

    def start(recipe: Recipe) -> Start:
        return Start.of(recipe, {"name": "x"}, dataset, [], 4)

    recipe = Recipe(window=4, layers=4, pack=5000)
    assert run.write(start(recipe)) == []
    for name, value in vars(recipe).items():
        changed: object
        match value:
            case bool():
                changed = not value
            case int() | float():
                changed = value + 2 if name not in ("warm_up", "floor", "alpha", "soft", "rate", "decay") else value / 2
            case str():
                changed = {"weighting": "pace", "precision": "bfloat16", "initial": "random"}[name]
            case tuple():
                changed = (0.5, 0.5) if name == "betas" else (1, 2)
            case _:
                changed = 3
        other = start(recipe.changed(**{name: changed}))
        if name in FREE:
            run.check(other)
        else:
            with pytest.raises(TrainingError, match=rf"its recipe\.{name} is "):
                run.check(other)


def test_other_versions_are_told_and_do_not_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may outlive an upgrade; then the last bits may differ, and the user knows."""
    run, start = RunFolder(tmp_path), Start(Recipe(), {}, {}, [], 0, "")
    run.write(start)
    monkeypatch.setattr("dflash_mlx.training.run_folder.__version__", "99")
    run.check(start)
    (line,) = run.write(start)
    assert line.startswith("dflash_mlx was ") and line.endswith("is 99 now: the last bits of the result may be others")


def test_a_run_json_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """Without it nothing says what the checkpoint is of."""
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(TrainingError, match=r"run\.json cannot be read .*Restore it"):
        RunFolder(tmp_path).shards()


def test_what_a_killed_process_left_half_written_is_deleted(tmp_path: Path) -> None:
    """Checkpoints are large; what has other names stays."""
    left = [".best." + "0f" * 16, ".draft." + "a1" * 16, ".run.abc_1.json", "checkpoint/.state.x.safetensors"]
    stay = ["best", ".best.mine", "checkpoint/state.safetensors"]
    for name in (*left, *stay):
        (tmp_path / name).mkdir(parents=True) if "best" in name or "draft" in name else None
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).exists() or (tmp_path / name).write_text("x")
    with RunFolder(tmp_path).held():
        pass
    assert not any((tmp_path / name).exists() for name in left)
    assert all((tmp_path / name).exists() for name in stay)
