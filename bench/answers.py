"""What an answer says, so that two texts can be compared by it and held against the right one.

    boxed    the last \\boxed{...}, LaTeX spelled one way; without one, the last number
    number   the last number
    exec     "pass" or "fail": the answer's Python code, then the prompt's tests, in a process of their own
    json     the last JSON value, keys in order
    text     the text, white space aside

Code of a model runs only where that was asked for: in an empty folder, isolated from this environment, with limits on
time, memory and files. That is no sandbox: it could reach the network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from decimal import Decimal, InvalidOperation
from typing import Any

from .record import Prompt

SECONDS = 10
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.S)
_PASSED = 42  # not 0, which an answer that ends the process itself gives
_LIMITED = """
import os, resource, sys
for what, most in (("RLIMIT_CPU", {seconds}), ("RLIMIT_AS", 2 << 30), ("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_NPROC", 64)):
    try:
        resource.setrlimit(getattr(resource, what), (most, most))
    except (AttributeError, ValueError, OSError):
        pass
exec(compile(sys.stdin.read(), "answer", "exec"), {{"__name__": "__main__"}})
os._exit({passed})
"""


def extract(prompt: Prompt, text: str, run_code: bool = False) -> str | None:
    """What `text` answers, in one spelling; None where it answers nothing, or its code may not be run."""
    if prompt.task == "exec":
        return verdict(code(text), prompt.tests) if run_code and prompt.tests is not None else None
    if prompt.task == "json":
        found = last_json(text)
        return None if found is None else json.dumps(found[0], sort_keys=True, ensure_ascii=False)
    if prompt.task == "boxed":
        return boxed(text) or number(text)
    if prompt.task == "number":
        return number(text)
    return " ".join(text.split()) or None


def is_right(prompt: Prompt, answer: str | None) -> bool | None:
    """None where the right answer is not known."""
    if prompt.task == "exec":
        return None if answer is None else answer == "pass"
    if prompt.expected is None:
        return None
    return answer == extract(prompt, prompt.expected if prompt.task != "boxed" else f"\\boxed{{{prompt.expected}}}")


def number(text: str) -> str | None:
    """The last number in its shortest decimal form: "1,250.00" is "1250"."""
    found = _NUMBER.findall(text)
    return _shortest(found[-1]) if found else None


def _shortest(text: str) -> str | None:
    try:
        value = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return format(value.normalize() + 0, "f")


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{} or \\fbox{} whose braces close; a plain number in its shortest form."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                return _latex(text[start:end]) or None
    return None


def _latex(text: str) -> str:
    """One spelling of a short formula; what looks different stays different."""
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[!,;: ]|\$", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+|\^\{?\\circ\}?|\\%|%$", "", text).rstrip(".")
    return (_shortest(text) or text) if _NUMBER.fullmatch(text) else text


def code(text: str) -> str:
    """The last fenced block of Python, or of no language; the whole text without a fence."""
    blocks = [body for language, body in _FENCE.findall(text) if language.lower() in ("", "python", "py", "python3")]
    return blocks[-1] if blocks else text


def verdict(source: str, tests: str) -> str:
    """ "pass" if code and tests run to their end within `SECONDS`, else "fail"."""
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _LIMITED.format(seconds=SECONDS, passed=_PASSED)],
                input=f"{source}\n\n{tests}\n".encode("utf-8", "replace"),
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS + 5,
            )
        except subprocess.TimeoutExpired:
            return "fail"
    return "pass" if done.returncode == _PASSED else "fail"


def last_json(text: str) -> tuple[Any] | None:
    """The last JSON object or array of a text, in a tuple; None without one."""
    decoder, found, place = json.JSONDecoder(), None, 0
    while (start := min((i for i in (text.find("{", place), text.find("[", place)) if i >= 0), default=-1)) >= 0:
        try:
            value, place = decoder.raw_decode(text, start)
            found = (value,)
        except json.JSONDecodeError:
            place = start + 1
        except RecursionError:  # brackets without end, each of which would be tried
            return found
    return found
