"""Whether a draft works, found out while it runs. A draft that does not costs speed and never shows in the text.

`Watch` stands between the decode loop and its schedule: it sees what every cycle gave, and when the draft returns NaN,
or nothing of it is accepted for too long, it stops asking for drafts, so that plain decoding goes on in the same loop
with the same tokens. `diagnose` says why, as far as the committed text can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.blocksize import BlockSchedule
from dflash_mlx.cache import TargetCache
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import DraftFault
from dflash_mlx.proposers import Proposer
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.targets import Target

_CYCLES = 16  # that drafted, before acceptance is judged: with 1 accepted in 5 cycles, none in 16 has 3 in 100
_NEAR_ZERO = 0.02  # accepted drafts per cycle; the DFlash paper's lowest is 1.09 (GovReport at 32K tokens)
_WINDOW, _ANCHORS, _LEAST = 96, 8, 12  # tokens, blocks and fewest tokens of a diagnosis
_ENOUGH = 60  # predictions from which on a diagnosis is believed for good
_SOME = 0.1  # share of a text from which on it is no fault of the draft's if nothing is accepted


@dataclass(frozen=True)
class Patient:
    """Who is watched: a draft at work in one request, whose committed tokens are `tokens`."""

    target: Target
    draft: DraftModel
    proposer: Proposer
    tokens: Sequence[int]

    @property
    def not_finite(self) -> bool:
        """Whether the last block had a row of NaN or infinity.

        Its tokens were computed before the verdict that was just read, so this waits for nothing.
        """
        last = self.proposer.last if isinstance(self.proposer, BlockProposer) else None
        tokens: list[int] = [] if last is None else last.tolist()  # type: ignore[assignment]
        return any(token < 0 for token in tokens)

    def why_not_finite(self) -> str:
        layers = self.proposer.context.layers if isinstance(self.proposer, BlockProposer) else ()
        held = [array for layer in layers for array in layer.held or ()]
        where = (
            "its weights or its activations overflow. Load the draft again, or with draft_dtype='float32'."
            if all(bool(mx.isfinite(array).all().item()) for array in held)
            else "it comes in with the target's features, which overflow. Load the target in bfloat16 or float32."
        )
        return f"the draft {self.draft.name} returned NaN or infinity: {where}"

    def why_nothing_is_accepted(self) -> str | None:
        """The reason as far as it can be told; None if the draft predicts the text well enough."""
        track = self.draft.track
        counts = f"{track.accepted} of {track.drafted} drafts were accepted in {track.cycles} cycles"
        if track.found is None:
            try:
                diagnosis = diagnose(self.target, self.draft, self.tokens)
            except Exception as error:  # no memory for it, say: an answer does not end for a diagnosis
                return f"the draft {self.draft.name} does not work here: {counts}. (Why could not be examined: {error})"
            if diagnosis.share >= _SOME:
                return None
            track.found = str(diagnosis)
            track.is_certain = diagnosis.cause is not None and diagnosis.predicted >= _ENOUGH
        return f"the draft {self.draft.name} does not work here: {counts}. {track.found}"


class Watch:
    """A schedule that stops drafting once the draft turns out not to work.

    insists: near-zero acceptance is noted, and drafting goes on (the caller asked for a draft in every cycle).
    strict:  raise `DraftFault` instead of falling back.
    notes:   what was found, for the user.
    """

    def __init__(
        self,
        schedule: BlockSchedule,
        patient: Patient,
        *,
        insists: bool = False,
        strict: bool = False,
    ) -> None:
        self._schedule, self._patient = schedule, patient
        self._insists, self._strict = insists, strict
        self.stopped = False
        self.notes: tuple[str, ...] = ()

    def limit(self) -> int:
        return 0 if self.stopped else self._schedule.limit()

    def record(self, *, drafted: int, accepted: int | None, emitted: int, seconds: float, position: int) -> None:
        if self.stopped:  # the schedule below would wait for drafts
            return
        self._schedule.record(drafted=drafted, accepted=accepted, emitted=emitted, seconds=seconds, position=position)
        if not drafted:
            return
        draft, track = self._patient.draft, self._patient.draft.track
        if accepted is not None:
            track.latest.append((drafted, accepted))
        if accepted != drafted and self._patient.not_finite:
            draft.fault = self._patient.why_not_finite()
            self._report(draft.fault, stop=True)
        elif not self.notes and track.cycles >= _CYCLES and track.accepted < _NEAR_ZERO * track.cycles:
            found = self._patient.why_nothing_is_accepted()
            track.latest.clear()  # the next text may suit it
            if found is None:
                return
            if track.is_certain and not self._insists:
                draft.fault = found
            self._report(found, stop=not self._insists)

    def _report(self, found: str, *, stop: bool) -> None:
        if self._strict:
            raise DraftFault(f"{found[0].upper()}{found[1:]} Without `strict` decoding would go on plainly.")
        self.notes += (f"plain decoding from here on: {found}" if stop else found,)
        self.stopped = stop


_UNKNOWN = (
    "It was made for another target (a fine-tune, another size or version), its config.json names other layers than it "
    "was trained on, its weights are damaged, or the text is far from what it was trained on."
)


@dataclass(frozen=True)
class Diagnosis:
    """What the draft predicts of a text that is known, as its config says and read in other ways.

    agreement: way of reading -> (tokens predicted right, tokens predicted).
    cause:     what is wrong, if one other way of reading explains the text much better; else None.
    """

    agreement: dict[str, tuple[int, int]]
    cause: str | None = None

    @property
    def predicted(self) -> int:
        """Tokens that were predicted, as configured."""
        return self.agreement.get(_AS_IS, (0, 0))[1]

    @property
    def share(self) -> float:
        """Of them, how many rightly, 0..1."""
        return self.agreement[_AS_IS][0] / self.predicted if self.predicted else 0.0

    def __str__(self) -> str:
        if not self.agreement:
            return f"Likely causes: {_UNKNOWN}"
        right, total = self.agreement[_AS_IS]
        known = f"Of {total} tokens of a known text it predicts {right}"
        return f"{known}, {self.cause}." if self.cause else f"{known}. Likely causes: {_UNKNOWN}"


_AS_IS = "as configured"
_CAUSES = {
    "layers one lower": "and {} with the outputs of the layers one below: `target_layer_ids` is one too high",
    "layers one higher": "and {} with the outputs of the layers one above: `target_layer_ids` is one too low",
    "one position later": (
        "and {} when every row is taken for the token after its own: it was made to predict from the anchor row, so it "
        "is no DFlash draft"
    ),
}


def diagnose(target: Target, draft: DraftModel, ids: Sequence[int]) -> Diagnosis:
    """Let the draft predict what is known, with its config's layers and with those beside them.

    Costs one forward of the target over at most 96 tokens and some 24 forwards of the draft.

    Args:
        ids: a text of this target, best one that it wrote itself; the last 96 tokens are used.
    Returns:
        a Diagnosis; an empty one if the text is shorter than 12 tokens.
    """
    ids = list(ids[-_WINDOW:])
    if len(ids) < _LEAST:
        return Diagnosis({})
    taps = draft.config.target_layer_ids
    outputs = _outputs(target, ids, taps)
    ways = {_AS_IS: 0, "layers one lower": -1, "layers one higher": 1}
    agreement: dict[str, tuple[int, int]] = {}
    for way, shift in ways.items():
        if all(tap + shift in outputs for tap in taps):
            features = mx.concatenate([outputs[tap + shift] for tap in taps], axis=-1)
            here, later = _agreement(target, draft, ids, features)
            agreement[way] = here
            if way == _AS_IS:
                agreement["one position later"] = later
    right, total = agreement[_AS_IS]
    best = max(agreement, key=lambda way: agreement[way][0] / max(agreement[way][1], 1))
    if best != _AS_IS and agreement[best][0] >= max(3 * right + 3, total // 8):
        return Diagnosis(agreement, _CAUSES[best].format(agreement[best][0]))
    return Diagnosis(agreement)


def _outputs(target: Target, ids: list[int], taps: Sequence[int]) -> dict[int, mx.array]:
    """[1, T, H] per layer: those of the taps and of their neighbours."""
    near = sorted({tap + shift for tap in taps for shift in (-1, 0, 1) if 0 <= tap + shift < target.spec.n_layers})
    cache = TargetCache(target.make_entries(), 0)
    cache.begin(len(ids))
    try:
        features = target.forward(mx.array([ids]), cache, near).features
        assert features is not None
        mx.eval(features)
    finally:
        cache.abort()
    return dict(zip(near, mx.split(features, len(near), axis=-1), strict=True))


def _agreement(
    target: Target, draft: DraftModel, ids: list[int], features: mx.array
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(right, predicted) over several blocks, and the same with every row taken for the token after its own."""
    proposer = BlockProposer(draft, target, draft.make_context())
    count = draft.block_size - 1
    first, last = len(ids) // 3, len(ids) - 2
    anchors = sorted({first + (last - first) * index // _ANCHORS for index in range(_ANCHORS)})
    right = total = late = late_total = seen = 0
    for anchor in anchors:
        proposer.observe(features[:, seen:anchor])
        seen = anchor
        guesses: list[int] = proposer.propose(ids[anchor], count, anchor + 1).tokens.tolist()  # type: ignore[assignment]
        truth, later = ids[anchor + 1 :], ids[anchor + 2 :]
        right += sum(guess == token for guess, token in zip(guesses, truth, strict=False))
        late += sum(guess == token for guess, token in zip(guesses, later, strict=False))
        total, late_total = total + min(count, len(truth)), late_total + min(count, len(later))
    return (right, total), (late, late_total)
