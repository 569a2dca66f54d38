"""Loading: mlx_lm's two values or three with the draft, and every failure says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from dflash_mlx import load, registry
from dflash_mlx import load as load_function
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CheckpointError, FetchError, IncompatiblePair
from tests.folders import draft_folder, target_folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    return str(target_folder(root / "tiny")), str(draft_folder(root / "tiny-draft"))


SCRIPT = """
from {package} import generate, load, stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.models.cache import make_prompt_cache

model, tokenizer = load({folder!r}{extra})
messages = [{{"role": "user", "content": "Tell me"}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
cache = make_prompt_cache(model)
out.append(generate(model, tokenizer, prompt=prompt, max_tokens=20, prompt_cache=cache))
out.append(generate(model, tokenizer, prompt="more", max_tokens=20, prompt_cache=cache))
processors = make_logits_processors(repetition_penalty=1.2)
for response in stream_generate(model, tokenizer, prompt, max_tokens=12, sampler=make_sampler(temp=0.0),
                                logits_processors=processors, prefill_step_size=8):
    out.append((response.text, response.token, response.finish_reason, response.generation_tokens))
"""


def test_an_mlx_lm_script_works_after_changing_the_import(pair: tuple[str, str]) -> None:
    results = []
    for package, extra in (("mlx_lm", ""), ("dflash_mlx", ", blas='off'")):
        out: list = []
        exec(SCRIPT.format(package=package, folder=pair[0], extra=extra), {"out": out})
        results.append(out)
    assert results[0] == results[1] and len(results[0]) == 14


def test_two_values_as_mlx_lm_or_three_with_the_draft(pair: tuple[str, str]) -> None:
    folder, draft = pair
    assert len(load(folder, blas="off")) == 2
    model, tokenizer, loaded = load(folder, draft=draft, blas="off")
    assert isinstance(loaded, DraftModel) and loaded.block_size == 16
    assert tokenizer.eos_token_ids == {257}
    assert load(folder, draft=None, blas="off")[2] is None
    *_, config = load(folder, return_config=True, blas="off")
    assert config["model_type"] == "llama"
    theirs, _ = mlx_lm.load(folder)
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(ids), theirs(ids))


def test_dtype_is_selectable_and_the_draft_follows_on_a_cpu(pair: tuple[str, str]) -> None:
    model, _, draft = load(pair[0], draft=pair[1], dtype="bfloat16", blas="off")
    assert model(mx.array([[1]])).dtype == mx.bfloat16 and draft.dtype == mx.bfloat16


def test_progress_says_what_is_done(pair: tuple[str, str]) -> None:
    said = []
    load(pair[0], draft=pair[1], blas="off", progress=lambda message, share: said.append(message))
    assert said[0] == f"Loading {pair[0]}" and f"Loading the draft {pair[1]}" in said


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(trust_remote_code=True), "never runs code from a model repository"),
        (dict(tokenizer_config={"trust_remote_code": True}), "never runs code"),
        (dict(gguf="x.gguf"), "`gguf` is not honoured for any model but 'demo'"),
        (dict(dtype="int8"), "`dtype` has to be one of"),
        (dict(dtype="packed"), "'packed' is for the demo target"),
        (dict(blas="on"), "`blas` has to be 'auto' or 'off'"),
    ],
)
def test_arguments_that_are_not_honoured_are_named(kwargs: dict, message: str, pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=message):
        load(pair[0], **{"blas": "off"} | kwargs)


def test_the_demo_refuses_what_it_cannot_honour() -> None:
    with pytest.raises(ValueError, match="`revision` is not honoured for the demo target"):
        load("demo", revision="main", blas="off")


def test_a_float16_target_gets_a_float32_draft_on_a_cpu(pair: tuple[str, str]) -> None:
    """Fused features overflow float16."""
    _, _, draft = load(pair[0], draft=pair[1], dtype="float16", blas="off")
    assert draft.dtype == mx.float32


def test_a_missing_folder_says_what_to_give() -> None:
    with pytest.raises(FetchError, match=r"does not exist\. Give a folder"):
        load("./nowhere/at-all", blas="off")


def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path, pair: tuple[str, str]) -> None:
    shutil.copy(Path(pair[0]) / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="is not a complete model folder"):
        load(str(tmp_path), blas="off")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros(1)})
    with pytest.raises(CheckpointError, match=r"could not be loaded by mlx_lm.*no_such_model"):
        load(str(tmp_path), blas="off")


def gated() -> GatedRepoError:
    """Made without a response, whose class depends on the hub library's version."""
    error = GatedRepoError.__new__(GatedRepoError)
    error.args = ("403 gated",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "not in the local cache and the hub cannot be reached. Connect once"),
        (gated(), "The hub refused org/model.*accept its licence"),
        (OSError(28, "No space left on device"), "No space left on device.*the next try continues"),
    ],
)
def test_a_failed_fetch_says_what_to_do(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FetchError, match=message):
        load("org/model", blas="off")


def test_a_draft_where_a_model_is_expected_says_how_to_use_it(tmp_path: Path, capsys) -> None:
    """Through Python, the command line and the chat; not "missing parameters: embed_tokens"."""
    from dflash_mlx.cli import generate_main

    folder = str(draft_folder(tmp_path / "draft"))
    message = "is a DFlash draft, which has no embedding"
    with pytest.raises(CheckpointError, match=message):
        load(folder, blas="off")
    assert generate_main(["--model", folder, "--draft", "none", "--blas", "off", "--prompt", "x"]) == 1
    assert message in capsys.readouterr().err
    chat = [
        sys.executable,
        "-m",
        "dflash_mlx.chat",
        "--model",
        folder,
        "--draft",
        "none",
        "--blas",
        "off",
        "--print",
        "x",
    ]
    done = subprocess.run(chat, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr


def test_a_model_where_a_draft_is_expected_says_how_to_use_it(tmp_path: Path, capsys) -> None:
    from dflash_mlx.cli import generate_main

    path = target_folder(tmp_path / "target") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    folder = str(path.parent)
    message = "If this is an ordinary language model, use it with mlx_lm's own speculative decoding"
    with pytest.raises(CheckpointError, match=message):
        load(folder, draft=folder, blas="off")
    assert generate_main(["--model", folder, "--draft", folder, "--blas", "off", "--prompt", "x"]) == 1
    assert message in capsys.readouterr().err


def test_a_name_that_is_no_repository_says_so() -> None:
    with pytest.raises(FetchError, match="neither a folder here nor a repository's name"):
        load("a/b/c/d", blas="off")


def test_auto_without_a_known_draft_warns_and_loads_none(pair: tuple[str, str]) -> None:
    """A fallback is never silent."""
    with pytest.warns(UserWarning, match="No DFlash draft is known for .*decoding will be plain"):
        assert load(pair[0], draft="auto", blas="off")[2] is None


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3-8B-4bit", "z-lab/Qwen3-8B-DFlash-b16"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit-dwq", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
        ("/models/Meta-Llama-3.1-8B-Instruct-8bit/", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("mlx-community/Qwen3-4B-MLX-4bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3.6-27B-4bit", "z-lab/Qwen3.6-27B-DFlash"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "z-lab/gpt-oss-20b-DFlash"),
        ("Qwen/Qwen3-40B", None),
        ("mlx-community/Qwen3-4B-Thinking-2507-4bit", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("someone/My-Qwen3-4B", None),
    ],
)
def test_the_registry_finds_a_draft_at_any_quantisation(target: str, draft: str | None) -> None:
    row = registry.draft_for(target)
    assert (row.draft if row else None) == draft


def test_auto_fetches_the_registrys_draft(pair: tuple[str, str], tmp_path: Path, monkeypatch) -> None:
    folder = shutil.copytree(pair[0], tmp_path / "Qwen3-4B-bf16")
    asked = []

    def snapshot(repo, **kwargs):
        asked.append((repo, kwargs["revision"]))
        return pair[1]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    draft = load(str(folder), draft="auto", draft_revision="abc", blas="off")[2]
    assert asked == [("z-lab/Qwen3-4B-DFlash-b16", "abc")] and draft.name == "z-lab/Qwen3-4B-DFlash-b16"


def test_a_draft_with_another_tokenizer_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    """Sizes agree and ids do not."""
    folder = Path(shutil.copytree(pair[1], tmp_path / "draft"))
    content = json.loads((Path(pair[0]) / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load(pair[0], draft=str(folder), blas="off")[2] is not None, "the same tokenizer is fine"
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(IncompatiblePair, match="2 tokens have other ids there"):
        load(pair[0], draft=str(folder), blas="off")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load(pair[0], draft=str(folder), blas="off")


def test_load_is_the_function() -> None:
    assert load_function is load and callable(load)
