"""A data set of tokens alone is completed to what was stored with the answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.targets import target_for
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.decoder import Decoder, MlxDecoder
from dflash_mlx.training.generate import Settings, generate
from dflash_mlx.training.generate import main as generate_main
from dflash_mlx.training.host_llama import HostLlama
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.recompute import complete
from dflash_mlx.training.recompute_command import main
from tests.conftest import byte_tokenizer
from tests.families import tiny
from tests.folders import target_folder

LAYERS = (2, 0)  # in the order that is asked for, which is not that of the layers


def decoders() -> list[Decoder]:
    return [HostLlama(tiny("llama"), LAYERS), MlxDecoder(target_for(tiny("llama")), LAYERS)]


@pytest.mark.parametrize("which", [0, 1], ids=["host", "mlx"])
def test_what_was_deleted_is_computed_again(tmp_path: Path, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of all lengths in one batch; interrupted in between; what is there stays as it is."""
    tokenizer = byte_tokenizer(range(50))  # many tokens stop
    prompts = [Prompt("say " + "a" * n, topic=f"{n}") for n in range(20)]
    settings = Settings(seed=1, samples=2, batch=20, max_tokens=7, top=4, features=LAYERS)
    dataset = generate(tiny("llama"), tokenizer, prompts, tmp_path / "data", settings, target={}, source="test")
    before = list(dataset.shards(top=4, layers=LAYERS))
    assert any(np.diff(np.diff(shard.offsets)).min() < 0 for shard in before)  # not in the order of their lengths
    shutil.rmtree(tmp_path / "data" / "soft-4")
    shutil.rmtree(tmp_path / "data" / "features-2-0")

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        complete(dataset, decoders()[which], top=4, layers=LAYERS, tell=interrupt)
    lines: list[str] = []
    read: list[int] = []
    whole = Dataset.shard
    monkeypatch.setattr(Dataset, "shard", lambda self, number, **rest: read.append(number) or whole(self, number))
    complete(dataset, decoders()[which], top=4, layers=LAYERS, tell=lines.append)
    monkeypatch.undo()
    assert read == dataset.numbers()[1:]  # what is complete is not read: features may be a terabyte
    assert len(lines) == len(before) - 1 == 1
    for was, now in zip(before, dataset.shards(top=4, layers=LAYERS), strict=True):
        assert was.features is not None and now.features is not None
        assert was.top_logprobs is not None and now.top_logprobs is not None
        assert now.features.dtype == np.float16 and now.features.shape == was.features.shape
        np.testing.assert_allclose(now.features, was.features, rtol=2e-3, atol=2e-3)
        np.testing.assert_array_equal(now.top_ids, was.top_ids)
        np.testing.assert_allclose(now.top_logprobs, was.top_logprobs, rtol=2e-3, atol=2e-3)


def test_a_decoder_with_other_features_is_refused(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Nothing is written in their place."""
    settings = Settings(batch=4, max_tokens=3, top=0)
    dataset = generate(tiny("llama"), tokenizer, [Prompt("say a")], tmp_path, settings, target={}, source="test")
    for taps in ((), (0, 2)):
        with pytest.raises(ValueError, match=r"`decoder` has to have the layers \(2, 0\)"):
            complete(dataset, HostLlama(tiny("llama"), taps), layers=LAYERS)
    assert Dataset.open(tmp_path).shard(0, layers=LAYERS).features is None


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Tokens alone, of a target in a folder."""
    target = target_folder(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("count to 3\ncount to 4\n")
    command = ["--target", str(target), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "data")]
    assert generate_main([*command, "--max-tokens", "4", "--samples", "1", "--top", "0"]) == 0
    return tmp_path / "data"


def test_the_command_completes_a_data_set_with_the_target_that_it_names(data: Path, capsys) -> None:
    """Its path on stdout, a line per shard on stderr; the same command again has nothing to do."""
    capsys.readouterr()
    command = ["--data", str(data), "--top", "5", "--features", "0,2"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == f"{data}\n" and "shard 0: 2 answers read" in said.err
    shard = Dataset.open(data).shard(0, top=5, layers=(0, 2))
    assert shard.top_ids is not None and shard.top_ids.shape == (8, 5) and shard.features is not None
    assert main(command) == 0 and "shard" not in capsys.readouterr().err


def test_another_target_than_the_answers_is_refused_and_writes_nothing(data: Path, tmp_path: Path, capsys) -> None:
    """Its distributions beside the other's tokens would be taken for what these were drawn from."""
    other = target_folder(tmp_path / "other", "llama-tied")
    assert main(["--data", str(data), "--target", str(other)]) == 1
    assert "made by another target: their target is" in capsys.readouterr().err
    assert main(["--data", str(data), "--dtype", "bfloat16"]) == 1
    assert not (data / "soft-16").exists()
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    assert main(["--data", str(data), "--target", str(moved)]) == 0
    assert (data / "soft-16").exists()


def test_a_data_set_that_names_no_target_asks_for_it(data: Path, capsys) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    del manifest["target"]["name"]
    (data / "manifest.json").write_text(json.dumps(manifest))
    assert main(["--data", str(data)]) == 1
    assert "Give it with `--target`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"), [(["--top", "-1"], "--top has to be 0"), (["--top", "0"], "asks for nothing")]
)
def test_what_cannot_be_meant_is_refused_at_once(options: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--data", "never", *options])
    assert end.value.code == 2 and message in capsys.readouterr().err
