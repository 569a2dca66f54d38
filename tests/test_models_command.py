"""`dflash-metal models`: the list, and what is said of one target, without loading anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mlx.__main__ import main
from dflash_mlx.pairing import registry
from tests import checkpoints
from tests.fake_hub import FakeHub, hub_with
from tests.folders import target_folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return hub_with(tmp_path, monkeypatch, "org/Qwen3-4B-8bit", "z-lab/Qwen3-4B-DFlash-b16")


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, stdout with its spaces squeezed, stderr."""
    status = main(["models", *words])
    out, err = capsys.readouterr()
    return status, "\n".join(" ".join(line.split()) for line in out.splitlines()), err


def test_the_list_names_every_draft_in_full(capsys) -> None:
    """A name that is cut off or folded cannot be copied."""
    status, out, _ = asked(capsys)
    assert status == 0
    for row in registry.rows():
        assert row.draft in out.split() and row.targets[0] in out.split()
    assert "no: multi-head latent attention" in out
    assert "Run here with its real weights: demo. The others" in out


def test_the_list_as_json_says_what_runs(capsys) -> None:
    status, out, _ = asked(capsys, "--json")
    found = {row["draft"]: row for row in json.loads(out)}
    assert status == 0 and found.keys() == {row.draft for row in registry.rows()}
    qwen = found["z-lab/Qwen3-4B-DFlash-b16"]
    assert (qwen["runs"], qwen["block"], qwen["format"], qwen["licence"]) == (True, 16, "DFlash", "MIT")
    assert qwen["revision"].startswith("b74e3a32") and "thinking off" in qwen["notes"][0]
    said = {name: (row["runs"], row["runs_reason"]) for name, row in found.items()}
    assert said["z-lab/Kimi-K2.5-DFlash"] == (False, "multi-head latent attention is not served")
    assert said["incoai/GLM-5.3-Flash-DFlash2"] == (False, "mlx_lm has no glm5_next")
    assert said["z-lab/MiniMax-M2.5-DFlash"] == (None, "if it passes the check at loading")
    unknown = found["z-lab/MiniMax-M2.5-DFlash"]
    assert qwen["runs_reason"] is unknown["licence"] is unknown["block"] is None


def test_a_target_is_told_its_draft_and_why_without_a_download(hub: FakeHub, capsys) -> None:
    status, out, _ = asked(capsys, "org/Qwen3-4B-8bit")
    lines = out.splitlines()
    assert status == 0 and "refused" not in out
    assert lines[0] == "target org/Qwen3-4B-8bit"
    assert lines[1] == "model type llama, layers 4, hidden 64, vocabulary 257, 0.00 GB to fetch"
    assert lines[2] == "runs here yes"
    assert lines[3] == "draft z-lab/Qwen3-4B-DFlash-b16 at b74e3a329c4d963783143b1e970d95b002be72bd"
    assert lines[4] == "format DFlash, block 16, layers 2, hidden 64, taps [0, 2], 0.00 GB to fetch"
    assert lines[5:7] == ["why the registry lists it for qwen3-4b", "licence MIT"]
    assert lines[7].startswith("note this draft was trained with thinking off")
    assert "snapshot" not in [what for what, _ in hub.asked]


def test_what_load_would_refuse_is_said_and_is_the_exit_status(hub: FakeHub, tmp_path: Path, capsys) -> None:
    """By the same check: a script can ask before it downloads."""
    hub.add("org/other", checkpoints.v1(tmp_path / "other", hidden_size=128))
    status, out, _ = asked(capsys, "org/Qwen3-4B-8bit", "--draft", "org/other")
    assert status == 1 and "why it was asked for" in out
    assert "refused The draft org/other was made for another target: its hidden size is 128" in out
    status, out, _ = asked(capsys, "org/Qwen3-4B-8bit", "--draft", "org/other", "--json")
    found = json.loads(out)
    assert status == 1 and "hidden size" in found["refused"] and found["draft"]["config"]["hidden"] == 128
    assert found["target"]["to_fetch_bytes"] > 1000 and found["target"]["runs"] is True


def test_without_a_network_the_registry_still_answers(hub: FakeHub, capsys) -> None:
    hub.down = True
    status, out, _ = asked(capsys, "Qwen/Qwen3-8B")
    assert status == 1
    assert "draft z-lab/Qwen3-8B-DFlash-b16 at 9b41424b" in out and "format DFlash, block 16, not read" in out
    assert (
        "runs here yes" in out
        and "refused There is no folder Qwen/Qwen3-8B here, and Qwen/Qwen3-8B is not complete" in out
    )


def test_no_known_draft_is_an_answer(tmp_path: Path, capsys) -> None:
    """`load` decodes plainly then."""
    status, out, _ = asked(capsys, str(target_folder(tmp_path / "mine")))
    assert status == 0 and "draft none" in out and f"why the registry has none for {tmp_path / 'mine'}" in out
    assert f"in {tmp_path / 'mine'}" in out


def test_a_draft_in_the_targets_place_runs_nowhere(tmp_path: Path, capsys) -> None:
    status, out, _ = asked(capsys, str(checkpoints.v1(tmp_path / "draft")))
    assert status == 1 and "runs here" not in out and "is a DFlash draft, which has no embedding" in out


def test_the_demo_is_described_without_being_fetched(capsys, monkeypatch) -> None:
    monkeypatch.setattr("dflash_mlx.demo.target_folder", lambda **_: pytest.fail("nothing is to be fetched"))
    status, out, _ = asked(capsys, "demo")
    assert status == 0 and "draft demo" in out and "block 6" in out and "licence Apache-2.0" in out


def test_wrong_usage_and_explained_errors_have_the_usual_exit_status(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["models", "--draft", "org/draft"])
    assert caught.value.code == 2 and "--draft needs a TARGET" in capsys.readouterr().err
    status, out, err = asked(capsys, str(target_folder(tmp_path / "mine")), "--revision", "main")
    assert (status, out) == (1, "") and err.startswith("Error: `revision` ('main') is of a repository")
    status, out, _ = asked(capsys, "./nowhere")
    assert status == 1 and "refused nowhere does not exist" in out


def test_names_stay_whole_on_a_narrow_terminal(capsys, monkeypatch) -> None:
    """A name that is folded inside a table cannot be copied."""
    for width in (60, 80, 120, 140):
        monkeypatch.setattr("dflash_mlx.models_command._width", lambda width=width: width)
        words = asked(capsys)[1].split()
        assert all(row.draft in words and row.targets[0] in words for row in registry.rows())
        assert ("licence" in words) == (width >= 140)


def test_no_draft_can_be_asked_for_as_in_generate(hub: FakeHub, capsys) -> None:
    for option in ("--draft", "--draft-model"):
        status, out, _ = asked(capsys, "org/Qwen3-4B-8bit", option, "none")
        assert status == 0 and "draft none" in out and "why no draft was asked for" in out
    assert {name for _, name in hub.asked} == {"org/Qwen3-4B-8bit"}


def test_errors_are_data_too(tmp_path: Path, capsys) -> None:
    """A program that asked for JSON reads JSON, whatever went wrong."""
    status, out, err = asked(capsys, str(target_folder(tmp_path / "mine")), "--revision", "main", "--json")
    found = json.loads(out)
    assert status == 1 and not err and found["refused"].startswith("`revision` ('main') is of a repository")
    assert found["target"]["name"] == str(tmp_path / "mine") and found["draft"] is None


def test_a_draft_is_described_where_a_target_was_asked_for(tmp_path: Path, capsys) -> None:
    folder = checkpoints.speculators(tmp_path / "draft")
    path = folder / "config.json"
    verifier = {"verifier": {"name_or_path": "Qwen/Qwen3-4B"}}
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"speculators_config": config.get("speculators_config", {}) | verifier}))
    status, out, _ = asked(capsys, str(folder))
    assert status == 1 and "format DFlash, block 8" in out and "made for Qwen/Qwen3-4B" in out
    assert f"why {folder} is a draft itself" in out and "(its config names Qwen/Qwen3-4B)" in out


def test_the_demo_is_compared_with_a_draft_by_its_sizes(tmp_path: Path, capsys, monkeypatch) -> None:
    """Whether it was converted already or not."""
    draft = str(checkpoints.v1(tmp_path / "draft"))
    converted = tmp_path / "converted"
    converted.mkdir()
    (converted / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 577}))
    for folder, hidden, where in ((None, 576, "fetched and converted when"), (converted, 577, f"in {converted}")):
        monkeypatch.setattr("dflash_mlx.demo.converted_folder", lambda folder=folder: folder)
        status, out, _ = asked(capsys, "demo", "--draft", draft)
        assert status == 1 and f"its hidden size is 64, that of demo is {hidden}" in out and where in out


def test_a_reason_is_said_once(hub: FakeHub, tmp_path: Path, capsys) -> None:
    """Not as why there is no draft and again as what is refused."""
    hub.down = True
    for target in ("org/mine", "./nowhere"):
        status, out, _ = asked(capsys, target)
        assert status == 1 and "why the registry has none for" in out and len(hub.asked) <= 1
        assert out.count("cannot be reached") + out.count("does not exist") == 1
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    status, out, _ = asked(capsys, str(tmp_path / "broken"))
    assert status == 1 and out.count("cannot be read") == 1


def test_a_target_that_can_never_run_says_that_first(hub: FakeHub, tmp_path: Path, capsys) -> None:
    """Not that it is not in the cache: fetching half a terabyte would not help."""
    hub.down = True
    status, out, _ = asked(capsys, "moonshotai/Kimi-K2.5")
    assert status == 1 and "runs here no: multi-head latent attention is not served" in out
    assert "refused The target of z-lab/Kimi-K2.5-DFlash cannot be run here (multi-head latent" in out
    assert "block 8" in out
    assert "block ?" in asked(capsys, "org/MiniMax-M2.5")[1]
    folder = str(target_folder(tmp_path / "Kimi-K2.5"))
    status, out, _ = asked(capsys, folder)
    assert status == 1 and "runs here no: multi-head" in out, "its config may be of a family that runs"


def test_the_licence_of_a_folder_is_unknown(hub: FakeHub, tmp_path: Path, capsys) -> None:
    """It has no page to be seen on."""
    target = str(target_folder(tmp_path / "mine"))
    draft = str(checkpoints.v1(tmp_path / "mine-draft"))
    status, out, _ = asked(capsys, target)
    assert status == 0 and f"draft {draft}" in out and "licence unknown" in out
    assert "licence unknown" in asked(capsys, target, "--draft", str(tmp_path / "nowhere"))[1]
    hub.add("org/draft", Path(draft))
    assert "licence see its page" in asked(capsys, target, "--draft", "org/draft")[1]


def test_the_commands_are_listed_and_models_runs_as_a_module(capsys) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"dflash-metal {name}" in out for name in ("chat", "generate", "models", "convert"))
    done = subprocess.run([sys.executable, "-m", "dflash_mlx", "models", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "TARGET" in done.stdout
