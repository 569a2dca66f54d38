"""The built-in prompts `demo`: tasks and topics from `tables`, in phrasings as people type them.

Code is two fifths of the prompts, most of it Python. The order is shuffled, so any beginning has the same mixture.
What the benchmark and the README ask is reserved: it is held out with everything like it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from dflash_mlx.training.prompts import Prompt, code, digest, holds_out, prose, tasks
from dflash_mlx.training.prompts.code import Asked

SHARES = {
    "code": 0.40,
    "explain": 0.12,
    "question": 0.10,
    "math": 0.08,
    "write": 0.11,
    "story": 0.07,
    "json": 0.06,
    "rewrite": 0.06,
}
MAKERS: dict[str, Callable[[random.Random], Iterator[Asked]]] = {
    "code": code.asked,
    "explain": prose.explain,
    "question": prose.question,
    "math": tasks.math,
    "write": prose.write,
    "story": prose.story,
    "json": tasks.as_json,
    "rewrite": tasks.rewrite,
}

# What bench/prompts/demo.jsonl and the README ask, and its near relatives.
RESERVED = re.compile(
    r"palindrome|fibonacci|factorial|vowel|celsius|fahrenheit|sorted lists|nested list|duplicates? from|"
    r"reverses? (a|the|each) (string|words?)|how often|words in a (file|text)|frequent words|rainbow|\bbread\b|"
    r"heat pump|lighthouse|\bfox\b|night train|pencils? (for|at)|hiking|quiet evening|move a meeting|Thursday, |"
    r"water bottle|train travels|consonants|heating('s| is) broken|old mill|mystery",
    re.IGNORECASE,
)

_ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])(?!one|eu|in\b|or\b|is\b|and\b)")  # "a engineer"

HELD_OUT_KEPT = 4  # of the prompts on topics that are held out only every so many-th is asked: they are for measuring


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    """The first `count` prompts of the shuffled set; all are distinct, and fewer if there are no more."""
    found: list[Prompt] = []
    for category, share in SHARES.items():
        wanted = round(count * share)
        made = MAKERS[category](random.Random(f"{seed} {category}"))
        found += _distinct(made, category, wanted)
    random.Random(f"{seed} order").shuffle(found)
    return found


def _distinct(made: Iterator[Asked], category: str, wanted: int) -> Iterator[Prompt]:
    """Up to `wanted` of them; a maker may repeat itself, and ends when it has little new to say."""
    seen: set[str] = set()
    repeated = 0
    for topic, raw in made:
        text = _ARTICLE.sub(r"\1n ", raw)
        if text in seen:
            repeated += 1
            if repeated > 50 * wanted:
                return
            continue
        seen.add(text)
        prompt = Prompt(text, category, f"{category}: {topic}")
        held_out = holds_out(prompt.topic) or RESERVED.search(text) is not None
        if not held_out or digest(text) % HELD_OUT_KEPT == 0:
            yield replace(prompt, held_out=held_out)
        if len(seen) == wanted:
            return
