"""Requests at the same time: every prompt once per pass, so many of them in flight, and passes in turn, A B B A.

A request's times are then what a user waits among others; what a server gets done is tokens over the time of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from . import checks
from .measure import Comparing, Progress, Step, check_run, compare_trials, kept
from .record import Asking, Pass, Prompt, Record
from .served import of_counters
from .served_arm import Served

WARMUP_TOKENS = 64
_AS_THEY_ARE = Comparing()


def measure_load(
    record: Record,
    arms: Sequence[Served],
    prompts: Sequence[Prompt],
    concurrency: int,
    *,
    comparing: Comparing = _AS_THEY_ARE,
    progress: Progress | None = None,
) -> Record:
    """As `measure`, with `concurrency` requests of an arm in flight. Warmed up with as many, which are discarded.

    Raises:
        ValueError: as `measure`, or `concurrency` is below 1.
        BenchError: a request failed, or its numbers do not agree.
    """
    if concurrency < 1:
        raise ValueError(f"`concurrency` has to be 1 or more, got {concurrency}.")
    run = record.run
    check_run(record, arms, prompts)
    record.prompts = [prompt.asked for prompt in prompts]
    turns = [turn for pair in range(run.pairs) for turn in _both_ways(arms, pair)]
    total, warm = len(turns) * len(prompts), replace(run.limits, max_tokens=min(WARMUP_TOKENS, run.limits.max_tokens))
    with kept(record), ThreadPoolExecutor(concurrency) as workers:
        try:
            for arm in arms:
                some = [prompts[index % len(prompts)] for index in range(concurrency)]
                record.order += [Asking("warm-up", prompt.name, arm.name) for prompt in some]
                list(workers.map(lambda prompt, arm=arm: arm.run(prompt, warm), some))
            for arm, trial in turns:
                _pass(record, arm, trial, prompts, workers, concurrency)
                if progress is not None:
                    last = record.measured[-1]
                    progress(Step(record.order[-1], len(record.measured), total, last))
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)  # what waits is not asked any more
            raise
        for prompt in prompts:
            compare_trials(record, arms, prompt, comparing)
    return record


def _both_ways(arms: Sequence[Served], pair: int) -> list[tuple[Served, int]]:
    return [*((arm, 2 * pair) for arm in arms), *((arm, 2 * pair + 1) for arm in arms[::-1])]


def _pass(
    record: Record, arm: Served, trial: int, prompts: Sequence[Prompt], workers: ThreadPoolExecutor, concurrency: int
) -> None:
    """Counters are of all requests together, so they are read around the pass and not around a request."""
    limits = record.run.limits
    among_others = replace(arm, alone=False)
    before = arm.server.counters()
    start = arm.clock()
    seen = list(workers.map(lambda prompt: among_others.run(prompt, limits), prompts))
    wall_s = arm.clock() - start
    said = of_counters(before, arm.server.counters() if before else None)
    for measured in seen:
        checks.demand(measured)
        asking = Asking("measured", measured.prompt, arm.name, trial)
        record.measured.append(replace(measured, trial=trial, order=len(record.order)))
        record.order.append(asking)
    record.passes.append(
        Pass(
            arm.name,
            concurrency,
            len(seen),
            sum(measured.generated for measured in seen),
            wall_s,
            said.cycles if said else None,
            said.drafted if said else None,
            said.accepted if said else None,
        )
    )
