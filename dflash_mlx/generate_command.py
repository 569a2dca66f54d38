"""What `python -m dflash_mlx.generate` does once its arguments are read: load, generate, compare, report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_mlx.cache import KVQuantization
from dflash_mlx.cli import (
    INTERRUPTED,
    LoadingBar,
    chat_ids,
    load_options,
    noted_warnings,
    print_summary,
    printable,
)
from dflash_mlx.cpu import prefill_step_size
from dflash_mlx.divergence import Divergence, check
from dflash_mlx.errors import DFlashError
from dflash_mlx.generate import encode, stream_generate
from dflash_mlx.load import load
from dflash_mlx.options import Options
from dflash_mlx.prompt_cache import PromptCache, make_prompt_cache
from dflash_mlx.prompt_file import cache_file, load_prompt_cache, save_prompt_cache
from dflash_mlx.report import Answer, as_json, check_line, summary_lines
from dflash_mlx.sampling import SamplingPolicy
from dflash_mlx.segments import Segments
from dflash_mlx.stops import StopStrings


def run(args: argparse.Namespace, prompt: str) -> int:
    """Returns the exit status.

    Raises:
        ValueError, DFlashError, OSError, KeyboardInterrupt: for `cli.guarded`.
    """
    policy, request = _policy(args), _request(args)
    model, tokenizer, draft, notes = _load(args)
    ids = encode(tokenizer, chat_ids(tokenizer, prompt, args.system_prompt, raw=args.raw, thinking=args.think))
    cache = _prompt_cache(args.prompt_cache, model, draft)
    reused = cache.reuse(ids) if cache else 0
    responses = stream_generate(
        model,
        tokenizer,
        ids[reused:],
        draft_model=draft,
        sampler=policy,
        prompt_cache=cache,
        block_size=args.block_size,
        mode=args.mode,
        rule=args.rule,
        exact=args.exact,
        strict=args.strict,
        pipelined=args.pipelined,
        kernels=args.kernels,
        **request,
    )
    answer, last, status = Answer(Segments.for_prompt(tokenizer, ids)), None, 0
    try:
        for last in responses:
            answer.add(last)
            if not args.json:
                print(printable(last.text), end="", flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (DFlashError, ValueError):
        if not args.json and answer.text and not answer.text.endswith("\n"):
            print(flush=True)  # what is said of the error begins a line of its own
        raise
    if last is None:
        raise KeyboardInterrupt
    answer.finish("interrupted" if status else last.finish_reason)
    lines, found, cut = summary_lines(last), None, bool(status)
    if not args.json:
        print(flush=True)
    if args.check and not cut:
        request["kernels"] = args.kernels if last.stats.drafted else "off"
        found, status = _checked(lambda: check(model, tokenizer, ids, answer.tokens, policy=policy, **request), lines)
    if args.json:
        noted = replace(last, notes=(*notes, *last.notes))
        json.dump(as_json(noted, answer, found), sys.stdout, ensure_ascii=False)
        print(flush=True)
    print_summary(last, lines, interrupted=cut)
    if cache:
        save_prompt_cache(args.prompt_cache, cache)
    return status


def _load(args: argparse.Namespace) -> tuple[Any, Any, Any, list[str]]:
    """Model, tokenizer, draft or None, and what loading them warned of, which is on stderr already."""
    notes: list[str] = []
    try:
        with LoadingBar() as bar, noted_warnings(notes):
            model, tokenizer, draft = load(args.model, progress=bar, **load_options(args))
    finally:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if args.strict and draft is None:
        raise ValueError(
            f"`--strict` forbids to decode plainly instead of with a draft, and there is none for {args.model}. Name "
            "one with --draft, or leave --strict out."
        )
    return model, tokenizer, draft, notes


def _policy(args: argparse.Namespace) -> SamplingPolicy:
    """How tokens are chosen, refused before any model loads where --check or --strict could say nothing about it."""
    policy = SamplingPolicy(args.temp, args.top_p, args.min_p, top_k=args.top_k, seed=args.seed)
    if args.check and not policy.greedy and (args.rule != "match" or args.seed is None):
        raise ValueError(
            "`--check` compares tokens with plain decoding, and sampled text is that of plain decoding only with "
            "`--rule match` and a `--seed`. Pass both, or --temp 0."
        )
    if args.strict and (args.draft == "none" or args.mode == "plain" or args.block_size == 1):
        plain = "--draft none" if args.draft == "none" else "--mode plain" if args.mode == "plain" else "--block-size 1"
        raise ValueError(
            f"`--strict` forbids to decode plainly instead of with a draft, and {plain} asks for that. Leave one of "
            "the two out."
        )
    if args.check and args.prompt_cache:
        raise ValueError(
            "`--check` decodes the whole prompt again, and `--prompt-cache` would compare that with a warm cache. "
            "Leave one of the two out."
        )
    return policy


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """What a plain decoding of the same request has to be given too, checked before any model loads."""
    step = args.prefill_step_size if args.prefill_step_size is not None else prefill_step_size()
    kv = None if args.kv_bits is None else KVQuantization(args.kv_bits, args.kv_group_size, args.quantized_kv_start)
    policy = SamplingPolicy(args.temp)
    Options(
        max_tokens=args.max_tokens,
        prefill_step_size=step,
        block_size=args.block_size,
        policy=policy,
        exact=args.exact,
        quantization=kv,
    )
    StopStrings(args.stop)
    return dict(
        max_tokens=args.max_tokens,
        prefill_step_size=step,
        stop=args.stop,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
    )


def _prompt_cache(path: Path | None, model: Any, draft: Any) -> PromptCache | None:
    """The cache in the file, or an empty one that will be written there."""
    if path is None:
        return None
    return load_prompt_cache(path, model, draft) if cache_file(path).exists() else make_prompt_cache(model, draft)


def _checked(check: Callable[[], Divergence], lines: list[str]) -> tuple[Divergence | None, int]:
    """Compare with plain decoding and add the line that says so: what was found, and the exit status."""
    start = time.perf_counter()
    try:
        found = check()
    except KeyboardInterrupt:
        lines.append("not checked against plain decoding: interrupted")
        return None, INTERRUPTED
    lines.append(check_line(found, time.perf_counter() - start))
    return found, int(found.kind == "bug")
