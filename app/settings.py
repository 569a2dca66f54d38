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
    """Nucleus sampling; 0 and everything from 1 mean off, as in mlx_lm."""
    min_p: float = 0.0
    """Least share of the top probability; 0 is off."""
    top_k: int = 0
    """Ranks kept; 0 is off."""
    max_tokens: int = 1024
    """Most tokens in one answer; -1 is no limit."""
    block_size: int | None = None
    """Anchor and draft tokens together, at most what the draft was trained with; 1 is plain decoding; None leaves the
    choice to the draft."""
    mode: str = "auto"
    system: str = ""
    """System prompt; empty means the template's own."""
    seed: int | None = None
    thinking: bool | None = None
    """Reason before answering; None is the model's default."""

    def __post_init__(self) -> None:
        # The ranges of dflash_mlx.sampling.SamplingPolicy and dflash_mlx.request.plan, which import MLX; a test
        # keeps the two together. Written so that nan fails too.
        _check(0 <= self.temperature < float("inf"), "temperature", "0 or more and finite", self.temperature)
        _check(self.top_p >= 0, "top_p", "0 (off) or in 0..1 (1 and more are off too)", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "in 0..1", self.min_p)
        _check(self.top_k >= 0, "top_k", "0 (off) or more", self.top_k)
        _check(self.max_tokens >= 1 or self.max_tokens == -1, "max_tokens", "1 or more, or -1", self.max_tokens)
        _check(self.seed is None or 0 <= self.seed < 2**64, "seed", "in 0..2**64-1", self.seed)
        _check(self.block_size is None or self.block_size >= 1, "block_size", "1 (plain) or more", self.block_size)
        _check(self.mode in MODES, "mode", f"one of {', '.join(MODES)}", self.mode)
        if self.mode == "dflash" and self.block_size == 1:
            raise ValueError("block_size 1 is plain decoding, and mode is dflash. Change one of them.")


def _check(good: bool, name: str, wanted: str, value: object) -> None:
    if not good:
        raise ValueError(f"{name} has to be {wanted}, got {value}.")
