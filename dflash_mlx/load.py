"""Load a target and its draft, and check that they belong together. Never runs code from a model repository.

`load` has mlx_lm's signature and returns what mlx_lm's returns; with `draft=` it returns the draft too. Arrays are
evaluated before it returns and belong to the thread that called it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import blas as blas_binding
from dflash_mlx import cpu, demo, registry, threads
from dflash_mlx.draft.checkpoint import check_pair, load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import CheckpointError, FetchError
from dflash_mlx.targets import target_for

Progress = Callable[[str, float | None], None]
DTYPES = ("float32", "bfloat16", "float16", "packed")
_NOT_GIVEN: Any = object()
_DEMO_CPU_BLOCK = 4  # against 6: bench/LOG.md


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    draft: str | None = _NOT_GIVEN,
    draft_revision: str | None = None,
    dtype: str | None = None,
    blas: str = "auto",
    gguf: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """Load a model and its tokenizer, and with `draft` the DFlash draft.

    Args:
        path_or_hf_repo: a folder, a Hugging Face repository, or "demo" for the embedded pair. The other
            positional arguments are mlx_lm's.
        draft: not given: mlx_lm's two values are returned. "auto": the registry's draft for this target, or None
            with a warning. A folder or repository: that draft. None: no draft, but three values.
        dtype: "float32", "bfloat16" or "float16" for the floating parameters; default as stored, and for "demo"
            what decodes fastest here. "packed" (demo only) keeps its 4-bit weights.
        blas: "auto" binds a real BLAS to MLX's CPU backend on Linux; "off" does not.
        gguf, cache_dir: for "demo": the GGUF file to use, and where converted models are kept.
        progress: called with (what is being done, share done or None).
    Returns:
        (model, tokenizer), or (model, tokenizer, draft) if `draft` was given; with `return_config` the model's
        config comes last, as in mlx_lm.
    Raises:
        FetchError, CheckpointError, UnsupportedTarget, IncompatiblePair: text for the user.
        ValueError: an argument is out of range or not honoured.
    """
    if trust_remote_code or (tokenizer_config or {}).get("trust_remote_code"):
        raise ValueError("`trust_remote_code` is not honoured: dflash_mlx never runs code from a model repository.")
    is_demo = path_or_hf_repo == registry.DEMO
    unused = {"revision": revision, "model_config": model_config} if is_demo else {"gguf": gguf, "cache_dir": cache_dir}
    for argument, value in unused.items():
        if value is not None:
            which = "the demo target" if is_demo else "any model but 'demo'"
            raise ValueError(f"`{argument}` is not honoured for {which}. Leave it out.")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` has to be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if blas not in ("auto", "off"):
        raise ValueError(f"`blas` has to be 'auto' or 'off', got {blas!r}.")
    tell = progress or (lambda message, share: None)
    threads.leave_cleanly()
    _prepare_cpu(blas)
    tell(f"Loading {path_or_hf_repo}", None)
    if is_demo:
        folder = demo.target_folder(gguf=_path(gguf), cache_dir=_path(cache_dir), progress=progress)
        model, config = demo.load_target(folder, dtype or demo.best_dtype())
    else:
        if dtype == "packed":
            raise ValueError("`dtype` 'packed' is for the demo target; other models are loaded as they are stored.")
        folder = fetch(path_or_hf_repo, revision, tell)
        model, config = _load_model(folder, path_or_hf_repo, model_config, lazy)
        if dtype is not None:
            model.set_dtype(getattr(mx, dtype))
            mx.eval(model.parameters())
    if adapter_path is not None:
        model = mlx_lm_utils.load_adapters(model, adapter_path)
        model.eval()
    ends = config["eos_token_id"] if "eos_token_id" in (model_config or {}) else _end_tokens(folder)
    tokenizer = mlx_lm_utils.load_tokenizer(folder, tokenizer_config, eos_token_ids=ends)
    result: tuple[Any, ...] = (model, tokenizer)
    if draft is not _NOT_GIVEN:
        result += (_load_draft(draft, path_or_hf_repo, draft_revision, model, tokenizer, tell),)
    return (*result, config) if return_config else result


def fetch(path_or_repo: str, revision: str | None, tell: Progress) -> Path:
    """A local folder as it is, or a snapshot of a repository's configs, tokenizer and safetensors.

    Raises:
        FetchError: no such folder, no such repository, no access or no network; says what to do.
    """
    path = Path(path_or_repo).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or path_or_repo.startswith((".", "~")):
        raise FetchError(f"{path} does not exist. Give a folder with a config.json, or a Hugging Face repository.")
    tell(f"Fetching {path_or_repo}", None)
    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken"]
    try:
        return Path(hub.snapshot_download(path_or_repo, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise FetchError(f"{path_or_repo!r} is neither a folder here nor a repository's name ({error}).") from error
    except LocalEntryNotFoundError as error:
        raise FetchError(
            f"{path_or_repo} is not in the local cache and the hub cannot be reached. Connect once, or download the "
            "folder on another machine and give its path."
        ) from error
    except HfHubHTTPError as error:
        raise FetchError(
            f"The hub refused {path_or_repo}: {error}. If it is gated, accept its licence on its page and run "
            "`hf auth login`; otherwise check the name and the revision."
        ) from error
    except OSError as error:
        raise FetchError(
            f"Fetching {path_or_repo} failed ({error}). What arrived is kept and the next try continues. Check the "
            "connection and the free disk space."
        ) from error


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


def _load_model(folder: Path, name: str, model_config: dict[str, Any] | None, lazy: bool) -> tuple[nn.Module, dict]:
    config = _json(folder / "config.json")
    if "dflash_config" in config or any("DFlash" in str(each) for each in config.get("architectures") or ()):
        raise CheckpointError(
            f"{name} is a DFlash draft, which has no embedding and no head of its own, so it cannot run alone. Load "
            "the target that it was trained for, and pass this as its draft (`draft=`, on the command line --draft)."
        )
    try:
        return mlx_lm_utils.load_model(folder, lazy, model_config=model_config)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a complete model folder ({error}). It needs config.json and model*.safetensors; "
            "download it again or convert it with mlx_lm.convert."
        ) from error
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{name} could not be loaded by mlx_lm: {error}") from error


def _end_tokens(folder: Path) -> list[int] | None:
    """End-token ids of config.json (its text_config too) and generation_config.json together, each an int or a list.

    mlx_lm lets generation_config.json replace config.json's, and takes its id 0 for none. The tokenizer's own comes on
    top of these.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        content = _json(folder / name)
        for ids in (content.get("eos_token_id"), (content.get("text_config") or {}).get("eos_token_id")):
            found |= {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(found) or None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file that need not be there; mlx_lm says what is wrong with one that has to."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _load_draft(
    draft: str | None,
    target_name: str,
    revision: str | None,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    tell: Progress,
) -> DraftModel | None:
    name = _resolve(draft, target_name)
    if name is None:
        return None
    target = target_for(model)
    folder = demo.draft_folder() if name == registry.DEMO else fetch(name, revision, tell)
    tell(f"Loading the draft {name}", None)
    on_cpu = mx.default_device() == mx.cpu
    # On a CPU dense float32 is fastest; fused features overflow float16, whatever the target runs in.
    dtype = mx.float32 if target.spec.dtype == mx.float16 else target.spec.dtype
    loaded = load_draft(folder, name=name, dtype=dtype if on_cpu else None, packed=not on_cpu)
    if name == registry.DEMO and on_cpu:
        loaded.block_size = min(_DEMO_CPU_BLOCK, loaded.config.block_size)
    check_pair(loaded, target, target_name, differing=_differing_tokens(folder, tokenizer))
    return loaded


def _resolve(draft: str | None, target_name: str) -> str | None:
    if draft != "auto":
        return draft
    if target_name == registry.DEMO:
        return registry.DEMO
    row = registry.draft_for(target_name)
    if row is None:
        warnings.warn(
            f"No DFlash draft is known for {target_name}, so decoding will be plain. Pass draft=<folder or "
            "repository> if you have one.",
            stacklevel=4,
        )
    return row.draft if row else None


def _differing_tokens(folder: Path, tokenizer: TokenizerWrapper) -> dict[str, int]:
    """Tokens of the draft's own tokenizer whose ids differ from the target's; empty if it ships none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        theirs = dict(content["model"]["vocab"]) | {t["content"]: t["id"] for t in content.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Download the draft again.") from error
    ours = tokenizer.get_vocab()
    return {token: index for token, index in theirs.items() if ours.get(token, index) != index}
