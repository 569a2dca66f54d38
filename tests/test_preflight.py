"""Before gigabytes are fetched: what is refused, what it costs to find out, and what needs no network at all."""

from __future__ import annotations

import errno
import importlib
import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import errors
from huggingface_hub.utils import hf_raise_for_status

from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import CheckpointError, DFlashError, FetchError, IncompatiblePair, UnsupportedTarget
from dflash_mlx.hub.cache import DRAFT, TARGET
from dflash_mlx.hub.errors import Gated, NoRepository, Unreachable, explained
from dflash_mlx.hub.repository import Source, find
from dflash_mlx.pairing import preflight
from dflash_mlx.pairing.preflight_target import check_target, target_spec
from tests import checkpoints
from tests.fake_hub import FakeHub, hub_with
from tests.folders import target_folder


def check(target: Source, draft: Source | None) -> None:
    """All that `load` asks before it fetches."""
    config = check_target(target)
    if draft is not None:
        preflight.check_draft_of(config, target, draft)
    preflight.check_disk(target, draft)


TEXT = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 257}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return hub_with(tmp_path, monkeypatch, "org/target", "org/draft")


def pair(target: str = "org/target", draft: str = "org/draft") -> tuple[Source, Source]:
    return find(target, TARGET), find(draft, DRAFT)


def change(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_fitting_pair_costs_lists_configs_and_the_head_of_the_drafts_weights(hub: FakeHub) -> None:
    check(*pair())
    assert [what for what, _ in hub.asked] == ["info", "info", "get", "get", "head"]
    assert hub.revisions[2:] == ["c" * 40] * 3, "one commit, whatever is published meanwhile"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(hidden_size=128), "its hidden size is 64, that of org/target is 128"),
        (dict(num_hidden_layers=5), "its number of target layers is 4, that of org/target is 5"),
        (dict(vocab_size=257 + 512), "its vocabulary size is 257, that of org/target is 769"),
        (dict(vocab_size=200), "its mask token id is 256, that of org/target is 200 rows"),
        (dict(hidden_size=32, text_config=TEXT | {"hidden_size": 96}), "is 96"),
    ],
)
def test_a_draft_of_another_target_is_refused_from_two_configs(config: dict, message: str, hub: FakeHub) -> None:
    """Not after both were downloaded."""
    change(hub.repositories["org/target"].folder, **config)
    with pytest.raises(IncompatiblePair, match=message):
        check(*pair())
    assert "snapshot" not in [what for what, _ in hub.asked]


@pytest.mark.parametrize("config", [dict(vocab_size=257 + 511), dict(text_config=TEXT, hidden_size=1), dict()])
def test_padding_and_what_a_config_leaves_to_defaults_fit(config: dict, hub: FakeHub) -> None:
    """Vision shells have the sizes in `text_config`, and gemma 3's leaves some out."""
    folder = hub.repositories["org/target"].folder
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    check(*pair())


@pytest.mark.parametrize("make", [checkpoints.dflash2, checkpoints.speculators])
def test_every_format_passes(make, hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/other", make(tmp_path / "other"))
    check(*pair(draft="org/other"))


def test_a_drafts_weights_are_compared_with_its_config_from_their_heads(hub: FakeHub, tmp_path: Path) -> None:
    """A tensor that is missing, or of another draft: found before the download and not after."""
    tensors = checkpoints.tensors_of(checkpoints.v1_config())
    tensors.pop("fc.weight")
    hub.add("org/part", checkpoints.write(tmp_path / "part", checkpoints.v1_config(), tensors))
    with pytest.raises(CheckpointError, match=r"org/part do not fit its config\.json \(1 missing: fc\.weight\)"):
        check(*pair(draft="org/part"))
    config = checkpoints.v1_config()
    hub.add("org/shards", checkpoints.write(tmp_path / "shards", config, checkpoints.tensors_of(config), shards=3))
    check(*pair(draft="org/shards"))
    assert hub.asked.count(("head", "org/shards")) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "has its weights as pickle only, and .* pickle can run code .*never opened. Choose a"),
        (["model-Q4_K_M.gguf"], "has its weights as GGUF only, and .* is packed for llama.cpp.* demo only. Choose a"),
        (["README.md"], "has no .* in its top folder"),
        (["mtp/model.safetensors"], "has no .* in its top folder"),
    ],
)
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_repository_without_safetensors_is_refused_with_its_reason(
    files: list[str], message: str, which: str, hub: FakeHub, tmp_path: Path
) -> None:
    folder = shutil.copytree(hub.repositories[f"org/{which}"].folder, tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    hub.add("org/bare", folder)
    with pytest.raises(FetchError, match=f"org/bare {message}"):
        check(*pair(**{which: "org/bare"}))
    assert "snapshot" not in [what for what, _ in hub.asked]


def test_a_folder_with_gguf_only_says_so(hub: FakeHub, tmp_path: Path) -> None:
    target = target_folder(tmp_path / "mine")
    (target / "model.safetensors").rename(target / "model.gguf")
    with pytest.raises(CheckpointError, match="has its weights as GGUF only"):
        check(find(str(target), TARGET), None)


def test_a_repository_packed_for_another_runtime_is_refused(hub: FakeHub) -> None:
    (hub.repositories["org/draft"].folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"org/draft has a hf_quant_config\.json"):
        check(*pair())


def test_a_draft_repository_as_the_target_is_refused(hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="org/draft is a DFlash draft, which has no embedding"):
        check(find("org/draft", TARGET), None)


def test_a_model_that_mlx_lm_does_not_know_is_refused(hub: FakeHub) -> None:
    """By its type and not after the download; a type that mlx_lm calls otherwise is known."""
    folder = hub.repositories["org/target"].folder
    for known in ("mistral", "gemma4_unified", "lfm2-vl"):
        change(folder, model_type=known)
        check(*pair())
    for unknown in ("glm5_next", "a.b"):
        change(folder, model_type=unknown)
        with pytest.raises(CheckpointError, match=f"org/target could not be loaded by mlx_lm.*{unknown}"):
            check(*pair())


def test_a_repository_without_a_config_is_no_model(hub: FakeHub) -> None:
    (hub.repositories["org/draft"].folder / "config.json").unlink()
    with pytest.raises(FetchError, match=r"org/draft has no config\.json in its top folder"):
        check(*pair())


def test_a_full_disk_is_noticed_before_and_both_numbers_are_said(hub: FakeHub, monkeypatch) -> None:
    """What is in the cache already needs no room."""
    hub.repositories["org/target"].sizes["model.safetensors"] = 40_000_000_000
    hub.repositories["org/draft"].sizes["model.safetensors"] = 2_500_000_000
    hub.repositories["org/target"].sizes["original/model.safetensors"] = 900_000_000_000
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, 41_000_000_000))
    message = r"42\.50 GB are still to be fetched \(org/target 40\.00 GB, org/draft 2\.50 GB\), and 41\.00 GB are free"
    with pytest.raises(FetchError, match=message):
        check(*pair())
    hub.place("org/draft").mkdir(parents=True)
    (hub.place("org/draft") / "model.safetensors").write_text("there")
    check(*pair())


def test_what_is_fetched_is_what_is_loaded(hub: FakeHub, tmp_path: Path) -> None:
    """No second copy in another format, no code; the card, which says what the model is derived from."""
    folder = hub.repositories["org/target"].folder
    for name in ("consolidated.safetensors", "modeling.py", "pytorch_model.bin", "README.md", "chat_template.jinja"):
        (folder / name).write_text("x")
    source, said = find("org/target", TARGET), []
    fetched = source.fetch(lambda message, share: said.append(message))
    names = {path.name for path in fetched.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
    assert not names & {"consolidated.safetensors", "modeling.py", "pytorch_model.bin"}
    size = sum(source.listing.sizes[n] for n in names - {"README.md"})
    assert said[0] == f"Fetching org/target (0.0 of {size / 1e6:.1f} MB)"


def test_what_is_in_the_cache_needs_no_network(hub: FakeHub) -> None:
    for source in pair():
        source.fetch(lambda message, share: None)
    hub.asked.clear()
    hub.down = True
    target, draft = pair()
    check(target, draft)
    assert target.fetch(print) == hub.place("org/target") and not hub.asked


@pytest.mark.parametrize("gone", ["tokenizer.json", "config.json", "model.safetensors"])
def test_an_incomplete_copy_is_completed_or_named(gone: str, hub: FakeHub) -> None:
    """Older versions of huggingface_hub take an interrupted download for a whole one."""
    find("org/target", TARGET).fetch(lambda message, share: None)
    (hub.place("org/target") / gone).unlink()
    assert find("org/target", TARGET).listing is not None
    hub.down = True
    with pytest.raises(Unreachable, match="org/target is not complete in the local cache and the hub cannot be"):
        find("org/target", TARGET)


def test_a_copy_that_has_all_that_is_loaded_will_do_where_the_hub_does_not_answer(hub: FakeHub, monkeypatch) -> None:
    """Another program fetched it without some files; with a network they are fetched."""
    find("org/target", TARGET).fetch(lambda message, share: None)
    lacking = errors.LocalEntryNotFoundError("some files are missing")
    lacking.snapshot_path = str(hub.place("org/target"))

    def snapshot(name: str, **how: object) -> str:
        raise lacking

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find("org/target", TARGET).listing is not None
    hub.down = True
    assert find("org/target", TARGET).folder == hub.place("org/target")


# The library's own cache, as it lies on a disk.


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the real huggingface_hub, which may not ask the hub."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(cache: Path, name: str, folder: Path) -> Path:
    """The snapshot of a repository in the cache, with its files as links."""
    base = cache / f"models--{name.replace('/', '--')}"
    snapshot = base / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("a" * 40)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    return snapshot


def test_the_real_cache_is_used_offline(offline: Path, tmp_path: Path) -> None:
    """Of the main branch, and of a commit that is there."""
    snapshot = cached(offline, "org/target", target_folder(tmp_path / "target"))
    draft = checkpoints.write(
        tmp_path / "draft", checkpoints.v1_config(), checkpoints.tensors_of(checkpoints.v1_config()), shards=2
    )
    cached(offline, "org/draft", draft)
    target, draft_source = pair()
    check(target, draft_source)
    assert target.fetch(print) == snapshot == find("org/target", TARGET, "a" * 40).folder
    with pytest.raises(Unreachable, match=r"HF_HUB_OFFLINE forbids to ask the hub\. Unset it once"):
        find("org/target", TARGET, "b" * 40)
    next(draft.glob("*.safetensors")).unlink()  # the link leads nowhere
    with pytest.raises(Unreachable, match="org/draft is not complete"):
        find("org/draft", DRAFT)


# What huggingface_hub raises, in the user's words.


def answer(status: int, code: str | None = None) -> errors.HfHubHTTPError:
    """What the library makes of a response."""
    http = importlib.import_module(errors.Response.__module__.split(".")[0])
    request = http.Request("GET", "https://hub/api/models/org/model/resolve/main/config.json")
    try:
        hf_raise_for_status(errors.Response(status, headers={"X-Error-Code": code} if code else {}, request=request))
    except errors.HfHubHTTPError as error:
        return error
    raise AssertionError("it should have raised")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            answer(403, "GatedRepo"),
            Gated,
            "org/model is gated: .*Accept it on the repository's page, then run `hf auth l",
        ),
        (
            answer(404, "RepoNotFound"),
            NoRepository,
            "The hub has no repository org/model, or it is private. Check the name",
        ),
        (answer(401), NoRepository, "an expired token looks the same"),
        (
            answer(404, "RevisionNotFound"),
            FetchError,
            "no revision 'v9'. It has main, v1, and commits. Ask for another",
        ),
        (answer(404, "EntryNotFound"), FetchError, "org/model lacks a file that a model needs"),
        (
            answer(429),
            FetchError,
            r"refused org/model for now \(status 429\). Wait some minutes, or run `hf auth login`",
        ),
        (answer(503), FetchError, r"trouble of its own \(status 503\).*Try again later"),
        (answer(400), FetchError, "The hub refused org/model: .*Check the name"),
        (caused(errors.LocalEntryNotFoundError("x"), answer(429)), FetchError, "status 429"),
        (
            errors.LocalEntryNotFoundError("x"),
            Unreachable,
            "not complete in the local cache and the hub cannot be reached",
        ),
        (errors.OfflineModeIsEnabled("x"), Unreachable, "Connect once, or download the folder on another machine"),
        (errors.HTTPError("no route"), Unreachable, "the hub cannot be reached"),
        (OSError(errno.ENOSPC, "No space left"), FetchError, "The disk of .* is full .*the next try fetches the rest"),
        (
            RuntimeError("Data processing error"),
            FetchError,
            "failed .*complete are kept, and the next try fetches the r",
        ),
        (errors.HFValidationError("bad"), FetchError, "'org/model' is neither a folder here nor a repository's name"),
    ],
)
def test_every_failure_says_what_to_do(error: Exception, kind: type, message: str, monkeypatch) -> None:
    """One message for each thing that the user would have to do."""
    refs = SimpleNamespace(branches=[SimpleNamespace(name="main")], tags=[SimpleNamespace(name="v1")])
    monkeypatch.setattr("huggingface_hub.list_repo_refs", lambda name: refs)
    with pytest.raises(kind, match=message) as caught, explained("org/model", "v9"):
        raise error
    assert type(caught.value) is kind and isinstance(caught.value, DFlashError)


def test_what_is_no_failure_of_the_hub_stays_what_it_is() -> None:
    """A mistake in this package is not explained away."""
    with pytest.raises(KeyError), explained("org/model"):
        raise KeyError("a bug")


def test_the_depth_of_a_hybrid_is_that_of_its_pattern() -> None:
    """nemotron_h counts its layers there; its `num_hidden_layers` may say something else."""
    draft = DraftConfig.from_dict(checkpoints.v1_config(num_target_layers=6))
    config = dict(model_type="nemotron_h", num_hidden_layers=4, hybrid_override_pattern="M*-M-*", hidden_size=64)
    assert target_spec(config, draft).n_layers == 6
    assert target_spec(config | dict(hybrid_override_pattern=None), draft).n_layers == 4


def test_a_folder_may_be_called_like_a_model_that_cannot_run(tmp_path: Path) -> None:
    """Its config says what it is."""
    preflight.refuse_by_name(str(target_folder(tmp_path / "kimi-k2.5")))
    with pytest.raises(UnsupportedTarget, match=r"kimi-k2\.5 cannot be run here"):
        preflight.refuse_by_name("moonshotai/kimi-k2.5")
