"""What a request asks for, checked for itself; `request.plan` checks it against the models."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_mlx.sampling import LogitsProcessor, Sampler, SamplingPolicy

MODES = ("auto", "dflash", "plain")
RULES = ("rejection", "match")


@dataclass(frozen=True)
class Options:
    """The arguments of `stream_generate` that say how, not what.

    max_tokens:   1 or more, or -1 for no limit.
    block_size:   anchor + drafts per cycle; 1 is plain decoding, None the draft's choice.
    requested_at: `time.perf_counter()` when the user asked; None is when the request starts.

    Raises:
        ValueError: an argument is out of range; names it, the legal range and the value.
    """

    max_tokens: int = 256
    prefill_step_size: int = 2048
    block_size: int | None = None
    mode: str = "auto"
    rule: str = "rejection"
    policy: SamplingPolicy | Sampler = field(default_factory=SamplingPolicy)
    processors: tuple[LogitsProcessor, ...] = ()
    max_kv_size: int | None = None
    requested_at: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or self.max_tokens == 0 or self.max_tokens < -1:
            raise ValueError(f"`max_tokens` has to be 1 or more, or -1 for no limit, got {self.max_tokens}.")
        if self.prefill_step_size < 1:
            raise ValueError(f"`prefill_step_size` has to be 1 or more, got {self.prefill_step_size}.")
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"`block_size` has to be 1 (plain decoding) or more, got {self.block_size}.")
        if self.mode not in MODES:
            raise ValueError(f"`mode` has to be one of {', '.join(MODES)}, got {self.mode!r}.")
        if self.rule not in RULES:
            raise ValueError(f"`rule` has to be one of {', '.join(RULES)}, got {self.rule!r}.")

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are drawn from a known q, for rejection sampling, rather than guessed."""
        policy = self.policy
        return (
            isinstance(policy, SamplingPolicy)
            and not policy.greedy
            and not self.processors
            and self.rule == "rejection"
        )

    @property
    def text_depends_on_blocks(self) -> bool:
        """Rejection sampling with a seed: exact whatever the blocks, but not the same text.

        A schedule that follows the clock would break the promise that a seed repeats it.
        """
        return self.samples_drafts and isinstance(self.policy, SamplingPolicy) and self.policy.seed is not None
