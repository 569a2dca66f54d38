"""Tasks with material in the prompt: word problems, records as JSON, short texts to rewrite."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dflash_mlx.training.prompts import tables
from dflash_mlx.training.prompts.code import Asked

_MATH = (
    "{q}",
    "{q}",
    "{q} Explain step by step.",
    "{q} Show your work.",
    "Solve this: {q}",
    "{q} Just give the answer.",
    "Help me with my homework: {q}",
)
_AS_JSON = (
    "Extract the facts from this text as JSON: {text}",
    "Return a JSON object with the keys {keys}: {text}",
    "Turn this into JSON. {text}",
    "{text}\n\nGive me the {keys} as JSON.",
    "Read the text and fill in a JSON object ({keys}).\n{text}",
    "Which {keys} are mentioned? Answer in JSON only.\n\n{text}",
    "Extract {keys} from the following text.\n\n{text}",
    "List the {keys} from this text as bullet points: {text}",
)
_EXAMPLE = (
    "Write an example JSON object for a {kind} with the keys {keys}.",
    "Create a JSON array with three entries for a {kind}. Keys: {keys}.",
    "Show me what a {kind} could look like in JSON ({keys}).",
    "Write a JSON schema for a {kind} with {keys}.",
    "Write a YAML example for a {kind} with {keys}.",
    "Make a CSV file with five rows for a {kind}; columns: {keys}.",
)
_TABLE = (
    "Convert this CSV to JSON:\n{text}",
    "Make a Markdown table from this:\n{text}",
    "Turn these lines into a JSON array:\n{text}",
    "Sort these rows by the last column:\n{text}",
)
_REWRITE = (
    "Summarise in one sentence: {t}",
    "Summarise this text: {t}",
    "Give me the main point of this text: {t}",
    "Write a headline for this text: {t}",
    "Rewrite this text in simpler words: {t}",
    "Rewrite this text for children: {t}",
    "Rewrite this in a more lively style: {t}",
    "Shorten this text by half: {t}",
    "Write a bullet-point summary.\n\n{t}",
    "{t}\n\nSummarise the text above in two sentences.",
    "{t}\n\nWhat happened, and why?",
    "Ask three questions about this text: {t}",
    "List the facts in this text: {t}",
    "Continue this text: {t}",
    "Write a reply to this: {t}",
    "Is this text positive or negative? Explain. {t}",
    "What are the key words of this text? {t}",
    "Translate into French: {t}",
    "tl;dr: {t}",
)
_MESSAGE = (
    "Rewrite this more formally: {t}",
    "Correct the mistakes: {t}",
    "Fix the grammar of this sentence: {t}",
    "Make this more polite: {t}",
    "Rewrite this message in a professional tone: {t}",
    "Make this shorter: {t}",
    "Write a friendly reply to: {t}",
    "Is this positive, negative or neutral? {t}",
    "Say this in three other ways: {t}",
    "Rewrite this so that it sounds more friendly: {t}",
    "Translate to Spanish: {t}",
)


def math(rng: random.Random) -> Iterator[Asked]:
    """Without end, as the other makers here: (topic, text). The topic is the problem without its numbers."""
    while True:
        problem = rng.choice(tables.lines("math"))
        yield problem, rng.choice(_MATH).format(q=problem.format(**_numbers(rng)))


def _numbers(rng: random.Random) -> dict[str, str | int]:
    """Numbers that fit each other: {p} is divisible by {b}, {t} is more than {b} and {c} together, and so on."""
    b, c, x, y = rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 6), rng.randint(1, 5)
    step = rng.randint(2, 9)
    n, m = rng.sample(tables.sections("fillers")["names"], 2)
    return {
        "a": rng.randint(13, 60),
        "b": b,
        "c": c,
        "p": b * rng.randint(3, 25),
        "t": b + c + rng.randint(10, 60),
        "h": rng.choice((80, 90, 100, 120, 150, 200, 240, 300)),
        "g": rng.choice((310, 325, 340, 360, 390, 400, 450)),
        "d": rng.choice((5, 10, 15, 20, 25, 30, 50)),
        "x": x,
        "y": y,
        "k": x + step,
        "l": x + 2 * step,
        "q": b * rng.randint(2, 12) + c,
        "s": rng.randint(2, 12) ** 2,
        "u": 3 * c,
        "v": 4 * c,
        "n": n,
        "m": m,
        "i": rng.choice(tables.sections("fillers")["things"]),
    }


def as_json(rng: random.Random) -> Iterator[Asked]:
    while True:
        kind = rng.random()
        if kind < 0.5:
            topic, keys, text = rng.choice(tables.rows("records"))
            yield f"record {topic}", rng.choice(_AS_JSON).format(keys=keys, text=_filled(rng, text))
        elif kind < 0.75:
            topic, keys = rng.choice(tables.rows("record_kinds"))
            chosen = rng.sample(keys.split(", "), rng.randint(3, len(keys.split(", "))))
            yield f"example {topic}", rng.choice(_EXAMPLE).format(kind=topic, keys=", ".join(chosen))
        else:
            topic, head, row = rng.choice(tables.rows("record_rows"))
            lines = [head, *(_filled(rng, row) for _ in range(rng.randint(3, 4)))]
            yield f"rows {topic}", rng.choice(_TABLE).format(text="\n".join(lines))


def _filled(rng: random.Random, text: str) -> str:
    words = tables.sections("fillers")
    names = rng.sample(words["names"], 2)
    return text.format(
        name=names[0],
        other=names[1],
        last=rng.choice(words["surnames"]),
        city=rng.choice(words["cities"]),
        job=rng.choice(words["jobs"]),
        thing=rng.choice(words["things"]),
        product=rng.choice(words["products"]),
        age=rng.randint(18, 79),
        few=rng.randint(2, 12),
        price=f"{rng.randint(3, 180)}.{rng.choice(('00', '50', '90', '95'))}",
        number=rng.randint(1000, 9999),
        day=rng.randint(1, 28),
        month=rng.choice(words["months"]),
        hour=rng.randint(8, 20),
        year=rng.randint(1950, 2024),
        degrees=rng.randint(-5, 34),
    )


def rewrite(rng: random.Random) -> Iterator[Asked]:
    texts, messages = tables.rows("short_texts"), tables.entries("messages")
    while True:
        if rng.random() < 0.6:
            topic, text = rng.choice(texts)
            yield f"text {topic}", rng.choice(_REWRITE).format(t=text)
        else:
            message = rng.choice(messages)
            yield f"message {message}", rng.choice(_MESSAGE).format(t=message)
