"""What is known of the registry's drafts and of one pair, without loading it: plain data for `dflash-metal models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_mlx import demo, spellings
from dflash_mlx.config import DraftConfig
from dflash_mlx.draft import vocabulary
from dflash_mlx.errors import DFlashError, UnsupportedTarget
from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.repository import Source, find
from dflash_mlx.pairing import preflight, registry, tokens
from dflash_mlx.pairing.preflight_target import check_target, demo_config, exists, model_files
from dflash_mlx.pairing.resolve import Resolution, resolve
from dflash_mlx.targets import supported

_FORMATS = {"dflash": "DFlash", "dflash2": "DFlash 2"}
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
            runs=_row_runs(row)[0],
            runs_reason=_row_runs(row)[1],
            licence=row.licence,
            notes=list(row.notes),
            remark=row.remark,
            tested=row.tested,
        )
        for row in registry.rows()
    ]


Runs = tuple[bool | None, str | None]


def runs(files: Sequence[str]) -> Runs:
    """Whether models of one of these mlx_lm files are served, None where that is found out at loading; and why."""
    if set(files) & set(supported()):
        return True, None
    if not any(exists(file) for file in files):
        return False, f"mlx_lm has no {' or '.join(files) or 'model type'}"
    return None, "if it passes the check at loading"


@dataclass(frozen=True)
class Pair:
    """A target and the draft that it gets, as far as they are known without loading them.

    config: the target's config.json, empty if it cannot be had. draft: where it is; None if there is none, or it cannot
    be found. refused: what `load` would raise.
    """

    target: Source
    config: Mapping[str, Any]
    resolution: Resolution
    draft: Source | None
    refused: DFlashError | None

    @property
    def is_draft(self) -> bool:
        """Whether a draft was given as the target."""
        return spellings.is_draft(self.config)

    @property
    def row(self) -> registry.Row | None:
        """The registry's, of the draft."""
        return registry.row_of(self.resolution.draft) if self.resolution.draft else None


def examine(name: str, revision: str | None, draft: str | None, draft_revision: str | None) -> Pair:
    """Which draft a target gets and why, and what `load` would refuse. Nothing but configs and lists is fetched.

    Args:
        draft: "auto", a folder or repository, or None for none.
    Raises:
        ValueError: an argument is no name, or a revision of what has none.
    """
    problems: list[DFlashError] = []

    def tried(ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except DFlashError as error:
            problems.append(error)
            return None

    name = preflight.model_name("target", name)
    target = tried(lambda: _target(name, revision)) or Source(name, TARGET, revision)
    config: dict[str, Any] = {}
    if name == registry.DEMO or target.folder is not None or target.listing is not None:
        config = _config(target)
        tried(lambda: check_target(target))
    is_draft = spellings.is_draft(config)
    resolution = _resolution(target, draft, draft_revision, is_draft)
    source = tried(lambda: preflight.draft_source(resolution))
    if source is not None and not config:
        tried(lambda: preflight.check_draft(source))
    elif config and not is_draft:
        if source is not None:
            tried(lambda: preflight.check_draft_of(config, target, source))
        if (folder := target.folder) is not None:
            tried(lambda: tokens.ids_in(folder))
        tried(lambda: preflight.check_disk(target, source))
    refused = next((each for each in problems if isinstance(each, UnsupportedTarget)), next(iter(problems), None))
    return Pair(target, config, resolution, source, refused)


def inspect(name: str, revision: str | None, draft: str | None, draft_revision: str | None) -> dict[str, Any]:
    """`examine`, as plain data (`refused` None: nothing). Raises as that does."""
    return described(examine(name, revision, draft, draft_revision))


def described(pair: Pair) -> dict[str, Any]:
    """Plain data, as `dflash-metal models` prints it."""
    target, source, resolution, row = pair.target, pair.draft, pair.resolution, pair.row
    served, why = (None, None) if pair.is_draft else _target_runs(target.name, pair.config, row)
    otherwise = "fetched and converted when it is first loaded" if target.name == registry.DEMO else "not read"
    return dict(
        target=dict(
            name=target.name,
            runs=served,
            runs_reason=why,
            config=_draft_facts(pair.config, target) if pair.is_draft else _target_facts(pair.config),
            **_place(target, otherwise),
        ),
        draft=dict(
            name=resolution.draft,
            revision=resolution.revision,
            reason=resolution.reason,
            notes=list(resolution.notes),
            licence=row.licence if row else None,
            config=(_draft_facts(_config(source), source) if source else {}) or _listed_facts(row),
            **(_place(source, "not read") if source else dict(where="not read", to_fetch_bytes=None)),
        ),
        refused=str(pair.refused) if pair.refused else None,
    )


def _target(name: str, revision: str | None) -> Source:
    if name != registry.DEMO:
        return find(name, TARGET, revision)
    if revision is not None:
        raise ValueError("`revision` is not honoured for the demo target. Leave it out.")
    return Source(name, TARGET, folder=demo.converted_folder())


def _config(source: Source) -> dict[str, Any]:
    """What its config.json says, as far as it can be had; that it cannot is said by the checks."""
    try:
        return demo_config() if source.name == registry.DEMO and source.folder is None else source.config()
    except DFlashError:
        return {}


def _resolution(target: Source, draft: str | None, revision: str | None, is_draft: bool) -> Resolution:
    if draft is None:
        if revision is not None:
            raise ValueError("`draft_revision` is not honoured without a draft. Leave it out.")
        return Resolution(None, "no draft was asked for")
    if is_draft:
        return Resolution(None, f"{target.name} is a draft itself")
    return resolve(target, preflight.model_name("draft", draft), revision)


def _target_runs(name: str, config: Mapping[str, Any], row: registry.Row | None) -> Runs:
    """By the registry if it says no, else by config.json, else by the registry's row of its draft."""
    own = registry.draft_for(name)
    if own is not None and own.refused:
        return False, own.refused
    if config:
        return runs(model_files(config))
    return _row_runs(row) if row else (None, None)


def _row_runs(row: registry.Row) -> Runs:
    return (False, row.refused) if row.refused else runs([row.family])


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


def _draft_facts(config: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Of a draft's config.json and of its list of tokens to propose; nothing if the config cannot be read."""
    try:
        draft = DraftConfig.from_dict(config)
    except DFlashError:
        return {}
    facts = dict(
        format="DFlash 2" if draft.selector else "DFlash",
        block=draft.block_size,
        layers=draft.num_layers,
        hidden=draft.hidden_size,
        taps=list(draft.target_layer_ids),
    )
    if proposed := _proposed(draft, source):
        facts["draft_vocabulary"] = proposed
    return facts | ({"made_for": draft.verifier} if draft.verifier else {})


def _proposed(draft: DraftConfig, source: Source) -> int | None:
    """How many tokens it proposes from, if not all; None too where that cannot be read."""
    if draft.draft_vocab_size is not None or vocabulary.FILE not in source.files():
        return draft.draft_vocab_size
    try:
        listed = vocabulary.listed_in(source.config(vocabulary.FILE), draft, source.name)
    except DFlashError:
        return None
    return None if listed is None else len(listed)


def _listed_facts(row: registry.Row | None) -> dict[str, Any]:
    """What the registry says where the config cannot be read."""
    return dict(format=_FORMATS[row.format], block=row.block) if row else {}
