"""The models of a run before they are loaded: what is missing here and how to fetch it, and whether they fit.

A benchmark fetches no weights: gigabytes that arrive in the middle of the night are nobody's wish. The demo pair is the
exception, as everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_mlx.errors import DFlashError, FetchError
from dflash_mlx.fit import Fit, Parts, Settings, parts_of
from dflash_mlx.hub.cache import DRAFT, TARGET, Kind, cached_snapshot
from dflash_mlx.hub.repository import Source, find
from dflash_mlx.layer_sizes import sizes_of
from dflash_mlx.machine import Machine, this_machine
from dflash_mlx.needs import stored_draft, target_weights
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.pairing.resolve import AUTO, Resolution, resolve

from .form import BenchError


@dataclass(frozen=True)
class Wanted:
    """Models by name, as the command line has them. draft: None for none; draft_bits: what it is quantised to."""

    target: str
    draft: str | None = AUTO
    revision: str | None = None
    draft_revision: str | None = None
    draft_bits: int | None = None
    sequential: str | None = None


@dataclass(frozen=True)
class Found:
    """Where they are. target: None for the demo, which has no folder before it is loaded."""

    wanted: Wanted
    target: Source | None
    draft: Source | None
    resolution: Resolution | None
    sequential: Source | None

    @property
    def revisions(self) -> dict[str, str | None]:
        """Commits of what lies in the hub's cache, by the names of `record.Pair`."""
        sources = {"target": self.target, "draft": self.draft, "sequential_draft": self.sequential}
        return {f"{name}_revision": _commit(source) for name, source in sources.items()}


def find_pair(wanted: Wanted, sets: Sequence[str] = ()) -> Found:
    """Everything that a run needs, on this machine.

    Args:
        sets: commands that fetch prompts which are missing; they are said with the models, and are no reason alone.
    Raises:
        FetchError: a model is not here; says all that is missing, with the commands.
        CheckpointError, ValueError: a name is of no model.
    """
    missing: list[str] = []
    target = None if wanted.target == DEMO else _here(wanted.target, TARGET, wanted.revision, missing)
    sequential = _here(wanted.sequential, TARGET, None, missing) if wanted.sequential else None
    resolution = draft = None
    if wanted.draft is not None:
        asked = target or Source(wanted.target, TARGET, wanted.revision)
        resolution = resolve(asked, wanted.draft, wanted.draft_revision)
        if resolution.draft not in (None, DEMO):
            draft = _here(str(resolution.draft), DRAFT, resolution.revision, missing)
    if missing:
        raise FetchError(
            "Not on this machine are models that this run needs, and a benchmark does not fetch them by itself, since "
            "they can be gigabytes. Run this, and then the benchmark again:\n  " + "\n  ".join([*missing, *sets])
        )
    return Found(wanted, target, draft, resolution, sequential)


def _here(name: str, kind: Kind, revision: str | None, missing: list[str]) -> Source | None:
    """A folder, or a whole snapshot in the hub's cache; else the command that fetches it is added to `missing`."""
    path = Path(os.path.expanduser(name))
    if path.exists() or path.is_absolute() or name.startswith((".", "~")):
        return find(name, kind, revision)
    folder, _ = cached_snapshot(name, kind, revision)
    if folder is not None:
        return Source(name, kind, revision, folder=folder)
    missing.append(f"hf download {name}" + (f" --revision {revision}" if revision else ""))
    return None


def _commit(source: Source | None) -> str | None:
    """Folders of the hub's cache are named by the commit."""
    if source is None or source.folder is None or source.given:
        return None
    return source.folder.name


def check_memory(found: Found, context: int, machine: Machine | None = None) -> str | None:
    """A remark where the pair barely fits or that is not known; None where it fits, and of the demo, which is small.

    Args:
        context: positions of the longest request.
    Raises:
        BenchError: it does not fit.
    """
    if found.target is None or found.target.folder is None:
        return None
    machine = machine or this_machine()
    try:
        parts = memory_parts(found, found.target, context, machine)
    except (DFlashError, OSError, KeyError, TypeError, ValueError):  # loading says what is wrong with it
        return "whether it fits into memory is not known: its files do not say how large it is"
    if parts is None:
        return "whether it fits into memory is not known: its config.json does not say how large its layers are"
    estimate, each = Fit.of(parts, machine), ", ".join(f"{name} {size:.1f}" for name, size in parts.gb().items())
    said = f"about {parts.total / 1e9:.1f} GB of the {machine.usable / 1e9:.1f} GB that a model may use here ({each})"
    if estimate.verdict == "too large":
        raise BenchError(
            f"{found.wanted.target} with a context of {context} tokens would take {said}. A machine that swaps "
            "measures its disk: take a smaller or more quantised model, a quantised draft (--draft-bits 4), or shorter "
            "prompts."
        )
    return f"memory is tight: {said}" if estimate.verdict == "tight" else None


def memory_parts(found: Found, target: Source, context: int, machine: Machine) -> Parts | None:
    """None where a config does not say how large the layers are. Caches are fresh, so no turn is kept."""
    config = target.config()
    sizes, (weights, size) = sizes_of(config), target_weights(target, config, machine)
    if sizes is None or weights is None:
        return None
    wanted = found.wanted
    need = stored_draft(found.draft).need(size, machine, wanted.draft_bits) if found.draft else None
    parts = parts_of(sizes, weights, need, Settings(context, size, snapshots=0), machine)
    if found.sequential is None:
        return parts
    small = memory_parts(replace(found, draft=None, sequential=None), found.sequential, context, machine)
    if small is None:
        return None
    return replace(
        parts,
        draft=parts.draft + small.target,
        draft_context=max(parts.draft_context, small.context),  # of one arm at a time
    )


def weights_of(model: Any) -> str | None:
    """How a model's weights are kept: "bfloat16", or "4 bits, groups of 64"; of several kinds, those of most layers."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear

    packed: dict[str, int] = {}
    for _, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)):
            kind = f"{module.bits} bits, groups of {module.group_size}"
            packed[kind] = packed.get(kind, 0) + 1
    if packed:
        return max(packed, key=packed.__getitem__)
    sizes: dict[str, int] = {}
    flat: Any = tree_flatten(model.parameters())
    for _, array in flat:
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.size
    return max(sizes, key=sizes.__getitem__, default=None)
