"""Explanations, questions, things to write, stories."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dflash_mlx.training.prompts import holds_out, tables
from dflash_mlx.training.prompts.code import Asked

_EXPLAIN = (
    "Explain {t}.",
    "Explain {t} in simple terms.",
    "Explain {t} to a ten-year-old.",
    "explain {t} in three sentences",
    "Can you explain {t} to me?",
    "Explain {t} with an example.",
    "Explain the basics of {t}.",
    "What should I know about {t}?",
    "Tell me about {t}.",
    "Tell me something surprising about {t}.",
    "Why does {t} matter to us?",
    "Why are people interested in {t}?",
    "What are common misunderstandings about {t}?",
    "What is the most important fact about {t}?",
    "Give me a short overview of {t}.",
    "Describe {t} in one paragraph.",
    "Summarise what is known about {t}.",
    "List five facts about {t}.",
    "Give me three interesting facts about {t}.",
    "Write a short paragraph about {t}.",
    "I have a test on {t} tomorrow. What do I need to know?",
    "How would you introduce {t} to a beginner?",
    "Compare {t} and {u}.",
    "What do {t} and {u} have in common?",
    "What role does {t} play in everyday life?",
)
_HOWTO = (
    "How do I {t}?",
    "How can I {t}?",
    "how to {t}",
    "What is the best way to {t}?",
    "Give me step-by-step instructions on how to {t}.",
    "I want to {t}. Where do I start?",
    "Any tips? I would like to {t}.",
    "Explain how to {t}, in five steps.",
    "What mistakes should I avoid when I {t}?",
    "Can you help me to {t}?",
)
_QUESTION = (
    "{q}",
    "{q}",
    "{q} Answer in one sentence.",
    "{q} Please explain briefly.",
    "I have a question. {q}",
    "Hi! {q}",
    "{q} Give an example.",
    "{q} Explain it like I'm five.",
    "Quick question: {q}",
    "My son asked me: {q} What do I tell him?",
)
_MAIL = (
    "Write an email that {t}.",
    "Write a short, polite email that {t}.",
    "Write a friendly email that {t}.",
    "Draft a formal letter that {t}.",
    "Help me write a message that {t}.",
    "Write a text message that {t}.",
    "Write an email that {t}. Keep it under 100 words.",
    "I need an email that {t}. Include a subject line.",
)
_LIST = (
    "List ten {t}.",
    "List five {t}.",
    "Give me five {t}.",
    "Give me a list of {t}.",
    "What are some {t}?",
    "Make a numbered list of eight {t}.",
    "Name three {t} and explain each in one sentence.",
    "I need {t}. Can you suggest some?",
    "Make a table of {t}.",
)
_RECIPE = (
    "Give me a recipe for {t}.",
    "How do I make {t}?",
    "Write a simple recipe for {t} with ingredients and steps.",
    "What do I need to cook {t} for four people?",
    "Write a recipe for {t} without dairy.",
    "A quick recipe for {t}, please.",
)
_PLAN = (
    "Make a plan for {t}.",
    "Plan {t}.",
    "Help me plan {t}.",
    "Write a schedule for {t}.",
    "Write a checklist for {t}.",
    "What should I think of for {t}?",
    "Create a table with a plan for {t}.",
)
_TEXT = (
    "Write {t}.",
    "Write {t}.",
    "Please write {t}.",
    "Write {t} in a friendly tone.",
    "Write {t}. Use simple words.",
    "Write {t}, no longer than five sentences.",
    "Can you write {t}?",
)
_STORY = (
    "Write a short story about {h} who {p}.",
    "Tell me a story about {h} who {p}.",
    "Write a story about {h} who {p}, {s}.",
    "Write the beginning of a story about {h} who {p}.",
    "Write a bedtime story about {h} who {p}.",
    "Write a story of five sentences about {h} who {p}.",
    "Write a funny story: {h} {p}.",
    "Write a sad story in which {h} {p}.",
    "Once upon a time there was {h}. Continue the story.",
    "Write a scene {s} with {h}.",
    "Invent a title and a first paragraph for a novel about {h} who {p}.",
    "Write a dialogue between {h} and {g}.",
    "Give me three ideas for a story about {h} {s}.",
    "Describe a place for a story {s}.",
)
_POEM = (
    "Write a poem about {t}.",
    "Write a short poem about {t}.",
    "Write a haiku about {t}.",
    "Write a rhyming poem of four lines about {t}.",
    "Write a limerick about {t}.",
    "Write a song verse about {t}.",
    "Write a poem about {t} for children.",
)


def explain(rng: random.Random) -> Iterator[Asked]:
    """Without end, as the other makers here: (topic, text)."""
    sections = list(tables.sections("topics").values())
    weights = [len(section) for section in sections]
    while True:
        topic, other = rng.sample(rng.choices(sections, weights)[0], 2)
        phrasing = rng.choice(_EXPLAIN)
        text = phrasing.format(t=topic, u=other)
        yield _held_of("explain", topic, other) if "{u}" in phrasing else topic, text


def _held_of(category: str, topic: str, other: str) -> str:
    """The one of two topics that is held out, so that a text about both is."""
    return other if holds_out(f"{category}: {other}") else topic


def question(rng: random.Random) -> Iterator[Asked]:
    while True:
        if rng.random() < 0.55:
            task = rng.choice(tables.entries("howto"))
            yield f"how to {task}", rng.choice(_HOWTO).format(t=task)
        else:
            each = rng.choice(tables.entries("questions"))
            yield each, rng.choice(_QUESTION).format(q=each)


def write(rng: random.Random) -> Iterator[Asked]:
    kinds = {"mail": _MAIL, "list": _LIST, "recipe": _RECIPE, "plan": _PLAN, "text": _TEXT}
    while True:
        kind = rng.choice(list(kinds))
        subject = rng.choice(tables.sections("writing")[kind])
        yield f"{kind} {subject}", rng.choice(kinds[kind]).format(t=subject)


def story(rng: random.Random) -> Iterator[Asked]:
    parts = tables.sections("stories")
    while True:
        if rng.random() < 0.25:
            subject = rng.choice(parts["poems"])
            yield f"poem {subject}", rng.choice(_POEM).format(t=subject)
            continue
        hero, plot = rng.choice(parts["heroes"]), rng.choice(parts["plots"])
        other, setting = rng.choice(parts["heroes"]), rng.choice(parts["settings"])
        phrasing = rng.choice(_STORY)
        text = phrasing.format(h=hero, g=other, p=plot, s=setting)
        yield _held_of("story", hero, other) if "{g}" in phrasing else hero, text
