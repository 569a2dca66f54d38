"""Converted folders: they load, compute what quantising in memory computes, and appear whole or not at all."""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from dflash_mlx import files, load, stream_generate
from dflash_mlx.convert import convert
from dflash_mlx.convert_command import convert_main
from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions
from dflash_mlx.errors import CheckpointError, FetchError
from tests import checkpoints
from tests.families import VOCAB, prompt_of, reference
from tests.folders import target_folder

CONVERT = importlib.import_module("dflash_mlx.convert")  # as an attribute of the package it is the function
CONVERT_TARGET = importlib.import_module("dflash_mlx.conversion.target")
KEPT = [3 * i % VOCAB for i in range(64)]  # not in the order of the ids
FORMATS: dict[str, Callable[[Path], Path]] = {
    "v1": checkpoints.v1,
    "dflash2": checkpoints.dflash2,
    "speculators-reduced": lambda folder: checkpoints.speculators(folder, kept=KEPT),
    "speculators-own": lambda folder: checkpoints.speculators(folder, own_head=True, own_embedding=True, dflash2=True),
}


def narrowed(folder: Path, dtype: mx.Dtype = mx.bfloat16) -> Path:
    """The weights as published ones are stored."""
    path = folder / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    narrow = {k: v.astype(dtype) if mx.issubdtype(v.dtype, mx.floating) else v for k, v in weights.items()}
    mx.eval(narrow)
    mx.save_safetensors(str(path), narrow)
    return folder


def source(name: str, folder: Path) -> Path:
    return narrowed(FORMATS[name](folder / name))


def same(ours: DraftModel, expected: DraftModel) -> None:
    """The same numbers, bit for bit, under the same names; the same forward; the same ids."""
    pairs = [dict(tree_flatten(draft.parameters())) for draft in (ours, expected)]
    assert pairs[0].keys() == pairs[1].keys()
    for name, value in pairs[0].items():
        assert value.dtype == pairs[1][name].dtype and mx.array_equal(value, pairs[1][name]), name
    outs = []
    for draft in (ours, expected):
        mx.random.seed(1)
        context = draft.make_context()
        draft.extend(context, mx.random.normal((1, 30, 128)))
        outs.append(draft.denoise(mx.random.normal((1, 5, 64)), context))
    assert mx.array_equal(*outs)
    rows = mx.arange(ours.config.draft_vocab_size or VOCAB)
    assert mx.array_equal(ours.target_ids(rows), expected.target_ids(rows))
    assert ours.block_size == expected.block_size and ours.largest_id == expected.largest_id


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("bits", "dtype"), [(4, None), (8, "float32"), (None, None), (None, "float32")])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_converted_draft_is_what_quantising_on_load_gives(
    name: str, bits: int | None, dtype: str | None, tmp_path: Path
) -> None:
    """Own heads, embeddings and the tables of a reduced vocabulary included."""
    folder = source(name, tmp_path)
    output = convert(str(folder), tmp_path / "out", bits=bits, group_size=32, dtype=dtype)
    same(load_draft(output), load_draft(folder, options=DraftOptions(bits, 32, dtype)))
    ours, theirs = config_of(output), config_of(folder)
    assert ours.pop("converted") == {
        "by": ours_version(),
        "source": name,
        **({} if bits is None else {"bits": bits, "group_size": 32}),
    }
    assert ours.pop("quantization", None) == (None if bits is None else {"bits": bits, "group_size": 32})
    assert ours == theirs


def ours_version() -> str:
    from dflash_mlx import __version__

    return f"dflash-metal {__version__}"


@lru_cache
def a_target(folder: Path) -> str:
    return str(target_folder(folder))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_target_loads_with_the_converted_draft_and_writes_its_own_text(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    output = convert(str(source(name, tmp_path)), tmp_path / "out", bits=4, group_size=32)
    target = a_target(tmp_path_factory.getbasetemp() / "convert-target")
    model, tokenizer, draft = load(target, draft=str(output), dtype="float32", blas="off")
    responses = list(stream_generate(model, tokenizer, prompt_of(20), 20, draft, mode="dflash"))
    assert [response.token for response in responses] == reference("llama", prompt_of(20), 20)
    assert responses[-1].mode == "dflash"


def test_other_spellings_become_one_clean_file(tmp_path: Path) -> None:
    """Prefixes, suffixes and shards of the source are gone; nothing else has changed."""
    config = checkpoints.dflash2_config()
    tensors = checkpoints.tensors_of(config)
    spelled = {
        f"model.{name}.weight" if name.endswith("codebook") else f"model.{name}": value
        for name, value in tensors.items()
    }
    folder = checkpoints.write(tmp_path / "in", config, spelled, shards=3)
    output = convert(str(folder), tmp_path / "out")
    assert sorted(os.listdir(output)) == ["config.json", "model.safetensors"]
    written: dict[str, mx.array] = mx.load(str(output / "model.safetensors"))  # type: ignore[assignment]
    assert written.keys() == tensors.keys()
    assert all(mx.array_equal(value, tensors[name]) for name, value in written.items())


def test_a_quantised_draft_is_copied_but_not_quantised_again(tmp_path: Path) -> None:
    once = convert(str(source("v1", tmp_path)), tmp_path / "once", bits=8, group_size=32)
    with pytest.raises(CheckpointError, match=r"once is quantised already \(8 bits\).*leave `bits` out"):
        convert(str(once), tmp_path / "twice", bits=4)
    assert not (tmp_path / "twice").exists()
    same(load_draft(convert(str(once), tmp_path / "copy")), load_draft(once))
    assert config_of(tmp_path / "copy")["quantization"] == {"bits": 8, "group_size": 32}


def test_half_precision_is_widened_for_a_draft_and_refused_by_name(tmp_path: Path) -> None:
    """Fused features overflow it."""
    folder = narrowed(checkpoints.v1(tmp_path / "half", torch_dtype="float16"), mx.float16)
    output = convert(str(folder), tmp_path / "out")
    assert load_draft(output).dtype == mx.float32 and config_of(output)["torch_dtype"] == "float32"
    with pytest.raises(ValueError, match=r"`dtype` .* got 'float16'\. Fused features overflow float16"):
        convert(str(folder), tmp_path / "out2", dtype="float16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(bits=3), "`bits` has to be one of 4, 8, or None, .* got 3"),
        (dict(bits=True), "`bits` .* got True"),
        (dict(bits=4, group_size=48), "`group_size` has to be one of 32, 64, 128; got 48"),
        (dict(dtype="int8"), "`dtype` has to be one of float32, bfloat16, float16 or None; got 'int8'"),
        (dict(revision="main"), r"`revision` \('main'\) is of a repository"),
        (dict(bits=4, group_size=128), "Groups of 128 weights fit no matrix of v1"),
    ],
)
def test_wrong_arguments_are_named_and_leave_nothing(changes: dict, message: str, tmp_path: Path) -> None:
    folder = source("v1", tmp_path)
    with pytest.raises(ValueError, match=message):
        convert(str(folder), tmp_path / "out", **changes)
    assert os.listdir(tmp_path) == ["v1"]


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'demo' is converted and quantised already"):
        convert("demo", tmp_path / "out")
    with pytest.raises(FetchError, match="does not exist"):
        convert(str(tmp_path / "nowhere"), tmp_path / "out")
    checkpoints.write(tmp_path / "bare", checkpoints.v1_config())
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        convert(str(tmp_path / "bare"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["folder", "empty", "file", "link"])
def test_what_is_at_the_output_is_never_touched(what: str, tmp_path: Path) -> None:
    folder, output = source("v1", tmp_path), tmp_path / "out"
    if what == "folder":
        output.mkdir()
        (output / "mine.txt").write_text("mine")
    elif what == "empty":
        output.mkdir()
    elif what == "file":
        output.write_text("mine")
    else:
        output.symlink_to(tmp_path / "elsewhere")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="out exists already, and nothing is overwritten"):
        convert(str(folder), output, bits=8, group_size=32)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_what_appears_at_the_output_meanwhile_is_not_touched_either(tmp_path: Path, monkeypatch) -> None:
    folder, output, save = source("v1", tmp_path), tmp_path / "out", files.save_weights

    def slowly(path: Path, weights) -> None:
        save(path, weights)
        output.mkdir()

    monkeypatch.setattr(CONVERT, "save_weights", slowly)
    with pytest.raises(FileExistsError, match="out exists already"):
        convert(str(folder), output)
    assert sorted(os.listdir(tmp_path)) == ["out", "v1"] and not os.listdir(output)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), RuntimeError("[write] no")])
@pytest.mark.parametrize("kind", ["draft", "target"])
@pytest.mark.parametrize("where", ["weights", "config", "beside"])
def test_whatever_goes_wrong_leaves_nothing(error: BaseException, kind: str, where: str, tmp_path, monkeypatch) -> None:
    """Ctrl-C, a full disk, a bug: no folder that looks like a model, and no debris beside it."""
    folder = source("v1", tmp_path) if kind == "draft" else target_folder(tmp_path / "tiny")
    (folder / "LICENSE").write_text("yours")
    before = sorted(os.listdir(tmp_path))

    def fail(path: object, *args: object, **kwargs: object) -> None:
        if where == "weights":
            Path(str(path)).write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        if where == "weights":
            patch.setattr(mx, "save_safetensors", fail)
        elif where == "config":
            for module in (CONVERT, CONVERT_TARGET):
                patch.setattr(module, "write_config", fail)
        else:
            patch.setattr(shutil, "copyfile", fail)
        with pytest.raises((KeyboardInterrupt, OSError, RuntimeError)) as caught:
            convert(str(folder), tmp_path / "out", bits=8, group_size=32)
    assert where != "weights" or isinstance(caught.value, OSError | KeyboardInterrupt)
    assert sorted(os.listdir(tmp_path)) == before
    convert(str(folder), tmp_path / "out", bits=8, group_size=32)


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_a_disk_that_fills_up_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """For real: the system refuses to let a file grow beyond what was given."""
    folder = source("v1", tmp_path) if kind == "draft" else target_folder(tmp_path / "tiny")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(OSError):
            convert(str(folder), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == [folder.name]


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_a_write_that_stops_half_way_without_an_error_is_noticed(kind: str, tmp_path: Path, monkeypatch) -> None:
    folder = source("v1", tmp_path) if kind == "draft" else target_folder(tmp_path / "tiny")
    save = mx.save_safetensors

    def short(path: str, *args: object, **kwargs: object) -> None:
        save(path, *args, **kwargs)  # type: ignore[arg-type]
        os.truncate(path, os.path.getsize(path) // 2)

    monkeypatch.setattr(mx, "save_safetensors", short)
    with pytest.raises(OSError, match="was cut short"):
        convert(str(folder), tmp_path / "out")
    assert os.listdir(tmp_path) == [folder.name]


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_too_little_space_is_noticed_before_anything_is_written(kind: str, tmp_path: Path, monkeypatch) -> None:
    folder = source("v1", tmp_path) if kind == "draft" else target_folder(tmp_path / "tiny")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 10**10, 50_000_000))
    with pytest.raises(OSError, match=r"out needs 0\.07 GB, and the disk of .* has 0\.05 GB free\. Free some"):
        convert(str(folder), tmp_path / "a" / "b" / "out", bits=8, group_size=32)
    assert os.listdir(tmp_path) == [folder.name]


def test_missing_parents_are_made_and_home_is_understood(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = source("v1", tmp_path)
    assert convert(str(folder), "~/a/b/out") == tmp_path / "a" / "b" / "out"
    assert load_draft(tmp_path / "a" / "b" / "out").config.num_layers == 2


def test_tokenizer_and_licence_come_along_and_code_does_not(tmp_path: Path) -> None:
    """Where the hub's cache has links, files are copied."""
    snapshot = tmp_path / "models--z-lab--Tiny-DFlash" / "snapshots" / "0123abc"
    checkpoints.v1(snapshot)
    (tmp_path / "blob").write_text("the licence")
    (snapshot / "LICENSE").symlink_to(tmp_path / "blob")
    for name in ("tokenizer.json", "README.md", "chat_template.jinja", "model.py", "optimizer.pt", "other.json"):
        (snapshot / name).write_text(name)
    output = convert(str(snapshot), tmp_path / "out")
    beside = {"LICENSE", "tokenizer.json", "README.md", "chat_template.jinja"}
    assert set(os.listdir(output)) == beside | {"config.json", "model.safetensors"}
    assert (output / "LICENSE").read_text() == "the licence" and not (output / "LICENSE").is_symlink()
    converted = config_of(output)["converted"]
    assert (converted["source"], converted["revision"]) == ("z-lab/Tiny-DFlash", "0123abc")


def test_a_repository_in_the_hubs_cache_is_converted_without_a_network(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit, repository = "0123456789" * 4, tmp_path / "models--z-lab--Tiny-DFlash"
    narrowed(checkpoints.v1(repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    told: list[str] = []
    for revision in (None, commit):
        output = convert(
            "z-lab/Tiny-DFlash",
            tmp_path / f"out-{revision}",
            bits=4,
            group_size=32,
            revision=revision,
            progress=lambda message, share: told.append(message),
        )
        assert config_of(output)["converted"]["revision"] == commit
        assert load_draft(output).config.quantization == {"group_size": 32, "bits": 4}
    assert "Reading z-lab/Tiny-DFlash" in told and not [text for text in told if text.startswith(f"Reading {commit}")]


def test_progress_names_the_steps(tmp_path: Path) -> None:
    told: list[tuple[str, float | None]] = []
    convert(str(source("v1", tmp_path)), tmp_path / "out", progress=lambda *step: told.append(step))
    assert [message.split()[0] for message, _ in told] == ["Looking", "Reading", "Writing", "Wrote"]
    assert told[-1][1] == 1.0


@pytest.mark.parametrize(("bits", "dtype"), [(4, None), (None, "float16")])
def test_a_target_is_converted_as_mlx_lm_does_it(bits: int | None, dtype: str | None, tmp_path: Path) -> None:
    folder = target_folder(tmp_path / "models--org--Tiny" / "snapshots" / "0123abc")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/Tiny-Base\n---\n# Tiny\n")
    (folder / "LICENSE").write_text("yours")
    output = convert(str(folder), tmp_path / "out", bits=bits, group_size=32, dtype=dtype)
    model, config = load_model(output)
    expected, _ = load_model(folder)
    if bits is None:
        expected.set_dtype(mx.float16)
    else:
        expected, _ = quantize_model(expected, config_of(folder), 32, bits)
    ids = mx.array([prompt_of(9)])
    assert mx.array_equal(model(ids), expected(ids))
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.QuantizedLinear) == (bits is not None)
    assert config["converted"]["source"] == "org/Tiny" and config["converted"]["revision"] == "0123abc"
    card = (output / "README.md").read_text()
    assert "base_model: org/Tiny\n" in card and "license: apache-2.0" in card and "# Tiny" in card
    assert ("base_model_relation: quantized" in card) == (bits is not None)
    assert (output / "LICENSE").read_text() == "yours"
    if bits is not None:
        with pytest.raises(CheckpointError, match=r"quantised already \(4 bits\)"):
            convert(str(output), tmp_path / "twice", bits=8)
    _, tokenizer = load(str(output), blas="off")
    assert tokenizer.encode("hi") == load(str(folder), blas="off")[1].encode("hi")


def without(part: str) -> Callable[[Path], None]:
    """The weights without the tensors that have `part` in their names."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        mx.eval(weights)
        mx.save_safetensors(str(path), {key: value for key, value in weights.items() if part not in key})

    return change


def configured(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = {key: value for key, value in (config_of(folder) | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "unheard-of": (configured(model_type="unheard_of"), r"it has no model of the type 'unheard_of'\. Update mlx_lm"),
    "no model_type": (configured(model_type=None), "`model_type`"),
    "tensors missing": (without("mlp"), r"layers\.0\.mlp\.down_proj\.weight and 11 more.*[Dd]ownload it again"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no .*model.*safetensors"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_target_that_mlx_lm_cannot_read_is_one_line_with_a_next_step(case: str, tmp_path: Path) -> None:
    """mlx_lm says `'model_type'`, or a page of parameters."""
    folder, (change, message) = target_folder(tmp_path / "tiny"), BROKEN[case]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(str(folder), tmp_path / "out")
    assert "tiny" in str(caught.value) and "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["tiny"]


def test_a_model_of_unknown_kind_is_refused_before_its_weights_are_read(tmp_path: Path, monkeypatch) -> None:
    folder = target_folder(tmp_path / "tiny")
    configured(model_type="unheard_of")(folder)
    monkeypatch.setattr("dflash_mlx.hub.repository.Source.fetch", lambda *args: pytest.fail("was fetched"))
    with pytest.raises(CheckpointError, match="unheard_of"):
        convert(str(folder), tmp_path / "out")


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_matrices_that_stay_wide_are_told(kind: str, tmp_path: Path, capsys) -> None:
    """Rows of 64 do not divide into groups of 128; whoever asked for 4 bits would take the folder for packed."""
    if kind == "draft":
        folder, wide = checkpoints.v1(tmp_path / "in", intermediate_size=128), "of the draft's"
    else:
        folder, wide = target_folder(tmp_path / "in"), "matrices of in"
    assert convert_main([str(folder), str(tmp_path / "out"), "--bits", "4", "--group-size", "128"]) == 0
    out, err = capsys.readouterr()
    (note,) = [line for line in err.splitlines() if line.startswith("note: ")]
    assert wide in note and "are not quantised: their rows do not divide into groups of 128" in note
    assert out == f"{tmp_path / 'out'}\n"
    count = int(note.split()[1])
    weights: dict[str, mx.array] = mx.load(str(tmp_path / "out" / "model.safetensors"))  # type: ignore[assignment]
    left = [key for key, value in weights.items() if value.ndim == 2 and key.replace("weight", "scales") not in weights]
    left = [key for key in left if not key.endswith((".scales", ".biases", "fc.weight"))]
    assert count == len(left) > 0
    with pytest.warns(UserWarning, match=f"^{count} of .* are not quantised"):
        convert(str(folder), tmp_path / "out2", bits=4, group_size=128)


def test_a_target_of_which_nothing_can_be_packed_is_refused(tmp_path: Path) -> None:
    folder = target_folder(tmp_path / "tiny")
    narrow = {key: value[..., :64] for key, value in tensors_in(folder).items()}
    narrow = {key: value[:64] if "gate_proj" in key or "up_proj" in key else value for key, value in narrow.items()}
    mx.eval(narrow)
    mx.save_safetensors(str(folder / "model.safetensors"), narrow)
    configured(intermediate_size=64)(folder)
    assert not any(value.shape[-1] % 128 == 0 for value in tensors_in(folder).values() if value.ndim == 2)
    with pytest.raises(ValueError, match=r"Groups of 128 weights fit no matrix of tiny.*smaller group size"):
        convert(str(folder), tmp_path / "out", bits=4, group_size=128)
    assert os.listdir(tmp_path) == ["tiny"]


def tensors_in(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))  # type: ignore[return-value]


def test_a_vision_part_that_is_left_out_is_told(tmp_path: Path) -> None:
    """The folder would be taken for the whole model."""
    folder = target_folder(tmp_path / "shell", "mistral3")
    weights = dict(tensors_in(folder)) | {"vision_tower.layers.0.weight": mx.zeros((8, 8))}
    mx.eval(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        convert(str(folder), tmp_path / "text-only")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.warns(UserWarning, match="^the vision part of shell is left out: mlx_lm reads the text model only"):
        convert(str(folder), tmp_path / "out")
    assert not any("vision" in key for key in tensors_in(tmp_path / "out"))


def test_a_place_where_no_folder_can_be_made_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch) -> None:
    folder = source("v1", tmp_path)
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(CONVERT, "find", lambda *args: pytest.fail("was looked for"))
    with pytest.raises(OSError, match=r"file is no folder, so .*file/a/out cannot be made in it\. Give another"):
        convert(str(folder), tmp_path / "file" / "a" / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(OSError, match=r"cannot be written by you, so .*b/out cannot be made in it\. Give a place"):
        convert(str(folder), tmp_path / "b" / "out")
    assert sorted(os.listdir(tmp_path)) == ["file", "v1"]


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_the_command_prints_the_folder_and_nothing_else(kind: str, tmp_path: Path, capsys) -> None:
    folder = source("v1", tmp_path) if kind == "draft" else target_folder(tmp_path / "tiny")
    output = tmp_path / "out"
    assert convert_main([str(folder), str(output), "--bits", "8", "--group-size", "32"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{output}\n" and f"Wrote {output}" in err


def test_a_refusal_is_one_line_and_status_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash_mlx", "convert", str(tmp_path / "nowhere"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {tmp_path} exists already") and done.stderr.count("\n") == 1


def test_wrong_usage_and_interrupts_have_their_own_status(tmp_path: Path, capsys, monkeypatch) -> None:
    for arguments in (
        [],
        ["only-one"],
        ["a", "b", "--bits", "5"],
        ["a", "b", "--dtype", "int8"],
        ["a", "b", "--group-size", "32"],
    ):
        with pytest.raises(SystemExit) as end:
            convert_main(arguments)
        assert end.value.code == 2

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CONVERT, "save_weights", interrupt)
    assert convert_main([str(source("v1", tmp_path)), str(tmp_path / "out")]) == 130
    assert "Interrupted." in capsys.readouterr().err and os.listdir(tmp_path) == ["v1"]


@pytest.mark.parametrize("module", ["__main__ convert", "convert"])
def test_help_imports_no_mlx(module: str) -> None:
    """`python -m dflash_mlx.convert` did nothing, and ended with 0."""
    name, *words = module.split()
    code = (
        f"import sys, runpy; sys.argv = ['x', *{words}, '--help']\n"
        f"try: runpy.run_module('dflash_mlx.{name}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "else: raise AssertionError('nothing was run')\n"
        "assert 'mlx.core' not in sys.modules and 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--bits" in done.stdout and "OUTPUT" in done.stdout and "python -m dflash_mlx convert" in done.stdout


def test_it_is_exported_as_a_function() -> None:
    """mlx_lm exports one of this name; the module over it would not be callable."""
    code = (
        "import dflash_mlx.convert, dflash_mlx\n"
        "from dflash_mlx import convert\n"
        "assert callable(convert) and dflash_mlx.convert is convert and convert.__module__ == 'dflash_mlx.convert'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
