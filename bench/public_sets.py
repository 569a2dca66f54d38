"""Public sets of prompts, asked as z-lab's benchmark of DFlash asks them, so that acceptance can be compared.

From the hub a set is fetched once and kept in its cache. Where there is none, or the set is not on the hub, a file with
the set's own rows does: gsm8k:test.jsonl. The sets ending in -raw are asked as Lucebox asks them, for runs without a
chat template.

Where the words are from: dflash/benchmark.py of z-lab/dflash (gsm8k, math500, humaneval, mbpp, mt-bench); copies in
other repositories of a loader that it had earlier (aime24, aime25, livecodebench, alpaca, swe-bench-lite: not seen in
z-lab's own); dflash/scripts/bench_llm.py of Luce-Org/lucebox-hub (-raw). The columns of the sets were not tried on the
hub's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub import errors

from dflash_mlx.errors import FetchError
from dflash_mlx.hub.errors import explained
from dflash_mlx.training.prompts.sources import read_rows

from .form import BenchError
from .items import Item

Row = Mapping[str, Any]
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Public:
    """dataset: on the hub, or None and `page` says where it is; files: patterns of those with the rows.

    item: a row, and a name for it, as what is asked.
    """

    dataset: str | None
    files: tuple[str, ...]
    item: Callable[[Row, str], Item]
    page: str = ""

    def command(self) -> str:
        """What to type to have it here."""
        if self.dataset is None:
            return f"download {self.files[0]} from {self.page}"
        patterns = " ".join(f'--include "{each}"' for each in self.files)
        return f"hf download {self.dataset} --repo-type dataset {patterns}"


def read(name: str, file: Path | None = None) -> list[Item]:
    """Every row of a set, in its order.

    Raises:
        FetchError, PromptsError: it cannot be had, or its files cannot be read.
        BenchError: a row is of another set.
    """
    public = SETS[name]
    found: list[Item] = []
    for path in [file] if file is not None else _files(name, public):
        for row in read_rows(path):
            try:
                found.append(public.item(row, f"{name}-{len(found) + 1}"))
            except (KeyError, TypeError, IndexError) as error:
                raise BenchError(
                    f"Row {len(found) + 1} of {path.name} is none of {name} ({type(error).__name__}: {error}). It "
                    "would not be asked as the set's own are: give the set's file, or name the file alone."
                ) from error
    return found


def missing(name: str) -> str | None:
    """The command that fetches a set, if it is not in the hub's cache; None if it is."""
    public = SETS[name]
    return None if _cached(public) else public.command()


def _files(name: str, public: Public) -> list[Path]:
    if found := _cached(public):
        return found
    if public.dataset is None:
        raise FetchError(
            f"The set {name} is not on the hub. To use it, {public.command()}, and name the file: "
            f"--prompts {name}:FILE."
        )
    try:
        with explained(public.dataset):
            folder = hub.snapshot_download(public.dataset, repo_type="dataset", allow_patterns=list(public.files))
    except FetchError as error:
        raise type(error)(
            f"The set {name} is not here. {error} Where there is a network: {public.command()}. Or give a file with "
            f"its rows: --prompts {name}:FILE."
        ) from error
    if found := _matching(Path(folder), public):
        return found
    raise FetchError(
        f"{public.dataset} has no {' or '.join(public.files)} any more, so the set {name} cannot be read from there. "
        f"Give a file with its rows: --prompts {name}:FILE."
    )


def _cached(public: Public) -> list[Path]:
    if public.dataset is None:
        return []
    try:
        with explained(public.dataset):
            folder = hub.snapshot_download(
                public.dataset, repo_type="dataset", allow_patterns=list(public.files), local_files_only=True
            )
    except (FetchError, errors.LocalEntryNotFoundError):
        return []
    return _matching(Path(folder), public)


def _matching(folder: Path, public: Public) -> list[Path]:
    names = {path: path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()}
    return [path for path, name in names.items() if any(fnmatch(name, pattern) for pattern in public.files)]


def _boxed(question: str, answer: str) -> Callable[[Row, str], Item]:
    """By the names of two columns; of GSM8K's answers what stands behind `####`."""

    def item(row: Row, name: str) -> Item:
        right = str(row[answer]).rpartition("####")[2].strip()
        return Item(name, name.rpartition("-")[0], (f"{row[question]}{_BOXED}",), "boxed", right)

    return item


def _raw(form: str, answer: str) -> Callable[[Row, str], Item]:
    def item(row: Row, name: str) -> Item:
        right = str(row[answer]).rpartition("####")[2].strip()
        return Item(name, name.rpartition("-")[0], (form.format(**row),), "boxed", right)

    return item


def _humaneval(row: Row, name: str) -> Item:
    asked = "Write a solution to the following problem and make sure that it passes the tests:"
    text = f"{asked}\n```python\n{row['prompt']}\n```"
    tests = f"{row['test']}\ncheck({row['entry_point']})"
    return Item(name, "humaneval", (text,), "exec", tests=tests)


def _humaneval_raw(row: Row, name: str) -> Item:
    return Item(
        name, "humaneval-raw", (row["prompt"],)
    )  # the answer goes on with a function, so it cannot be run alone


def _mbpp(row: Row, name: str) -> Item:
    tests = "\n".join([*row["test_imports"], *row["test_list"]])
    return Item(name, "mbpp", (row["prompt"],), "exec", tests=tests)


def _livecodebench(row: Row, name: str) -> Item:
    code, given = "# YOUR CODE HERE", "Write your code in the following format:"
    if row.get("starter_code"):
        code, given = row["starter_code"], "Use the following code structure:"
    parts = [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program",
        f"### Question:\n{row['question_content']}",
        f"### Format: {given}\n```python\n{code}\n```",
        "### Answer: (use the provided format with backticks)",
    ]
    return Item(name, "livecodebench", ("\n\n".join(parts),))


def _turns(column: str, category: str | None = None) -> Callable[[Row, str], Item]:
    def item(row: Row, name: str) -> Item:
        turns: Sequence[str] = row[column]
        if isinstance(turns, str) or not turns:
            raise TypeError(f"`{column}` holds no list of turns")
        return Item(name, category or str(row["category"]), tuple(turns))

    return item


def _alpaca(row: Row, name: str) -> Item:
    more = f"\n\nInput:\n{row['input']}" if row.get("input") else ""
    return Item(name, "alpaca", (f"{row['instruction']}{more}",))


def _swe_bench(row: Row, name: str) -> Item:
    text = f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."
    return Item(name, "swe-bench-lite", (text,))


_GSM8K = ("openai/gsm8k", ("main/test-*.parquet",))
_MATH500 = ("HuggingFaceH4/MATH-500", ("test.jsonl",))
_HUMANEVAL = ("openai/openai_humaneval", ("openai_humaneval/test-*.parquet",))
SETS: dict[str, Public] = {
    "gsm8k": Public(*_GSM8K, _boxed("question", "answer")),
    "math500": Public(*_MATH500, _boxed("problem", "answer")),
    "aime24": Public("HuggingFaceH4/aime_2024", ("data/train-*.parquet",), _boxed("problem", "answer")),
    "aime25": Public("MathArena/aime_2025", ("data/train-*.parquet",), _boxed("problem", "answer")),
    "humaneval": Public(*_HUMANEVAL, _humaneval),
    "mbpp": Public("google-research-datasets/mbpp", ("sanitized/test-*.parquet",), _mbpp),
    "livecodebench": Public("livecodebench/code_generation_lite", ("test*.jsonl",), _livecodebench),
    "mt-bench": Public("HuggingFaceH4/mt_bench_prompts", ("data/train-*.parquet",), _turns("prompt", "mt-bench")),
    "alpaca": Public("tatsu-lab/alpaca", ("data/train-*.parquet",), _alpaca),
    "swe-bench-lite": Public("princeton-nlp/SWE-bench_Lite", ("data/test-*.parquet",), _swe_bench),
    "spec-bench": Public(None, ("data/spec_bench/question.jsonl",), _turns("turns"), "github.com/hemingkx/Spec-Bench"),
    "humaneval-raw": Public(*_HUMANEVAL, _humaneval_raw),
    "gsm8k-raw": Public(*_GSM8K, _raw("Question: {question}\nAnswer: ", "answer")),
    "math500-raw": Public(*_MATH500, _raw("Problem: {problem}\nSolution: ", "answer")),
}
