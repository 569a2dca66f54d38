"""The model card of a trained draft: what it was made of, what it accepts, and what is not known.

Every number is one that was counted; what was not is said to be missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub as hub
import numpy as np

from dflash_mlx import __version__
from dflash_mlx.config import DraftConfig
from dflash_mlx.training.about import About, Stored
from dflash_mlx.training.prompts import HELD_OUT_SHARE
from dflash_mlx.training.recipe import FROM_TARGET, RANDOM

_UNKNOWN = "unknown"


def card(about: About, config: DraftConfig, stored: Stored, parameters: int, vocabulary: np.ndarray | None) -> str:
    """README.md of a draft with so many parameters. vocabulary: the tokens that it proposes; None: all."""
    target = about.target
    kind = "DFlash" if config.selector is None else "DFlash 2"
    proposes = "all tokens" if vocabulary is None else f"{len(vocabulary)} of {config.vocab_size} tokens"
    parts = [
        _front(about),
        f"# {kind} draft for {target.name}",
        f"A draft for speculative decoding: {config.num_layers} layers, {parameters / 1e6:.2f} million parameters, "
        f"block size {config.block_size}, {stored}. It {_shared(config)}, proposes {proposes}, and reads the target's "
        f"hidden states after the layers {', '.join(map(str, config.target_layer_ids))} (counted from 0). It never "
        "changes what the target says, only how fast.",
        "## Licence\n\n" + _licence(about),
        "## How to load it\n\n" + _loading(about),
        "## What it accepts\n\n" + _acceptance(about, stored),
        "## What it was trained on\n\n" + _data(about),
        "## How it was trained\n\n" + _training(about),
        "## What is not known\n\n" + _unknown(about),
    ]
    return "\n\n".join(parts) + "\n"


def _shared(config: DraftConfig) -> str:
    own = [name for name, has in (("embedding", config.own_embedding), ("head", config.draft_vocab_size)) if has]
    shared = [name for name in ("embedding", "head") if name not in own]
    parts = [f"shares the target's {' and '.join(shared)}"] if shared else []
    return ", ".join([*parts, *([f"has its own {' and '.join(own)}"] if own else [])])


def _front(about: About) -> str:
    data = hub.ModelCardData(
        base_model=about.target.repository,
        license=_front_licence(about.target.licence),
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["dflash", "speculative-decoding", "draft"],
    )
    return f"---\n{data.to_yaml()}\n---"


def _front_licence(licence: str | None) -> str:
    """The hub knows one name; several are said in the text."""
    return _UNKNOWN if licence is None or ", " in licence else licence


def _licence(about: About) -> str:
    target = about.target
    if target.licence is None:
        return (
            f"Unknown: {target.name} does not name a licence in its model card or its config. This draft learned from "
            "its answers, and may be initialised with its weights, so the target's licence decides what may be done "
            "with it. Find that out before you pass it on."
        )
    return (
        f"`{target.licence}`, as the model card of {target.repository or target.name} says of the target. This draft "
        "learned from its answers, and may be initialised with its weights, so the target's licence decides what may "
        "be done with it."
    )


def _loading(about: About) -> str:
    name, revision = about.target.name, about.target.revision
    at = f" --revision {revision}" if revision else ""
    keyword = f", revision={revision!r}" if revision else ""
    scaled = (
        ""
        if about.row_scale == 1.0
        else f" The rows of this target's embedding are multiplied by {about.row_scale:g} before they enter the "
        "draft, as before the target's own first layer. A tool that takes the table's raw rows gets other proposals, "
        "of which fewer are accepted."
    )
    return (
        f"```bash\ndflash-metal generate --model {name}{at} --draft path/to/this/folder -p 'Hello'\n```\n\n"
        f"```python\nfrom dflash_mlx import load, stream_generate\n\n"
        f'model, tokenizer, draft = load("{name}"{keyword}, draft="path/to/this/folder")\n'
        f'for response in stream_generate(model, tokenizer, "Hello", draft_model=draft):\n'
        f'    print(response.text, end="")\n```\n\n'
        "In z-lab's format, so other tools that read DFlash checkpoints can load it too. They ignore "
        f"`draft_vocabulary.json`, if it is there, and propose from the whole vocabulary.{scaled}"
    )


def _acceptance(about: About, stored: Stored) -> str:
    found, recipe = about.evaluation, about.recipe
    if found is None:
        return "Not measured."
    exact = found.get("stored") == str(stored) or (stored.bits is None and stored.dtype == "float32")
    rounded = "" if exact else f", before they were stored as {stored}"
    block = f", block size {recipe.block_size}, at most {recipe.evaluate_tokens} tokens an answer" if recipe else ""
    lines = [
        f"Tokens per cycle (accepted draft tokens + 1; plain decoding makes 1), greedy{block}, on held-out prompts, "
        f"with the weights of step {found.get('step', 'unknown')}{rounded}:"
    ]
    categories = found.get("categories") or {}
    if categories:
        rows = [(name, each.get("prompts"), each.get("tokens_per_cycle")) for name, each in sorted(categories.items())]
        prompts = [count for _, count, _ in rows if count is not None]
        rows.append(("**all**", sum(prompts) if len(prompts) == len(rows) else None, found.get("tokens_per_cycle")))
        table = ["| prompts | number | tokens per cycle |", "|---|---|---|"]
        table += [
            f"| {name} | {_UNKNOWN if count is None else count} | {_number(value)} |" for name, count, value in rows
        ]
        lines.append("\n".join(table))
    else:
        lines.append("Not measured in the decode loop.")
    if found.get("best"):
        lines.append("These prompts also decided which step was kept, so on others it may accept a little less.")
    if accuracy := found.get("accuracy"):
        shares = ", ".join(_percent(share) for share in accuracy)
        lines.append(f"Right proposals at each position of a block, whatever was proposed before it: {shares}.")
    return "\n\n".join(lines)


def _data(about: About) -> str:
    target, data = about.target, about.data
    learned = f"{_count(about.answers, 'answers')}, {_count(about.tokens, 'tokens')} without their prompts."
    if about.usable is not None and about.answers is not None and about.answers < about.usable:
        learned += f" Those are the ones that its steps reached, of {about.usable:,} that there were."
    lines = [f"The target's own answers and nothing else: {learned}"]
    if data is None:
        lines.append("How they were made is not recorded.")
        return "\n\n".join(lines)
    prompts, settings = data.get("prompts", {}), data.get("settings", {})
    source, digest = _public(str(prompts.get("source", _UNKNOWN))), prompts.get("sha256", _UNKNOWN)
    chosen = ", ".join(f"{key} {value}" for key, value in settings.items()) or _UNKNOWN
    lines.append(
        f"`{source}`: {_count(prompts.get('count'), 'prompts')} (SHA-256 `{digest}`). Target in "
        f"{target.dtype or 'an unknown dtype'}; settings: {chosen}."
    )
    lines.append(
        f"Held out: whole topics, one of {HELD_OUT_SHARE} by a digest of the topic's name (of the prompt's text where "
        "it has no topic), and what the prompt set reserves. No answer to them is trained on, in any phrasing; what is "
        "measured above is measured on them."
    )
    return "\n\n".join(lines)


def _training(about: About) -> str:
    recipe = about.recipe
    took = "" if about.seconds is None else f" in {about.seconds / 3600:.1f} hours"
    each = "" if recipe is None else f" of {recipe.sequences * recipe.accumulate} answers each"
    lines = [f"{_count(about.steps, 'steps')}{each}{took}, with dflash-metal {__version__}."]
    if recipe is None:
        lines.append("The recipe is not recorded.")
    else:
        begun = {FROM_TARGET: "the target's own last layers", RANDOM: "random weights"}
        at = begun.get(recipe.initial) or f"the draft {_public(recipe.initial)}"
        shown = recipe.changed(initial=_public(recipe.initial))
        lines += [f"Initialised from {at}. Recipe:", f"```toml\n{shown.text()}```"]
    if about.versions:
        lines.append(", ".join(f"{name} {value}" for name, value in about.versions.items()) + ".")
    return "\n\n".join(lines)


def _unknown(about: About) -> str:
    lines = [
        "- It was never measured on Apple hardware: neither how fast it is there nor whether it pays.",
        "- How much it accepts on prompts unlike those above, in other languages, in long conversations, or of a "
        "target that is quantised otherwise.",
    ]
    if about.evaluation is None:
        lines.append("- How much it accepts at all: nothing was measured.")
    return "\n".join(lines)


def _public(name: str) -> str:
    """Of what is on this machine only the last part: where it lies is nobody's business."""
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or path.exists() else name


def _count(value: Any, what: str) -> str:
    return f"an unknown number of {what}" if value is None else f"{value:,} {what}"


def _number(value: Any) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _percent(share: Any) -> str:
    return "not measured" if share is None else f"{share:.0%}"
