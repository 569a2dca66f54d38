"""A data set of tokens alone is completed to what was stored with the answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.targets import target_for
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.decoder import Decoder, MlxDecoder
from dflash_mlx.training.generate import Settings, generate
from dflash_mlx.training.host_llama import HostLlama
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.recompute import complete
from tests.conftest import byte_tokenizer
from tests.families import tiny

LAYERS = (2, 0)  # in the order that is asked for, which is not that of the layers


def decoders() -> list[Decoder]:
    return [HostLlama(tiny("llama"), LAYERS), MlxDecoder(target_for(tiny("llama")), LAYERS)]


@pytest.mark.parametrize("which", [0, 1], ids=["host", "mlx"])
def test_what_was_deleted_is_computed_again(tmp_path: Path, which: int) -> None:
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
    complete(dataset, decoders()[which], top=4, layers=LAYERS, tell=lines.append)
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
