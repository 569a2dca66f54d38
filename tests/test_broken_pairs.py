"""Folders that do not belong together, or are broken, through `load`: each says what it is and what to do next.

One text for two different faults would send the user looking for the wrong one; a traceback would tell them nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_mlx
from dflash_mlx.errors import CheckpointError, DFlashError, FetchError, IncompatiblePair
from tests import checkpoints
from tests.checkpoints import (
    dflash2_config,
    embedding,
    head,
    quantized,
    speculators_config,
    tensors_of,
    v1,
    v1_config,
    vocabulary,
    write,
)
from tests.families import VOCAB
from tests.folders import target_folder

Make = Callable[[Path], object]
KEPT = list(range(0, 128, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("pair") / "target")


def tokenizer_of_another(folder: Path) -> None:
    v1(folder)
    vocabulary = {chr(ord("a") + index): index for index in range(26)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))


def damaged_tokenizer(folder: Path) -> None:
    v1(folder)
    (folder / "tokenizer.json").write_text("{")


def truncated(folder: Path) -> None:
    path = v1(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def of_doubles(folder: Path) -> None:
    write(folder, v1_config())
    weights = {name: np.array(value, np.float64) for name, value in tensors_of(v1_config()).items()}
    save_file(weights, folder / "model.safetensors")


def without_shard(folder: Path) -> None:
    write(folder, v1_config(), tensors_of(v1_config()), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_file(name: str, config: object = None) -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("")
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))

    return make


def with_tensor(name: str, *shape: int, config: dict | None = None) -> Make:
    config = config or v1_config()
    return lambda folder: write(folder, config, tensors_of(config) | {name: mx.zeros(shape)})


def without_tensor(name: str) -> Make:
    tensors = tensors_of(v1_config())
    tensors.pop(name)
    return lambda folder: write(folder, v1_config(), tensors)


def of(config: dict, **tables: mx.array) -> Make:
    """A draft of this config, with its own random weights."""
    return lambda folder: write(folder, config, tensors_of(config) | tables)


def reduced(**tables: mx.array) -> Make:
    config = speculators_config(draft_vocab_size=len(KEPT))
    return lambda folder: write(folder, config, tensors_of(config) | head(len(KEPT)) | vocabulary(KEPT) | tables)


def nan(folder: Path) -> None:
    tensors = tensors_of(v1_config())
    tensors["layers.0.mlp.down_proj.weight"] = tensors["layers.0.mlp.down_proj.weight"] * mx.nan
    write(folder, v1_config(), tensors)


def wider_vocabulary(folder: Path) -> None:
    decoder = {"vocab_size": 320}
    config = speculators_config(draft_vocab_size=2, transformer_layer_config=decoder)
    write(folder, config, tensors_of(config) | head(2) | vocabulary([1, 300], 320))


def in_subfolder(folder: Path) -> None:
    write(folder, {"architectures": ["MiMoV2ForCausalLM"]}, {})
    v1(folder / "dflash")


def packed_without_saying(folder: Path) -> None:
    write(folder, v1_config(), quantized(tensors_of(v1_config())))


def packed_otherwise(folder: Path) -> None:
    write(folder, v1_config(quantization={"group_size": 32, "bits": 8}), quantized(tensors_of(v1_config())))


def says(without: Sequence[str] = (), **changes: object) -> Make:
    """The weights of a good draft beside a config that says something else, or less."""
    config = v1_config(**changes)
    for key in without:
        (config if key in config else config["dflash_config"]).pop(key)
    return lambda folder: write(folder, config, tensors_of(v1_config()))


BROKEN: dict[str, tuple[type[DFlashError], Make, str]] = {
    # another target's
    "hidden size": (IncompatiblePair, of(v1_config(hidden_size=32)), "hidden size is 32"),
    "layer count": (IncompatiblePair, of(v1_config(num_target_layers=36)), "number of target layers is 36"),
    "tap": (
        IncompatiblePair,
        of(v1_config(num_target_layers=5, dflash_config={"target_layer_ids": [0, 4]})),
        "reads layer 4 .* count from 0",
    ),
    "vocabulary": (IncompatiblePair, of(v1_config(vocab_size=4096)), "vocabulary size is 4096"),
    "mask": (IncompatiblePair, of(v1_config(dflash_config={"mask_token_id": 300})), "mask token id is 300"),
    "tokenizer": (IncompatiblePair, tokenizer_of_another, "another tokenizer"),
    "mapped id": (IncompatiblePair, wider_vocabulary, "proposes the token id 300"),
    # no draft at all
    "nowhere": (FetchError, lambda folder: None, "does not exist"),
    "empty": (CheckpointError, lambda folder: folder.mkdir(), r"no config\.json"),
    "language model": (CheckpointError, target_folder, "ordinary language model"),
    "file": (CheckpointError, lambda folder: folder.write_text(""), "is a file"),
    "adapter": (CheckpointError, with_file("adapter_config.json"), "LoRA adapter"),
    "GGUF": (CheckpointError, with_file("draft.gguf", v1_config()), "GGUF"),
    "pickle": (CheckpointError, with_file("pytorch_model.bin", v1_config()), "pickled"),
    "subfolder": (CheckpointError, in_subfolder, "subfolder dflash/"),
    # a damaged download
    "no weights": (CheckpointError, lambda folder: write(folder, v1_config()), r"no \.safetensors"),
    "truncated": (CheckpointError, truncated, "damaged or incomplete"),
    "doubles": (CheckpointError, of_doubles, "stores numbers as F64"),
    "shard": (CheckpointError, without_shard, "lacks 1 of the 2 files"),
    "config": (CheckpointError, lambda folder: write(folder, [1], {}), "holds a list"),
    "JSON": (CheckpointError, lambda folder: (v1(folder) / "config.json").write_text("{"), "cannot be read"),
    "tokenizer file": (CheckpointError, damaged_tokenizer, r"tokenizer\.json cannot be read"),
    "NaN": (CheckpointError, nan, "not finite"),
    "missing tensor": (CheckpointError, without_tensor("fc.weight"), r"1 missing: fc\.weight"),
    "unknown tensor": (CheckpointError, with_tensor("extra.weight", 3), r"1 unknown: extra\.weight"),
    "shape": (CheckpointError, with_tensor("fc.weight", 64, 64), r"shape \[64, 64\]"),
    "two names": (CheckpointError, with_tensor("model.norm.weight", 64), "two tensors for"),
    # a config that does not say enough, or contradicts itself
    "no taps": (CheckpointError, says(without=["target_layer_ids"]), "`target_layer_ids` is missing"),
    "no mask": (CheckpointError, says(without=["mask_token_id"]), "`mask_token_id` is missing"),
    "no rope": (CheckpointError, says(without=["rope_theta"]), "`rope_theta` is missing"),
    "block": (CheckpointError, of(v1_config(dflash_config={"block_size": 8})), "`block_size` is 8"),
    "text for a number": (CheckpointError, says(hidden_size="64"), "integer, .*got '64'"),
    "activation": (CheckpointError, of(v1_config(hidden_act="gelu")), "`hidden_act`"),
    "scale": (CheckpointError, of(v1_config(dflash_config={"embedding_scale": 8})), "`embedding_scale` is 8"),
    # another architecture
    "DFlash 2 in part": (
        CheckpointError,
        of(dflash2_config(dflash_config={"selector_rank": None})),
        "DFlash 2 draft without `selector_rank`",
    ),
    "DFlash 2 as v1": (CheckpointError, of(dflash2_config(architectures=["DFlashDraftModel"])), "belongs to DFlash 2"),
    "id 0": (CheckpointError, of(speculators_config(aux_hidden_state_layer_ids=[0, 3])), "count from 1"),
    "anchor": (CheckpointError, of(speculators_config(sample_from_anchor=True)), "DSpark"),
    "EAGLE": (CheckpointError, of(v1_config(architectures=["LlamaForCausalLMEagle3"])), "EAGLE"),
    "MiMo": (CheckpointError, with_tensor("mask_embedding", 64), "MiMo"),
    "Laguna": (CheckpointError, with_tensor("aux_hidden_norms.0.weight", 64), "Laguna"),
    "FP8": (CheckpointError, of(v1_config(quantization_config={"quant_method": "fp8"})), "another runtime"),
    "packed": (CheckpointError, packed_without_saying, "no `quantization`"),
    "packed otherwise": (CheckpointError, packed_otherwise, "has shape"),
    # a vocabulary of its own
    "no table": (CheckpointError, of(v1_config(), **head(64)), "no table"),
    "no head": (CheckpointError, of(speculators_config(draft_vocab_size=64)), r"`lm_head\.weight` is missing"),
    "absolute table": (CheckpointError, reduced(d2t=mx.array(KEPT)), "look like target ids"),
    "contradiction": (CheckpointError, reduced(t2d=mx.arange(VOCAB) >= VOCAB - 64), "contradicts itself"),
    "embedding": (CheckpointError, of(v1_config(), **embedding(100)), r"embed_tokens\.weight"),
}
STEP = re.compile(r"(?:^|[.:;,] |, or )(Choose|Correct|Get|Give|Fetch|Download|Delete|Add|Convert|correct|download) ")


@pytest.fixture(scope="module")
def messages(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, DFlashError]:
    """What `load` says to each pair; any other kind of exception fails here, with its traceback."""
    said = {}
    for name, (_, make, _) in BROKEN.items():
        folder = tmp_path_factory.mktemp("broken") / "draft"
        make(folder)
        with pytest.raises(DFlashError) as caught:
            dflash_mlx.load(str(target), draft=str(folder), blas="off")
        said[name] = caught.value
    return said


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pair_says_what_it_is_and_what_to_do(name: str, messages: dict[str, DFlashError]) -> None:
    """The kind of the error is what a program can act on; the text is what a person can."""
    kind, _, text = BROKEN[name]
    assert type(messages[name]) is kind
    assert re.search(text, str(messages[name]))
    assert STEP.search(str(messages[name])), f"no next step in: {messages[name]}"


def test_every_fault_has_a_text_of_its_own(messages: dict[str, DFlashError]) -> None:
    """Compared without what belongs to the folder or the numbers in it."""
    texts = {name: re.sub(r"/\S+|\d+", "_", str(error)) for name, error in messages.items()}
    assert len(texts) >= 45 and len(set(texts.values())) == len(texts)


def test_the_pairs_are_broken_by_what_was_changed_only(target: Path, tmp_path: Path) -> None:
    """The same folders without the fault load."""
    for index, make in enumerate((v1, checkpoints.dflash2, checkpoints.speculators, reduced())):
        make(tmp_path / str(index))
        _, _, draft = dflash_mlx.load(str(target), draft=str(tmp_path / str(index)), blas="off")
        assert draft.config.hidden_size == 64
