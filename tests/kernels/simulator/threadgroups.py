"""Threadgroup variables: each declaration becomes an allocation of the runtime, so that it gets bounds of its own.

`threadgroup float a[64], b;` becomes, for each of the two, a typedef of its type and a reference to what
`__msl_tg_alloc` returns; `sizeof(a)` and clang's checks of array indices keep working. Pointers and references to
threadgroup memory are left alone.
"""

from __future__ import annotations

from tests.kernels.simulator.errors import CompileError
from tests.kernels.simulator.tokens import CLOSING, OPENING, is_space, newlines

_WITH_PARENTHESES = ("alignas", "decltype", "metal")


def allocate(tokens: list[str], first: int) -> tuple[list[str], int]:
    """Rewritten tokens, and the number after the last variable's; the first variable gets the number `first`."""
    out: list[str] = []
    at, number, previous = 0, first, ";"
    while at < len(tokens):
        if not is_space(tokens[at]) and previous in (";", "{", "}", ":") and tokens[at] != "return":
            statement = _statement(tokens, at)
            names = _declared(statement) if statement is not None else None
            if statement is not None and names is not None:
                specifiers, declarators = names
                parts = [_allocation(specifiers, declarator, number + i) for i, declarator in enumerate(declarators)]
                out.append("; ".join(parts) + newlines(statement))
                number += len(declarators)
                at, previous = at + len(statement), declarators[-1][-1]
                continue
        out.append(tokens[at])
        if not is_space(tokens[at]):
            previous = tokens[at]
        at += 1
    return out, number


def _statement(tokens: list[str], at: int) -> list[str] | None:
    """The tokens from `at` to before the `;` that ends the statement; None where it ends otherwise."""
    depth, end = 0, at
    while end < len(tokens) and not (depth == 0 and tokens[end] in (";", "{", "}")):
        depth += (tokens[end] in ("(", "[")) - (tokens[end] in (")", "]"))
        if depth < 0:  # the third clause of a for(;;)
            return None
        end += 1
    return tokens[at:end] if end < len(tokens) and tokens[end] == ";" else None


def _declared(statement: list[str]) -> tuple[list[str], list[list[str]]] | None:
    """Specifiers and declarators of a threadgroup variable's declaration; None for any other statement."""
    code = [token for token in statement if not is_space(token)]
    if "threadgroup" not in code:
        return None
    end = _end_of_specifiers(code)
    following = code[end] if end < len(code) else ";"
    if following not in (",", "[", ";", "=") or "threadgroup" not in code[:end]:
        return None  # a pointer, a cast, a call
    if following == "=" and "&" in code[: end + 1]:
        return None
    specifiers = [token for token in code[: end - 1] if token not in ("threadgroup", "volatile")]
    if "alignas" in specifiers:  # every allocation is aligned to 16 bytes
        start = specifiers.index("alignas")
        specifiers = specifiers[:start] + specifiers[_after_parenthesis(specifiers, start + 1) :]
    declarators: list[list[str]] = [[]]
    depth = 0
    for token in code[end - 1 :]:
        depth += (token in (*OPENING, "<")) - (token in (*CLOSING, ">"))
        if token == "," and depth == 0:
            declarators.append([])
        else:
            declarators[-1].append(token)
    return specifiers, declarators


def _end_of_specifiers(code: list[str]) -> int:
    """The index after the first declared name."""
    at, angles = 0, 0
    while at < len(code):
        token = code[at]
        angles += (token == "<") - (token == ">") - 2 * (token == ">>")
        if token == "(" and at and code[at - 1] in _WITH_PARENTHESES:
            at = _after_parenthesis(code, at)
            continue
        if angles == 0 and token in ("*", "&", "(", "=", "[", ",", "&&"):
            break
        at += 1
    return at


def _after_parenthesis(code: list[str], at: int) -> int:
    depth = 0
    while True:
        depth += (code[at] == "(") - (code[at] == ")")
        at += 1
        if depth == 0:
            return at


def _allocation(specifiers: list[str], declarator: list[str], number: int) -> str:
    name, dimensions = declarator[0], "".join(declarator[1:])
    if "=" in declarator:
        raise CompileError(f"kernel: error: threadgroup variable `{name}` must not have an initialiser")
    kind = f"__tgt_{name}"
    size = f'{number}u, sizeof({kind}), alignof({kind}), (ulong)(const constant char*)"{name}"'
    return (
        f"typedef {' '.join(specifiers)} {kind}{dimensions}; "
        f"threadgroup {kind}& {name} = *(threadgroup {kind}*)__msl_tg_alloc({size})"
    )
