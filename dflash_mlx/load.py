"""Load a target and its draft, and check that they belong together. Never runs code from a model repository.

`load` has mlx_lm's signature and returns what mlx_lm's returns; with `draft=` it returns the draft too. Which draft
that is, and what can be refused, is known before any weights are fetched. Arrays are evaluated before it returns and
belong to the thread that called it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import blas as blas_binding
from dflash_mlx import cpu, demo, threads
from dflash_mlx.draft.checkpoint import check_pair, load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions
from dflash_mlx.draft.vocabulary import borrow_head
from dflash_mlx.errors import CheckpointError, IncompatiblePair
from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.repository import Progress, Source, find
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.gate import parse_wish, select
from dflash_mlx.load_target import load_target, load_tokenizer
from dflash_mlx.pairing import preflight
from dflash_mlx.pairing.preflight_target import check_target
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.pairing.resolve import Resolution, resolve
from dflash_mlx.proposers.cases import cases_of_pair
from dflash_mlx.targets import target_for

DTYPES = ("float32", "bfloat16", "float16", "packed")
_NOT_GIVEN: Any = object()


def load(
    path_or_hf_repo: str | os.PathLike[str],
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    draft: str | os.PathLike[str] | None = _NOT_GIVEN,
    draft_revision: str | None = None,
    draft_bits: int | None = None,
    draft_group_size: int = 64,
    draft_dtype: str | None = None,
    draft_window: int | None = None,
    draft_vocabulary: str = "auto",
    dtype: str | None = None,
    blas: str = "auto",
    kernels: str | Kernels = "auto",
    gguf: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """Load a model and its tokenizer, and with `draft` the DFlash draft.

    What the hub's cache holds completely is used as it is, without a network; `hf download NAME` brings it up to date.

    Args:
        path_or_hf_repo: a folder, a Hugging Face repository, or "demo" for the embedded pair. The other
            positional arguments are mlx_lm's.
        draft: not given: mlx_lm's two values are returned. "auto": the draft that lies beside the target, or that the
            registry has for it or for what it is derived from; None with a warning if there is none, or none that
            fits. A folder or repository: that draft. None: no draft, but three values.
        draft_revision: branch, tag or commit of the draft's repository; default: the registry's, or main.
        draft_bits, draft_group_size: quantise the draft on load, to 4 or 8 bits. draft_dtype: "float32" or
            "bfloat16". draft_window: context rows that each of its layers keeps at most; default all.
        draft_vocabulary: "auto": where the draft's folder lists the tokens worth proposing, only those are proposed;
            "full": all are. It never changes an answer.
        dtype: "float32", "bfloat16" or "float16" for the floating parameters; default as stored, and for "demo"
            what decodes fastest here. "packed" (demo only) keeps its 4-bit weights.
        blas: "auto" binds a real BLAS to MLX's CPU backend on Linux; "off" does not.
        kernels: as in `stream_generate`. With Metal and a draft, the kernels that the pair can use and that were not
            tried on this machine yet are raced against stock here, once; the result is remembered.
        gguf, cache_dir: for "demo": the GGUF file to use, and where converted models are kept.
        progress: called with (what is being done, share done or None).
    Returns:
        (model, tokenizer), or (model, tokenizer, draft) if `draft` was given; with `return_config` the model's
        config comes last, as in mlx_lm. The draft's `notes` say what its user should know.
    Raises:
        FetchError, CheckpointError, UnsupportedTarget, IncompatiblePair: text for the user.
        ValueError: an argument is out of range or not honoured.
    """
    if trust_remote_code or (tokenizer_config or {}).get("trust_remote_code"):
        raise ValueError("`trust_remote_code` is not honoured: dflash_mlx never runs code from a model repository.")
    name = preflight.model_name("path_or_hf_repo", path_or_hf_repo)
    is_demo = name == DEMO
    _refuse_unused(
        {"revision": revision, "model_config": model_config} if is_demo else {"gguf": gguf, "cache_dir": cache_dir},
        "the demo target" if is_demo else "any model but 'demo'",
    )
    returns_draft = draft is not _NOT_GIVEN
    wanted = preflight.model_name("draft", draft) if returns_draft and draft is not None else None
    for_draft = {"draft_revision": draft_revision, "draft_bits": draft_bits}
    for_draft |= {"draft_dtype": draft_dtype, "draft_window": draft_window}
    for_draft |= {"draft_vocabulary": None if draft_vocabulary == "auto" else draft_vocabulary}
    if wanted is None:
        _refuse_unused(for_draft, "a load without a draft")
    options = DraftOptions(draft_bits, draft_group_size, draft_dtype, draft_window, draft_vocabulary)
    _check_choices(dtype, blas, is_demo)
    parse_wish(kernels)
    tell = progress or (lambda message, share: None)
    threads.leave_cleanly()
    _prepare_cpu(blas)
    tell(f"Loading {name}", None)
    if wanted is not None:
        preflight.refuse_by_name(name)
    target = Source(DEMO, TARGET) if is_demo else find(name, TARGET, revision)
    sizes = check_target(target, model_config)
    resolution = resolve(target, wanted, draft_revision) if wanted is not None else None
    source = loaded = None
    with _sparing(resolution):
        found = _draft_source(resolution, target.name, tell, for_draft) if resolution else None
        if found is not None:
            preflight.check_draft_of(sizes, target, found)
        source = found
    preflight.check_disk(target, source)
    if is_demo:
        folder = demo.target_folder(gguf=_path(gguf), cache_dir=_path(cache_dir), progress=progress)
    else:
        folder = target.fetch(tell)
    draft_folder = source.fetch(tell) if source else None
    tokenizer = load_tokenizer(folder, name, tokenizer_config, model_config)  # fails faster than the weights load
    with _sparing(resolution):
        checked, draft_folder = draft_folder, None
        if checked is not None and source is not None:
            preflight.check_tokens(checked, source.name, tokenizer.get_vocab(), name)
        draft_folder = checked
    model, config = load_target(folder, name, dtype, model_config, lazy)
    if adapter_path is not None:
        model = mlx_lm_utils.load_adapters(model, adapter_path)
        model.eval()
    if resolution is not None and draft_folder is not None:
        tell(f"Loading the draft {resolution.draft}", None)
        with _sparing(resolution):
            loaded = _load_draft(draft_folder, resolution, options, model, tokenizer, target.name)
    if loaded is not None and adapter_path is not None:
        loaded.notes += ("an adapter changes the target and the draft does not know it: acceptance may be lower",)
    if loaded is not None:
        _race(model, loaded, select(kernels), tell)
    return (model, tokenizer, *((loaded,) if returns_draft else ()), *((config,) if return_config else ()))


def _race(model: nn.Module, draft: DraftModel, kernels: Kernels, tell: Progress) -> None:
    if kernels.wired:
        kernels.prepare(cases_of_pair(target_for(model, kernels), draft, kernels), tell)


@contextmanager
def _sparing(resolution: Resolution | None) -> Iterator[None]:
    """A draft that was only found, and proves wrong in this block, is left out with a warning.

    Raises:
        CheckpointError, IncompatiblePair: of a draft that was asked for by name.
    """
    try:
        with preflight.named(str(resolution.draft if resolution else None)):
            yield
    except (CheckpointError, IncompatiblePair) as error:
        if resolution is None or resolution.asked:
            raise
        warnings.warn(
            f"The draft {resolution.draft} is not used, so decoding will be plain. {error} (It was not asked for by "
            f"name: {resolution.reason}.)",
            stacklevel=4,
        )


def _check_choices(dtype: str | None, blas: str, is_demo: bool) -> None:
    """Raises ValueError naming the argument that is out of range."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` has to be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if dtype == "packed" and not is_demo:
        raise ValueError("`dtype` 'packed' is for the demo target; other models are loaded as they are stored.")
    if blas not in ("auto", "off"):
        raise ValueError(f"`blas` has to be 'auto' or 'off', got {blas!r}.")


def _refuse_unused(arguments: dict[str, Any], where: str) -> None:
    for argument, value in arguments.items():
        if value is not None:
            raise ValueError(f"`{argument}` is not honoured for {where}. Leave it out.")


def _draft_source(resolution: Resolution, target_name: str, tell: Progress, for_draft: dict[str, Any]) -> Source | None:
    """Where the draft is, said aloud; None with a warning if there is none, and about options that were for it."""
    if resolution.draft is None:
        unused = ", ".join(f"`{argument}`" for argument, value in for_draft.items() if value is not None)
        warnings.warn(
            f"No DFlash draft is known for {target_name}, so decoding will be plain ({resolution.reason}). Pass "
            "draft=<folder or repository> if you have one."
            + (f" Not applied, because they are for a draft: {unused}." if unused else ""),
            stacklevel=3,
        )
        return None
    tell(f"Draft {resolution.draft}: {resolution.reason}", None)
    return preflight.draft_source(resolution)


def _prepare_cpu(mode: str) -> None:
    if mx.default_device() != mx.cpu:
        return
    if mode == "auto":
        blas_binding.bind()
    note = cpu.ensure_compile()
    if note:
        warnings.warn(note, stacklevel=3)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()


def _load_draft(
    folder: Path,
    resolution: Resolution,
    options: DraftOptions,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    target_name: str,
) -> DraftModel:
    name, target, on_cpu = str(resolution.draft), target_for(model), mx.default_device() == mx.cpu
    # On a CPU dense float32 is fastest; fused features overflow float16, whatever the target runs in.
    dtype = mx.float32 if target.spec.dtype == mx.float16 else target.spec.dtype
    draft = load_draft(folder, name=name, dtype=dtype if on_cpu else None, packed=not on_cpu, options=options)
    check_pair(draft, target, target_name)
    borrow_head(draft, target)
    draft.notes = (*draft.notes, *resolution.notes)
    draft.known_tokens = 1 + max(tokenizer.get_vocab().values())
    return draft
