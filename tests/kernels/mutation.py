"""Spoiled kernels: every barrier deleted, every subscript widened by one, each on its own.

All the places of one kernel are compiled once, each behind a switch, and a launch turns one of them on:

    p[e]                        p[(e) + __msl_mutant(7u)]
    threadgroup_barrier(flags)  (__msl_mutant(8u) ? (void)0 : threadgroup_barrier(flags))

`__msl_mutant(number)` is 1 for the launch's mutant, else 0, so that switched text with no mutant is the kernel itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from dflash_mlx.kernels.operation import Launch, MetalKernel, Operation
from dflash_mlx.metal import put_in, source
from tests.kernels.simulator import Rules, Simulator
from tests.kernels.simulator.tokens import is_space, is_word, split

BARRIERS = ("threadgroup_barrier", "simdgroup_barrier")
_BEFORE_A_VALUE = ("return", "else", "case", "do", "sizeof")  # words that no type is
_LIMITS = Rules(linted=False, seconds=10, accesses=50_000_000)


@dataclass(frozen=True)
class Place:
    """One place of a text that can be spoiled.

    start, end: token numbers of what is replaced: between the brackets, or the whole call.
    """

    start: int
    end: int
    line: int
    text: str
    barrier: bool


@dataclass(frozen=True)
class Mutant:
    """Number 1 and on; 0 is the kernel itself.

    what: where and how, such as "accept_block: target[lane] + 1 (2)", the second of its kind in that function. Lines
          would change with every edit.
    line: of the text that MLX compiles, headers put in.
    """

    number: int
    what: str
    line: int


class Spoiled:
    """The switched text of an operation's kernels."""

    def __init__(self, operation: Operation) -> None:
        self.text = source(operation.name)
        self.mutants: list[Mutant] = []
        self.header = self._switched(self.text, None, _unused(self.text))
        self.bodies = {k.name: self._switched(k.body, f"body of {k.name}", set()) for k in operation.kernels}

    def runner(self, mutant: Mutant | None = None) -> _Run:
        """A Runner of the switched kernels, with this place spoiled."""
        return _Run(self, mutant.number if mutant else 0)

    def _switched(self, text: str, function: str | None, left_out: set[str]) -> str:
        """`text` with a switch at each place of the functions that are not left out; a body is one function."""
        tokens = split(text)
        names = _functions(tokens)
        seen: Counter[str] = Counter()
        for place in list(places(tokens)):
            name = function or names[place.start]
            if name in left_out:
                continue
            number = len(self.mutants) + 1
            what = f"{name}: {f'without {place.text}' if place.barrier else f'{place.text} + 1'}"
            seen[what] += 1
            self.mutants.append(Mutant(number, what if seen[what] == 1 else f"{what} ({seen[what]})", place.line))
            switch = f"__msl_mutant({number}u)"
            before, after = (f"({switch} ? (void)0 : ", ")") if place.barrier else ("(", f") + {switch}")
            tokens[place.start] = before + tokens[place.start]
            tokens[place.end - 1] += after
        return "".join(tokens)


class _Run:
    def __init__(self, spoiled: Spoiled, number: int) -> None:
        self.spoiled = spoiled
        self.simulator = Simulator(0, _LIMITS, number)

    def __call__(self, kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        assert self.spoiled.text in kernel.header, f"the header of {kernel.name} does not hold its source"
        header = kernel.header.replace(self.spoiled.text, self.spoiled.header)
        body = self.spoiled.bodies.get(kernel.name, kernel.body)
        return self.simulator(replace(kernel, header=header, body=body), launch)


def places(tokens: list[str]) -> Iterator[Place]:
    """The subscripts and barriers, in order. Declarations of arrays and preprocessor lines are none."""
    line, directive = 1, False
    previous: list[int] = []  # tokens of the statement so far that are no space
    for at, token in enumerate(tokens):
        if token.strip() == "#" and (at == 0 or "\n" in tokens[at - 1]):
            directive = True
        if directive:
            directive = "\n" not in token
        elif token == "[" and previous and _is_index(tokens, previous):
            end = _closing(tokens, at)
            base = "".join(tokens[_base(tokens, previous) : end + 1])
            yield Place(at + 1, end, line, base, barrier=False)
        elif token in BARRIERS:
            end = _closing(tokens, at + 1) + 1
            yield Place(at, end, line, "".join(tokens[at:end]), barrier=True)
        line += token.count("\n")
        if not is_space(token):
            previous.append(at)


def _is_index(tokens: list[str], previous: list[int]) -> bool:
    """Whether a "[" after these tokens is a subscript: of a name that is not being declared, or of a value."""
    last = tokens[previous[-1]]
    if last == "]":
        opening = _opening(tokens, previous, "[", "]")
        return _is_index(tokens, previous[:opening])
    if last == ")":
        return True
    if not is_word(last) or last in _BEFORE_A_VALUE:
        return False
    before = tokens[previous[-2]] if len(previous) > 1 else ""
    if is_word(before) and before not in _BEFORE_A_VALUE:
        return False  # `float sums[4]`
    return not (before == ">" and _is_template(tokens, previous[:-1]))  # `vec<float, 4> rows[2]`


def _is_template(tokens: list[str], previous: list[int]) -> bool:
    """Whether the ">" at the end closes a list of template arguments rather than compares."""
    depth = 0
    for at in reversed(previous):
        depth += (tokens[at] == ">") - (tokens[at] == "<")
        if depth == 0:
            return True
        if tokens[at] in (";", "{", "}", "(", ")", "&&", "||", "=", "?"):
            return False
    return False


def _opening(tokens: list[str], previous: list[int], opening: str, closing: str) -> int:
    """The index in `previous` of the bracket that its last token closes."""
    depth = 0
    for index in range(len(previous) - 1, -1, -1):
        depth += (tokens[previous[index]] == closing) - (tokens[previous[index]] == opening)
        if depth == 0:
            return index
    raise ValueError(f"no {opening} for a {closing}")


def _base(tokens: list[str], previous: list[int]) -> int:
    """The token number at which the value that is indexed starts, for its name in a report."""
    last = tokens[previous[-1]]
    for opening, closing in ("[]", "()"):
        if last == closing:
            index = _opening(tokens, previous, opening, closing)
            return _base(tokens, previous[:index]) if index else previous[index]
    if len(previous) > 2 and tokens[previous[-2]] == ".":
        return _base(tokens, previous[:-2])
    return previous[-1]


def _closing(tokens: list[str], at: int) -> int:
    """`tokens[at]` opens; the number of the token that closes."""
    opening, closing = tokens[at], {"[": "]", "(": ")", "{": "}"}[tokens[at]]
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index] == opening) - (tokens[index] == closing)
        if depth == 0:
            return index
    raise ValueError(f"no {closing} for the {opening} at token {at}")


def _unused(text: str) -> set[str]:
    """The functions of common.h that this text has, and does not call: other kernels' mutants."""
    shared = put_in('#include "common.h"\n', "")
    if shared not in text:
        return set()
    rest = set(split(text.replace(shared, "")))
    called = _calls(split(shared))
    used = {name for name in called if name in rest}
    while more := {callee for name in used for callee in called[name]} - used:
        used |= more
    return called.keys() - used


def _calls(tokens: list[str]) -> dict[str, set[str]]:
    """The functions that a text defines, and which of them each names."""
    bodies: dict[str, set[str]] = {}
    for token, name in zip(tokens, _functions(tokens), strict=True):
        if name:
            bodies.setdefault(name, set()).add(token)
    return {name: (body & bodies.keys()) - {name} for name, body in bodies.items()}


def _functions(tokens: list[str]) -> list[str]:
    """For every token the function in whose body it is, or ""."""
    names: list[str] = []
    braces, parentheses, name, last = 0, 0, "", ""
    for token in tokens:
        if braces == 0:
            if token == "(" and parentheses == 0:
                name = last
            parentheses += (token == "(") - (token == ")")
            name = "" if token == ";" else name
        braces += (token == "{") - (token == "}")
        names.append(name if braces else "")
        last = last if is_space(token) else token
    return names
