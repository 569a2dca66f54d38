"""Keys, commands, and what the numbers mean; what is loaded and set."""

from __future__ import annotations

from dflash_mlx.app.actions import command_rows, key_rows
from dflash_mlx.app.commands import setting_rows
from dflash_mlx.app.messages import ModelCard
from dflash_mlx.app.screens.sheet import Section, Sheet
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.widgets.cycle_strip import ACCEPTED, OWN, REJECTED

MEANING: tuple[tuple[str, str], ...] = (
    ("generation only", "tokens after the first, over the time after the first"),
    ("prefill-inclusive", "all tokens, over the time since you pressed Enter"),
    ("TTFT", "time to the first token, since you pressed Enter; a message that waited: since it was sent"),
    ("tokens/cycle", "mean acceptance length: 1 + accepted / cycles that drafted"),
    ("acceptance", "draft tokens accepted / draft tokens proposed"),
    ("resting", "drafts do not pay on this text now: one token a cycle"),
    (f"{ACCEPTED} {REJECTED} {OWN}", "accepted, rejected, the target's own token"),
)


class HelpScreen(Sheet):
    """Opens over the chat, which goes on below."""

    def __init__(self) -> None:
        super().__init__(
            "Help",
            (("Keys", key_rows()), ("Commands", (*command_rows(), *setting_rows())), ("Numbers", MEANING)),
        )


def info(card: ModelCard | None, settings: Settings, chat_id: str | None) -> tuple[Section, ...]:
    """Sections for a `Sheet`: what is loaded, and with what the next message is answered."""
    return (("Model", model_rows(card)), ("From the next message on", setting_values(settings)), ("Chat", (
        ("id", chat_id or "not saved"),
    )))  # fmt: skip


def model_rows(card: ModelCard | None) -> tuple[tuple[str, str], ...]:
    """What is known of the loaded pair."""
    if card is None:
        return (("target", "none"),)
    rows = [
        ("target", card.model or card.target),
        ("draft", card.draft or "none: plain decoding"),
        ("block size", f"{card.block_size}, at most {card.largest_block}" if card.draft else ""),
        ("context", f"{card.context_length:,} tokens" if card.context_length else ""),
        ("target weights", _gb(card.target_gb)),
        ("draft weights", _gb(card.draft_gb)),
        ("memory limit", _gb(card.memory_gb)),
        ("thinking", "can be switched" if card.thinks else "the template has no switch for it"),
        *(("note", note) for note in card.notes),
    ]
    return tuple((name, value) for name, value in rows if value)


def setting_values(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Every setting with its value in words."""
    thinking = {None: "the model's default", True: "on", False: "off"}[settings.thinking]
    return (
        ("mode", settings.mode),
        ("block size", "auto" if settings.block_size is None else str(settings.block_size)),
        ("temperature", f"{settings.temperature:g}" + (" (greedy)" if settings.temperature == 0 else "")),
        ("top_p", f"{settings.top_p:g}" if settings.top_p else "off"),
        ("top_k", str(settings.top_k) if settings.top_k else "off"),
        ("min_p", f"{settings.min_p:g}" if settings.min_p else "off"),
        ("seed", "off" if settings.seed is None else str(settings.seed)),
        ("max tokens", "no limit" if settings.max_tokens == -1 else f"{settings.max_tokens:,}"),
        ("thinking", thinking),
        ("system prompt", settings.system or "the template's own"),
    )


def _gb(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} GB"
