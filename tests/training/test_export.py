"""An exported folder is what `load` runs, whole or not there; its card says what was counted and what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import load, stream_generate
from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions
from dflash_mlx.draft.vocabulary import FILE
from dflash_mlx.targets import target_for
from dflash_mlx.training import export as export_module
from dflash_mlx.training.about import About, Stored, TargetFacts, licence_in
from dflash_mlx.training.card import card
from dflash_mlx.training.export import ExportError, export
from dflash_mlx.training.recipe import Recipe
from dflash_mlx.training.scales import FeatureScales
from dflash_mlx.training.target_facts import row_scale
from tests.conftest import DFLASH2, special_draft, tiny_draft
from tests.families import tiny
from tests.folders import target_folder
from tests.generating import PROMPT

ABOUT = About(TargetFacts("tiny"))
SCALES = FeatureScales(np.array([4.0, 0.5], np.float32))
LISTED = np.arange(0, 257, 2, dtype=np.int32)


def weights_of(draft: DraftModel) -> dict[str, mx.array]:
    return dict(tree_flatten(draft.parameters()))


def hidden(draft: DraftModel, features: mx.array) -> mx.array:
    context = draft.make_context()
    draft.extend(context, features)
    return draft.denoise(mx.ones((1, 5, 64)), context)


@pytest.mark.parametrize("kind", ["v1", "sliding", "DFlash 2"])
def test_what_is_exported_is_loaded_again_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """With its scales taken out, a draft in training does to plain features what it did to divided ones."""
    changes = (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24} if kind == "sliding" else {}
    )
    draft = special_draft(DFLASH2 if kind == "DFlash 2" else {}, **changes)
    trained = SCALES.into(draft)
    export(trained, tmp_path / "d", ABOUT, scales=SCALES, stored=Stored("float32"))
    found = load_draft(tmp_path / "d")
    assert found.config == draft.config and found.dtype == mx.float32
    assert weights_of(found).keys() == weights_of(draft).keys()
    features = mx.random.normal((1, 7, 128))
    assert mx.array_equal(hidden(found, features), hidden(draft, features))
    divided = mx.array(SCALES.divided(np.array(features)))
    assert mx.allclose(hidden(found, features), hidden(trained, divided), rtol=1e-5, atol=1e-5)
    assert mx.array_equal(weights_of(trained)["fc.weight"], SCALES.times(draft.fc.weight)), "the draft was changed"


@pytest.mark.parametrize("stored", [Stored(), Stored("float32", 8, 32), Stored("bfloat16", 4, 32)], ids=str)
def test_it_is_stored_as_load_would_pack_it(tmp_path: Path, stored: Stored) -> None:
    """Packed after the cast it would be rounded twice."""
    draft = tiny_draft()
    folder = export(draft, tmp_path / "d", ABOUT, stored=stored)
    plain = export(draft, tmp_path / "plain", ABOUT, stored=Stored("float32"))
    options = DraftOptions(stored.bits, stored.group_size, stored.dtype)
    expected, found = weights_of(load_draft(plain, options=options)), weights_of(load_draft(folder))
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in found)
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored.dtype


@pytest.mark.parametrize("listed", [True, False])
def test_the_target_runs_it(tmp_path: Path, listed: bool) -> None:
    """From the folder alone, with what it proposes; the text is the target's own."""
    draft = tiny_draft()
    draft.vocabulary = LISTED if listed else None
    folder = export(draft, tmp_path / "d", ABOUT)
    assert (folder / FILE).exists() == listed
    target = str(target_folder(tmp_path / "tiny"))
    model, tokenizer, found = load(target, draft=str(folder), blas="off")
    assert found.reduced_size == (len(LISTED) if listed else None) and found.notes == ()
    tokens = [r.token for r in stream_generate(model, tokenizer, PROMPT, 24, found, mode="dflash")]
    assert tokens == [r.token for r in stream_generate(model, tokenizer, PROMPT, 24)]


def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best draft so far must not be lost to the one that was to replace it."""
    export(tiny_draft(), tmp_path / "best", ABOUT)
    before = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}

    def interrupted(*arguments: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "card", interrupted)
        for name in ("best", "new"):
            with pytest.raises(KeyboardInterrupt):
                export(tiny_draft(4), tmp_path / name, ABOUT, replace=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    with pytest.raises(FileExistsError, match="best exists already"):
        export(tiny_draft(4), tmp_path / "best", ABOUT)
    export(tiny_draft(4), tmp_path / "best", ABOUT, replace=True)
    assert (tmp_path / "best" / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_a_draft_that_could_not_work_is_not_written(tmp_path: Path) -> None:
    """A training that went astray ends in NaN; `load` would refuse the folder when nobody remembers why."""
    draft = tiny_draft()
    draft.fc.weight = draft.fc.weight * mx.nan
    with pytest.raises(ExportError, match=r"fc\.weight of the draft is not finite \(1 of .* earlier checkpoint"):
        export(draft, tmp_path / "d", ABOUT)
    with pytest.raises(ValueError, match=r"takes features that are divided by \[4\.0, 0\.5\]"):
        export(SCALES.into(tiny_draft()), tmp_path / "d", ABOUT)
    with pytest.raises(ValueError, match="cannot be taken out"):
        export(tiny_draft(), tmp_path / "d", ABOUT, scales=SCALES)
    for stored, message in (
        (Stored("float16"), "`dtype`"),
        (Stored(bits=3), "`bits`"),
        (Stored(bits=4, group_size=7), "`group_size`"),
    ):
        with pytest.raises(ValueError, match=message):
            export(tiny_draft(), tmp_path / "d", ABOUT, stored=stored)
    assert not list(tmp_path.iterdir())


# --- The card ---

RECORD = {
    "best": True,
    "step": 700,
    "accuracy": [0.614, 0.4, None],
    "tokens_per_cycle": 2.412,
    "categories": {
        "story": {"prompts": 3, "tokens": 90, "cycles": 60, "tokens_per_cycle": 1.5},
        "code": {"prompts": 8, "tokens": 300, "cycles": 100, "tokens_per_cycle": 3.0},
    },
}
MANIFEST = {
    "prompts": {"source": "/home/me/secret/prompts.jsonl", "count": 12000, "sha256": "ab" * 32},
    "settings": {"seed": 0, "samples": 2, "temperature": 0.7, "max_tokens": 160},
}
WHOLE = About(
    TargetFacts("org/Model-4bit", "org/Model-4bit", "abc123", "bfloat16", "apache-2.0"),
    MANIFEST,
    answers=23456,
    tokens=1234567,
    recipe=Recipe(layers=2, block_size=8, evaluate_tokens=96, initial="/home/me/old-draft", accumulate=2),
    steps=1000,
    seconds=7200,
    evaluation=RECORD,
    versions={"mlx": "0.32.4"},
)


def text_of(about: About, stored: Stored | None = None, vocabulary: np.ndarray | None = None) -> str:
    draft = tiny_draft()
    return card(about, draft.config, stored or Stored(), 12_340_000, vocabulary)


def test_the_card_says_what_was_counted(tmp_path: Path) -> None:
    text = text_of(WHOLE, Stored("bfloat16", 8, 64), LISTED)
    (tmp_path / "README.md").write_text(text)
    front = hub.metadata_load(tmp_path / "README.md")
    assert front is not None and front["base_model"] == "org/Model-4bit" and front["license"] == "apache-2.0"
    assert "2 layers, 12.34 million parameters, block size 16, the layers' matrices in 8 bits (groups of 64)" in text
    assert "proposes 129 of 257 tokens, and reads the target's hidden states after the layers 0, 2" in text
    assert "23,456 answers, 1,234,567 tokens without their prompts" in text
    assert "`prompts.jsonl`: 12,000 prompts (SHA-256 `abab" in text and "Target in bfloat16" in text
    assert "seed 0, samples 2, temperature 0.7, max_tokens 160" in text and "whole topics, one of 20" in text
    assert "| code | 8 | 3.00 |\n| story | 3 | 1.50 |\n| **all** | 11 | 2.41 |" in text
    assert (
        "block size 8, at most 96 tokens an answer" in text and "weights of step 700, before they were stored" in text
    )
    assert "61%, 40%, not measured" in text
    assert "These prompts also decided which step was kept" in text
    assert "1,000 steps of 8 answers each in 2.0 hours" in text and "layers = 2\n" in text and "mlx 0.32.4." in text
    assert "Initialised from the draft old-draft" in text and "/home" not in text
    assert 'load("org/Model-4bit", revision=\'abc123\', draft="path/to/this/folder")' in text
    assert "never measured on Apple hardware" in text


def test_the_card_says_what_is_missing_and_invents_nothing() -> None:
    """A number that nobody counted would be believed."""
    text = text_of(ABOUT)
    assert "## What it accepts\n\nNot measured." in text and "nothing was measured" in text
    assert "an unknown number of answers, an unknown number of tokens" in text
    assert "How they were made is not recorded" in text and "The recipe is not recorded" in text
    assert "an unknown number of steps, with" in text and "Unknown: tiny does not name a licence" in text
    assert "license: unknown" in text and "base_model" not in text
    partly = {"step": 3, "accuracy": [], "tokens_per_cycle": None, "categories": {"code": {"tokens_per_cycle": None}}}
    text = text_of(replace(ABOUT, evaluation=partly, data={}))
    assert "| code | unknown | not measured |\n| **all** | unknown | not measured |" in text
    assert "`unknown`: an unknown number of prompts" in text and "settings: unknown" in text
    assert "Not measured in the decode loop." in text_of(replace(ABOUT, evaluation={"accuracy": [0.5]}))


@pytest.mark.parametrize(
    ("readme", "config", "licence"),
    [
        ("---\nlicense: mit\n---\n", {}, "mit"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", {}, "mit, apache-2.0"),
        ("---\nlicense: mit\n---\n", {"license": "other"}, "mit"),
        ("# No front matter\n", {"license": "llama3"}, "llama3"),
        ("---\nlicense: {a: [\n---\n", {}, None),
        (None, {}, None),
        (None, {"license": 3}, None),
        (None, [], None),
    ],
)
def test_the_licence_is_the_targets_or_unknown(
    tmp_path: Path, readme: str | None, config: Any, licence: str | None
) -> None:
    """It decides what may be done with the draft; a guess would be worse than nothing."""
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert licence_in(tmp_path) == licence
    facts = TargetFacts.of({"name": str(tmp_path), "dtype": "float32", "revision": None}, None)
    assert facts == TargetFacts(tmp_path.name, None, None, "float32", licence)


def test_the_demos_card_names_its_base() -> None:
    """Its target is made from a GGUF and has no card of its own."""
    facts = TargetFacts.of({"name": "demo", "dtype": "float32"}, None)
    assert (facts.name, facts.licence) == ("demo", "apache-2.0") and "SmolLM2-135M-Instruct" in str(facts.repository)
    text = text_of(About(facts))
    assert 'load("demo", draft=' in text and "--model demo --draft" in text


def test_the_card_says_that_a_short_training_reached_a_part_of_the_answers() -> None:
    text = text_of(replace(WHOLE, usable=30000))
    assert (
        "23,456 answers, 1,234,567 tokens without their prompts. Those are the ones that its steps reached, of " in text
    )
    assert "of 30,000 that there were." in text
    assert "reached" not in text_of(replace(WHOLE, usable=23456)) + text_of(WHOLE)


@pytest.mark.parametrize(
    ("name", "scale"), [("llama", 1.0), ("gemma3_text", 8.0), ("gemma4_text", 8.0), ("muse_glimmer", 1.0)]
)
def test_the_card_warns_of_rows_that_another_tool_may_not_scale(name: str, scale: float) -> None:
    """Gemma multiplies its embedding by the root of its width; a tool that reads the table would lose acceptance."""
    assert row_scale(target_for(tiny(name))) == pytest.approx(scale, rel=0.01)
    text = text_of(replace(ABOUT, row_scale=scale))
    assert ("The rows of this target's embedding are multiplied by 8 before they enter the draft" in text) == (
        scale > 1
    )
