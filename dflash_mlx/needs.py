"""How much memory a target's and a draft's weights will take, by their configs, heads of files and lists of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

from dflash_mlx import demo
from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.fit import DraftNeed, activation_size
from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.repository import Source, read_object
from dflash_mlx.machine import Machine
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.stored_weights import Stored, is_held, read_stored

DEMO_PARAMETERS = 134_515_008  # of SmolLM2-135M
_LISTED = "draft_vocabulary.json"
_GROUP_SIZE = 64
_INDEX = "model.safetensors.index.json"
_MORE = ("vision_", "audio_", "mtp_")  # how keys begin of a config that has more than a text model


def demo_sizes() -> dict[str, Any]:
    """The demo target's config where it was not made yet: its draft's sizes, but for the number of layers."""
    draft = DraftConfig.from_dict(read_object(demo.draft_folder() / "config.json"))
    return dict(
        model_type="llama",
        hidden_size=draft.hidden_size,
        intermediate_size=draft.intermediate_size,
        num_hidden_layers=draft.num_target_layers,
        num_attention_heads=draft.num_heads,
        num_key_value_heads=draft.num_kv_heads,
        head_dim=draft.head_dim,
        vocab_size=draft.vocab_size,
        max_position_embeddings=draft.max_position_embeddings,
    )


def target_weights(target: Source, config: Mapping[str, Any], machine: Machine) -> tuple[int | None, int]:
    """Bytes of a target's weights in memory, None if they are not known, and bytes of an activation.

    Of a repository that is still to be fetched its files' sizes count, and where its config speaks of more than text,
    heads of files say what of them is left out.
    """
    if target.name == DEMO:
        size = 2 if machine.metal else 4  # `demo.best_dtype`; its packed weights are unpacked
        return DEMO_PARAMETERS * size, size
    size = activation_size(config)
    if target.folder is not None:
        stored = read_stored(target.folder, config, TARGET.weights)
        return stored.held, max(stored.size, size)
    listed = _listed_bytes(target)
    return None if listed is None else listed - _beside(target, config), size


@dataclass(frozen=True)
class StoredDraft:
    """A draft's config, what its files hold, and how many tokens it proposes from, 0 for all."""

    config: DraftConfig
    stored: Stored
    listed: int

    def need(self, size: int, machine: Machine, bits: int | None = None) -> DraftNeed:
        """Its part of the memory. size: bytes of the target's activations. bits: of `draft_bits`."""
        return DraftNeed(self.config, draft_bytes(self.config, self.stored, size, machine, bits), self.listed)


def stored_draft(draft: Source) -> StoredDraft:
    """What is known of a draft. Raises DFlashError where it cannot be read."""
    content = draft.config()
    if draft.folder is not None:
        stored, listed = read_stored(draft.folder, content), _listed(draft.folder)
    else:
        stored, listed = _of_files(_listed_bytes(draft) or 0, content), 0
    return StoredDraft(DraftConfig.from_dict(content), stored, listed)


def draft_bytes(config: DraftConfig, stored: Stored, size: int, machine: Machine, bits: int | None) -> int:
    """Bytes of a draft's weights in memory: on a CPU unpacked to the target's type, on a GPU as they are stored.

    bits: what `draft_bits` quantises them to when they are loaded; it changes nothing of what is packed already.
    """
    if bits is not None and config.quantization is None:
        wide = len(config.target_layer_ids) * config.hidden_size**2  # the fusion, which is never packed
        narrow = max(0, stored.parameters - wide)
        held = stored.size if machine.metal else size
        return round(narrow * (bits / 8 + 2 * held / _GROUP_SIZE) + wide * held)
    return stored.bytes if machine.metal else stored.parameters * size


def _of_files(size: int, content: Mapping[str, Any]) -> Stored:
    """What files of so many bytes hold, if all is stored alike."""
    packing = content.get("quantization")
    each = 4.0 if activation_size(content) == 4 else 2.0
    if isinstance(packing, Mapping) and packing.get("bits"):
        each = int(packing["bits"]) / 8 + 4 / int(packing.get("group_size") or _GROUP_SIZE)
    return Stored(size, round(size / each), activation_size(content))


def _listed_bytes(source: Source) -> int | None:
    """Bytes of the weights in a repository's list of files."""
    if source.listing is None:
        return None
    sizes = source.listing.sizes
    return sum(sizes[name] for name in source.weights()) or None


def _beside(target: Source, config: Mapping[str, Any]) -> int:
    """Bytes of what a target in a repository is loaded without; 0 where that cannot be read, so too much is counted."""
    nested = config.get("text_config")
    keys = {*config, *(nested if isinstance(nested, Mapping) else ())}
    if not any(key.startswith(_MORE) for key in keys):
        return 0
    try:
        files = target.weights()
        if _INDEX in target.files():  # then only files that have some of it
            places = target.config(_INDEX).get("weight_map")
            named = places if isinstance(places, Mapping) else {}
            files = sorted({file for name, file in named.items() if not is_held(name, config)} & set(files))
        tensors = {name: tensor for file in files for name, tensor in target.head(file).items()}
    except DFlashError:
        return 0
    offsets = [tensor.data_offsets for name, tensor in tensors.items() if not is_held(name, config)]
    return sum(end - begin for begin, end in offsets)


def _listed(folder: Path) -> int:
    """How many tokens it proposes from, if not all."""
    try:
        return len(loads((folder / _LISTED).read_text("utf-8"))["ids"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
