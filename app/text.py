"""Numbers and foreign text as the user sees them. No unlabelled number, no rate that is not known."""

from __future__ import annotations

from textwrap import wrap

from dflash_mlx.app.messages import ModelCard, Numbers, PrefillProgress, TurnDone

UNKNOWN = "–"

# Control characters would reach the terminal as commands (an answer could retitle the window or move the
# cursor), and every line break except \n makes Textual's Markdown count lines differently from its parser.
_VISIBLE: dict[int, str | None] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),  # would show other text than there is
    **dict.fromkeys([0x0A, 0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029], "\n"),
    0x09: "    ",
    0x0D: None,
    # What turns the direction of text around can make code read otherwise than it runs. A half of a character cannot be
    # written to a terminal. What has no width and no shape could fill a line unseen.
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], "\ufffd"),
    **dict.fromkeys([0xAD, 0x180E, 0x200B, *range(0x2060, 0x2065), 0xFEFF, *range(0xE0000, 0xE0080)], None),
}
_PASTED: dict[int, str | None] = {**_VISIBLE, 0x09: "\t", **dict.fromkeys({*range(0x20), 0x7F} - {0x09, 0x0A}, None)}


def visible(text: str) -> str:
    """Foreign text without anything that a terminal would obey, and without what misleads a reader."""
    return text.translate(_VISIBLE)


def pasted(text: str) -> str:
    """Foreign text for the clipboard: the same, but tabs stay, and control characters leave no trace.

    With them a paste could end the bracket around it and run as a command.
    """
    return text.translate(_PASTED)


def rate(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return UNKNOWN
    return f"{tokens_per_s:.1f}" if tokens_per_s < 1000 else f"{tokens_per_s:.0f}"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def per_cycle(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def mode_badge(numbers: Numbers, card: ModelCard | None) -> str:
    """What the running or the last turn does, by its own account: `dflash B=4`, or `plain` with a reason.

    B is the block of the newest cycle, which changes in mode auto.
    """
    if card is None or card.draft is None:
        return "plain: no draft" if card is not None else "no model"
    if numbers.reading is not None:
        return f"reading {numbers.reading:.0%}"
    if numbers.mode == "plain":
        if numbers.asked_mode == "plain":
            return "plain: by /mode"
        return "plain: see the note" if numbers.notes else "plain"
    if numbers.mode == "dflash":
        return "dflash, resting" if numbers.resting else f"dflash B={numbers.newest_block or numbers.block_size}"
    return "ready"


def fell_back(numbers: Numbers) -> bool:
    """Whether a turn ran plainly without having been asked to, so that its notes say why."""
    return numbers.mode == "plain" and numbers.asked_mode != "plain" and bool(numbers.notes)


def pair_name(card: ModelCard) -> str:
    """Target and draft, once if they are the two halves of one thing."""
    if card.draft is None:
        return card.target
    return f"{card.target} pair" if card.draft == card.target else f"{card.target} + {card.draft}"


def note_line(notes: tuple[str, ...]) -> str:
    return " · ".join(note.replace("\n", " ").removesuffix(".") for note in notes)


def fitting_notes(notes: tuple[str, ...], width: int, lines: int) -> str:
    """As many notes as fit, each of them whole; of a first one that does not, as many sentences as fit."""
    kept = notes
    while len(kept) > 1 and len(wrap(note_line(kept), width)) > lines:
        kept = kept[:-1]
    line = note_line(kept)
    while ". " in line and len(wrap(line, width)) > lines:
        line = line.rpartition(". ")[0]
    return line


def turn_line(numbers: Numbers) -> str:
    """What a finished turn cost: tokens, time, what the cache saved of the prompt, how often the draft rested."""
    parts = [count(numbers.generation_tokens, "token")]
    if numbers.total_s is not None:
        parts[0] += f" in {seconds(numbers.total_s)} s"
    prompt = f"prompt {count(numbers.prompt_tokens, 'token')}"
    if numbers.cached_tokens:
        prompt += f", {numbers.cached_tokens:,} from cache"
    if numbers.recomputed_tokens:
        prompt += f", {numbers.recomputed_tokens:,} read again"
    parts.append(prompt)
    if numbers.mode == "dflash" and numbers.plain_steps:
        parts.append(f"{numbers.plain_steps:,} of {count(numbers.cycles, 'cycle')} without drafts")
    return " · ".join(parts)


def statistics_line(numbers: Numbers) -> str:
    """The one line of the plain path."""
    draft = ""
    if numbers.mode == "dflash":
        draft = f" · {per_cycle(numbers.tokens_per_cycle)} tokens/cycle · acceptance {percent(numbers.acceptance_rate)}"
    peak = f" · peak {numbers.peak_gb:.2f} GB" if numbers.peak_gb else ""
    return (
        f"{turn_line(numbers)} · generation only {rate(numbers.decode_tps)} tok/s"
        f" · prefill-inclusive {rate(numbers.request_tps)} tok/s · TTFT {seconds(numbers.ttft_s)} s"
        f"{draft} · {numbers.mode or UNKNOWN}{peak}"
    )


def prefill_line(progress: PrefillProgress) -> str:
    """What is read of the prompt, and what the cache saved."""
    cached = f" · {progress.cached:,} from cache" if progress.cached else ""
    return f"reading the prompt · {progress.done:,} of {count(progress.total, 'token')}{cached}"


def closing_line(done: TurnDone, *, empty: bool) -> str:
    """Why the answer ended, if that needs saying, and what it cost."""
    if done.reason == "cancelled" and empty:
        return "stopped before the first token; this message is not part of the conversation"
    line = turn_line(done.numbers)
    if done.reason == "cancelled":
        return f"stopped, this much is kept · {line}"
    if done.reason == "length":
        return f"token limit reached, /max raises it · {line}"
    return line
