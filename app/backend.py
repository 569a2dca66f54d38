"""The library functions the chat calls, as one value: the seam where tests put a scripted model.

`mlx_backend` is the only place of this package that imports MLX, and it is called inside the engine thread
(design D7, D9): mlx_lm takes about 3 s to import, and arrays belong to the thread that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the chat asks of an mlx_lm TokenizerWrapper."""

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
    """The plain values of a GenerationResponse; `logprobs` is an array and stays untouched."""

    @property
    def text(self) -> str: ...

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


@dataclass(frozen=True)
class Pair:
    """A loaded target with its tokenizer and draft."""

    model: object
    tokenizer: Tokenizer
    draft: Draft | None
    largest_block: int | None = None
    """What the draft was trained with."""


Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Backend:
    """The engine library, seen from the chat."""

    load: Callable[[str, Mapping[str, str | None], Progress], Pair]
    """(path or repository, keyword arguments of `dflash_mlx.load`, progress) -> Pair."""
    stream: Callable[..., Generator[Response, None, None]]
    """Checks its arguments when it is called, before the generator runs."""
    make_sampler: Callable[..., object]
    make_cache: Callable[[object, Draft | None], Cache]
    clear_streams: Callable[[], None]
    user_errors: tuple[type[Exception], ...] = (ValueError,)
    """Errors whose text is meant for the user."""
    prefill_step_size: int = 2048
    """Prompt tokens per forward pass, and so between two looks at whether to stop."""


def mlx_backend() -> Backend:
    """Import the engine library. Slow; only inside the thread that will own the arrays."""
    # `load` comes first: it puts a real BLAS under MLX on Linux, which has to happen early.
    from dflash_mlx import load, make_prompt_cache, make_sampler, stream_generate  # noqa: I001
    from dflash_mlx.cpu import prefill_step_size
    from dflash_mlx.errors import DFlashError
    import mlx.core as mx

    def load_pair(path: str, options: Mapping[str, Any], progress: Progress) -> Pair:
        model, tokenizer, draft = load(path, progress=progress, **options)
        return Pair(model, tokenizer, draft, draft.config.block_size if draft is not None else None)

    def make_cache(model: Any, draft: Any) -> Cache:
        return make_prompt_cache(model, draft)

    return Backend(
        load_pair,
        stream_generate,
        make_sampler,
        make_cache,
        mx.clear_streams,
        (DFlashError, ValueError),
        prefill_step_size(),
    )
