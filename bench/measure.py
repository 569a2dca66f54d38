"""The order of a run, and what becomes of it when it ends early.

Every arm is warmed up on the first and on the longest prompt, which is discarded. Then each prompt is asked of all arms
in turn and in reverse turn, A B B A, as often as `pairs` says, so that a machine that gets slower treats them alike. At
the end the first measured request is made again: what it took then and now is the drift of the whole run.

Every request is checked as it comes (`checks`). An interrupt, or an error, leaves a record of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from . import checks
from .arms import Arm
from .compare import Judge, compared
from .form import BenchError
from .record import Asking, Measured, Prompt, Record
from .statistics import summarise


@dataclass(frozen=True)
class Step:
    """What a progress callback is told when a request was made: `done` of `total`, and what was seen."""

    asking: Asking
    done: int
    total: int
    measured: Measured


Progress = Callable[[Step], None]


@dataclass(frozen=True)
class Comparing:
    """How answers are compared: whether rounding is examined, and whether the code of answers may run."""

    judge: Judge | None = None
    run_code: bool = False


def plan(arms: Sequence[str], prompts: Sequence[Prompt], pairs: int) -> list[Asking]:
    """Every request of a run in its order."""
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    warm = dict.fromkeys([prompts[0].name, longest.name])
    order = [Asking("warm-up", name, arm) for name in warm for arm in arms]
    for prompt in prompts:
        turns = [each for pair in range(pairs) for each in ((arms, 2 * pair), (arms[::-1], 2 * pair + 1))]
        order += [Asking("measured", prompt.name, arm, trial) for turn, trial in turns for arm in turn]
    return [*order, Asking("closing", prompts[0].name, arms[0])]


def measure(
    record: Record,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    *,
    comparing: Comparing = Comparing(),
    progress: Progress | None = None,
) -> Record:
    """Fill `record`, whose run says the limits and how often; the first arm is the baseline.

    An interrupt returns the record as it is, not complete. So does an error before it is raised.

    Raises:
        BenchError: an identity does not hold, or an exact arm gave other tokens.
        ValueError: there are no prompts, two have one name, or arms and the record's do not agree.
    """
    run = record.run
    check_run(record, arms, prompts)
    by_name, asked = {arm.name: arm for arm in arms}, {prompt.name: prompt for prompt in prompts}
    order = plan(list(by_name), prompts, run.pairs)
    warm = replace(run.limits, max_tokens=min(run.warmup_tokens, run.limits.max_tokens))
    record.prompts = [prompt.asked for prompt in prompts]
    with kept(record):
        for index, asking in enumerate(order):
            prompt, arm = asked[asking.prompt], by_name[asking.arm]
            seen = arm.run(prompt, warm if asking.kind == "warm-up" else run.limits)
            seen = replace(seen, trial=asking.trial, order=index)
            record.order.append(asking)
            if asking.kind != "warm-up":
                checks.demand(seen)
            if asking.kind == "measured":
                record.measured.append(seen)
            elif asking.kind == "closing":
                record.closing = seen
            if progress is not None:
                progress(Step(asking, index + 1, len(order), seen))
            if asking.kind == "measured":
                compare_trials(record, arms, prompt, comparing)
    return record


@contextmanager
def kept(record: Record) -> Iterator[None]:
    """Whatever happens, the record says how far it came and what that comes to."""
    try:
        yield
        record.complete = True
    except KeyboardInterrupt:
        record.ended = "interrupted"
    except BaseException as error:
        record.ended = f"{type(error).__name__}: {error}"
        raise
    finally:
        record.summary = summarise(record)


def compare_trials(record: Record, arms: Sequence[Arm], prompt: Prompt, comparing: Comparing) -> None:
    """Once all arms have answered a prompt as often as they are to."""
    trials = {arm.name: record.of(prompt.name, arm.name) for arm in arms}
    if any(len(each) < 2 * record.run.pairs for each in trials.values()):
        return
    baseline = trials[arms[0].name]
    for arm in arms:
        judge = comparing.judge
        row = compared(prompt, baseline, trials[arm.name], judge, comparing.run_code)
        record.compared.append(row)
        checks.demand_same(row, arm.exact)


def check_run(record: Record, arms: Sequence[Arm], prompts: Sequence[Prompt]) -> None:
    names = [arm.name for arm in arms]
    if not prompts:
        raise ValueError("`prompts` has none. Give at least one.")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise ValueError("`prompts` has two of one name, so that their numbers would mix. Name each differently.")
    if names != list(record.run.arms):
        raise ValueError(f"`arms` are {names}, and the record's {list(record.run.arms)}. Give both the same, in order.")
    if record.run.warmup_tokens < 1:
        raise ValueError(f"`warmup_tokens` has to be 1 or more, got {record.run.warmup_tokens}: a cold arm would lose.")
    if record.run.pairs < 1:
        raise ValueError(f"`pairs` has to be 1 or more, got {record.run.pairs}: a pair is what A B B A takes.")
    if record.measured or record.order:
        raise BenchError("The record holds a run already. A record is of one run: make a new one.")
