"""What the user can change between two messages. Plain values, validated where they are made."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("auto", "dflash", "plain")


@dataclass(frozen=True)
class Settings:
    """Settings of one turn; sent to the engine with the question.

    Raises:
        ValueError: a value is outside its range; the text names the value and the range.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 0.0
    """Nucleus sampling; 0 and 1 both mean off, as in mlx_lm."""
    min_p: float = 0.0
    """Least share of the top probability; 0 is off."""
    top_k: int = 0
    """Ranks kept; 0 is off."""
    max_tokens: int = 1024
    """Most tokens in one answer; -1 is no limit."""
    block_size: int | None = None
    """Anchor and draft tokens together; None leaves the choice to the draft."""
    mode: str = "auto"
    system: str = ""
    """System prompt; empty means the template's own."""
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 5.0)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("top_k", self.top_k, 0, 1_000_000)
        if self.max_tokens != -1:
            _check("max_tokens", self.max_tokens, 1, 1_000_000)
        if self.block_size is not None:
            _check("block_size", self.block_size, 2, 64)
        if self.mode not in MODES:
            raise ValueError(f"mode has to be one of {', '.join(MODES)}, got {self.mode}.")


def _check(name: str, value: float, low: float, high: float) -> None:
    # Written so that nan fails too.
    if not low <= value <= high:
        raise ValueError(f"{name} has to be in {low:g}..{high:g}, got {value:g}.")
