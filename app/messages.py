"""What crosses from the engine thread to whoever listens: frozen dataclasses of plain values.

They know nothing of Textual, so the plain path prints them without importing it. The app carries them in an
`envelope.EngineMessage`: a Textual message cannot be a frozen dataclass itself, its base writes to it when it
is sent. Times are seconds, rates are tokens per second, None means "not known yet".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Reason: TypeAlias = Literal["stop", "length", "cancelled"]
Kind: TypeAlias = Literal["reasoning", "answer", "tool_call", "marker"]
"""As `dflash_mlx.segments`; a marker is not for the reader."""
Origin: TypeAlias = Literal["draft", "target"]
"""Whose proposal a token was: an accepted draft, or the target's own (the first one, a correction, a bonus)."""
ArmName: TypeAlias = Literal["plain", "dflash"]


@dataclass(frozen=True)
class ModelLoading:
    """Sent while the model is found, fetched and loaded; the newest replaces the ones before it."""

    text: str
    """What is being done."""
    fraction: float | None
    """0..1, or None when it is not known how long it takes."""


@dataclass(frozen=True)
class ModelCard:
    """What was loaded."""

    target: str
    draft: str | None
    """Name of the draft; None means plain decoding."""
    block_size: int | None
    """What the draft runs unless told otherwise: anchor and draft tokens together."""
    ready_s: float
    """From the launch to here, or from the choice of the model: imports, fetching, loading."""
    notes: tuple[str, ...] = ()
    """What the library warned about while it loaded, such as why there is no draft."""
    largest_block: int | None = None
    """What the draft was trained with; None if it is not known."""
    model: str = ""
    """The target as it was asked for: what to load again."""
    context_length: int | None = None
    """Positions that the target was made for; None if its config does not say."""
    target_gb: float | None = None
    """Weights in memory, in units of 1e9 bytes, as all `_gb`."""
    draft_gb: float | None = None
    memory_gb: float | None = None
    """What this machine recommends a process to use at most (Metal), or has (elsewhere)."""
    thinks: bool = False
    """The template can switch reasoning on and off."""
    from_launch: bool = True
    """`ready_s` counts from the program's start; else from when the model was chosen in it."""


@dataclass(frozen=True)
class LoadCancelled:
    """Loading ended because it was cancelled."""

    number: int
    kept: ModelCard | None = None
    """The pair before, which is still loaded; None: nothing is."""


@dataclass(frozen=True)
class ModelReady:
    """A pair is loaded, and questions can be asked."""

    card: ModelCard
    number: int = 0
    """Of the load, which may have been overtaken by another one."""


@dataclass(frozen=True)
class PrefillProgress:
    """Sent while the prompt is read; the newest replaces the ones before it."""

    turn: int
    done: int
    """Tokens read so far, of `total`."""
    total: int
    """Tokens that have to be read: the prompt without what the cache already holds."""
    cached: int
    """Tokens that the cache already holds."""


@dataclass(frozen=True)
class Part:
    """Text of one kind and one origin."""

    kind: Kind
    origin: Origin
    text: str


@dataclass(frozen=True)
class Chunk:
    """A piece of the answer, at most about 20 a second. Never dropped, never replaced."""

    turn: int
    parts: tuple[Part, ...]
    n_tokens: int
    """Tokens that this piece stands for; may be 0 for text that was held back."""

    @property
    def text(self) -> str:
        """All of it, markers included: the texts of all chunks of a turn are what the model wrote."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Numbers:
    """The running numbers of a turn, as the engine measured them."""

    reading: float | None = None
    """Share of the prompt that has been read, 0..1, before the first token; None otherwise."""
    asked_mode: str = "auto"
    """The mode that was asked for."""
    mode: str = ""
    """"dflash" or "plain", as it ran; empty before the first token."""
    resting: bool = False
    """The newest cycle of a dflash turn had no drafts."""
    block_size: int | None = None
    """What ran: anchor and draft tokens together, at most; 1 for plain decoding."""
    newest_block: int | None = None
    """Anchor and draft tokens of the newest cycle that drafted."""
    prompt_tokens: int = 0
    """The whole prompt, `cached_tokens` included."""
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    """Of the rest, those that were cached too but had to be read again."""
    generation_tokens: int = 0
    ttft_s: float | None = None
    """From the question to the first token."""
    total_s: float | None = None
    """From the question to the newest token."""
    prompt_tps: float | None = None
    decode_tps: float | None = None
    """Generation only: tokens after the first, over the time after the first."""
    request_tps: float | None = None
    """Prefill-inclusive: all tokens of the answer, over the time since the question."""
    cycles: int = 0
    plain_steps: int = 0
    """Of these, cycles without drafts."""
    tokens_per_cycle: float | None = None
    """Mean acceptance length: 1 + accepted / cycles that drafted."""
    acceptance_rate: float | None = None
    """Draft tokens accepted / draft tokens proposed, 0..1."""
    recent: tuple[tuple[int, int], ...] = ()
    """(accepted, drafted) of the last cycles, oldest first."""
    rates: tuple[float, ...] = ()
    """Generation-only tok/s of the last stretches of about half a second, oldest first, by the engine's clock."""
    active_gb: float | None = None
    """What MLX holds now."""
    peak_gb: float | None = None
    notes: tuple[str, ...] = ()
    """For the user: why drafts are not used, then facts."""
    prefill_s: float | None = None
    """Since the question, while the prompt is read: what the ETA is made of."""


@dataclass(frozen=True)
class CycleTick:
    """Sent at most ten times a second while an answer grows; the newest replaces the ones before it."""

    turn: int
    numbers: Numbers


@dataclass(frozen=True)
class TurnDone:
    """The last message of a turn that did not fail. All its text has been sent before."""

    turn: int
    reason: Reason
    numbers: Numbers
    record: Mapping[str, Any] = field(default_factory=dict)
    """The turn as a JSON object: the keys of `generate --json`, without what was said. For the metrics file."""


@dataclass(frozen=True)
class RaceTick:
    """Sent while an arm of a race runs; the newest replaces the ones before it."""

    number: int
    arm: ArmName
    numbers: Numbers
    text: str
    """All of its answer so far."""


@dataclass(frozen=True)
class Arm:
    """One finished run of a race."""

    name: ArmName
    numbers: Numbers
    pieces: tuple[tuple[float, str], ...]
    """(seconds since its start, text that came then): enough to replay it."""

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)


@dataclass(frozen=True)
class RaceDone:
    """Both arms ran, one after the other, each from an empty cache."""

    number: int
    plain: Arm
    dflash: Arm
    verdict: Literal["identical", "near-tie", "bug"]
    """As `dflash_mlx.divergence`."""
    index: int | None
    """Of the first token that differs, from 0; None if none does."""
    explanation: str


@dataclass(frozen=True)
class RaceCancelled:
    """The race was stopped; nothing is said about who is faster."""

    number: int


@dataclass(frozen=True)
class Noticed:
    """Something the user has to know that ends nothing: the metrics file cannot be written, say."""

    title: str
    body: str


@dataclass(frozen=True)
class EngineFailed:
    """Something went wrong. After `fatal` no question can be asked; otherwise the next turn starts clean."""

    title: str
    body: str
    fatal: bool
    turn: int | None = None
    """Number of the turn, race or load that failed; None if it was none of these."""
    details: str = ""
    """A traceback if this is a bug, to print when the app has closed; empty for errors meant for the user."""
    kept: ModelCard | None = None
    """Of a load: the pair before, which is still loaded."""
    may_insist: bool = False
    """Of a load: asked for once more, it is done all the same."""


Event: TypeAlias = (
    ModelLoading
    | ModelReady
    | LoadCancelled
    | PrefillProgress
    | Chunk
    | CycleTick
    | TurnDone
    | RaceTick
    | RaceDone
    | RaceCancelled
    | Noticed
    | EngineFailed
)

REPLACEABLE = (ModelLoading, PrefillProgress, CycleTick, RaceTick)
"""Events of which only the newest matters."""
