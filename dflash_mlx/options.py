"""What a request asks for, checked for itself; `request.plan` checks it against the models."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_mlx.cache import KVQuantization
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.gate import parse_wish
from dflash_mlx.sampling import LogitsProcessor, Sampler, SamplingPolicy

MODES = ("auto", "dflash", "plain")
RULES = ("rejection", "match")
KV_BITS = (2, 3, 4, 5, 6, 8)  # what MLX quantises to
KV_GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Options:
    """The arguments of `stream_generate` that say how, not what.

    max_tokens:   1 or more, or -1 for no limit.
    block_size:   anchor + drafts per cycle; 1 is plain decoding, None the draft's choice.
    requested_at: `time.perf_counter()` when the user asked; None is when the request starts.
    exact:        decide near-ties again by single rows; a number is the margin in log-probability.
    strict:       raise if the draft turns out not to work, instead of decoding plainly.
    pipelined:    submit the next draft before the verdict is read (`dflash_mlx.decode`), where that can be done.
    kernels:      "auto", "off", names of operations separated by commas, or what `kernels.gate.select` returned.

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
    exact: bool | float = False
    quantization: KVQuantization | None = None
    strict: bool = False
    pipelined: bool = False
    kernels: str | Kernels = "auto"

    def __post_init__(self) -> None:
        if not _is_integer(self.max_tokens) or self.max_tokens == 0 or self.max_tokens < -1:
            raise ValueError(f"`max_tokens` has to be 1 or more, or -1 for no limit, got {self.max_tokens!r}.")
        _check_integer("prefill_step_size", self.prefill_step_size)
        if self.block_size is not None:
            _check_integer("block_size", self.block_size, "1 (plain decoding) or more")
        if self.max_kv_size is not None:
            _check_integer("max_kv_size", self.max_kv_size)
        if self.mode not in MODES:
            raise ValueError(f"`mode` has to be one of {', '.join(MODES)}, got {self.mode!r}.")
        if self.rule not in RULES:
            raise ValueError(f"`rule` has to be one of {', '.join(RULES)}, got {self.rule!r}.")
        if not isinstance(self.pipelined, bool):
            raise ValueError(f"`pipelined` has to be True or False, got {self.pipelined!r}.")
        if self.exact is not False:
            self._check_exact()
        if self.quantization is not None:
            _check_quantization(self.quantization)
        parse_wish(self.kernels)

    def _check_exact(self) -> None:
        if not isinstance(self.exact, bool | int | float) or not 0 < self.exact < float("inf"):
            raise ValueError(
                f"`exact` has to be True, False, or a margin above 0 in log-probability, got {self.exact!r}."
            )
        if not isinstance(self.policy, SamplingPolicy) or not self.policy.greedy or self.processors:
            raise ValueError(
                "`exact` is for greedy decoding without logits processors; near-ties of a draw are not looked for. "
                "Leave `sampler` and `logits_processors` out, or pass mode='plain', which is exact for all of them."
            )

    @property
    def margin(self) -> float | None:
        """Of `exact`; None is by dtype."""
        return None if self.exact is True else float(self.exact)

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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integer(name: str, value: int, legal: str = "1 or more", least: int = 1) -> None:
    if not _is_integer(value) or value < least:
        raise ValueError(f"`{name}` has to be {legal}, got {value!r}.")


def _check_quantization(q: KVQuantization) -> None:
    for name, value, known in (("kv_bits", q.bits, KV_BITS), ("kv_group_size", q.group_size, KV_GROUP_SIZES)):
        if not _is_integer(value) or value not in known:
            raise ValueError(f"`{name}` has to be one of {', '.join(map(str, known))}, got {value!r}.")
    _check_integer("quantized_kv_start", q.start, "0 or more", least=0)
