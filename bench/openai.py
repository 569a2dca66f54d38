"""`bench openai`: a server with OpenAI's API measured with the same prompts, clocks and metrics as the arms in process.

    python -m bench.openai --base-url http://localhost:8000 --prompts bench/prompts/demo.jsonl
    python -m bench.openai --base-url http://localhost:8000 --base-url http://localhost:8001   # plain, then speculating

The first address is the baseline; two are asked in turn, A B B A. Answers are compared as text.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_mlx.bench_command import one_or_more

from .form import BenchError
from .load import measure_load
from .measure import Comparing, Step, measure
from .output import check_writable, file_for, give
from .record import Limits, Pair, Prompt, Record, Run
from .served_arm import Served, text_prompt
from .server import Server

INTERRUPTED = 130
_KEY = "OPENAI_API_KEY"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="dflash-metal bench openai", description="Measure a server with OpenAI's API: SGLang, vLLM, llama.cpp, ..."
    )
    made.add_argument("--base-url", action="append", required=True, metavar="URL", help="twice: baseline, then another")
    made.add_argument(
        "--name", action="append", metavar="NAME", help="of each address; default: server, or plain, spec"
    )
    made.add_argument(
        "--model", action="append", help="as the server names it; default: its only one. Once, or per URL"
    )
    made.add_argument("--api-key-env", default=_KEY, metavar="NAME", help=f"environment variable (default {_KEY})")
    made.add_argument("--prompts", default="offline", metavar="SET|FILE", help="a set, or a .jsonl file")
    made.add_argument("--limit", type=one_or_more, metavar="N", help="prompts at most")
    made.add_argument("--max-tokens", type=one_or_more, default=256, help="default 256")
    made.add_argument(
        "--trials", type=one_or_more, default=1, metavar="N", help="pairs of passes, A B and B A (default 1)"
    )
    made.add_argument(
        "--concurrency", type=one_or_more, default=1, metavar="N", help="requests at the same time (default 1)"
    )
    made.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    made.add_argument("--seed", type=int, help="needed at a temperature")
    made.add_argument(
        "--no-eos", action="store_true", help="ask for ignore_eos, which vLLM, SGLang and llama.cpp honour"
    )
    made.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="goes into every request as it is")
    made.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds without a byte (default 600)")
    made.add_argument("--run-code", action="store_true", help="run the code of answers to check it: no sandbox")
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="write the record here (default without --json: bench-TIME.json)"
    )
    made.add_argument("--json", action="store_true", help="print the record instead of tables")
    return made


def openai_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does; 130 after an interrupt, with what was measured written."""
    from dflash_mlx.cli import guarded

    given = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(given)
    return guarded(lambda: _run(args, shlex.join(["dflash-metal", "bench", "openai", *given])))


def _run(args: argparse.Namespace, command: str) -> int:
    check_writable(args.out)
    arms = connect(args)
    prompts = read_prompts(args.prompts, args.limit)
    run = Run(
        command=command,
        pair=Pair(arms[0].model, draft=None),
        limits=Limits(args.max_tokens, args.no_eos, args.temperature, seed=args.seed),
        arms={arm.name: arm.describe() for arm in arms},
        machine=client_card(),
        prompt_set=args.prompts,
        template="the server's",
        pairs=args.trials,
    )
    record = Record(run)
    try:
        fill(record, arms, prompts, args)
    finally:
        name_tokens(record)
        if record.measured:
            give(record, file_for(args.out, args.json), args.json)
    return INTERRUPTED if record.ended == "interrupted" else 0


def fill(record: Record, arms: Sequence[Served], prompts: Sequence[Prompt], args: argparse.Namespace) -> None:
    comparing = Comparing(run_code=args.run_code)
    if args.concurrency == 1:
        measure(record, arms, prompts, comparing=comparing, progress=tell)
    else:
        measure_load(record, arms, prompts, args.concurrency, comparing=comparing, progress=tell)


def connect(args: argparse.Namespace) -> list[Served]:
    """The arms, each asked for its models first.

    Raises:
        ServerError: cannot be reached, wants a key, has no such model.
        ValueError: names or models do not fit the addresses.
    """
    urls, models = args.base_url, args.model or [None]
    names = args.name or (
        ["server"] if len(urls) == 1 else ["plain", "spec", *(f"spec{i}" for i in range(2, len(urls)))]
    )
    models = models * len(urls) if len(models) == 1 else models
    if not len(urls) == len(names) == len(models) or len(set(names)) < len(names):
        raise ValueError(
            f"`base_url` is given {len(urls)} times, `name` {len(names)} and `model` {len(models)} times: as many are "
            "needed, or one model for all, and every name once."
        )
    key = os.environ.get(args.api_key_env) or None
    servers = [Server(url, key, args.timeout) for url in urls]
    rows = zip(servers, models, names, strict=True)
    return [Served.of(server, model, name, extra=args.extra_body) for server, model, name in rows]


def read_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """Of a set or a file, as text; of conversations the first turn, as z-lab's benchmark of servers does.

    Raises:
        BenchError: a set that needs a tokenizer, which only the server has.
    """
    from .prompt_sets import read_set

    made = []
    for item in read_set(source, limit):
        if item.document is not None:
            raise BenchError(
                f"{source} cuts its texts to a number of tokens, and a server's tokenizer is not here. Its prompts "
                "would be of other lengths: give prompts as they are, in a .jsonl file."
            )
        asked: tuple[Any, ...] = (item.task, item.expected, item.tests) if len(item.turns) == 1 else ()
        made.append(text_prompt(item.name, item.category, item.turns[0], *asked))
    return made


def name_tokens(record: Record) -> None:
    """How many tokens a prompt has is known when the server has said so; 0 where it never does."""
    from .statistics import summarise

    said = {each.prompt: each.prompt_tokens for each in record.measured}
    record.prompts = [replace(asked, tokens=said.get(asked.name, 0)) for asked in record.prompts]
    record.summary = summarise(record)


def client_card() -> dict[str, Any]:
    """This machine's card, which is the client's: what the server runs on it does not say."""
    from . import machine

    return {**machine.card(), "role": "client"}


def tell(step: Step) -> None:
    """Progress on stderr."""
    seen = step.measured
    rate = "" if seen.request_tps is None else f", {seen.request_tps:.1f} tokens/s with prefill"
    text = f"{step.done}/{step.total} {step.asking.arm} {step.asking.prompt}: {seen.generated} tokens{rate}"
    print(text, file=sys.stderr)


def _object(text: str) -> dict[str, Any]:
    """For argparse. Raises ArgumentTypeError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"has to be a JSON object, got {text!r}")
    return value


if __name__ == "__main__":
    raise SystemExit(openai_main())
