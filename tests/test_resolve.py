"""Which draft a target gets, and why: beside it, by its name, or by what its model card says it is derived from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from dflash_mlx.errors import FetchError, UnsupportedTarget
from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.repository import find
from dflash_mlx.pairing.preflight import draft_source
from dflash_mlx.pairing.resolve import Resolution, resolve
from tests import checkpoints
from tests.fake_hub import FakeHub

PINNED = "b74e3a329c4d963783143b1e970d95b002be72bd"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "cache")
    made.install(monkeypatch)
    return made


def folder(path: Path, readme: str | None = None, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if readme is not None:
        (path / "README.md").write_text(readme)
    return path


def card(**fields: object) -> str:
    return f"---\n{json.dumps(fields)}\n---\n# A model\n"


def resolved(target: Path | str, *args: str) -> Resolution:
    return resolve(find(str(target), TARGET), *args)


def error(kind: type[Exception]) -> Exception:
    made = kind.__new__(kind)
    made.args = ("no",)
    return made


def test_a_draft_that_was_asked_for_comes_first_and_unpinned(tmp_path: Path) -> None:
    """The registry's notes come with it: they are about the draft, whoever chose it."""
    target = folder(tmp_path / "Qwen3-4B")
    checkpoints.v1(target / "dflash")
    found = resolved(target, "z-lab/Qwen3-8B-DFlash-b16")
    assert (found.draft, found.revision, found.reason) == ("z-lab/Qwen3-8B-DFlash-b16", None, "it was asked for")
    assert "thinking off" in found.notes[0]


@pytest.mark.parametrize("name", ["Qwen3-4B/dflash", "Qwen3-4B/draft", "Qwen3-4B-DFlash-b16", "qwen3-4b_Draft"])
def test_a_draft_beside_the_target_comes_before_the_registrys(name: str, tmp_path: Path) -> None:
    """As MiMo ships it, and as people lay it; at a quantisation of the target too."""
    for target in (folder(tmp_path / "Qwen3-4B"), folder(tmp_path / "Qwen3-4B-4bit-DWQ")):
        if "/" in name and target.name != "Qwen3-4B":
            continue
        draft = checkpoints.v1(tmp_path / name)
        found = resolved(target)
        assert found.draft == str(draft) and "beside the target" in found.reason and not found.notes


def test_of_several_drafts_beside_the_first_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    """Inside before next to it, then by name: the same one everywhere, and the user sees that there was a choice."""
    target = folder(tmp_path / "Qwen3-4B")
    for name in ("Qwen3-4B-draft-b", "Qwen3-4B-draft-a"):
        checkpoints.v1(tmp_path / name)
    found = resolved(target)
    assert found.draft == str(tmp_path / "Qwen3-4B-draft-a")
    assert found.reason.endswith("Qwen3-4B-draft-a (others are there: Qwen3-4B-draft-b)")
    checkpoints.v1(target / "draft")
    found = resolved(target)
    assert found.draft == str(target / "draft") and "Qwen3-4B-draft-a, Qwen3-4B-draft-b" in found.reason


def test_only_a_drafts_folder_counts_as_beside(tmp_path: Path) -> None:
    """A model of that name, a config without weights, and another model's draft."""
    target = folder(tmp_path / "Qwen3-4B")
    folder(target / "dflash")
    checkpoints.write(target / "draft", checkpoints.v1_config())
    checkpoints.v1(tmp_path / "Qwen3-4B-Thinking-DFlash")
    checkpoints.v1(tmp_path / "Qwen3-DFlash")
    (tmp_path / "Qwen3-4B-DFlash").write_text("a file")
    assert resolved(target).draft == "z-lab/Qwen3-4B-DFlash-b16"
    checkpoints.v1(tmp_path / "Qwen3-4B-draft")
    assert resolved(target).draft == str(tmp_path / "Qwen3-4B-draft")


@pytest.mark.parametrize("path", ["Qwen3-4B-4bit", "models--org--Qwen3-4B-8bit/snapshots/0123abc"])
def test_the_registry_goes_by_the_folders_name_and_pins_the_revision(path: str, tmp_path: Path, monkeypatch) -> None:
    """Through a link and as `.` too; a revision of the caller's wins over the pin."""
    target = folder(tmp_path / path)
    (tmp_path / "current").symlink_to(target)
    monkeypatch.chdir(target)
    for name in (str(target), str(tmp_path / "current"), "."):
        found = resolved(name)
        assert (found.draft, found.revision) == ("z-lab/Qwen3-4B-DFlash-b16", PINNED)
        assert found.reason == "the registry lists it for qwen3-4b" and len(found.notes) == 1
    assert resolved(target, "auto", "v2").revision == "v2"


@pytest.mark.parametrize(
    ("fields", "config", "note"),
    [
        (dict(base_model="Qwen/Qwen3.5-9B", base_model_relation="quantized"), {}, None),
        (dict(base_model="Qwen/Qwen3.5-9B"), dict(quantization={"bits": 4}), None),  # as mlx_lm.convert writes it
        (dict(base_model=["Qwen/Qwen3.5-9B"]), {}, "(how is not stated)"),
        (dict(base_model="Qwen/Qwen3.5-9B", base_model_relation="finetune"), dict(quantization={}), "(finetune)"),
        (dict(base_model="Qwen/Qwen3.5-9B", base_model_relation="adapter"), {}, "(adapter)"),
        (
            dict(base_model=["org/unknown", "Qwen/Qwen3.5-9B", "Qwen/Qwen3-4B"]),
            {},
            "(merge; of 3 models that were merged, it is the first with a draft)",
        ),
    ],
)
def test_a_folders_card_leads_to_the_draft_of_its_base(
    fields: dict, config: dict, note: str | None, tmp_path: Path
) -> None:
    """A quantised copy accepts like its base; anything else may accept less, and every request says so."""
    target = folder(tmp_path / "mine", card(**fields), **config)
    found = resolved(target)
    assert found.draft == "z-lab/Qwen3.5-9B-DFlash"
    assert found.reason.endswith(f"{target} < Qwen/Qwen3.5-9B")
    said = [f"{target} is derived from Qwen/Qwen3.5-9B {note}: acceptance may be lower"] if note else []
    assert list(found.notes) == said


def test_a_folders_config_may_name_what_it_was_made_from(tmp_path: Path) -> None:
    """`_name_or_path` is what was loaded before training as well as before converting, so there is a note."""
    target = folder(tmp_path / "out", _name_or_path="/data/Qwen3.5-9B/")
    found = resolved(target)
    assert found.draft == "z-lab/Qwen3.5-9B-DFlash" and "acceptance may be lower" in found.notes[0]
    (target / "README.md").write_text(card(base_model="Qwen/Qwen3.5-4B"))
    assert resolved(target).draft == "z-lab/Qwen3.5-4B-DFlash", "the card comes first"


def test_a_repositorys_card_and_tags_lead_there(hub: FakeHub, tmp_path: Path) -> None:
    """The relation that the hub inferred is in the tags; the list of files brings both, so nothing else is asked."""
    hub.add(
        "mlx-community/Mine-4bit",
        folder(tmp_path / "mine"),
        card={"base_model": "Qwen/Qwen3.5-9B"},
        tags=["mlx", "base_model:Qwen/Qwen3.5-9B", "base_model:quantized:Qwen/Qwen3.5-9B"],
    )
    found = resolved("mlx-community/Mine-4bit")
    assert found.draft == "z-lab/Qwen3.5-9B-DFlash" and not found.notes
    assert hub.asked == [("info", "mlx-community/Mine-4bit")]


def test_a_chain_of_cards_is_followed(hub: FakeHub, tmp_path: Path) -> None:
    """A quantised finetune of a quantised copy: one step changed the weights, so there is one note."""
    empty = folder(tmp_path / "empty")
    hub.add("org/tuned-4bit", empty, card={"base_model": "org/tuned", "base_model_relation": "quantized"})
    hub.add("org/tuned", empty, card={"base_model": "org/copy", "base_model_relation": "finetune"})
    hub.add("org/copy", empty, card={"base_model": "Qwen/Qwen3-8B", "base_model_relation": "quantized"})
    found = resolved("org/tuned-4bit")
    assert found.draft == "z-lab/Qwen3-8B-DFlash-b16" and found.revision
    assert found.reason.endswith("org/tuned-4bit < org/tuned < org/copy < Qwen/Qwen3-8B")
    derived, about_the_draft = found.notes
    assert derived == "org/tuned-4bit is derived from Qwen/Qwen3-8B (finetune): acceptance may be lower"
    assert "thinking" in about_the_draft


def test_the_nearest_base_wins(hub: FakeHub, tmp_path: Path) -> None:
    """Breadth first: a base with a draft comes before the base of an earlier base."""
    empty = folder(tmp_path / "empty")
    hub.add("org/first", empty, card={"base_model": "Qwen/Qwen3-4B"})
    target = folder(tmp_path / "merged", card(base_model=["org/first", "Qwen/Qwen3-8B"]))
    assert resolved(target).draft == "z-lab/Qwen3-8B-DFlash-b16" and not hub.asked


def test_cards_that_go_round_or_on_end(hub: FakeHub, tmp_path: Path) -> None:
    """Two models that name each other, and a chain without end: no draft, and not for ever."""
    empty = folder(tmp_path / "empty")
    hub.add("org/a", empty, card={"base_model": ["org/B", "org/a"]})
    hub.add("org/B", empty, card={"base_model": "ORG/A"})
    found = resolved("org/a")
    assert found.draft is None and "derived from (org/b)" in found.reason and len(hub.asked) == 2
    hub.asked.clear()
    for index in range(20):
        hub.add(f"org/x{index}", empty, card={"base_model": f"org/x{index + 1}"})
    assert resolved("org/x0").draft is None and len(hub.asked) == 5


def test_without_a_network_it_says_that_the_chain_could_not_be_asked(hub: FakeHub, tmp_path: Path) -> None:
    """And asks once: an unreachable hub may take its time to not answer."""
    hub.down = True
    target = folder(tmp_path / "mine", card(base_model=["org/one", "org/two"]))
    found = resolved(target)
    assert found.draft is None and hub.asked == [("info", "org/one")]
    assert "the model card of org/one could not be asked for: the hub cannot be reached" in found.reason


def test_a_gated_base_is_passed_over_and_named(hub: FakeHub, tmp_path: Path) -> None:
    empty = folder(tmp_path / "empty")
    hub.add("meta/Gated", empty, gone=error(GatedRepoError))
    hub.add("org/open", empty, card={"base_model": "Qwen/Qwen3-8B"})
    found = resolved(folder(tmp_path / "mine", card(base_model=["meta/Gated", "org/open"])))
    assert found.draft == "z-lab/Qwen3-8B-DFlash-b16"
    assert "meta/Gated is gated" in found.reason


def test_a_model_card_in_the_cache_is_read_there(hub: FakeHub, tmp_path: Path) -> None:
    hub.down = True
    folder(hub.place("org/tuned"), card(base_model="Qwen/Qwen3-8B", base_model_relation="finetune"))
    found = resolved(folder(tmp_path / "mine", card(base_model="org/tuned", base_model_relation="quantized")))
    assert found.draft == "z-lab/Qwen3-8B-DFlash-b16" and not hub.asked


def test_a_snapshot_without_its_card_asks_for_its_repositorys(hub: FakeHub, tmp_path: Path) -> None:
    """mlx_lm does not fetch README.md."""
    target = folder(tmp_path / "models--org--tuned-4bit" / "snapshots" / "0123")
    hub.add("org/tuned-4bit", target, card={"base_model": "Qwen/Qwen3-8B"}, tags=["base_model:quantized:Qwen/Qwen3-8B"])
    found = resolved(target)
    assert found.draft == "z-lab/Qwen3-8B-DFlash-b16" and hub.asked == [("info", "org/tuned-4bit")]


@pytest.mark.parametrize("readme", ["---\n{not: [yaml\n---\n", "---\n- a list\n---\n", "no front matter", ""])
def test_a_broken_card_says_nothing_and_breaks_nothing(readme: str, tmp_path: Path) -> None:
    found = resolved(folder(tmp_path / "mine", readme))
    assert found.draft is None and found.reason == f"the registry has none for {tmp_path / 'mine'}"


def test_what_a_card_names_may_be_no_repository(hub: FakeHub, tmp_path: Path) -> None:
    """A path on the trainer's machine is compared with the registry and not asked for."""
    target = folder(tmp_path / "mine", card(base_model=["/data/x/Other", "/data/Qwen3-8B"]))
    assert resolved(target).draft == "z-lab/Qwen3-8B-DFlash-b16"
    (target / "README.md").write_text(card(base_model=["../outputs/run 7"]))
    assert resolved(target).draft is None and not hub.asked


def test_a_target_that_cannot_run_here_says_so_before_anything_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    """Half a terabyte of it."""
    hub.add("moonshotai/Kimi-K2.5", folder(tmp_path / "kimi"))
    with pytest.raises(UnsupportedTarget, match=r"z-lab/Kimi-K2\.5-DFlash cannot be run here \(multi-head latent"):
        draft_source(resolved("moonshotai/Kimi-K2.5"))
    assert hub.asked == [("info", "moonshotai/Kimi-K2.5")]


def test_a_misspelled_folder_is_said_before_the_network(hub: FakeHub) -> None:
    """Most names that the hub does not have were meant as folders; one that it refuses for another reason was not."""
    hub.add("models/qwen", Path(), gone=error(RepositoryNotFoundError))
    hub.add("org/gated", Path(), gone=error(GatedRepoError))
    with pytest.raises(FetchError, match=r"^There is no folder models/qwen here, and the hub has no repository "):
        find("models/qwen", TARGET)
    with pytest.raises(FetchError, match=r"^org/gated is gated"):
        find("org/gated", TARGET)
    hub.down = True
    with pytest.raises(FetchError, match=r"^There is no folder models/qwen here, and models/qwen is not complete"):
        find("models/qwen", TARGET)


def test_a_missing_folder_is_no_repository() -> None:
    with pytest.raises(FetchError, match="does not exist"):
        find("./nowhere/at-all", TARGET)
