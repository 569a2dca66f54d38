"""The files of a draft folder: which tensors it holds, and under which names.

Published names differ in a prefix or suffix; in here all are z-lab's. Only safetensors are read: pickled files run code
when they are opened, GGUF files hold another layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from dflash_mlx.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
MODELOPT = "hf_quant_config.json"  # of NVIDIA's quantiser, which leaves config.json as it is
_UNUSED = ("verifier_norm.", "verifier_lm_head.")  # copies of the target's parts that training may have saved
_CODEBOOKS = ("predecessor_codebook", "successor_codebook")


def canonical(name: str) -> str | None:
    """z-lab's name of a tensor; None for those that nothing needs."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    bare = name.removesuffix(".weight")
    if bare.endswith(_CODEBOOKS):
        name = bare
    return None if name.startswith(_UNUSED) else name


def renamed(names: Iterable[str], where: object) -> dict[str, str]:
    """Stored name -> z-lab's, without those that nothing needs.

    Raises:
        CheckpointError: two tensors have one name.
    """
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        new = canonical(name)
        if new is None:
            continue
        if new in taken:
            raise CheckpointError(
                f"{where} holds two tensors for {new}: `{taken[new]}` and `{name}`. Which one the draft was trained "
                "with cannot be told. Download it again into an empty folder."
            )
        taken[new], found[name] = name, new
    return found


def explain_folder(folder: Path) -> CheckpointError:
    """Why a folder cannot be a draft, from the files in it: it has no config.json, or no safetensors."""
    suffixes = {path.suffix for path in folder.iterdir()} if folder.is_dir() else set()
    if any((folder / name).exists() for name in ("adapter_config.json", "adapters.safetensors")):
        return CheckpointError(
            f"{folder} is a LoRA adapter, which changes a model and is none. Give the draft's own folder as the "
            "draft; an adapter of the target goes into `adapter_path`."
        )
    if (folder / "dflash" / "config.json").is_file():
        return CheckpointError(
            f"{folder} is no draft, but its subfolder dflash/ may be one. Give {folder / 'dflash'} instead."
        )
    if ".gguf" in suffixes:
        return CheckpointError(
            f"{folder} holds GGUF files and no safetensors. Their tensors are named, ordered and packed for "
            "llama.cpp, and are not read here. Download the draft's safetensors."
        )
    if pickled := suffixes & set(PICKLED):
        found = ", ".join(sorted(pickled))
        return CheckpointError(
            f"{folder} holds pickled weights ({found}) and no safetensors. Opening a pickle runs code that is stored "
            "in it, so they are never loaded. Get the draft's safetensors, or convert it where you trust the file."
        )
    if not (folder / "config.json").is_file():
        return CheckpointError(
            f"{folder} has no config.json, so it is not a draft folder. Give the folder (or repository) that holds the "
            "draft's config.json and safetensors."
        )
    return CheckpointError(f"{folder} has a config.json but no .safetensors file. Download the draft's weights too.")


def read_tensors(folder: Path, *, evaluate: bool = True) -> dict[str, mx.array]:
    """Every tensor of the folder under z-lab's names.

    Args:
        evaluate: read them; otherwise only the heads of the files, with which MLX compares their lengths.
    Raises:
        CheckpointError: no file, a missing or damaged one, numbers that MLX cannot read, or one name twice.
    """
    tensors: dict[str, mx.array] = {}
    for path in _files(folder):
        try:
            loaded: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
            if evaluate:
                mx.eval(loaded)  # a truncated file fails here, not in the middle of an answer
        except (RuntimeError, ValueError, OSError) as error:
            raise _unreadable(path, error) from error
        if twice := sorted(loaded.keys() & tensors.keys()):
            raise CheckpointError(
                f"{folder} holds `{twice[0]}` in two files, one of them {path.name}. Two downloads seem to be mixed. "
                "Download the draft again into an empty folder."
            )
        tensors |= loaded
    return {new: tensors[name] for name, new in renamed(tensors, folder).items()}


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if foreign := re.search(r"unsupported dtype (\w+)", str(error)):
        return CheckpointError(
            f"{path} stores numbers as {foreign[1]}, which MLX cannot read. The file may be whole, so another download "
            "would not help. Get the draft in bfloat16, or convert the file to that where you can read it."
        )
    return CheckpointError(f"{path} is damaged or incomplete ({error}). Delete it and download it again.")


def _files(folder: Path) -> list[Path]:
    """The safetensors of a folder: those that its index names, or all."""
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise explain_folder(folder)
        return files
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted({str(name) for name in shards})
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}). Download the draft again.") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that its {_INDEX} names, for example "
            f"{(missing or ['any'])[0]}. The download is incomplete. Download the missing files."
        )
    return [folder / name for name in names]
