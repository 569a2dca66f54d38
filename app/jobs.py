"""What crosses from the UI to the engine thread: frozen dataclasses of plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from dflash_mlx.app.settings import Settings
from dflash_mlx.pairing.registry import DEMO

Messages: TypeAlias = tuple[tuple[str, str], ...]
"""The conversation as (role, text) pairs, the question last."""

_OF_THE_JOB = ("model", "launched_at", "number", "insist")


@dataclass(frozen=True)
class LoadModel:
    """Load a target and, unless `draft` is None, its draft."""

    model: str = "demo"
    draft: str | None = "auto"
    """"auto", a path or repository, or None for plain decoding."""
    dtype: str | None = None
    blas: str = "auto"
    gguf: str | None = None
    """A GGUF file to use as the demo target instead of the packaged one."""
    revision: str | None = None
    draft_revision: str | None = None
    draft_bits: int | None = None
    draft_group_size: int = 64
    draft_dtype: str | None = None
    draft_window: int | None = None
    draft_vocabulary: str = "auto"
    kernels: str = "auto"
    """These eight as in `dflash_mlx.load`."""
    launched_at: float | None = field(default=None, compare=False)
    """`time.perf_counter()` when the program started; None: when loading starts."""
    insist: bool = field(default=False, compare=False)
    """The user was told that it is too large by the estimate, and wants it."""
    number: int = field(default=0, compare=False)
    """Numbers of jobs grow, whatever their kind; `Engine.cancel(number)` stops this one and all before it."""

    @property
    def options(self) -> dict[str, Any]:
        """What `dflash_mlx.load` takes beside the model."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_THE_JOB}

    def instead(self, model: str, draft: str | None) -> LoadModel:
        """Another pair, with those of these options that are about no one model and that `load` takes for it."""
        job = replace(
            self,
            model=model,
            draft=draft,
            gguf=None,
            revision=None,
            draft_revision=None,
            launched_at=None,
            insist=False,
        )
        if job.dtype == "packed" and model != DEMO:  # only the demo's target comes so
            job = replace(job, dtype=None)
        if draft is None:
            job = replace(job, draft_bits=None, draft_dtype=None, draft_window=None, draft_vocabulary="auto")
        return job


@dataclass(frozen=True)
class Ask:
    """Answer the last message. `turn` is its number as a job; the answer's events carry it."""

    turn: int
    messages: Messages
    settings: Settings
    requested_at: float | None = None
    """`time.perf_counter()` when the user pressed Enter, where the clocks start; None: when the engine does."""


@dataclass(frozen=True)
class Race:
    """Answer the last message plainly and with drafts, each from an empty cache, and compare the tokens.

    At a temperature both arms use one seed (the settings', or one drawn for the race) and the rule "match", so that
    equal tokens can be demanded. The conversation and its cache stay as they are.
    """

    number: int
    messages: Messages
    settings: Settings


@dataclass(frozen=True)
class Shutdown:
    """Free everything and end the thread."""


Job: TypeAlias = LoadModel | Ask | Race | Shutdown
