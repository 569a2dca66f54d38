"""What a batch of answers is said to need is about what it takes, and its size follows the memory."""

from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.__main__ import main
from dflash_mlx.targets import target_for
from dflash_mlx.training import generate as generate_module
from dflash_mlx.training.batching import Choosing, Sample, decode
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.decoder import decoder_for
from dflash_mlx.training.generate import Settings
from dflash_mlx.training.generation_memory import SHARE, Rows, chosen, rows_of
from dflash_mlx.training.memory import TooLarge
from dflash_mlx.training.prompts import Prompt
from tests.conftest import byte_tokenizer
from tests.families import tiny
from tests.training.following import prompts_file, target_folder
from tests.training.runs import RECIPE, TAPS, answers, prepared

PROMPTS = [Prompt("short"), Prompt("a prompt of more words " * 5), Prompt("words " * 4)]
SETTINGS = Settings(max_tokens=40, features=TAPS)


@pytest.mark.parametrize("name", ["qwen3", "llama"])  # mlx_lm's caches, and the host's own
@pytest.mark.parametrize("shape", [(20, 160), (160, 20)])  # tokens of the prompt, and of the answer
def test_rows_take_about_what_they_are_said_to(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Within a half, which the share that stays free covers; by what MLX and numpy count."""
    prompt, longest = shape
    batch, model = 48, tiny(name)
    target = target_for(model)
    need = rows_of(target, Settings(max_tokens=longest, features=TAPS), prompt)
    decoder = decoder_for(model, TAPS)
    decoder.read(np.zeros((1, 4), np.int64))
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.start()
    random = np.random.default_rng(0)
    rows = [(Sample(Prompt(f"{n}")), random.integers(0, 256, prompt).tolist()) for n in range(batch)]
    made = decode(decoder, rows, choosing=Choosing(), stops=frozenset(), max_tokens=longest, seed=0)
    Dataset.create_or_resume(tmp_path, {"vocabulary": 257}).write(0, made, TAPS)
    on_host = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    measured = max(0, mx.get_peak_memory() - before) + on_host  # a host's decoder asks MLX for nothing
    assert 0.5 <= batch * need.each / measured <= 1.5, (need, measured)


def choose(
    asked: int | None, begun: int | None = None, there: int = 1 << 40, prompts: list[Prompt] = PROMPTS
) -> tuple[int, str]:
    dataset = None if begun is None else Dataset(Path("data"), {"settings": {"batch": begun}})
    return chosen(asked, dataset, target_for(tiny("llama")), byte_tokenizer(), prompts, SETTINGS, there)


def need() -> Rows:
    """Of `PROMPTS`: the longest one decides, wherever it is."""
    longest = len(byte_tokenizer().apply_chat_template(PROMPTS[1].messages, add_generation_prompt=True))
    return rows_of(target_for(tiny("llama")), SETTINGS, longest)


def test_the_default_batch_is_as_large_as_fits_and_the_line_says_what_it_needs() -> None:
    """A fixed one of 96 rows takes 17 GB of keys and values of a 4-B target at 1200 positions."""
    batch, line = choose(None)
    assert batch == 96 and f"about {need().peak(96) / 1e9:.2f} GB" in line and "keys and values" in line
    assert "96 rows together of up to" in line
    there = int((need().weights + 10.5 * need().each) / SHARE)
    assert choose(None, there=there)[0] == 10
    assert choose(None, there=there, prompts=PROMPTS[::2])[0] > 10


def test_a_batch_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    there = int((need().weights + 10.5 * need().each) / SHARE)
    assert choose(10, there=there)[0] == 10
    with pytest.raises(TooLarge, match=r"A batch of 11 rows needs .* 10 rows fit\. .*Give a `--batch` of 10 or less"):
        choose(11, there=there)
    with pytest.raises(TooLarge, match=r"A batch of 1 rows .* 0 rows fit\. .*Lower `--max-tokens`.* smaller target"):
        choose(None, there=need().weights)


def test_a_data_set_that_was_begun_keeps_its_batch() -> None:
    """It decides which answers are in a shard: with another one the data set could not be continued."""
    there = int((need().weights + 10.5 * need().each) / SHARE)
    assert choose(None, begun=7)[0] == 7
    assert choose(None, begun=12, there=there)[0] == 12 and choose(12, begun=12, there=there)[0] == 12
    with pytest.raises(TooLarge, match="made in such batches: go on where there is more memory"):
        choose(None, begun=96, there=there)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    target_folder(root / "target")
    prompts_file(root / "prompts.jsonl", 24)
    return root


def fits(place: Path, batch: int, features: tuple[int, ...], max_tokens: int) -> int:
    """Bytes of memory in which so many rows of `place` have room: its longest prompt has nine letters."""
    from dflash_mlx import load

    target = target_for(load(str(place / "target"))[0])
    rows = rows_of(target, Settings(max_tokens=max_tokens, features=features), 9)
    return int((rows.weights + (batch + 0.5) * rows.each) / SHARE)


def batch_of(folder: Path) -> int:
    return json.loads((folder / "manifest.json").read_text())["settings"]["batch"]


def test_train_says_what_its_answers_need_and_goes_on_with_the_batch_that_it_began_with(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with more memory the shards would else be cut otherwise."""
    words = ["train", "--target", str(place / "target"), "--data", str(place / "prompts.jsonl")]
    words += ["--out", str(tmp_path / "run"), "--max-tokens", "8", "--layers", "1", "--steps", "1", "--threads", "1"]
    words += [f"--set={entry}" for entry in ("taps=[0,2]", "sequences=2", "anchors=2", "block_size=4")]
    monkeypatch.setattr("dflash_mlx.training.supply.memory_here", lambda: fits(place, 13, TAPS, 8))
    assert main([*words, "--dry-run"]) == 0
    assert "Memory of the answers: about" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main([*words, "--dry-run", "--batch", "14"]) == 1
    assert "Give a `--batch` of 13 or less" in capsys.readouterr().err
    monkeypatch.setattr("dflash_mlx.training.supply.fill", lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # after the answers, before the training
        main(words)
    assert batch_of(tmp_path / "run" / "data") == 13
    shard = tmp_path / "run" / "data" / "shards" / "00001.safetensors"
    before = shard.read_bytes()
    shard.unlink()
    monkeypatch.undo()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert shard.read_bytes() == before and batch_of(tmp_path / "run" / "data") == 13


def test_generate_chooses_its_batch_and_keeps_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", str(place / "target"), "--prompts", str(place / "prompts.jsonl"), "--max-tokens", "6"]
    words += ["--out", str(tmp_path / "data")]
    monkeypatch.setattr("dflash_mlx.training.memory.memory_here", lambda: fits(place, 9, (), 6))
    assert generate_module.main([*words, "--batch", "10"]) == 1
    assert "Give a `--batch` of 9 or less" in capsys.readouterr().err and not (tmp_path / "data").exists()
    assert generate_module.main(words) == 0
    assert batch_of(tmp_path / "data") == 9 and "Memory of the answers" in capsys.readouterr().err
    monkeypatch.undo()
    assert generate_module.main(words) == 0
    assert batch_of(tmp_path / "data") == 9
    assert generate_module.main([*words, "--batch", "12"]) == 1
    assert "made otherwise: its settings.batch is 9, asked for is 12" in capsys.readouterr().err


def test_what_is_kept_of_held_out_answers_is_counted_unless_it_is_stored(tmp_path: Path) -> None:
    """With `evaluate_prompts` of a thousand it is gigabytes, and stays for the whole training."""
    from dflash_mlx.training.memory import estimate

    stored = prepared(answers(tmp_path / "stored"), RECIPE)
    bare = prepared(answers(tmp_path / "bare", features=False), RECIPE)
    assert estimate(stored, 1000).held_out == 0
    found = estimate(bare, 1000)
    assert (
        found.held_out == 1000 * 2 * len(TAPS) * 64 and found.peak == replace(found, held_out=0).peak + found.held_out
    )
    assert "held_out 0.00" in found.line()
    with pytest.raises(TooLarge, match="lower `evaluate_prompts` or `evaluate_tokens`, or store the features"):
        found.refuse_more_than(found.peak - 1)
