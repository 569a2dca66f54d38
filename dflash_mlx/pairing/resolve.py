"""Which draft belongs to this target, and why.

Asked in this order: the caller; a draft that lies beside the target; the registry, by the target's name; the models
that the target is derived from, as the model cards say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx import spellings
from dflash_mlx.errors import CheckpointError, FetchError
from dflash_mlx.hub.card import Card, fetch_card
from dflash_mlx.hub.errors import Unreachable
from dflash_mlx.hub.repository import Source, read_object
from dflash_mlx.pairing import registry
from dflash_mlx.pairing.registry import is_copy

AUTO = "auto"
_DEPTH = 5  # a quantisation of a merge of finetunes is four steps from what was trained
_NO_NETWORK = "the hub cannot be reached"
_SUBFOLDERS = ("dflash", "draft")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SIBLING = re.compile(r"(.+?)[-_.](dflash|draft)", re.IGNORECASE)


@dataclass(frozen=True)
class Resolution:
    """draft: a folder, a repository or "demo"; None if there is none. reason: why, for people.

    revision: of the draft's repository; None is its main branch. notes: what its user should know. asked: by name.
    refused: why the target cannot be run here, if that is known.
    """

    draft: str | None
    reason: str
    revision: str | None = None
    notes: tuple[str, ...] = ()
    asked: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class _Step:
    """From a model to one of the `bases` models that its card names."""

    base: str
    relation: str | None
    bases: int


def resolve(target: Source, draft: str = AUTO, revision: str | None = None, *, ask: bool = True) -> Resolution:
    """The draft for a target.

    Args:
        target: where it is; its own files are read, not fetched.
        draft: "auto", or a folder or repository.
        revision: of the draft; the registry's if None.
        ask: whether the hub may be asked for model cards that are not here.
    """
    if draft == AUTO and target.name == registry.DEMO:
        return Resolution(registry.DEMO, "it is the demo's own", revision)
    if draft != AUTO:
        row, own = registry.row_of(draft), _row(target)
        notes, refused = row.notes if row else (), own.refused if own else None
        return Resolution(draft, "it was asked for", revision, notes, asked=True, refused=refused)
    if beside := _beside(target):
        first, *others = beside
        also = f" (others are there: {', '.join(path.name for path in others)})" if others else ""
        return Resolution(str(first), f"it lies beside the target, in {first}{also}", revision)
    row = _row(target)
    if row is not None:
        return _of(row, f"the registry lists it for {row.targets[0]}", revision)
    if target.folder is None and target.listing is None:
        return Resolution(None, f"the registry has none for {target.name}, and its model card cannot be had")
    return _by_cards(target, revision, ask)


def _of(row: registry.Row, reason: str, revision: str | None, *notes: str) -> Resolution:
    return Resolution(row.draft, reason, revision or row.revision, (*notes, *row.notes), refused=row.refused)


def _row(target: Source) -> registry.Row | None:
    """By the name that was given, or by that of the folder it leads to."""
    found = registry.draft_for(target.name)
    if found is None and target.given and target.folder is not None:
        found = registry.draft_for(str(target.folder.resolve()))
    return found


def _beside(target: Source) -> list[Path]:
    """Drafts' folders, the one to take first: inside the target's folder, then next to it by name in its order."""
    if not target.given or target.folder is None:
        return []
    found = [target.folder.resolve() / name for name in _SUBFOLDERS]
    for folder in (target.folder.absolute(), target.folder.resolve()):  # next to a link, and to what it leads to
        found += _named_after(folder)
    return [path for path in dict.fromkeys(found) if _holds_draft(path)]


def _named_after(folder: Path) -> list[Path]:
    """Folders next to this one that carry its name, in the order of theirs."""
    try:
        siblings = sorted(path for path in folder.parent.iterdir() if path != folder and path.is_dir())
    except OSError:
        return []
    return [path for path in siblings if (found := _SIBLING.match(path.name)) and is_copy(folder.name, found[1])]


def _holds_draft(folder: Path) -> bool:
    try:
        return spellings.is_draft(read_object(folder / "config.json")) and any(folder.glob("*.safetensors"))
    except CheckpointError:
        return False


def _by_cards(target: Source, revision: str | None, ask: bool) -> Resolution:
    """The draft of the nearest model that the target is derived from: breadth first, in the order of the cards."""
    seen, problems = [target.name.lower()], list[str]()
    level: list[tuple[str, tuple[_Step, ...]]] = [(target.name, ())]
    for _ in range(_DEPTH):
        following = []
        for name, path in level:
            card = _card(target, name if path else None, problems, ask)
            fresh = [base for base in card.bases if base.lower() not in seen]
            seen += [base.lower() for base in fresh]
            steps = [(*path, _Step(base, card.relation, len(card.bases))) for base in fresh]
            for step in steps:
                row = registry.draft_for(step[-1].base)
                if row is not None:
                    return _of(row, _why(target, step, problems), revision, *_derived(target, step))
            following += [(step[-1].base, step) for step in steps if _REPOSITORY.fullmatch(step[-1].base)]
        level = following
    known = f" or for what it is derived from ({', '.join(seen[1:5])})" if seen[1:] else ""
    return Resolution(None, "; ".join([f"the registry has none for {target.name}{known}", *problems]))


def _card(target: Source, base: str | None, problems: list[str], ask: bool) -> Card:
    """The target's own card, else what its config names, or the card of a base; empty, and a problem, if out of reach.

    After the hub did not answer once it is not asked again: it may take its time for that.
    """
    if base is not None and _NO_NETWORK in "".join(problems):
        return Card()
    try:
        if base is not None:
            return fetch_card(base, ask)
        card = target.card(ask)
        named = target.config().get("_name_or_path") if target.folder is not None else None
        if not card.bases and isinstance(named, str) and named:
            return Card((named,))
        return card
    except Unreachable:
        problems.append(f"the model card of {base or target.name} could not be asked for: {_NO_NETWORK}")
    except CheckpointError:
        pass  # of the target's own config: what is wrong with it is said where the target is checked
    except FetchError as error:
        problems.append(f"the model card of {base or target.name} could not be read: {error}")
    return Card()


def _why(target: Source, path: tuple[_Step, ...], problems: list[str]) -> str:
    names = [target.name, *(step.base for step in path)]
    return "; ".join([f"the registry lists it for what the target is derived from: {' < '.join(names)}", *problems])


def _derived(target: Source, path: tuple[_Step, ...]) -> list[str]:
    """What to say if a step changed the weights by more than rounding them."""
    changed = [step for step in path if step.relation != "quantized"]
    if not changed:
        return []
    base, several = path[-1].base, max(step.bases for step in changed)
    kinds = ", ".join(dict.fromkeys(step.relation or "how is not stated" for step in changed))
    first = f"; of {several} models that were merged, it is the first with a draft" if several > 1 else ""
    return [f"{target.name} is derived from {base} ({kinds}{first}): acceptance may be lower"]
