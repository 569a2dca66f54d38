"""Programming tasks: an operation, a language, and how people ask for it. The topic is the operation."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from dflash_mlx.training.prompts import tables

Asked = tuple[str, str]  # topic, text

# {t}: "reverses a string"; {b}: "reverse a string"; {g}: "reversing a string"; {l}: the language
_PHRASINGS = (
    "Write a {l} function that {t}.",
    "Write a {l} function that {t}.",
    "Write a function in {l} that {t}.",
    "write a {l} function that {t}",
    "Write {l} code that {t}.",
    "Can you write a {l} function that {t}?",
    "Could you write a {l} function that {t}? Please explain it.",
    "Create a {l} function that {t} and show an example.",
    "How do I write a function in {l} that {t}?",
    "How can I {b} in {l}?",
    "How do you {b} in {l}?",
    "{l}: {b}",
    "I need a {l} function that {t}.",
    "I need {l} code to {b}. Keep it short.",
    "Implement a {l} function that {t}. Handle invalid input.",
    "Give me a {l} function that {t}, with type hints.",
    "Give me a short {l} function that {t}. Only code, please.",
    "Give me a simple example in {l}: {b}.",
    "Write a {l} program that {t}.",
    "Write a small {l} script that {t}.",
    "Please write a {l} function that {t}, with a docstring and a test.",
    "Show me how to {b} in {l}, step by step.",
    "Show two ways to {b} in {l}.",
    "As a beginner, how would I {b} in {l}?",
    "Write a {l} function that {t}. Explain its complexity.",
    "Write a {l} function that {t} without using any libraries.",
    "Complete this task in {l}: {b}.",
    "I am learning {l}. Write a function that {t} and comment every line.",
)
_OTHERS = (
    "JavaScript",
    "JavaScript",
    "TypeScript",
    "Java",
    "C",
    "C++",
    "C#",
    "Go",
    "Rust",
    "Ruby",
    "PHP",
    "Kotlin",
    "Swift",
)
_CLASS = (
    "Write a Python class {name} with {has}. Its methods: {does}.",
    "Define a class {name} in Python. Attributes: {has}. Methods: {does}.",
    "Create a {name} class in Python ({has}) and show how to use it.",
    "Implement a {name} class with {has}, and methods for {does}.",
    "Write a {l} class called {name} with {has}; methods: {does}.",
    "Write a Python dataclass for {name} with {has}.",
)
_SQL = (
    "Write an SQL query that {t} {on}.",
    "SQL: how do I write a statement that {t} {on}?",
    "Give me a query that {t} {on}. Explain it.",
    "Write SQL that {t} the following: {on}.",
)
_SHELL = (
    "Write a bash script that {t}.",
    "Which shell command {t}?",
    "Give me a bash one-liner that {t}.",
    "How do I write a shell script that {t}?",
)
_WEB = (
    "Write HTML and CSS for {t}.",
    "Create {t} with HTML, CSS and JavaScript.",
    "Show me the HTML for {t}.",
    "How do I make {t} in HTML?",
    "Write a React component for {t}.",
)
_SECOND = re.compile(r"and (adds|catches|compares|counts|greets|inserts|prints|returns|runs|shows|splits|warns)\b")


def asked(rng: random.Random) -> Iterator[Asked]:
    """Without end: (topic, text)."""
    operations = [(task, task) for name in ("text", "numbers", "algorithms") for task in tables.entries(f"code_{name}")]
    operations += _composed()
    kinds = (_operation, _of_class, _sql, _shell, _web)
    while True:
        kind = rng.choices(kinds, weights=(86, 5, 3, 2.5, 3.5))[0]
        yield kind(rng, operations)


def _composed() -> list[Asked]:
    """(topic, task) of every operation with every collection that it makes sense for."""
    items = tables.rows("code_items")
    tasks = []
    for operation, kinds in tables.rows("code_composed"):
        for kind, collection in items:
            if kind in kinds.split():
                tasks.append((operation, operation.format(c=collection)))
    return tasks


def _operation(rng: random.Random, operations: list[Asked]) -> Asked:
    topic, task = rng.choice(operations)
    language = "Python" if rng.random() < 0.78 else rng.choice(_OTHERS)
    return topic, rng.choice(_PHRASINGS).format(t=task, b=base_form(task), l=language)


def _of_class(rng: random.Random, _: list[Asked]) -> Asked:
    name, has, does = rng.choice(_classes())
    language = rng.choice(_OTHERS)
    return f"class {name}", rng.choice(_CLASS).format(name=name, has=has, does=does, l=language)


def _classes() -> list[tuple[str, str, str]]:
    split = (tuple(part.strip() for part in entry.split(":")) for entry in tables.entries("code_classes"))
    return [(name, has, does) for name, has, does in split]


def _sql(rng: random.Random, _: list[Asked]) -> Asked:
    task, on = rng.choice(tables.rows("code_sql"))
    return f"sql {task}", rng.choice(_SQL).format(t=task, on=on)


def _shell(rng: random.Random, _: list[Asked]) -> Asked:
    task = rng.choice(tables.entries("code_shell"))
    return f"shell {task}", rng.choice(_SHELL).format(t=task)


def _web(rng: random.Random, _: list[Asked]) -> Asked:
    task = rng.choice(tables.entries("code_web"))
    return f"web {task}", rng.choice(_WEB).format(t=task)


def base_form(task: str) -> str:
    """ "parses a string and adds a sign" -> "parse a string and add a sign"."""
    verb, _, rest = task.partition(" ")
    return f"{_base(verb)} {_SECOND.sub(lambda found: 'and ' + _base(found[1]), rest)}"


def _base(verb: str) -> str:
    for ending, base in (("ches", "ch"), ("shes", "sh"), ("sses", "ss"), ("xes", "x"), ("ies", "y")):
        if verb.endswith(ending):
            return verb.removesuffix(ending) + base
    return verb.removesuffix("s")
