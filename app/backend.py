"""The library functions the chat calls, as one value: the seam where tests put a scripted model.

`library.mlx_backend` makes the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Progress = Callable[[str, float | None], None]


class TooLarge(ValueError):
    """By its metadata a pair does not fit into this machine's memory. An estimate, so the user may insist."""


class Tokenizer(Protocol):
    """What the chat asks of an mlx_lm TokenizerWrapper, beside what `dflash_mlx.segments` does."""

    @property
    def has_chat_template(self) -> bool: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool
    ) -> Sequence[int]: ...


class Draft(Protocol):
    """What the chat asks of a DraftModel."""

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...


class Cache(Protocol):
    """What the chat asks of a PromptCache."""

    def reuse(self, ids: list[int], stable: int | None = None) -> int: ...


class Stats(Protocol):
    @property
    def cycles(self) -> int: ...

    @property
    def plain_steps(self) -> int: ...

    @property
    def mean_acceptance_length(self) -> float | None: ...

    @property
    def draft_acceptance_rate(self) -> float | None: ...


class Timings(Protocol):
    @property
    def ttft_s(self) -> float | None: ...

    @property
    def total_s(self) -> float | None: ...

    @property
    def prompt_tps(self) -> float | None: ...

    @property
    def decode_tps(self) -> float | None: ...

    @property
    def request_tps(self) -> float | None: ...


class Response(Protocol):
    """The plain values of a GenerationResponse that are read here; `dflash_mlx.report` takes the same object, and
    `logprobs` is an array and stays untouched."""

    @property
    def text(self) -> str: ...

    @property
    def token(self) -> int: ...

    @property
    def from_draft(self) -> bool: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def generation_tokens(self) -> int: ...

    @property
    def peak_memory(self) -> float: ...

    @property
    def mode(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def cycle(self) -> int: ...

    @property
    def accepted(self) -> int: ...

    @property
    def drafted(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def recomputed_tokens(self) -> int: ...

    @property
    def stats(self) -> Stats | None: ...

    @property
    def timings(self) -> Timings | None: ...


class Verdict(Protocol):
    """What the chat reads of a `dflash_mlx.divergence.Divergence`."""

    @property
    def kind(self) -> Literal["identical", "near-tie", "bug"]: ...

    @property
    def index(self) -> int | None: ...

    @property
    def explanation(self) -> str: ...


@dataclass(frozen=True)
class Pair:
    """A loaded target with its tokenizer and draft, and what is known of them.

    largest_block:  what the draft was trained with.
    context_length: positions that the target was made for.
    target_gb, draft_gb: their weights, in units of 1e9 bytes.
    """

    model: object
    tokenizer: Tokenizer
    draft: Draft | None
    largest_block: int | None = None
    context_length: int | None = None
    target_gb: float | None = None
    draft_gb: float | None = None


@dataclass(frozen=True)
class Backend:
    """The engine library, seen from the chat."""

    load: Callable[[str, Mapping[str, Any], Progress], Pair]
    """(path or repository, keyword arguments of `dflash_mlx.load`, progress) -> Pair."""
    stream: Callable[..., Generator[Response, None, None]]
    """Checks its arguments when it is called, before the generator runs."""
    make_sampler: Callable[..., object]
    make_cache: Callable[[object, Draft | None], Cache]
    clear_streams: Callable[[], None]
    compare: Callable[..., Verdict]
    """`dflash_mlx.compare`: model, prompt ids, expected ids, got ids, `policy`, `kernels`."""
    warm_up: Callable[[Pair, Sequence[int], str], None] = lambda pair, ids, kernels: None
    """Run both ways of decoding briefly, so that a race's first arm does not pay for what is made only once."""
    free: Callable[[], None] = lambda: None
    """Give memory back that nothing refers to any more."""
    active_gb: Callable[[], float | None] = lambda: None
    memory_gb: float | None = None
    """What this machine recommends a process to use at most, or has."""
    user_errors: tuple[type[Exception], ...] = (ValueError,)
    """Errors whose text is meant for the user."""
    prefill_step_size: int = 2048
    """Prompt tokens per forward pass, and so between two looks at whether to stop."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    prepare: Callable[[str, Mapping[str, Any], Progress, bool], None] = lambda path, options, progress, insist: None
    """All of `load` that can fail before weights are read. insist: even if it is too large by the estimate."""
