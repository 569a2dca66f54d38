"""The README is a promise: commands parse, the Python runs, tables are those of the results, CI is its tests."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_mlx.__main__ import COMMANDS
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import tiny

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands() -> list[list[str]]:
    lines = [line.split(" #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line]


def modules() -> list[list[str]]:
    """["module", argument, ...] of every `python -m` line."""
    return [words[words.index("-m") + 1 :] for words in commands() if "-m" in words and "python" in words]


def test_the_readme_names_the_commands() -> None:
    assert {words[0] for words in modules()} == {"dflash_mlx.chat", "dflash_mlx.generate", "dflash_mlx"}
    named = set(re.findall(r"`dflash-metal ([a-z]+)", README))
    assert {"models", "convert", "doctor"} <= named <= set(COMMANDS)


@pytest.mark.parametrize("words", modules(), ids=" ".join)
def test_every_command_of_the_readme_is_accepted(words: list[str]) -> None:
    """The arguments parse; the network test below runs one for real."""
    from dflash_mlx import bench_command, chat, cli, doctor_command, models_command, plan_command

    parsers = {
        "dflash_mlx.chat": chat.parser,
        "dflash_mlx.generate": cli.generate_parser,
        "bench": bench_command.bench_parser,
        "plan": plan_command.plan_parser,
        "doctor": doctor_command.doctor_parser,
        "models": models_command.models_parser,
    }
    name, *rest = words[1:] if words[0] == "dflash_mlx" else words
    parsers[name]().parse_args(rest)


@pytest.mark.network
def test_the_generate_command_of_the_readme_runs(tmp_path: Path) -> None:
    words = next(words for words in modules() if words[0] == "dflash_mlx.generate")
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "def " in done.stdout and "generation only" in done.stderr


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    """With a tiny pair in the demo's place."""
    load_module = importlib.import_module("dflash_mlx.load")

    def load(name: str, *, draft: str):
        assert (name, draft) == ("demo", "auto")
        return tiny("llama"), byte_tokenizer(), tiny_draft()

    monkeypatch.setattr(load_module, "load", load)
    monkeypatch.setitem(vars(sys.modules["dflash_mlx"]), "load", load)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in blocks("python"):
        exec(code, names)
    assert names["reused"] > 40 and (tmp_path / "chat.safetensors").exists()
    assert "tok/s generation only" in capsys.readouterr().out


def test_the_tables_are_those_of_the_results() -> None:
    from bench.report import PAGES, render

    for page in PAGES:
        text = (ROOT / page).read_text()
        assert render(page, text) == text, f"{page}: run python -m bench.report"


def test_ci_runs_the_test_commands_of_the_readme() -> None:
    (block,) = [b for b in blocks("bash") if "pytest" in b]
    promised = [line.split(" #")[0].strip() for line in block.splitlines()]
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in script if line.startswith("uv run")] == promised
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_mac_workflow_runs_the_same_tests() -> None:
    """Who has a Mac runs what is run here, and is told that nobody has yet."""
    text = (ROOT / ".github" / "workflows" / "macos.yml").read_text()
    steps = yaml.safe_load(text)["jobs"]["metal"]["steps"]
    run = [step["run"] for step in steps if "run" in step]
    (block,) = [b for b in blocks("bash") if "pytest" in b]
    promised = [line.split(" #")[0].strip() for line in block.splitlines()]
    assert [line for line in run if line in promised] == promised
    assert "Never run by the authors" in text
    (kernels,) = [line for line in run if "bench." in line]
    words = shlex.split(kernels)
    importlib.import_module(words[words.index("-m") + 1]).parser().parse_args(words[words.index("-m") + 2 :])


def test_errors_in_the_readme_exist() -> None:
    from dflash_mlx import errors

    named = re.findall(r"^\| `(\w+)` \|", README, re.M)
    assert {
        "FetchError",
        "CheckpointError",
        "IncompatiblePair",
        "UnsupportedTarget",
        "CacheStateError",
        "DraftFault",
    } < set(named)
    for name in named:
        assert name == "ValueError" or issubclass(getattr(errors, name), errors.DFlashError)
