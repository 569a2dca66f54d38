"""What the demo draft was made of is in the repository, whole: anyone can repeat it or go on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from bench.report import RUNS
from dflash_mlx import demo
from dflash_mlx.draft.checkpoint import read_config
from dflash_mlx.train_command import train_parser
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.generate import parser as generate_parser
from dflash_mlx.training.log import Log
from dflash_mlx.training.prompts import fingerprint
from dflash_mlx.training.prompts.sources import read_prompts
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.run_folder import Start

ROOT = Path(__file__).parent.parent.parent
MADE = ROOT / "bench" / "demo-draft"
DRAFTS = {"first": MADE / "first" / "draft", "second": demo.draft_folder()}


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset.open(MADE / "data")


def test_the_answers_are_of_the_prompts_that_the_package_has(dataset: Dataset) -> None:
    """Otherwise a generation could not go on, and nobody could tell what was asked."""
    prompts = read_prompts("demo", None, 0)
    assert dataset.manifest["prompts"] == {"source": "demo", "count": len(prompts), "sha256": fingerprint(prompts)}
    keys = {prompt.key: prompt for prompt in prompts}
    for shard in dataset.shards():
        for key, held_out, topic in zip(shard.prompts.tolist(), shard.held_out, shard.topics, strict=True):
            assert (keys[key].held_out, keys[key].topic) == (bool(held_out), topic)


def test_nothing_that_is_held_out_is_trained_on(dataset: Dataset) -> None:
    """By prompt and by topic, over all shards."""
    trained, held = set(), set()
    for shard in dataset.shards():
        for topic, held_out in zip(shard.topics, shard.held_out, strict=True):
            (held if held_out else trained).add(topic)
    reserved = [json.loads(line)["prompt"] for line in (ROOT / "bench/prompts/demo.jsonl").read_text().splitlines()]
    asked = {prompt.text for prompt in read_prompts("demo", None, 0) if not prompt.held_out}
    assert held and not held & trained
    assert not asked & set(reserved)


@pytest.mark.parametrize("run", RUNS)
def test_a_log_is_of_the_recipe_and_of_the_draft_that_came_of_it(run: str) -> None:
    recipe, records = Recipe.read(MADE / run / "recipe.toml"), Log(MADE / run / "log.jsonl").read()
    made = DRAFTS[run]
    config = read_config(made)
    assert (config.num_layers, config.block_size, config.target_layer_ids) == (
        recipe.layers,
        recipe.block_size,
        recipe.taps,
    )
    starts = [record for record in records if record["kind"] == "start"]
    (accepted,) = [record for record in records if record["kind"] == "acceptance"]
    assert starts[0]["steps"] == recipe.steps
    ids = json.loads((made / "draft_vocabulary.json").read_text())["ids"]
    assert len(ids) == recipe.vocabulary == starts[0]["vocabulary"]
    card = (made / "README.md").read_text()
    for category in accepted["categories"].values():
        assert f"{category['tokens_per_cycle']:.2f}" in card


def test_the_second_run_began_with_the_draft_of_the_first() -> None:
    """Which is kept for that: with another beginning another draft would come of it."""
    begun = json.loads((MADE / "second" / "run.json").read_text())
    assert begun["recipe"]["initial"] == "first/draft"
    assert (MADE / "first" / "draft" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", RUNS)
def test_the_answers_that_a_run_learned_from_are_those_that_are_here(dataset: Dataset, name: str) -> None:
    """To the last byte: with others it would be another draft."""
    run = json.loads((MADE / name / "run.json").read_text())
    start = Start.of(Recipe.from_dict(run["recipe"]), run["target"], dataset, run["shards"], run["top"])
    assert (start.tokens_sha256, start.data) == (run["tokens_sha256"], run["data"])


@pytest.mark.parametrize("run", RUNS)
def test_the_curves_are_drawn_from_the_log(run: str, tmp_path: Path) -> None:
    from dflash_mlx.training import charts

    pytest.importorskip("matplotlib")
    charts.write(Log(MADE / run / "log.jsonl").read(), tmp_path)
    drawn = (tmp_path / "report.svg").read_text()
    labels = re.compile(r"<!-- (.*?) -->")
    assert labels.findall(drawn) == labels.findall((MADE / run / "report.svg").read_text())


def test_the_weights_are_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in demo.draft_folder().iterdir()) <= 24e6


@pytest.mark.parametrize("page", ["docs/training.md", "bench/demo-draft/README.md"])
def test_every_command_of_the_pages_is_accepted(page: str) -> None:
    lines = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S)
    found = [shlex.split(line.split(" #")[0]) for block in lines for line in block.splitlines() if line.strip()]
    assert len(found) >= 3
    for words in found:
        if "dflash_mlx.training.generate" in words:
            generate_parser().parse_args(words[3:])
        elif words[:2] == ["dflash-metal", "train"]:
            train_parser().parse_args(words[2:])
        else:
            from dflash_mlx.cli import generate_parser as one_prompt

            assert words[:2] == ["dflash-metal", "generate"], words
            one_prompt().parse_args(words[2:])


def test_the_answers_are_of_the_tokens_that_the_manifest_counts(dataset: Dataset) -> None:
    assert all(int(np.max(shard.tokens)) < dataset.manifest["vocabulary"] for shard in dataset.shards())
