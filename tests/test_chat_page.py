"""docs/chat.md and the tour are promises too: commands parse, config.toml's keys are read, and the pictures are of the
committed run and show its numbers."""

from __future__ import annotations

import hashlib
import importlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.chat_page import TOUR, on_cpu, tour
from bench.picture import lines_of, missing
from bench.tour import ENOUGH_CPU
from dflash_mlx import chat
from dflash_mlx.app.places import Places
from dflash_mlx.app.screens.help import MEANING
from dflash_mlx.app.settings import Settings, from_config
from dflash_mlx.app.text import per_cycle, percent, rate, seconds

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = [picture["file"] for picture in tour()["pictures"]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def picture(name: str) -> dict[str, Any]:
    return next(each for each in tour()["pictures"] if each["file"] == f"{name}.svg")


def test_every_command_of_the_page_is_accepted() -> None:
    lines = [line.split(" #")[0].split("|")[-1] for block in blocks("bash") for line in block.splitlines()]
    found = [shlex.split(line) for line in lines if line.strip()]
    assert len(found) >= 5
    for words in found:
        assert words[:5] == ["uv", "run", "python", "-m", "dflash_mlx.chat"], words
        chat.parser().parse_args(words[5:])


def test_every_flag_on_the_page_exists_and_the_chats_own_are_all_there() -> None:
    """A flag that was renamed would stay in the page."""
    options = {option for action in chat.parser()._actions for option in action.option_strings}
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.S)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", prose)) <= options
    own = [group for group in chat.parser()._action_groups if group.title == "options"]
    for action in (action for group in own for action in group._group_actions):
        assert any(option in prose for option in action.option_strings), action.option_strings


def test_the_example_of_a_config_is_read_and_has_every_setting(tmp_path: Path) -> None:
    """A key that the chat refuses would end the first start of whoever copied it."""
    (example,) = blocks("toml")
    places = Places(tmp_path, tmp_path)
    places.config_file.write_text(example)
    settings, default = from_config(places).settings, Settings()
    unchanged = {name for name in vars(default) if getattr(settings, name) == getattr(default, name)}
    assert unchanged == {"mode", "min_p", "top_k", "max_tokens"}  # written out with their defaults
    assert all(f"\n{name} = " in example for name in vars(default))


@pytest.mark.parametrize(("platform", "column"), [("linux", 1), ("darwin", 2)])
def test_the_folders_on_the_page_are_those_that_are_used(
    monkeypatch: pytest.MonkeyPatch, platform: str, column: int
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("HOME", "/h")
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = Places.default()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if "dflash-metal`" in line]
    for file, folder in (("chats/", places.data), ("config.toml", places.config)):
        row = next(row for row in rows if file in row[0])
        assert row[column] == f"`{str(folder).replace('/h', '~', 1)}`"
    for file in (places.chats, places.metrics, places.state, places.config_file):
        assert f"`{file.name}" in PAGE


def test_every_number_that_the_help_explains_is_explained_on_the_page() -> None:
    table = PAGE[PAGE.index("## What the numbers mean") :]
    for name, _ in MEANING:
        assert name in table, name


def test_the_command_of_the_tour_is_accepted_and_writes_to_docs() -> None:
    *_, module = words = shlex.split(tour()["command"])
    assert words[:2] == ["python", "-m"] and f"`{shlex.join(words)}`" in PAGE and f"`{shlex.join(words)}`" in README
    assert importlib.import_module(module).parser().parse_args([]).out == TOUR


def test_the_pictures_of_the_pages_are_those_of_the_run() -> None:
    """A picture that was taken in another run, or drawn, has another digest."""
    assert re.findall(r"\]\(tour/(\w+\.svg)\)", PAGE) == PICTURES
    first = re.findall(r"\]\(docs/tour/(\w+\.svg)\)", README)
    assert 3 <= len(first) <= 5 and set(first) <= set(PICTURES)
    assert sorted(path.name for path in TOUR.iterdir()) == sorted([*PICTURES, "tour.json"])
    for each in tour()["pictures"]:
        assert hashlib.sha256((TOUR / each["file"]).read_bytes()).hexdigest() == each["sha256"], each["file"]


@pytest.mark.parametrize("name", PICTURES)
def test_the_numbers_of_a_picture_stand_on_it(name: str) -> None:
    svg = (TOUR / name).read_text(encoding="utf-8")
    assert missing(svg, picture(name.removesuffix(".svg"))["numbers"]) == []


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_of_nobodys_machine(name: str) -> None:
    text = "\n".join(lines_of((TOUR / name).read_text(encoding="utf-8")))
    assert not re.search(r"/(home|root|Users|tmp|var|private|work)\b|\w@\w", text)


def clocks(record: dict[str, Any]) -> set[str]:
    return {
        f"generation only {rate(record['decode_tps'])} tok/s",
        f"prefill-inclusive {rate(record['request_tps'])} tok/s",
        f"TTFT {seconds(record['ttft_s'])} s",
    }


def test_the_numbers_of_the_answer_are_those_that_the_engine_recorded() -> None:
    """The window shows what was measured, and the captions what the window showed."""
    record, shown = tour()["turns"][0], set(picture("answer")["numbers"])
    assert clocks(record) <= shown
    assert {
        f"{per_cycle(record['mean_acceptance_length'])} tokens/cycle",
        f"acceptance {percent(record['draft_acceptance_rate'])}",
    } <= shown
    assert set(record["settings"].items()) >= {("temperature", 0.0), ("mode", "auto")}


def test_the_numbers_of_the_race_are_those_that_the_engine_recorded() -> None:
    race, shown = tour()["race"], set(picture("race")["numbers"])
    assert clocks(race["plain"]) | clocks(race["dflash"]) <= shown
    assert not on_cpu(tour()["machine"]) or min(race["cpu_share"].values()) >= ENOUGH_CPU  # else it means nothing
    assert race["verdict"] == "identical" and "✓ identical" in shown  # on a CPU nothing else is right


def test_a_text_that_is_not_on_a_picture_is_missed() -> None:
    """Else the tests above would pass whatever the pictures show."""
    console = Console(record=True, width=40, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print("[bold]5.4[/bold] tok/s      [red]far[/red] <&>")
    console.print("next")
    svg = console.export_svg(title="in the frame")
    assert lines_of(svg)[:2] == ["5.4 tok/s      far <&>", "next"]
    assert missing(svg, ["5.4 tok/s", "far <&>", "5.5 tok/s", "far <&> next", "in the frame"]) == [
        "5.5 tok/s",
        "far <&> next",
        "in the frame",
    ]


@pytest.mark.parametrize("text", ["<svg", "<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_what_is_no_picture_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"The picture (is not SVG|has no line).*python -m bench\.tour"):
        lines_of(text)
