"""From settings to what can be measured: models in memory, arms, and every prompt as ids."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.cli import LoadingBar, chat_ids, load_options, noted_warnings
from dflash_mlx.cpu import prefill_step_size
from dflash_mlx.load import load
from dflash_mlx.load_target import load_target

from . import machine
from .arms import Arm, Models, Ours, Sequential, Stock
from .form import BenchError
from .items import Item
from .pair import Found, weights_of
from .presets import Preset, Settings
from .prompt_sets import SEED, Rendering, as_prompts
from .record import Limits, Pair, Prompt, Record, Run


@dataclass(frozen=True)
class Loaded:
    """The models in memory. draft, sequential: None where there is none. pair: as it stands in records."""

    models: Models
    draft: Any
    sequential: Any
    pair: Pair


@dataclass(frozen=True)
class Job:
    """A part, ready to be measured."""

    name: str
    record: Record
    arms: list[Arm]
    prompts: list[Prompt]


def load_models(args: argparse.Namespace, found: Found) -> Loaded:
    """What `found` found; what loading warns of goes to stderr. Raises as `load`."""
    notes: list[str] = []
    try:
        with LoadingBar() as bar, noted_warnings(notes):
            model, tokenizer, draft = load(args.model, progress=bar, **load_options(args))
            sequential = None
            if found.sequential is not None and found.sequential.folder is not None:
                sequential, _ = load_target(found.sequential.folder, found.sequential.name, None, None, False)
    finally:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    name = None if draft is None or found.resolution is None else found.resolution.draft
    pair = Pair(
        target=args.model,
        target_weights=weights_of(model),
        draft=name,
        draft_weights=None if draft is None else weights_of(draft),
        sequential_draft=args.sequential_draft,
        **(found.revisions if draft is not None else found.revisions | {"draft_revision": None}),
    )
    return Loaded(Models(model, tokenizer), draft, sequential, pair)


def make_job(
    part: Settings, items: Sequence[Item], made: Preset | None, args: argparse.Namespace, loaded: Loaded, command: str
) -> Job:
    """All that can be wrong with a part is found out here, before any is measured.

    Raises:
        BenchError: there is no model for an arm, or a prompt cannot be made.
        ValueError: a setting is out of range.
    """
    arms, tokenizer = arms_of(part, loaded, args), loaded.models.tokenizer
    limits = Limits(
        part.max_tokens, part.ignore_eos, part.temperature, seed=part.seed, prefill_step_size=prefill_step_size()
    )
    template = part.template if tokenizer.has_chat_template else "raw"
    thinking = part.thinking
    if args.think is None and (template == "raw" or not _switches(tokenizer)):
        thinking = None  # a preset's wish that this model knows nothing of
    first = Stock(loaded.models)
    prompts = as_prompts(
        items, tokenizer, Rendering(template == "raw", thinking), lambda prompt: _answer(first, prompt, limits)
    )
    own = Run(
        command=command,
        pair=loaded.pair,
        limits=limits,
        arms={name: what for name, (_, what) in arms.items()},
        machine=machine.card(),
        preset=None if made is None else f"{made.name}/{part.name}".removesuffix("/"),
        prompt_set=", ".join(part.prompts),
        prompt_seed=SEED,
        template=template,
        thinking=thinking,
        pairs=part.pairs,
    )
    return Job(part.name, Record(own), [arm for arm, _ in arms.values()], prompts)


def arms_of(part: Settings, loaded: Loaded, args: argparse.Namespace) -> dict[str, tuple[Arm, str]]:
    """By name: an arm, and what it is in words.

    Raises:
        BenchError: there is no model for it.
    """
    models, draft, made = loaded.models, loaded.draft, dict[str, tuple[Arm, str]]()
    options = {"kernels": args.kernels}
    for name in part.arms:
        if name in ("dflash", "auto") and draft is None:
            raise BenchError(
                f"The arm {name!r} needs a draft, and there is none for {args.model}. Name one with --draft, or leave "
                "the arm out: --arms stock,plain."
            )
        if name == "stock":
            made[name] = Stock(models), "mlx_lm.stream_generate"
        elif name == "plain":
            made[name] = replace(Ours.plain(models), options=options), "this loop without drafts"
        elif name == "auto":
            made[name] = replace(Ours.auto(models, draft), options=options), "drafts where they pay"
        elif name == "sequential":
            drafts = args.sequential_tokens
            what = f"mlx_lm's speculative decoding, {args.sequential_draft} drafts {drafts} tokens one by one"
            made[name] = Sequential(models, loaded.sequential, drafts), what
        else:
            for size in part.block_sizes or (draft.block_size,):
                _check_block(size, draft)
                label = f"dflash-{size}" if len(part.block_sizes) > 1 else "dflash"
                arm = replace(Ours.dflash(models, draft, size, label), options=options)
                made[label] = arm, f"drafts in every cycle, blocks of {size}"
    return made


def _check_block(size: int, draft: Any) -> None:
    if size > draft.config.block_size:
        raise BenchError(
            f"`--block-size` {size} is more than the {draft.config.block_size} that the draft was trained with, so it "
            "cannot propose that many. Give less."
        )


def _answer(arm: Arm, prompt: Prompt, limits: Limits) -> str:
    """What the next turn of a conversation follows: the target's own answer, by mlx_lm."""
    print(f"{prompt.name}: its answer, for the next turn", file=sys.stderr)
    return arm.run(prompt, limits).text


def _switches(tokenizer: Any) -> bool:
    """Whether thinking can be switched."""
    try:
        chat_ids(tokenizer, "?", None, raw=False, thinking=True)
    except ValueError:
        return False
    return True
