"""Prompt caches on disk: what comes back continues as if it had never left, and a bad file is one clear error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx import load_prompt_cache, make_prompt_cache, save_prompt_cache, stream_generate
from dflash_mlx.errors import CacheStateError
from dflash_mlx.prompt_file import fingerprint
from tests.conftest import byte_tokenizer, tiny_draft
from tests.families import BY_NAME, build, prompt_of, reference, tiny
from tests.test_prompt_snapshots import same_context

DRAFT, TOKENIZER = tiny_draft(), byte_tokenizer()
SLIDING = tiny_draft(5, layer_types=["sliding_attention", "full_attention"], sliding_window=16)


def ask(cache, name: str, ids: list[int], count: int = 12, draft=DRAFT, **kwargs):
    reused = cache.reuse(ids)
    kwargs = dict(mode="dflash", block_size=6) | kwargs
    return list(stream_generate(tiny(name), TOKENIZER, ids[reused:], count, draft, prompt_cache=cache, **kwargs))


def tokens(responses) -> list[int]:
    return [r.token for r in responses]


@pytest.mark.parametrize("draft", [DRAFT, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5", "lfm2", "gemma3_text"])
def test_a_conversation_goes_on_from_disk(name: str, draft, tmp_path: Path) -> None:
    """Text, acceptance and what is reused are those of the cache that stayed in memory."""
    cache = make_prompt_cache(tiny(name), draft)
    said = prompt_of(30) + tokens(ask(cache, name, prompt_of(30), draft=draft))
    save_prompt_cache(tmp_path / "chat.safetensors", cache)
    loaded = load_prompt_cache(tmp_path / "chat.safetensors", tiny(name), draft)
    assert loaded.tokens == cache.tokens and loaded.snapshots == cache.snapshots
    same_context(loaded, cache)
    edited = prompt_of(30) + [7, 8]  # goes back to the end of the first prompt
    for turn in (said + [1, 2, 3], edited):
        runs = [ask(c, name, turn, draft=draft) for c in (cache, loaded)]
        assert tokens(runs[0]) == tokens(runs[1]) == reference(name, turn, 12)
        same_context(loaded, cache)
        assert cache.last_reuse == loaded.last_reuse and cache.last_reuse.reused >= 29
        assert runs[1][0].notes == runs[0][0].notes


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["llama", "llama-sliding", "qwen3_5"]), st.sampled_from([1, 2, 14, 15, 16, 17, 18, 30]))
def test_every_boundary_size_survives(name: str, length: int) -> None:
    """One token, a window that is just not full, just full, just wrapped; a sliding draft context that is empty."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cache = make_prompt_cache(tiny(name), SLIDING)
        said = prompt_of(length) + tokens(ask(cache, name, prompt_of(length), 1, SLIDING))
        save_prompt_cache(Path(folder) / "c.safetensors", cache)
        loaded = load_prompt_cache(Path(folder) / "c.safetensors", tiny(name), SLIDING)
        assert tokens(ask(loaded, name, said + [3], draft=SLIDING)) == reference(name, said + [3], 12)


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
def test_an_empty_cache_can_be_saved(name: str, tmp_path: Path) -> None:
    save_prompt_cache(tmp_path / "c.safetensors", make_prompt_cache(tiny(name), SLIDING))
    loaded = load_prompt_cache(tmp_path / "c.safetensors", tiny(name), SLIDING)
    assert loaded.tokens == [] and tokens(ask(loaded, name, prompt_of(9), draft=SLIDING)) == reference(
        name, prompt_of(9), 12
    )


def test_quantised_keys_come_back_quantised(tmp_path: Path) -> None:
    from tests.test_quantized_kv import wide

    model = wide("qwen3_5")
    kv = dict(kv_bits=4, quantized_kv_start=10)
    caches = [make_prompt_cache(model, DRAFT)]
    run = lambda cache, new: tokens(  # noqa: E731
        stream_generate(model, TOKENIZER, new, 20, DRAFT, mode="dflash", prompt_cache=cache, **kv)
    )
    run(caches[0], prompt_of(20))
    save_prompt_cache(tmp_path / "c.safetensors", caches[0])
    caches.append(load_prompt_cache(tmp_path / "c.safetensors", model, DRAFT))
    assert run(caches[0], [3, 4]) == run(caches[1], [3, 4])
    assert [type(e) for e in caches[0].cache.entries] == [type(e) for e in caches[1].cache.entries]


@pytest.mark.parametrize("saved", [None, DRAFT])
@pytest.mark.parametrize("used", [None, DRAFT, SLIDING])
def test_another_draft_joins_late_and_says_so(saved, used, tmp_path: Path) -> None:
    """The target's part serves whatever the draft."""
    cache = make_prompt_cache(tiny("llama"), saved)
    said = prompt_of(20) + tokens(ask(cache, "llama", prompt_of(20), draft=saved, mode="auto"))
    save_prompt_cache(tmp_path / "c.safetensors", cache)
    loaded = load_prompt_cache(tmp_path / "c.safetensors", tiny("llama"), used)
    responses = ask(loaded, "llama", said + [5], draft=used, mode="dflash" if used else "auto")
    assert tokens(responses) == reference("llama", said + [5], 12)
    late = any("has not seen all" in note for note in responses[-1].notes)
    assert late == (used is not None and used is not saved)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """Keys of another checkpoint of the same shape would give fluent nonsense."""
    path = tmp_path / "c.safetensors"
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    ask(cache, "llama", prompt_of(9))
    save_prompt_cache(path, cache)
    for other in (build(BY_NAME["llama"], seed=1), build(BY_NAME["llama"], mx.bfloat16), tiny("qwen3")):
        with pytest.raises(CacheStateError, match="saved for a target with other weights"):
            load_prompt_cache(path, other, DRAFT)


def test_the_fingerprint_sees_one_changed_layer() -> None:
    model = build(BY_NAME["llama"])
    before = fingerprint(model)
    assert before == fingerprint(build(BY_NAME["llama"])) == fingerprint(tiny("llama"))
    layer = model.model.layers[2].self_attn.v_proj
    layer.weight = layer.weight * 1.01
    assert fingerprint(model) != before


def a_file(tmp_path: Path) -> Path:
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    ask(cache, "llama", prompt_of(9), 3)
    save_prompt_cache(tmp_path / "c.safetensors", cache)
    return tmp_path / "c.safetensors"


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_one_clear_error(share: float, tmp_path: Path) -> None:
    path = a_file(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CacheStateError, match=r"cannot be used as a prompt cache \(it is damaged or was cut short"):
        load_prompt_cache(path, tiny("llama"), DRAFT)


@pytest.mark.parametrize("where", [0.4, 0.7, 0.999])
def test_one_damaged_byte_is_one_clear_error(where: float, tmp_path: Path) -> None:
    """Not fluent nonsense."""
    path = a_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CacheStateError, match="its contents have changed since they were written"):
        load_prompt_cache(path, tiny("llama"), DRAFT)


def test_a_file_of_another_kind_is_one_clear_error(tmp_path: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
    from mlx_lm.models.cache import save_prompt_cache as mlx_lm_save

    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.zeros((2,))})
    mlx_lm_save(str(tmp_path / "theirs.safetensors"), mlx_lm_cache(tiny("llama")), {"tokenizer": "x"})
    for name in ("weights", "theirs"):
        with pytest.raises(CacheStateError, match="it was not written by dflash_mlx"):
            load_prompt_cache(tmp_path / f"{name}.safetensors", tiny("llama"), DRAFT)
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load_prompt_cache(tmp_path / "none.safetensors", tiny("llama"), DRAFT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "its format is 99, and this version reads 1"),
        ({"context_layers": 7}, "header does not fit"),
        ({"places": [{"length": "x"}]}, "header does not fit"),
        ({"tokens": None}, "header does not fit"),
    ],
)
def test_a_header_that_does_not_fit_is_one_clear_error(change: dict, message: str, tmp_path: Path) -> None:
    path = a_file(tmp_path)
    arrays, metadata = mx.load(str(path), return_metadata=True)
    key = next(k for k, v in metadata.items() if v.startswith("{"))
    metadata[key] = json.dumps(json.loads(metadata[key]) | change)
    mx.save_safetensors(str(path), arrays, metadata)
    with pytest.raises(CacheStateError, match=message):
        load_prompt_cache(path, tiny("llama"), DRAFT)


@pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt(), OSError(28, "No space left")])
def test_a_save_that_fails_keeps_the_old_file_and_leaves_no_other(error, tmp_path: Path, monkeypatch) -> None:
    """Interrupt, full disk: what was there before is still there."""
    path = a_file(tmp_path)
    before = path.read_bytes()

    def fail(name, *args):
        Path(name).write_bytes(b"half")
        raise error

    monkeypatch.setattr("mlx_lm.models.cache.save_prompt_cache", fail)
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    with pytest.raises((OSError, KeyboardInterrupt)):
        save_prompt_cache(path, cache)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_a_write_that_stops_half_way_without_an_error_is_noticed(tmp_path: Path, monkeypatch) -> None:
    from mlx_lm.models import cache as mlx_lm_cache

    path, save = a_file(tmp_path), mlx_lm_cache.save_prompt_cache
    before = path.read_bytes()

    def short(name, *args):
        save(name, *args)
        os.truncate(name, os.path.getsize(name) // 2)

    monkeypatch.setattr(mlx_lm_cache, "save_prompt_cache", short)
    with pytest.raises(OSError, match=r"was cut short .*Is the disk full\? What was there before is kept"):
        save_prompt_cache(path, make_prompt_cache(tiny("llama"), DRAFT))
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["chat", "chat.cache", "chat.safetensors"])
def test_any_name_can_be_saved_and_loaded(name: str, tmp_path: Path, monkeypatch) -> None:
    """The suffix that MLX tells the format by is added where it is missing; ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    ask(cache, "llama", prompt_of(9), 3)
    save_prompt_cache(f"~/{name}", cache)
    assert os.listdir(tmp_path) == [name if name.endswith(".safetensors") else f"{name}.safetensors"]
    assert load_prompt_cache(f"~/{name}", tiny("llama"), DRAFT).tokens == cache.tokens


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    """A new file holds a conversation, and only its owner can read it."""
    path, link = a_file(tmp_path), tmp_path / "link.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    link.symlink_to(path)
    before = path.read_bytes()
    save_prompt_cache(link, make_prompt_cache(tiny("llama"), DRAFT))
    assert link.is_symlink() and path.read_bytes() != before and path.stat().st_mode & 0o777 == 0o644


def test_another_config_with_the_same_weights_is_refused(tmp_path: Path) -> None:
    """Keys are rotated as the config says: turning YaRN on changes no weight."""
    from dataclasses import replace

    path = a_file(tmp_path)
    family = BY_NAME["llama"]
    other = build(replace(family, config={**family.config, "rope_theta": 5000.0}))
    with pytest.raises(CacheStateError, match="other weights or another config"):
        load_prompt_cache(path, other, DRAFT)
    assert fingerprint(tiny_draft()) == fingerprint(DRAFT) != fingerprint(tiny_draft(rope_theta=5000.0))


def test_mlx_lms_arguments_are_told_apart(tmp_path: Path) -> None:
    """The functions have its names and not its arguments."""
    from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

    with pytest.raises(ValueError, match="`cache` has to be a PromptCache, got list"):
        save_prompt_cache(tmp_path / "c", mlx_lm_cache(tiny("llama")))
    with pytest.raises(ValueError, match="`model` is missing"):
        load_prompt_cache(a_file(tmp_path))
    with pytest.raises(ValueError, match="`draft_model` has to be a DFlash draft or None, got int"):
        make_prompt_cache(tiny("llama"), 4096)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        save_prompt_cache(tmp_path / "nowhere" / "c.safetensors", make_prompt_cache(tiny("llama")))


def test_a_cache_in_use_is_not_saved(tmp_path: Path) -> None:
    cache = make_prompt_cache(tiny("llama"), DRAFT)
    responses = stream_generate(tiny("llama"), TOKENIZER, prompt_of(9), 20, DRAFT, prompt_cache=cache)
    next(responses)
    with pytest.raises(CacheStateError, match="A request is still running"):
        save_prompt_cache(tmp_path / "c.safetensors", cache)
    responses.close()
    save_prompt_cache(tmp_path / "c.safetensors", cache)
    cache.cache.closed = "because."
    with pytest.raises(CacheStateError, match=r"because\."):
        save_prompt_cache(tmp_path / "c.safetensors", cache)
