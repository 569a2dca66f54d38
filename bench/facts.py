"""What a reader of a record has to know beside its tables, in lines."""

from __future__ import annotations

from collections.abc import Iterable

from .record import Record


def facts(record: Record) -> list[str]:
    """What was run, on what, and what a reader has to know."""
    run, card, summary = record.run, record.run.machine, record.summary
    limits = run.limits
    pair = [run.pair.target, *(f"draft {run.pair.draft}" for _ in [1] if run.pair.draft)]
    how = "greedy" if limits.greedy else f"temperature {limits.temperature:g}, seed {limits.seed}"
    ends = "end markers ignored" if limits.ignore_eos else "answers end where the model ends them"
    known = ("chip", "cores", "gpu_cores", "memory_gb", "system", "macos", "mlx", "mlx-lm", "dflash-metal", "date")
    machine = ", ".join(f"{name} {card[name]}" for name in known if card.get(name) is not None)
    lines = [
        f"pair: {', '.join(pair)}",
        *(f"arm {name}: {what}" for name, what in run.arms.items() if what != name),
        f"settings: {how}, at most {limits.max_tokens} tokens, {ends}, {2 * run.pairs} trials of every prompt",
        *(f"prompts: {run.prompt_set}" for _ in [1] if run.prompt_set),
        *(f"machine{' (of the client)' if card.get('role') == 'client' else ''}: {machine}" for _ in [1] if machine),
        f"command: {run.command}",
    ]
    lines += [f"differs from the run that it is held against: {what}" for what in run.conditions_differ]
    lines += [f"note: {note}" for note in (*(summary.notes if summary else ()), *_cached(record))]
    said = dict.fromkeys(note for each in record.measured for note in each.notes if note.startswith("acceptance: "))
    return [*lines, *said]


def _cached(record: Record) -> Iterable[str]:
    """A server that has read a prompt before does not read it again."""
    for name in record.run.arms:
        seen = [each for each in record.measured if each.arm == name]
        cached, every = sum(each.cached_tokens for each in seen), sum(each.prompt_tokens for each in seen)
        if cached:
            yield (
                f"{name}: {cached / every:.0%} of its prompts' tokens came from the server's cache, so that its times "
                "with prefill are shorter than those of new prompts"
            )
