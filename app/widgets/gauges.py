"""What is used of what there is: prompt, memory, context; and the speed-up over plain decoding, as facts.

A bar repeats the number beside it. What is not known is left out, or said to be unknown; it is never guessed.
"""

from __future__ import annotations

from dflash_mlx.app.baseline import Baseline, speedup
from dflash_mlx.app.messages import ModelCard, Numbers
from dflash_mlx.app.text import percent, rate, seconds
from dflash_mlx.app.widgets.facts import Fact, line

FULL, EMPTY = "█", "░"
NEAR = 0.85
"""Share of a limit from which on it is warned of."""
GAUGE_CELLS = 8
LEAST_CELLS = 4
"""A shorter bar says nothing."""


def gauge(share: float, cells: int) -> str:
    """A bar of `cells`: none filled only at 0, all only at 1 and above."""
    filled = min(max(int(share * cells), 1 if share > 0 else 0), cells)
    return FULL * filled + EMPTY * (cells - filled)


def _barred(share: float, cells: int, text: str) -> str:
    return f"{gauge(share, cells)} {text}" if cells >= LEAST_CELLS else text


def prefill(numbers: Numbers) -> tuple[Fact, ...]:
    """The prompt while it is read: tokens, time left, cached share, tok/s; the most important first.

    `numbers.reading` is the share of the prompt without its cached tokens. Rate and time left are by the time since
    the question, so they are on the careful side; both are left out until a first piece has been read.
    """
    share, to_read = numbers.reading or 0.0, numbers.prompt_tokens - numbers.cached_tokens
    if to_read <= 0:
        return (Fact("", "reading the prompt"),)
    done = round(share * to_read)
    facts = [Fact("", f"{done:,} of {to_read:,}", "tokens")]
    pace = done / numbers.prefill_s if numbers.prefill_s and done else None
    if pace is not None:
        facts.append(Fact("", seconds((to_read - done) / pace), "s left"))
    if numbers.cached_tokens:
        facts.append(Fact("", percent(numbers.cached_tokens / numbers.prompt_tokens), "from cache"))
    if pace is not None:
        facts.append(Fact("prefill", rate(pace), "tok/s"))
    return tuple(facts)


def with_bar(facts: tuple[Fact, ...], share: float, room: int) -> tuple[Fact, ...]:
    """The same with a bar in front of the first one, as long as the `room` on the line allows."""
    cells = min(room - line(facts).cell_length - 1, 3 * GAUGE_CELLS)
    first = facts[0]
    return (first._replace(value=_barred(share, cells, first.value)), *facts[1:])


def memory(numbers: Numbers, card: ModelCard | None, cells: int = GAUGE_CELLS) -> tuple[Fact, ...]:
    """What MLX holds, of what this machine recommends at most, and the most it held."""
    facts: list[Fact] = []
    limit, near = (card.memory_gb if card is not None else None), _memory_near(numbers, card)
    if numbers.active_gb is not None and limit:
        bar = _barred(numbers.active_gb / limit, cells, f"{numbers.active_gb:.2f}")
        facts.append(Fact("memory", bar, f"of {limit:.1f} GB", near))
    elif numbers.active_gb is not None:
        facts.append(Fact("memory", f"{numbers.active_gb:.2f}", "GB"))
    if numbers.peak_gb is not None:
        facts.append(Fact("memory peak", f"{numbers.peak_gb:.2f}", "GB", near))
    return tuple(facts)


def context(used: int, card: ModelCard | None, cells: int = GAUGE_CELLS) -> Fact:
    """Positions that the conversation uses, of those that the target was made for."""
    limit = card.context_length if card is not None else None
    if not limit:
        return Fact("context", f"{used:,}", "tokens")
    share = used / limit
    unit = f"of {limit:,} tokens ({percent(share)})"
    return Fact("context", _barred(share, cells, f"{used:,}"), unit, share >= NEAR)


def speed_up(numbers: Numbers, card: ModelCard | None, baseline: Baseline | None) -> Fact | None:
    """Against plain decoding on this machine, or how to measure it; None where there are no drafts to speed up."""
    if card is None or card.draft is None or numbers.mode == "plain":
        return None
    measured = speedup(numbers, baseline)
    if measured is not None and baseline is not None:
        return Fact("", f"{measured:.2f}x", f"plain generation, by {baseline.how}", measured < 1)
    if baseline is None:
        return Fact("speed-up:", "/race", "measures it")
    if numbers.decode_tps is not None:
        return Fact("speed-up:", "/race", "measures it here")  # the baseline is from a much shorter context, or longer
    return Fact("plain", rate(baseline.decode_tps), f"tok/s generation, by {baseline.how}")


def warnings(numbers: Numbers, card: ModelCard | None, used: int) -> tuple[str, ...]:
    """Limits that are near, in words."""
    said: list[str] = []
    if card is not None and card.memory_gb and _memory_near(numbers, card):
        most = max(numbers.active_gb or 0.0, numbers.peak_gb or 0.0)
        said.append(
            f"memory is near the limit: {most:.1f} of {card.memory_gb:.1f} GB at peak. "
            "A new chat (/clear) or a smaller model needs less"
        )
    if card is not None and card.context_length and used >= NEAR * card.context_length:
        how = "full" if used >= card.context_length else "nearly full"
        said.append(
            f"the context is {how}: {used:,} of {card.context_length:,} tokens. Answers get worse beyond it; "
            "/clear begins a new chat"
        )
    return tuple(said)


def _memory_near(numbers: Numbers, card: ModelCard | None) -> bool:
    limit = card.memory_gb if card is not None else None
    return bool(limit) and max(numbers.active_gb or 0.0, numbers.peak_gb or 0.0) >= NEAR * (limit or 1.0)
