"""The real chat with the real demo pair in a pseudo-terminal: type, watch, stop, resume, quit."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from terminal import Terminal

from dflash_mlx import demo
from dflash_mlx.errors import FetchError

ROOT = Path(__file__).parent.parent.parent
LONG = "Write a long story about a lighthouse keeper and the sea."
CODE = "Write a Python function that reverses a string."


@pytest.fixture(scope="module", autouse=True)
def demo_target() -> None:
    """Fetched once, as a first start does. Without a network there is nothing real to run."""
    try:
        demo.target_folder()
    except FetchError as error:
        pytest.skip(f"the demo target is not here and cannot be fetched: {error}")


def chat(home: Path, *arguments: str, size: tuple[int, int] = (100, 32), **env: str) -> Terminal:
    """The chat as from a shell, with a data folder of its own and the models that this machine has."""
    places = {name: str(home / name) for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    added = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache, "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, "-m", "dflash_mlx.chat", *arguments]
    return Terminal(program, env={**places, **added, **env}, cwd=home, size=size)


def turns_in(home: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in home.rglob("metrics.jsonl") for line in path.read_text().splitlines()]


def written(text: str) -> list[str]:
    """The words of the answer below the question."""
    return text.partition("the sea.\n")[2].partition("╭")[0].split()


def test_pick_a_model_ask_watch_and_quit(tmp_path: Path) -> None:
    """From the picker to an answer with both clocks, and back to a clean shell with status 0."""
    with chat(tmp_path) as terminal:
        terminal.until("comes with this package")
        terminal.press("enter")
        terminal.until("ready", 90)
        terminal.type(CODE)
        terminal.press("enter")
        shown = terminal.until(lambda text: "return" in text and re.search(r"\d+ tokens in", text) is not None, 120)
        assert re.search(r"generation only \d+\.\d tok/s · prefill-inclusive \d+\.\d tok/s · TTFT \d+\.\d\d s", shown)
        assert re.search(r"dflash.* \d\.\d\d tokens/cycle · acceptance \d+%", shown)
        assert "def reverse_string" in shown and "```" not in shown
        terminal.press("ctrl+q")
        assert terminal.end() == 0
        assert terminal.left_behind() == []
    (record,) = turns_in(tmp_path)
    assert record["mode"] == "dflash" and record["finish_reason"] == "stop"


def test_stop_an_answer_quit_and_resume_the_chat(tmp_path: Path) -> None:
    """What was written until Esc is kept, is there again after a restart, and the next turn goes on from it."""
    with chat(tmp_path, "--demo", "--max-tokens", "400") as terminal:
        terminal.until("ready", 90)
        terminal.type(LONG)
        terminal.press("enter")
        terminal.until("Esc stop")
        terminal.until(lambda text: len(written(text)) > 40, 120)
        terminal.press("escape")
        stopped = terminal.until("stopped, this much is kept")
        terminal.press("ctrl+q")
        assert terminal.end() == 0 and terminal.left_behind() == []
    first_line = next(line for line in stopped.partition("▌")[2].splitlines()[1:] if len(line.split()) > 8)

    with chat(tmp_path, "--demo", "--resume", "--max-tokens", "12") as terminal:
        terminal.until("Loaded", 90)
        assert first_line.strip() in terminal.text
        terminal.type("Go on.")
        terminal.press("enter")
        terminal.until("/max raises it", 120)
        terminal.press("ctrl+q")
        assert terminal.end() == 0
    (record, following) = turns_in(tmp_path)
    assert record["finish_reason"] == "cancelled"
    said = record["prompt_tokens"] + record["generation_tokens"]  # type: ignore[operator]
    assert following["prompt_tokens"] > said  # type: ignore[operator]


@pytest.mark.parametrize("how", ["hang-up", "SIGTERM"])
def test_whatever_ends_the_chat_the_conversation_is_saved(tmp_path: Path, how: str) -> None:
    """In the middle of an answer: the terminal's window is closed, or somebody ends the process."""
    with chat(tmp_path, "--demo", "--max-tokens", "400") as terminal:
        terminal.until("ready", 90)
        terminal.type(LONG)
        terminal.press("enter")
        terminal.until(lambda text: len(written(text)) > 30, 120)
        if how == "hang-up":
            assert terminal.hang_up() == 128 + signal.SIGHUP
        else:
            terminal.signal(signal.SIGTERM)
            assert terminal.end() == 128 + signal.SIGTERM
            assert terminal.left_behind() == []
    (saved,) = [path for path in tmp_path.rglob("*.jsonl") if path.name != "metrics.jsonl"]
    assert LONG in saved.read_text() and len(saved.read_text()) > 400


def test_a_paste_of_lines_stays_in_the_box_and_the_window_can_shrink(tmp_path: Path) -> None:
    with chat(tmp_path, "--demo", size=(120, 40), NO_COLOR="1") as terminal:
        terminal.until("ready", 90)
        terminal.paste("one\ntwo\nthree")
        terminal.until(lambda text: all(word in text for word in ("one", "two", "three")))
        assert not turns_in(tmp_path) and "reading the prompt" not in terminal.text
        terminal.resize(60, 18)
        terminal.until(lambda text: "three" in text and "generation only" in text)
        terminal.press("ctrl+c")
        terminal.press("ctrl+q")
        assert terminal.end() == 0 and terminal.left_behind() == []


def test_a_model_that_cannot_be_loaded_is_a_message_and_a_clean_end(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with chat(tmp_path, "--model", str(tmp_path / "broken")) as terminal:
        terminal.until("could not be loaded", 60)
        terminal.press("ctrl+q")
        assert terminal.end() == 0 and terminal.left_behind() == []
        assert "config.json" in terminal.text and "Traceback" not in terminal.text


def test_a_typo_in_load_leaves_the_model_that_answers(tmp_path: Path) -> None:
    """The demo pair stays, with its cache; nothing has to be loaded again."""
    with chat(tmp_path, "--demo", "--max-tokens", "8") as terminal:
        terminal.until("ready", 90)
        terminal.type("/load nobody/No-Such-Model")
        terminal.press("enter")
        shown = terminal.until("demo pair is still loaded", 60)
        assert "There is no folder nobody/No-Such-Model here" in " ".join(shown.split())  # which may be wrapped
        terminal.type(CODE)
        terminal.press("enter")
        terminal.until("/max raises it", 120)
        terminal.press("ctrl+q")
        assert terminal.end() == 0 and terminal.left_behind() == []
        assert "No-Such-Model" not in terminal.text, "it is no reason to say at the end"
    assert len(turns_in(tmp_path)) == 1


def test_a_race_ends_in_a_verdict(tmp_path: Path) -> None:
    with chat(tmp_path, "--demo", "--max-tokens", "24") as terminal:
        terminal.until("ready", 90)
        terminal.type(CODE)
        terminal.press("enter")
        terminal.until("/max raises it", 120)
        terminal.type("/race")
        terminal.press("enter")
        shown = terminal.until(lambda text: "identical" in text or "near-tie" in text, 180)
        assert "generation only" in shown and "prefill-inclusive" in shown
        terminal.press("escape", "ctrl+q")
        assert terminal.end() == 0 and terminal.left_behind() == []
