"""What is known of the registry's drafts and of one pair, without loading it: plain data for `dflash-metal models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dflash_mlx import preflight, registry, spellings
from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.repository import Source, find
from dflash_mlx.resolve import resolve
from dflash_mlx.targets import supported

_FORMATS = {"dflash": "DFlash", "dflash2": "DFlash 2"}
_SEE_PAGE = "see its page"
_T = TypeVar("_T")


def listed() -> list[dict[str, Any]]:
    """The registry's rows, with whether their targets run here."""
    return [
        dict(
            targets=list(row.targets),
            draft=row.draft,
            revision=row.revision,
            format=_FORMATS[row.format],
            block=row.block,
            runs=_row_runs(row),
            licence=_licence(row),
            notes=list(row.notes),
            remark=row.remark,
            tested=row.tested,
        )
        for row in registry.rows()
    ]


def runs(files: Sequence[str]) -> str:
    """Whether models of one of these mlx_lm files are served: by an adapter, perhaps by the generic one, or not."""
    if set(files) & set(supported()):
        return "yes"
    if not any(preflight.exists(file) for file in files):
        return f"no: mlx_lm has no {' or '.join(files) or 'model type'}"
    return "if it passes the check at loading"


def inspect(name: str, revision: str | None, draft: str, draft_revision: str | None) -> dict[str, Any]:
    """Which draft a target gets and why, what is known of both, and what `load` would refuse (None: nothing).

    Raises:
        ValueError: a revision of what has none.
    """
    problems: list[str] = []

    def tried(ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except DFlashError as error:
            problems.append(str(error))
            return None

    is_demo = name == registry.DEMO
    unread = Source(name, TARGET, revision)
    target = unread if is_demo else tried(lambda: find(name, TARGET, revision)) or unread
    known = target.folder is not None or target.listing is not None
    resolution = resolve(target, draft, draft_revision)
    source = tried(lambda: preflight.draft_source(resolution))
    config = (tried(target.config) if known else None) or {}
    draft_config = tried(lambda: DraftConfig.from_dict(source.config())) if source else None
    if known and not problems:
        tried(lambda: preflight.check(target, source))
    row = registry.row_of(resolution.draft) if resolution.draft else None
    return dict(
        target=dict(
            name=name,
            runs=None if spellings.is_draft(config) else _target_runs(config, row),
            config=_target_facts(config),
            **_place(target, "fetched and converted when it is first loaded" if is_demo else "not read"),
        ),
        draft=dict(
            name=resolution.draft,
            revision=resolution.revision,
            reason=resolution.reason,
            notes=list(resolution.notes),
            licence=_licence(row) if resolution.draft else None,
            config=_draft_facts(draft_config) if draft_config else _listed_facts(row),
            **(_place(source, "not read") if source else dict(where="not read", to_fetch_bytes=None)),
        ),
        refused=problems[0] if problems else None,
    )


def _target_runs(config: Mapping[str, Any], row: registry.Row | None) -> str | None:
    """By its config.json, else by the registry's row of its draft; None if neither is known."""
    if config:
        return runs(preflight.model_files(config))
    return _row_runs(row) if row else None


def _row_runs(row: registry.Row) -> str:
    return f"no: {row.refused}" if row.refused else runs([row.family])


def _place(source: Source, otherwise: str) -> dict[str, Any]:
    """Where a model is, in words, and how much of it is still to be fetched."""
    if source.folder is not None:
        return dict(where=f"in {source.folder}", to_fetch_bytes=0)
    if source.listing is None:
        return dict(where=otherwise, to_fetch_bytes=None)
    size = sum(source.missing().values())
    return dict(where=f"{size / 1e9:.2f} GB to fetch", to_fetch_bytes=size)


def _target_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config") or {}
    keys = dict(model_type="model_type", layers="num_hidden_layers", hidden="hidden_size", vocabulary="vocab_size")
    found = {name: text.get(key, config.get(key)) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _draft_facts(config: DraftConfig) -> dict[str, Any]:
    return dict(
        format="DFlash 2" if config.selector else "DFlash",
        block=config.block_size,
        layers=config.num_layers,
        hidden=config.hidden_size,
        taps=list(config.target_layer_ids),
    )


def _listed_facts(row: registry.Row | None) -> dict[str, Any]:
    """What the registry says where the config cannot be read."""
    return dict(format=_FORMATS[row.format], block=row.block or "unknown") if row else {}


def _licence(row: registry.Row | None) -> str:
    return (row.licence if row else None) or _SEE_PAGE
