"""Where the time of a cycle goes: draft, verify, commit. A run apart, whose numbers enter no throughput.

    python -m bench.profile --prompts demo --limit 1 --max-tokens 64 --out profile.json

The loop is the ordinary one (`decode`), over a session whose parts wait for the device at the end of each phase. That
is what makes the phases visible, and what makes the cycle slower: draft and host's work no longer overlap. The text
stays the same. Nothing of the engine is changed, so that without a profile there is no wait.

    draft     proposing, and taking in the features of what was kept
    verify    the target's forward over anchor and drafts, the verdict, and reading it
    commit    what the cache keeps and takes back
    rest      the host's work in between, the caller's text included
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .form import BenchError, plain, read
from .record import Limits, Pair, Prompt

if TYPE_CHECKING:
    from .arms import Models

SCHEMA = 1
KIND = "dflash-profile"
PHASES = ("draft", "verify", "commit", "rest")


@dataclass(frozen=True)
class Cycle:
    """Seconds by phase. context: positions that the target's cache held before it."""

    context: int
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    commit_s: float
    rest_s: float


@dataclass(frozen=True)
class Profiled:
    """One prompt. tokens: generated ids, which are those of an ordinary run."""

    prompt: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    cycles: tuple[Cycle, ...]


@dataclass(frozen=True)
class Profile:
    command: str
    pair: Pair
    limits: Limits
    block_size: int
    machine: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[Profiled, ...] = ()

    @property
    def cycles(self) -> list[Cycle]:
        """Of all prompts; those that drafted, since others have no phases to compare."""
        return [cycle for prompt in self.prompts for cycle in prompt.cycles if cycle.drafted]

    def median_s(self, phase: str) -> float | None:
        values = [getattr(cycle, f"{phase}_s") for cycle in self.cycles]
        return float(np.median(values)) if values else None


class Phases:
    """Gives every moment to one phase: `mark` adds the time since the last mark to it.

    "proposed" is the draft of the next cycle.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, "proposed"), 0.0)
        self._last = self._clock()

    def mark(self, phase: str) -> None:
        now = self._clock()
        self.seconds[phase] += now - self._last
        self._last = now


def profile(models: Models, draft: Any, prompt: Prompt, limits: Limits, block_size: int | None = None) -> Profiled:
    """One request, with drafts in every cycle.

    Raises:
        ValueError, DFlashError: as `stream_generate`.
    """
    from mlx_lm.generate import wired_limit

    from dflash_mlx.decode import decode
    from dflash_mlx.options import Options
    from dflash_mlx.request import plan
    from dflash_mlx.sampling import SamplingPolicy

    from .profiled_session import watched

    options = Options(
        max_tokens=limits.max_tokens,
        prefill_step_size=limits.prefill_step_size,
        block_size=block_size or draft.block_size,
        mode="dflash",
        policy=SamplingPolicy(limits.temperature, limits.top_p, top_k=limits.top_k, seed=limits.seed),
    )
    request = plan(models.model, draft, options)
    request.check_prompt(prompt.ids)
    eos = frozenset(models.tokenizer_for(limits).eos_token_ids)
    phases = Phases(models.clock)
    session = watched(request.open(eos), phases)
    cycles: list[Cycle] = []
    tokens: list[int] = []
    step, proposed_s = limits.prefill_step_size, 0.0
    try:
        with wired_limit(models.model):
            for commit in decode(session, prompt.ids, max_tokens=limits.max_tokens, stop=eos, prefill_step_size=step):
                tokens += commit.tokens
                session.undelivered = 0
                phases.mark("rest")
                seconds = phases.seconds
                if commit.cycle:
                    context = len(prompt.ids) + len(tokens) - len(commit.tokens) - 1
                    draft_s = proposed_s + seconds["draft"]
                    times = draft_s, seconds["verify"], seconds["commit"], seconds["rest"]
                    cycles.append(Cycle(context, commit.drafted, commit.accepted, *times))
                proposed_s = seconds["proposed"]  # for the next cycle, before this one is handed out
                phases.begin()
    finally:
        request.close(session)
    return Profiled(prompt.name, len(prompt.ids), tuple(tokens), tuple(cycles))


def to_json(made: Profile) -> dict[str, Any]:
    medians = {f"{phase}_s": made.median_s(phase) for phase in PHASES}
    return {"kind": KIND, "schema": SCHEMA, **plain(made), "median": medians}


def from_json(value: Any) -> Profile:
    """Raises BenchError: no profile, a newer one, or damaged."""
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise BenchError(f"This is no profile: `kind` is not {KIND!r}. Give a file that bench.profile wrote.")
    if not isinstance(value.get("schema"), int) or not 1 <= value["schema"] <= SCHEMA:
        raise BenchError(
            f"The profile has schema {value.get('schema')!r}, and this version reads 1 to {SCHEMA}. What it does not "
            "know it would show wrongly: read it with the version that wrote it, or a newer one."
        )
    return read(Profile, value, "profile")


def profile_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does."""
    from dflash_mlx import cli
    from dflash_mlx.bench_command import one_or_more

    given = list(sys.argv[1:] if argv is None else argv)
    made = argparse.ArgumentParser(
        prog="dflash-metal bench profile", description="Where the time of a cycle goes. Never a throughput."
    )
    cli.add_model_arguments(made)
    made.add_argument("--prompts", default="demo", metavar="SET|FILE", help="default demo")
    made.add_argument("--limit", type=one_or_more, default=1, metavar="N", help="prompts of each category (default 1)")
    made.add_argument("--max-tokens", type=one_or_more, default=128, help="default 128")
    made.add_argument("--block-size", type=int, help="anchor + drafts per cycle; default: the draft's")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the profile, for `bench report`")
    args = made.parse_args(given)
    cli.check_model_arguments(made, args)
    return cli.guarded(lambda: _run(args, shlex.join(["dflash-metal", "bench", "profile", *given])))


def _run(args: argparse.Namespace, command: str) -> int:
    from rich.console import Console

    from dflash_mlx.cli import LoadingBar, load_options
    from dflash_mlx.files import whole_file
    from dflash_mlx.load import load

    from . import machine
    from .arms import Models
    from .output import check_writable
    from .prompt_sets import Rendering, as_prompts, read_set
    from .report_command import profile_table
    from .tables import rich_group

    check_writable(args.out)
    items = [item for item in read_set(args.prompts, args.limit) if len(item.turns) == 1]
    if not items:
        raise BenchError(
            f"{args.prompts} has conversations only, and a profile is of single turns. Give other prompts."
        )
    with LoadingBar() as progress:
        model, tokenizer, draft = load(args.model, progress=progress, **load_options(args))
    if draft is None:
        raise BenchError("There is no draft, so a cycle has no phases. Give one with --draft.")
    models, limits = Models(model, tokenizer, time.perf_counter), Limits(args.max_tokens)
    prompts = as_prompts(items, tokenizer, Rendering(), lambda _: "")
    profile(models, draft, prompts[0], Limits(min(32, args.max_tokens)), args.block_size)  # a warm-up
    seen = tuple(profile(models, draft, prompt, limits, args.block_size) for prompt in prompts)
    pair = Pair(args.model, draft=draft.name)
    made = Profile(command, pair, limits, args.block_size or draft.block_size, machine.card(), seen)
    if args.out is not None:
        with whole_file(args.out) as part:
            part.write_text(json.dumps(to_json(made), allow_nan=False, separators=(",", ":")) + "\n", "utf-8")
    console = Console(highlight=False)
    console.print(rich_group([profile_table(made)], [], console.width))
    return 0


if __name__ == "__main__":
    raise SystemExit(profile_main())
