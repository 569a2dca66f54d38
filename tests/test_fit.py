"""The estimate of memory against what MLX holds."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

from dflash_mlx import make_prompt_cache, prompt_cache, stream_generate
from dflash_mlx.config import DraftConfig
from dflash_mlx.errors import CheckpointError
from dflash_mlx.fit import SNAPSHOTS, DraftNeed, Parts, fit
from dflash_mlx.layer_sizes import sizes_of
from dflash_mlx.machine import Machine
from dflash_mlx.stored_weights import read_stored
from tests.conftest import DRAFT_CONFIG, byte_tokenizer, tiny_draft
from tests.families import BY_NAME, FAMILIES, PROBED, prompt_of, tiny
from tests.folders import draft_folder, target_folder

CPU = Machine.other(16 * 10**9)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES + PROBED])
def test_the_cache_of_every_family_is_counted_to_the_element(name: str) -> None:
    """A window taken for a full layer, or a state for keys, would be wrong by gigabytes in a long context."""
    length, model = 300, tiny(name)
    cache = mlx_lm_cache(model)
    model(mx.array(prompt_of(length))[None], cache=cache)
    held = [getattr(entry, "cache", None) or [entry.keys, entry.values] for entry in cache]
    sizes = sizes_of(BY_NAME[name].config)
    assert sizes is not None
    assert sizes.rows(length, 2048) + sizes.states == sum(array.size for arrays in held for array in arrays)


def _bytes(module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


@pytest.mark.parametrize("prompt", [768, 1536])
@pytest.mark.parametrize(("name", "with_draft"), [("llama", False), ("gemma3_text", False), ("llama", True)])
def test_the_peak_of_a_generation_is_foretold(name: str, with_draft: bool, prompt: int) -> None:
    """On a CPU, of prompts that are read in whole pieces."""
    model, draft = tiny(name), tiny_draft() if with_draft else None
    need = DraftNeed(DraftConfig.from_dict(DRAFT_CONFIG), _bytes(draft)) if draft else None

    def generate(ids: list[int], cache=None) -> None:
        for _ in stream_generate(
            model, byte_tokenizer(), ids, 24, draft, prompt_cache=cache, prefill_step_size=CPU.chunk
        ):
            pass

    generate(prompt_of(prompt))  # what is made once is not a generation's
    gc.collect()
    kept = mx.get_active_memory() - _bytes(model) - (_bytes(draft) if draft else 0)
    mx.clear_cache()
    mx.reset_peak_memory()
    generate(prompt_of(prompt), make_prompt_cache(model, draft))
    measured = mx.get_peak_memory() - kept
    foretold = fit(BY_NAME[name].config, _bytes(model), need, context=prompt + 24, size=4, machine=CPU).needed_gb
    assert foretold is not None and 0.9 < foretold * 1e9 / measured < 1.15


def test_the_snapshots_are_those_of_the_prompt_cache() -> None:
    assert SNAPSHOTS == prompt_cache.SNAPSHOTS


def test_a_longer_context_and_a_draft_need_more_and_a_window_bounds_it() -> None:
    config = BY_NAME["gemma3_text"].config
    need = DraftNeed(DraftConfig.from_dict(DRAFT_CONFIG), 10**6)

    def gb(context: int, draft: DraftNeed | None = None) -> float:
        return fit(config, 10**6, draft, context=context, machine=CPU).needed_gb or 0

    assert gb(4096) < gb(8192) < gb(8192, need)
    llama = fit(BY_NAME["llama"].config, 10**6, context=8192, machine=CPU).parts["context"]
    assert fit(config, 10**6, context=8192, machine=CPU).parts["context"] < 0.6 * llama  # half of its layers slide


@pytest.mark.parametrize(
    ("weights", "verdict"), [(8, "fits"), (13.5, "tight"), (14.4, "too large"), (40, "too large"), (None, "unknown")]
)
def test_the_verdict_follows_from_what_is_needed(weights: float | None, verdict: str) -> None:
    """16 GB, of which 14.4 may be used; from nine tenths of them on it is tight."""
    size = None if weights is None else int(weights * 1e9)
    found = fit(BY_NAME["llama"].config, size, context=256, machine=CPU)
    assert (found.verdict, found.available_gb) == (verdict, 14.4)
    if weights is not None:
        assert found.needed_gb == pytest.approx(sum(found.parts.values())) and found.parts["target"] == weights


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "llama"}, {"hidden_size": "x", "vocab_size": 3, "num_hidden_layers": 2}]
)
def test_a_config_that_says_too_little_is_no_verdict(config: dict) -> None:
    """Rather than a number that was made up."""
    found = fit(config, 10**9, machine=CPU)
    assert found.verdict == "unknown" and found.needed_gb is None and not found.parts


def test_a_draft_that_was_not_fetched_yet_is_not_forgotten() -> None:
    """Qwen3-4B's is about 1 GB: without it a target could be said to fit that does not."""
    config = {**BY_NAME["qwen3"].config, "hidden_size": 2560}
    assert fit(config, 10**9, machine=CPU, unread_draft=True).parts["draft"] == pytest.approx(0.92, abs=0.01)


def test_parts_add_up_and_are_named_for_people() -> None:
    parts = Parts(target=3 * 10**9, draft_context=10**9)
    assert parts.total == 4 * 10**9 and parts.gb() == {"target": 3.0, "draft context": 1.0}


@pytest.mark.parametrize(
    ("gib", "usable_mib"), [(8, 5461), (16, 10922), (32, 21845), (36, 27648), (64, 49152), (128, 98304)]
)
def test_a_mac_may_use_what_metal_recommends(gib: int, usable_mib: int) -> None:
    machine = Machine.mac(gib * 2**30)
    assert machine.usable // 2**20 == usable_mib and machine.metal and machine.chunk == 2048
    assert Machine.mac(gib * 2**30, wired_limit=7 * 2**30).usable == 7 * 2**30


def test_packed_weights_are_counted_unpacked(tmp_path: Path) -> None:
    """On a CPU a packed draft is unpacked: its file says a quarter of what it takes."""
    from mlx import nn

    model = tiny_draft()
    parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
    plain = draft_folder(tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    stored = read_stored(plain, config)
    assert (stored.bytes, stored.parameters, stored.size) == (4 * parameters, parameters, 4)

    nn.quantize(model, 32, 4)
    (tmp_path / "packed").mkdir()
    mx.save_safetensors(str(tmp_path / "packed" / "model.safetensors"), dict(tree_flatten(model.parameters())))
    packed = read_stored(tmp_path / "packed", config | {"quantization": {"group_size": 32, "bits": 4}})
    assert packed.parameters == parameters and packed.bytes < stored.bytes / 2


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x05\x00\x00\x00\x00\x00\x00\x00{}", b"\x02" + bytes(7) + b"[]"]
)
def test_what_is_no_safetensors_file_is_named(content: bytes, tmp_path: Path) -> None:
    """A length of 2^64 bytes must not be read."""
    folder = target_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file|no \*\.safetensors"):
        read_stored(folder, {})
