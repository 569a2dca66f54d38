"""Loading: mlx_lm's two values or three with the draft, and every failure says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from dflash_mlx import load
from dflash_mlx import load as load_function
from dflash_mlx.__main__ import main
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CheckpointError, FetchError, IncompatiblePair, UnsupportedTarget
from tests import checkpoints
from tests.fake_hub import FakeHub
from tests.folders import draft_folder, target_folder
from tests.test_broken_pairs import BROKEN


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
    assert said == [f"Loading {pair[0]}", f"Draft {pair[1]}: it was asked for", f"Loading the draft {pair[1]}"]


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
    message = "use this one with mlx_lm's own speculative decoding"
    with pytest.raises(CheckpointError, match=message):
        load(folder, draft=folder, blas="off")
    assert generate_main(["--model", folder, "--draft", folder, "--blas", "off", "--prompt", "x"]) == 1
    assert message in capsys.readouterr().err


def test_a_name_that_is_no_repository_says_so() -> None:
    with pytest.raises(FetchError, match="neither a folder here nor a repository's name"):
        load("a/b/c/d", blas="off")


def test_auto_without_a_known_draft_warns_and_loads_none(pair: tuple[str, str], tmp_path: Path) -> None:
    """A fallback is never silent."""
    folder = str(shutil.copytree(pair[0], tmp_path / "tiny"))
    with pytest.warns(
        UserWarning, match="No DFlash draft is known for .*decoding will be plain .the registry has none"
    ):
        assert load(folder, draft="auto", blas="off")[2] is None


def test_auto_takes_the_draft_that_lies_beside_the_target(pair: tuple[str, str]) -> None:
    said = []
    draft = load(pair[0], draft="auto", blas="off", progress=lambda message, share: said.append(message))[2]
    assert draft.name == pair[1] and f"Draft {pair[1]}: it lies beside the target, in {pair[1]}" in said


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]) -> FakeHub:
    made = FakeHub(tmp_path / "cache")
    made.install(monkeypatch)
    made.add("org/tuned", Path(pair[0]), card={"base_model": "Qwen/Qwen3-4B", "base_model_relation": "finetune"})
    made.add("z-lab/Qwen3-4B-DFlash-b16", Path(pair[1]))
    return made


def test_everything_is_checked_before_anything_large_is_fetched(hub: FakeHub, monkeypatch) -> None:
    """The target's list, card and config, the draft's, the heads of the draft's files; weights last."""
    monkeypatch.setattr("mlx_lm.utils.load_model", lambda *args, **kwargs: hub.asked.append(("load", "")) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load("org/tuned", draft="auto", draft_revision="v2", blas="off")
    draft = "z-lab/Qwen3-4B-DFlash-b16"
    assert hub.asked == [
        ("info", "org/tuned"),
        ("get", "org/tuned"),
        ("info", draft),
        ("get", draft),
        ("head", draft),
        ("snapshot", "org/tuned"),
        ("snapshot", draft),
        ("load", ""),
    ]
    assert hub.revisions[2] == hub.revisions[-1] == "v2", "the caller's revision wins over the registry's"


def test_what_is_fetched_once_loads_without_a_network(hub: FakeHub) -> None:
    """And carries what its user should know: of the draft, and that it was trained for another target."""
    model, _, first = load("org/tuned", draft="auto", blas="off")
    hub.down, hub.asked = True, []
    again, _, second = load("org/tuned", draft="auto", blas="off")
    assert not hub.asked and mx.array_equal(model(mx.array([[1, 2]])), again(mx.array([[1, 2]])))
    derived = "org/tuned is derived from Qwen/Qwen3-4B (finetune): acceptance may be lower"
    for draft in (first, second):
        assert draft.notes[0] == derived and "thinking off" in draft.notes[1] and len(draft.notes) == 2


def test_a_draft_out_of_reach_says_how_to_go_on_without_it(hub: FakeHub) -> None:
    """Where it was asked for by name, only why."""
    load("org/tuned", blas="off")
    hub.down = True
    with pytest.raises(FetchError, match=r"not complete in the local cache.*Or go without a draft: draft=None"):
        load("org/tuned", draft="auto", blas="off")
    with pytest.raises(FetchError, match=r"give its path\.$"):
        load("org/tuned", draft="org/mine", blas="off")
    assert load("org/tuned", draft=None, blas="off")[2] is None


def test_a_wrong_pair_is_refused_before_the_target_is_loaded(
    pair: tuple[str, str], tmp_path: Path, monkeypatch
) -> None:
    """Loading a large target takes a minute, and fetching it longer."""
    monkeypatch.setattr("mlx_lm.utils.load_model", lambda *args, **kwargs: pytest.fail("too late"))
    draft = checkpoints.v1(tmp_path / "draft", hidden_size=128)
    with pytest.raises(IncompatiblePair, match=f"hidden size is 128, that of {pair[0]} is 64"):
        load(pair[0], draft=str(draft), blas="off")
    (draft / "model.safetensors").rename(draft / "model.gguf")
    with pytest.raises(CheckpointError, match="GGUF"):
        load(pair[0], draft=str(draft), blas="off")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(draft_bits=5), "`draft_bits` has to be"),
        (dict(draft_bits=4, draft_group_size=48), "`draft_group_size` has to be"),
        (dict(draft_dtype="float16"), "`draft_dtype` has to be"),
        (dict(draft_window=0), "`draft_window` has to be"),
        (dict(draft=None, draft_bits=4), "`draft_bits` is not honoured for a load without a draft"),
        (dict(draft=None, draft_window=64), "`draft_window` is not honoured"),
        (dict(draft=None, draft_revision="v2"), "`draft_revision` is not honoured"),
    ],
)
def test_options_of_the_draft_are_checked_before_anything_is_asked(kwargs: dict, message: str, hub: FakeHub) -> None:
    with pytest.raises(ValueError, match=message):
        load("org/tuned", **{"draft": "auto", "blas": "off"} | kwargs)
    assert not hub.asked


def test_a_revision_of_a_folder_is_refused(pair: tuple[str, str]) -> None:
    """It would be ignored, and the user would believe it was honoured."""
    with pytest.raises(ValueError, match=r"`revision` \('main'\) is of a repository, and .* is a folder"):
        load(pair[0], revision="main", blas="off")
    for draft in (pair[1], "auto"):
        with pytest.raises(ValueError, match=r"`draft_revision` \('v2'\) is of a repository"):
            load(pair[0], draft=draft, draft_revision="v2", blas="off")


def test_options_reach_the_draft(pair: tuple[str, str]) -> None:
    """Packed on a CPU too, where it was asked for; and the tokenizer's size, beyond which nothing is proposed."""
    draft = load(pair[0], draft=pair[1], draft_bits=4, draft_group_size=32, draft_window=7, blas="off")[2]
    assert draft.layers[0].mlp.up_proj.bits == 4 and draft.layers[0].mlp.up_proj.group_size == 32
    assert draft.context_window == 7 and draft.known_tokens == 258
    assert load(pair[0], draft=pair[1], draft_dtype="bfloat16", blas="off")[2].dtype == mx.bfloat16


def test_an_adapter_is_noted_as_what_the_draft_does_not_know(pair: tuple[str, str], monkeypatch) -> None:
    monkeypatch.setattr("mlx_lm.utils.load_adapters", lambda model, path: model)
    draft = load(pair[0], adapter_path="x", draft=pair[1], blas="off")[2]
    assert "an adapter changes the target" in draft.notes[-1]


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


@pytest.mark.parametrize("argument", [dict(draft=False), dict(draft=""), dict(draft="none"), dict(draft="None")])
def test_what_can_be_no_draft_is_refused_by_its_argument(argument: dict, pair: tuple[str, str], tmp_path, monkeypatch):
    """Looked up as a name it would be a folder or a repository of that name, or an AttributeError."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"`draft`.* None"):
        load(pair[0], **argument, blas="off")
    with pytest.raises(ValueError, match="`path_or_hf_repo` has to be a folder"):
        load("", blas="off")


def test_paths_are_taken_as_text_is(pair: tuple[str, str], tmp_path: Path, monkeypatch) -> None:
    """A folder that is called none can be given, too."""
    assert load(Path(pair[0]), draft=Path(pair[1]), blas="off")[2].name == pair[1]
    shutil.copytree(pair[1], tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    assert load(Path(pair[0]), draft="none", blas="off")[2] is not None


def test_options_for_a_draft_that_is_not_there_are_named(pair: tuple[str, str], tmp_path: Path) -> None:
    """Otherwise the user believes that a quantised draft runs."""
    folder = str(shutil.copytree(pair[0], tmp_path / "tiny"))
    with pytest.warns(UserWarning, match=r"Not applied, because they are for a draft: `draft_bits`, `draft_window`\.$"):
        load(folder, draft="auto", draft_bits=4, draft_window=7, blas="off")
    with pytest.warns(UserWarning, match=r"if you have one\.$"):
        load(folder, draft="auto", blas="off")


EARLY = [
    "tokenizer",
    "truncated",
    "shard",
    "doubles",
    "missing tensor",
    "shape",
    "two names",
    "MiMo",
    "no head",
    "no table",
    "absolute table",
    "tokenizer file",
]


@pytest.mark.parametrize("name", EARLY)
def test_a_broken_draft_folder_is_refused_before_the_target_is_read(
    name: str, pair: tuple[str, str], tmp_path: Path, monkeypatch, capsys
) -> None:
    """The target's weights take minutes, and `models` says the same without loading anything; both name the draft."""
    monkeypatch.setattr("mlx_lm.utils.load_model", lambda *args, **kwargs: pytest.fail("too late"))
    monkeypatch.setattr("mlx_lm.utils.load_tokenizer", lambda *args, **kwargs: pytest.fail("too late"))
    kind, make, text = BROKEN[name]
    folder = tmp_path / "draft"
    make(folder)
    with pytest.raises(kind, match=text) as caught:
        load(pair[0], draft=str(folder), blas="off")
    assert str(folder) in str(caught.value)
    assert main(["models", pair[0], "--draft", str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["refused"] == str(caught.value)


def test_an_error_about_a_draft_names_it_once(pair: tuple[str, str], tmp_path: Path, monkeypatch) -> None:
    """Also one that only its numbers show, and a folder whose name is a word of the text."""
    monkeypatch.chdir(tmp_path)
    for name in ("no taps", "anchor", "truncated", "NaN"):
        BROKEN[name][1](Path("draft") if name == "no taps" else tmp_path / name)
        draft = "draft" if name == "no taps" else str(tmp_path / name)
        with pytest.raises(CheckpointError) as caught:
            load(pair[0], draft=draft, blas="off")
        said = str(caught.value)
        assert said.startswith("The draft draft: ") if draft == "draft" else said.count(draft) == 1, said


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def containing(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_text(text)

    return make


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def lacking_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_sizes(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 6}))


TARGETS = {
    "no weights": (without("model.safetensors"), r"it has no model\*\.safetensors\. Download"),
    "a missing shard": (lacking_a_shard, r"lacks 1 files .* example model-00002\.safetensors\. Download"),
    "no tokenizer": (without_tokenizer, r"has no tokenizer .*Download"),
    "a broken tokenizer": (
        containing("tokenizer.json", "{"),
        r"tokenizer.* cannot be loaded \(.*\)\. .*Download",
    ),
    "no type": (containing("config.json", "{}"), "config.json has no `model_type`.*Download"),
    "code": (containing("config.json", '{"model_type": "x", "model_file": "x.py"}'), "never runs code .*Choose"),
    "other weights": (other_sizes, r"Missing 18 parameters: \S+ and 17 more\. .*Download"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_broken_target_folder_says_what_it_is_and_what_to_do(
    name: str, pair: tuple[str, str], tmp_path: Path, monkeypatch
) -> None:
    """In one line, and before the weights are read but where only they show it."""
    folder = Path(shutil.copytree(pair[0], tmp_path / "target"))
    make, text = TARGETS[name]
    make(folder)
    if name != "other weights":
        monkeypatch.setattr("mlx_lm.utils.load_model", lambda *args, **kwargs: pytest.fail("too late"))
    with pytest.raises(CheckpointError, match=text) as caught:
        load(str(folder), blas="off")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_draft_as_the_target_is_no_target_without_a_draft(pair: tuple[str, str], tmp_path: Path) -> None:
    """Said at once: not after a warning that no draft is known for it; with the target that its config names."""
    folder = checkpoints.speculators(tmp_path / "draft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=r"is a DFlash draft.* \(its config names \S+\), and pass"):
            load(str(folder), draft="auto", blas="off")


def test_a_target_that_can_never_run_is_refused_before_the_hub_is_asked(hub: FakeHub) -> None:
    with pytest.raises(UnsupportedTarget, match=r"moonshotai/Kimi-K2\.5 cannot be run here \(multi-head latent"):
        load("moonshotai/Kimi-K2.5", draft="auto", blas="off")
    assert not hub.asked


def test_the_demo_refuses_a_foreign_draft_before_it_is_fetched(pair: tuple[str, str], monkeypatch) -> None:
    monkeypatch.setattr("dflash_mlx.demo.target_folder", lambda **_: pytest.fail("too late"))
    with pytest.raises(IncompatiblePair, match="hidden size is 64, that of demo is 576"):
        load("demo", draft=pair[1], blas="off")


def stale(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def extra_head(folder: Path) -> None:
    index = {
        "weight_map": {"a": "./model.safetensors", "mtp.fc.weight": "mtp.safetensors", "b": "text/model.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("change", [stale, extra_head, containing("model.safetensors.index.json", "{")])
def test_an_index_that_mlx_lm_never_reads_refuses_nothing(change: Callable[[Path], None], pair, tmp_path: Path) -> None:
    """A left-over index, or one with files that are no part of the model, is no reason not to load."""
    folder = Path(shutil.copytree(pair[0], tmp_path / "tiny"))
    change(folder)
    mlx_lm.load(str(folder))
    assert load(str(folder), draft=pair[1], blas="off")[2] is not None


def test_a_draft_that_was_only_guessed_and_does_not_fit_leaves_plain_decoding(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    """A deeper merge of a known model, say: the default must not keep it from running. Asked for, it is an error."""
    deeper = Path(shutil.copytree(pair[0], tmp_path / "merged" / "merge"))
    checkpoints.v1(tmp_path / "merged" / "merge-DFlash", num_target_layers=40)
    with pytest.warns(UserWarning, match=r"merge-DFlash is not used, so decoding will be plain\..* layers is 40"):
        assert load(str(deeper), draft="auto", blas="off")[2] is None
    with pytest.raises(IncompatiblePair, match="layers is 40"):
        load(str(deeper), draft=str(tmp_path / "merged" / "merge-DFlash"), blas="off")


def test_a_guessed_draft_with_another_tokenizer_leaves_plain_decoding(pair: tuple[str, str], tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair[0], tmp_path / "tuned"))
    draft = Path(shutil.copytree(pair[1], tmp_path / "tuned-DFlash"))
    content = json.loads((target / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (draft / "tokenizer.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="is not used, so decoding will be plain"):
        assert load(str(target), draft="auto", blas="off")[2] is None


def test_a_guessed_draft_that_cannot_be_filled_leaves_plain_decoding(pair: tuple[str, str], tmp_path: Path) -> None:
    """Numbers that are not finite are seen only when they are read."""
    target = shutil.copytree(pair[0], tmp_path / "tiny")
    tensors = checkpoints.tensors_of(checkpoints.v1_config())
    tensors["norm.weight"] = tensors["norm.weight"] * mx.nan
    checkpoints.write(tmp_path / "tiny-DFlash", checkpoints.v1_config(), tensors)
    with pytest.warns(UserWarning, match=r"is not used, so decoding will be plain\..*not finite"):
        assert load(str(target), draft="auto", blas="off")[2] is None


def test_a_draft_is_found_beside_a_link_to_the_target(pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    shutil.copytree(pair[0], tmp_path / "store" / "blob123")
    (tmp_path / "Tiny").symlink_to(tmp_path / "store" / "blob123")
    shutil.copytree(pair[1], tmp_path / "Tiny-DFlash")
    assert load(str(tmp_path / "Tiny"), draft="auto", blas="off")[2].name == str(tmp_path / "Tiny-DFlash")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "x" * 5000])
def test_impossible_paths_are_explained(name: str) -> None:
    with pytest.raises(FetchError):
        load(name, blas="off")


def test_load_is_the_function() -> None:
    assert load_function is load and callable(load)
