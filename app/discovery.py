"""The models that can be chosen: the demo pair, then what is on this machine, each with its draft and whether it fits.

Cheap and offline: configs, heads of weight files and cards that are here are read; MLX is not imported and the hub is
not asked. It is made for a worker thread, which hands each candidate on as it is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dflash_mlx import demo, served
from dflash_mlx.errors import DFlashError
from dflash_mlx.fit import CONTEXT, DraftNeed, Fit, activation_size, fit
from dflash_mlx.hub.cache import DRAFT, TARGET, cached_snapshot
from dflash_mlx.hub.local import LocalTarget, targets_here
from dflash_mlx.hub.repository import Source, read_object
from dflash_mlx.machine import Machine, this_machine
from dflash_mlx.needs import DEMO_PARAMETERS, demo_sizes, stored_draft
from dflash_mlx.pairing import registry
from dflash_mlx.pairing.resolve import AUTO, Resolution, resolve
from dflash_mlx.stored_weights import read_stored

From: TypeAlias = Literal["demo", "hub cache", "LM Studio", "folder"]
_DEMO_BYTES = 98_362_432  # of the demo target, to fetch


@dataclass(frozen=True)
class Candidate:
    """A target that can be chosen.

    name: for people. path_or_repo: what is loaded. size_gb: its weights on the disk, in units of 1e9 bytes.
    draft: the draft that it gets, None if none is known; draft_here: it need not be fetched. draft_reason: why.
    runs: whether it is run here, None where loading finds that out. why: about `runs`, for people.
    here: the target need not be fetched.
    """

    name: str
    path_or_repo: str
    source: From
    size_gb: float | None
    draft: str | None
    draft_reason: str
    runs: bool | None
    why: str | None
    fit: Fit | None
    draft_here: bool = True
    here: bool = True


def candidates(
    folders: Iterable[str | os.PathLike[str]] = (),
    home: Path | None = None,
    context: int = CONTEXT,
    machine: Machine | None = None,
) -> Iterator[Candidate]:
    """The demo pair, then every target of `targets_here`; one that cannot be examined is left out."""
    machine = machine or this_machine()
    yield demo_candidate(context, machine)
    for target in targets_here(folders, home):
        try:
            yield _candidate(target, context, machine)
        except (DFlashError, OSError, ValueError, TypeError, KeyError, AttributeError):  # damaged files say anything
            continue


def demo_candidate(context: int = CONTEXT, machine: Machine | None = None) -> Candidate:
    """The pair that comes with this package."""
    machine = machine or this_machine()
    folder, size = demo.converted_folder(), 2 if machine.metal else 4
    need = _draft_need(demo.draft_folder(), size, machine)
    config = read_object(folder / "config.json") if folder else demo_sizes()
    return Candidate(
        name="demo",
        path_or_repo=registry.DEMO,
        source="demo",
        size_gb=_DEMO_BYTES / 1e9,
        draft=registry.DEMO,
        draft_reason="it is the demo's own",
        runs=True,
        why=None,
        fit=fit(config, DEMO_PARAMETERS * size, need, context=context, size=size, machine=machine),
        here=folder is not None,
    )


def _candidate(target: LocalTarget, context: int, machine: Machine) -> Candidate:
    resolution = resolve(target.source, AUTO, ask=False)
    runs, why = _runs(target.config, resolution)
    stored = read_stored(target.folder, target.config, TARGET.weights)
    size = max(stored.size, activation_size(target.config))
    folder = _draft_folder(resolution)
    need = None
    if folder is not None:
        try:
            need = _draft_need(folder, size, machine)
        except DFlashError:
            folder = None
    return Candidate(
        name=target.name,
        path_or_repo=target.path,
        source=target.place,
        size_gb=stored.bytes / 1e9,
        draft=resolution.draft,
        draft_reason=resolution.reason,
        runs=runs,
        why=why,
        fit=fit(
            target.config,
            stored.held,
            need,
            context=context,
            size=size,
            machine=machine,
            unread_draft=resolution.draft is not None and need is None,
        ),
        draft_here=folder is not None or resolution.draft is None,
    )


def _runs(config: Mapping[str, Any], resolution: Resolution) -> tuple[bool | None, str | None]:
    return (False, resolution.refused) if resolution.refused else served.runs(config)


def _draft_folder(resolution: Resolution) -> Path | None:
    """Where the draft is on this machine."""
    if resolution.draft is None:
        return None
    if os.path.isdir(resolution.draft):
        return Path(resolution.draft)
    return cached_snapshot(resolution.draft, DRAFT, resolution.revision)[0]


def _draft_need(folder: Path, size: int, machine: Machine) -> DraftNeed:
    """A draft's part of the memory."""
    return stored_draft(Source(str(folder), DRAFT, folder=folder)).need(size, machine)
