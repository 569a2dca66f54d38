"""A candidate's lines as the user reads them. A shape and a word for every verdict, so that no colour is needed."""

from __future__ import annotations

from dflash_mlx.app.discovery import Candidate
from dflash_mlx.fit import CONTEXT, Fit

SHAPES = {"fits": "●", "tight": "◐", "too large": "○", "unknown": "?", "cannot run": "✗"}
_FROM = {"demo": "comes with this package", "hub cache": "hub cache", "LM Studio": "LM Studio", "folder": "folder"}


def state(candidate: Candidate) -> str:
    """A key of `SHAPES`: a model that cannot run is not said to fit."""
    if candidate.runs is False:
        return "cannot run"
    return candidate.fit.verdict if candidate.fit is not None else "unknown"


def verdict(candidate: Candidate) -> str:
    """With its shape and, if they are known, gigabytes."""
    said = state(candidate)
    fit = candidate.fit
    if said == "unknown":
        return f"{SHAPES[said]} size unknown"
    if said == "cannot run" or fit is None or fit.needed_gb is None:
        return f"{SHAPES[said]} {said}"
    return f"{SHAPES[said]} {said} · {fit.needed_gb:.1f} of {fit.available_gb:.1f} GB"


def place(candidate: Candidate) -> str:
    """Where it is and how much it is there."""
    size = "" if candidate.size_gb is None else f" · {candidate.size_gb:.{1 if candidate.size_gb >= 1 else 2}f} GB"
    return f"{_FROM[candidate.source]}{size}{'' if candidate.here else ' to fetch'}"


def draft(candidate: Candidate) -> str:
    """Which draft it gets; for one that cannot run, why."""
    if candidate.runs is False:
        return candidate.why or ""
    if candidate.draft is None:
        return "no draft known: plain decoding"
    name = candidate.draft.rstrip("/").rpartition("/")[2] if candidate.draft.startswith("/") else candidate.draft
    return f"draft {name}{'' if candidate.draft_here else ', to fetch'}"


def details(candidate: Candidate) -> str:
    """What the two lines of a row have no room for."""
    runs = f"Runs {candidate.why}." if candidate.runs is None and candidate.why else ""
    lines = [candidate.path_or_repo, " ".join(filter(None, [_draft_reason(candidate), runs])), _memory(candidate.fit)]
    return "\n".join(filter(None, lines))


def _draft_reason(candidate: Candidate) -> str:
    what = f"Draft {candidate.draft}" if candidate.draft is not None else "No draft"
    return f"{what}: {candidate.draft_reason}."


def _memory(fit: Fit | None) -> str:
    if fit is None or fit.needed_gb is None:
        return "Memory: its config does not say enough to tell."
    parts = ", ".join(f"{name} {size:.2f}" for name, size in fit.parts.items())
    return f"Memory with {CONTEXT:,} tokens of context, about {fit.needed_gb:.2f} GB: {parts}."


def found(candidates: list[Candidate], *, looking: bool) -> str:
    """The line under the list."""
    count = len(candidates)
    said = f"{count} model{'' if count == 1 else 's'}"
    if looking:
        return f"{said} so far, looking on this machine"
    return f"{said} on this machine; type ORG/MODEL to fetch another"
