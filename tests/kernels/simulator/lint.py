"""Rules of Metal that clang's C++ for OpenCL does not enforce, read off its dump of the syntax tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NODE = re.compile(r"^[ |`-]*(\w+) 0x[0-9a-f]+ (.*)$")
_LINKS = re.compile(r"^(?:(?:prev|parent) 0x[0-9a-f]+ )+")
_PLACE = re.compile(r"(?:([^\s<>,:]+|<scratch space>|<invalid sloc>):)?(\d+):(\d+)|col:(\d+)|<invalid sloc>")
_MARKS = re.compile(r"\b(?:used|referenced|implicit|invalid|col:\d+|line:\d+:\d+)\b")
_TO_BFLOAT = re.compile(r"'(?:\w+ )?(?:bfloat16_t|bfloat|__bf16)'(?::'[^']*')? <FloatingCast>")
_NO_SPACE = re.compile(r"(?:^| )[A-Za-z_]\w* '[^']*__generic[^']*[*&]")
_STATIC = re.compile(r" static(?: |$)")
_CONSTANT = re.compile(r"'const |constexpr|__constant")
_DEDUCED = re.compile(r"\bauto\b|__msl_tg_alloc")
_DECLARATIONS = ("VarDecl", "ParmVarDecl", "FieldDecl")
_BANNED = ("CXXNewExpr", "CXXDeleteExpr", "GotoStmt", "CXXTryStmt", "CXXThrowExpr", "CXXDynamicCastExpr")
_FILES = ("header", "kernel", "signature")


@dataclass(frozen=True)
class _Node:
    kind: str
    file: str
    line: int
    rest: str


def errors(tree: str, unit: str) -> list[str]:
    """What Metal would refuse in `unit`, whose syntax tree clang wrote as `tree`; each once, as `file:line: error:`."""
    lines = _lines_of(unit)
    found: dict[str, None] = {}
    for node in _nodes(tree):
        message = _objection(node, lines)
        if message:
            found[f"{node.file}:{node.line}: error: {message}"] = None
    return list(found)


def _objection(node: _Node, lines: dict[tuple[str, int], str]) -> str | None:
    if node.kind == "ImplicitCastExpr" and "part_of_explicit_cast" not in node.rest and _TO_BFLOAT.search(node.rest):
        return "implicit conversion to bfloat is not allowed in MSL (needs a cast)"
    if node.kind in _DECLARATIONS and _NO_SPACE.search(_MARKS.sub("", node.rest)):
        # A pointer that `auto` deduced has its address space.
        if not _DEDUCED.search(lines.get((node.file, node.line), "")):
            return f"pointer or reference needs an explicit address space in MSL: {node.rest.strip()[:120]}"
    elif node.kind == "VarDecl" and _STATIC.search(node.rest) and not _CONSTANT.search(node.rest):
        return f"static variables are not allowed in MSL: {node.rest.strip()[:80]}"
    elif node.kind in _BANNED:
        return f"{node.kind} is not allowed in MSL"
    return None


def _nodes(tree: str) -> Iterator[_Node]:
    """The nodes of the user's files, with their places. A place is written only where it differs from the last."""
    file, line = "", 0
    for text in _of_the_user(tree).split("\n"):
        match = _NODE.match(text)
        if not match:
            continue
        kind, rest = match[1], _LINKS.sub("", match[2])
        if not rest.startswith("<"):
            continue
        end = _closing_angle(rest)
        start: tuple[str, int] | None = None
        tail = rest[end + 1 :]
        for part in rest[1:end].split(", "):
            file, line = _moved(_PLACE.fullmatch(part), file, line)
            start = start or (file, line)
        place = _PLACE.match(tail.strip())
        if place and place[2]:
            file, line = _moved(place, file, line)
            start = (file, line) if kind.endswith("Decl") else start
        if start and start[0] in _FILES:
            yield _Node(kind, *start, tail)


def _of_the_user(tree: str) -> str:
    """The end of the dump, from the first node that names one of the user's files."""
    starts = [at for at in (tree.find(f"<{file}:") for file in _FILES) if at >= 0]
    return tree[tree.rfind("\n", 0, min(starts)) + 1 :] if starts else ""


def _closing_angle(text: str) -> int:
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "<") - (character == ">")
        if depth == 0:
            return at
    return len(text) - 1


def _moved(place: re.Match[str] | None, file: str, line: int) -> tuple[str, int]:
    if not place or not place[2]:
        return file, line
    return (place[1] if place[1] and place[1] != "line" else file), int(place[2])


def _lines_of(unit: str) -> dict[tuple[str, int], str]:
    """The text of every line of a unit, by its `#line` name and number."""
    lines: dict[tuple[str, int], str] = {}
    file, number = "", 0
    for text in unit.split("\n"):
        mark = re.match(r'#line (\d+) "(.*)"', text)
        if mark:
            file, number = mark[2], int(mark[1]) - 1
        else:
            number += 1
            lines.setdefault((file, number), text)
    return lines
