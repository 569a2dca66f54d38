"""Metal text to what clang's C++ for OpenCL reads. Lines stay where they are.

Four things differ: the type of plain floating literals, how vectors are constructed, threadgroup variables, and
constructors that are qualified `thread`.
"""

from __future__ import annotations

import re
from itertools import pairwise

from tests.kernels.simulator import threadgroups
from tests.kernels.simulator.tokens import after_angle, is_space, is_word, skip, split

_FLOATING = re.compile(r"(?:\d[\d']*\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d[\d']*[eE][+-]?\d+")
_ELEMENTS = "bool char uchar short ushort int uint long ulong half float bfloat"
VECTORS = {f"{element}{n}" for element in _ELEMENTS.split() for n in (2, 3, 4)}
# Metal's own headers: `include/msl.h` is all of them.
_PARTS = "atomic|array|compute|common|geometric|integer|limits|logging|math|matrix|pack|quadgroup|relational|simdgroup"
_OWN_HEADER = re.compile(rf"^\s*#\s*include\s*<metal_(?:stdlib|{_PARTS}|simdgroup_matrix|type_traits|types)>", re.M)
_POINTED = ("*", "&", "thread", "device", "threadgroup", "constant")  # after "(": a cast, no construction


def prelude(text: str) -> str:
    """MLX's own text in front of every kernel."""
    return "".join(_words(text, body=False))


def header(text: str) -> str:
    return "".join(_words(text, body=False))


def body(text: str, first: int = 0) -> str:
    """A kernel's statements; its threadgroup variables are numbered from `first`."""
    tokens, _ = threadgroups.allocate(_words(text, body=True), first)
    return "".join(tokens)


def whole_kernel_header(text: str) -> tuple[str, int]:
    """A header that itself declares threadgroup variables, as MLX's own kernels do, and how many it declares."""
    tokens, count = threadgroups.allocate(_words(text, body=False), 0)
    return "".join(tokens), count


def _words(text: str, body: bool) -> list[str]:
    return _constructors(_vectors(_literals(split(_OWN_HEADER.sub("", text))), body))


def _literals(tokens: list[str]) -> list[str]:
    """`1.0` is a float in Metal; clang rebuilds such a literal as a double inside templates, so it gets its suffix."""
    for at, token in enumerate(tokens):
        if not (token[0].isdigit() or (token[0] == "." and len(token) > 1)) or token[:2].lower() == "0x":
            continue
        match = _FLOATING.match(token)
        if match and match.end() == len(token):
            tokens[at] = token + "f"
        elif match and token[match.end() :].lower() == "bf":
            tokens[at] = f"bfloat({match[0]}f)"
    return tokens


def _constructors(tokens: list[str]) -> list[str]:
    """`Foo(int x) thread : a(x) {}` loses `thread`, with which clang could not build a return value of that type.

    Ordinary methods keep it.
    """
    code = [(at, token) for at, token in enumerate(tokens) if not is_space(token)]
    structs = {name for (_, word), (_, name) in pairwise(code) if word in ("struct", "class")}
    for place in range(1, len(code) - 1):
        at, token = code[place]
        if token != "thread" or code[place - 1][1] != ")" or code[place + 1][1] not in (":", "{", "=", ";"):
            continue
        depth, opening = 0, place - 1
        while opening >= 0:
            depth += (code[opening][1] == ")") - (code[opening][1] == "(")
            if depth == 0:
                break
            opening -= 1
        if opening > 0 and code[opening - 1][1] in structs:
            tokens[at] = ""
    return tokens


def _vectors(tokens: list[str], body: bool) -> list[str]:
    """`float4(a, b)` becomes `metal::__mk<float4>(a, b)`, which clang has no other way to write for its vectors.

    Likewise `vec<T, 4>(...)`, `static_cast<half4>(...)`, and in a body `float2 v(a, b);`.
    """
    out: list[str] = []
    at, previous = 0, ""
    while at < len(tokens):
        name, end = _vector_type(tokens, at)
        opening = skip(tokens, end)
        if name and previous not in ("operator", "struct", "using") and opening < len(tokens):
            variable = opening if body and tokens[at] != "static_cast" and is_word(tokens[opening]) else None
            if variable is not None and (paren := skip(tokens, variable + 1)) < len(tokens) and tokens[paren] == "(":
                out.append(f"{name} {tokens[variable]} = metal::__mk<{name}>")
                at, previous = paren, ">"
                continue
            inner = skip(tokens, opening + 1)
            if tokens[opening] == "(" and inner < len(tokens) and tokens[inner] not in _POINTED:
                if previous == "::":
                    name = _pop_qualifier(out) + name
                out.append(f"metal::__mk<{name}>")
                at, previous = opening, ">"
                continue
        out.append(tokens[at])
        if not is_space(tokens[at]):
            previous = tokens[at]
        at += 1
    return out


def _vector_type(tokens: list[str], at: int) -> tuple[str, int]:
    """The vector type that starts at `at` (or that a static_cast there asks for) and the index after it; else ""."""
    token = tokens[at]
    if token in VECTORS:
        return token, at + 1
    if token not in ("vec", "static_cast"):
        return "", at + 1
    angle = skip(tokens, at + 1)
    end = after_angle(tokens, angle) if angle < len(tokens) and tokens[angle] == "<" else None
    if end is None:
        return "", at + 1
    if token == "vec":
        return "".join(tokens[at:end]), end
    inner = [t for t in tokens[angle + 1 : end - 1] if not is_space(t)]
    plain = inner[2:] if inner[:2] == ["metal", "::"] else inner
    if (len(plain) == 1 and plain[0] in VECTORS) or (inner[:1] == ["vec"] and inner[-1] == ">"):
        return "".join(inner), end
    return "", at + 1


def _pop_qualifier(out: list[str]) -> str:
    """Take `metal::` off the end of what is written."""
    words: list[str] = []
    while len(words) < 2:
        token = out.pop()
        if not is_space(token):
            words.insert(0, token)
    return "".join(words)
