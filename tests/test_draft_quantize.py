"""Drafts quantised on load: what is packed, that it computes what its weights say, and which options are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import load, stream_generate
from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions, quantize
from tests import checkpoints
from tests.conftest import tiny_draft
from tests.families import prompt_of, reference
from tests.folders import target_folder

BACKBONE = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bits=5), r"`draft_bits` has to be one of 4, 8, or None, .* got 5"),
        (dict(bits=True), r"`draft_bits` has to be one of 4, 8, .* got True"),
        (dict(bits="4"), r"`draft_bits` .* got '4'"),
        (dict(group_size=16), r"`draft_group_size` has to be one of 32, 64, 128; got 16"),
        (dict(bits=4, group_size=64.0), r"`draft_group_size` .* got 64\.0"),
        (dict(dtype="float16"), r"`draft_dtype` .* got 'float16'\. Fused features overflow float16"),
        (dict(dtype="int8"), r"`draft_dtype` has to be 'float32', 'bfloat16' or None; got 'int8'\.$"),
        (dict(dtype=mx.float32), r"`draft_dtype` has to be 'float32', 'bfloat16' or None; got mlx"),
        (dict(window=0), r"`draft_window` has to be an integer of 1 or more .* got 0"),
        (dict(window=-5), r"`draft_window` .* got -5"),
        (dict(window=True), r"`draft_window` .* got True"),
        (dict(window=1024.0), r"`draft_window` .* got 1024\.0"),
    ],
)
def test_an_option_out_of_range_is_refused_by_the_users_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftOptions(**options)


def test_what_is_in_range_is_taken() -> None:
    for bits, group_size, dtype, window in [(None, 32, None, None), (4, 64, "float32", 1), (8, 128, "bfloat16", 4096)]:
        assert DraftOptions(bits, group_size, dtype, window).bits == bits


def packed(draft: DraftModel) -> dict[str, tuple[int, int]]:
    """Bits and group size of the packed modules."""
    return {
        path: (module.bits, module.group_size)
        for path, module in draft.named_modules()
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    }


def forward(draft: DraftModel) -> np.ndarray:
    mx.random.seed(1)
    context = draft.make_context()
    draft.extend(context, mx.random.normal((1, 9, 128)))
    return np.array(draft.denoise(mx.random.normal((1, 5, 64)), context))


def test_the_backbone_is_packed_and_all_else_stays_wide(tmp_path: Path) -> None:
    """Fusion, convolutions, selector, norms, and a head and an embedding of its own."""
    folder = checkpoints.speculators(tmp_path, dflash2=True, own_head=True, own_embedding=True)
    draft = load_draft(folder, options=DraftOptions(bits=4, group_size=32))
    assert packed(draft) == {f"layers.{i}.{part}": (4, 32) for i in range(2) for part in BACKBONE}
    wide = load_draft(folder)
    assert not packed(wide)
    stored: dict[str, mx.array] = dict(tree_flatten(wide.parameters()))
    for name, value in tree_flatten(draft.parameters()):
        if not any(name.startswith(f"{path}.") for path in packed(draft)):
            assert mx.array_equal(value, stored[name]), name
    assert {"fc.weight", "lm_head.weight", "embed_tokens.weight", "candidate_selector.hidden_projection.weight"} <= {
        name for name, _ in tree_flatten(draft.parameters())
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_draft_computes_what_its_rounded_weights_say(bits: int, bias: bool) -> None:
    """The forward of the packed weights is that of the same weights, unpacked; and not that of the original ones."""
    draft, rounded = tiny_draft(attention_bias=bias), tiny_draft(attention_bias=bias)
    plain = forward(draft)
    quantize(draft, bits, 32)
    for path, module in rounded.named_modules():
        if path in packed(draft):
            parts = mx.quantize(module.weight, group_size=32, bits=bits)
            module.weight = mx.dequantize(*parts, group_size=32, bits=bits)
    np.testing.assert_allclose(forward(draft), forward(rounded), atol=1e-4)
    distance = np.abs(forward(draft) - plain).max()
    assert 1e-3 < distance < {4: 2.0, 8: 0.1}[bits]


def test_what_is_packed_already_stays_as_it_is() -> None:
    """Rounding rounded weights again would only lose."""
    draft = tiny_draft()
    nn.quantize(draft, 32, 8, class_predicate=lambda path, module: path.endswith(("q_proj", "fc")))
    before = dict(tree_flatten(draft.parameters()))
    quantize(draft, 4, 32)
    bits = packed(draft)
    assert bits["layers.0.self_attn.q_proj"] == bits["fc"] == (8, 32)
    assert bits["layers.1.mlp.up_proj"] == (4, 32)
    after = dict(tree_flatten(draft.parameters()))
    for name in ("fc.weight", "layers.1.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.scales"):
        assert mx.array_equal(before[name], after[name])


@pytest.mark.parametrize(("bits", "told"), [(4, True), (8, False)])
def test_bits_that_a_packed_draft_does_not_get_are_told(tmp_path: Path, bits: int, told: bool) -> None:
    """The user would take it for a smaller one than it is."""
    config = checkpoints.v1_config(quantization={"group_size": 32, "bits": 8})
    tensors = checkpoints.quantized(checkpoints.tensors_of(config), bits=8)
    draft = load_draft(checkpoints.write(tmp_path, config, tensors), options=DraftOptions(bits=bits, group_size=32))
    assert set(packed(draft).values()) == {(8, 32)}
    note = "the draft's weights are packed already (8 bits), so `draft_bits` 4 changes nothing; convert the original "
    note += "for that"
    assert draft.notes == (note,) * told
    partly = tiny_draft()
    nn.quantize(partly, 32, 8, class_predicate=lambda path, module: path.endswith("q_proj"))
    quantize(partly, 4, 32)
    assert any("2 of the draft's matrices are packed already (8 bits)" in each for each in partly.notes)


def test_rows_that_do_not_divide_into_groups_stay_wide_and_a_note_says_so() -> None:
    """`down_proj` has rows of 96."""
    draft = tiny_draft()
    quantize(draft, 4, 64)
    assert "layers.0.mlp.down_proj" not in packed(draft) and "layers.0.mlp.up_proj" in packed(draft)
    assert any("2 of the draft's 14 matrices are not quantised" in note for note in draft.notes)
    whole = tiny_draft()
    quantize(whole, 4, 32)
    assert not whole.notes


def test_a_group_size_that_fits_nothing_is_refused() -> None:
    """Rather than loading a wide draft that the user takes for a small one."""
    draft = tiny_draft()
    with pytest.raises(ValueError, match=r"Groups of 128 weights fit no matrix .*hidden size 64"):
        quantize(draft, 4, 128)
    assert not packed(draft)


def test_a_target_loads_with_a_quantised_windowed_draft_and_writes_its_own_text(tmp_path: Path) -> None:
    """On a CPU too an explicit `draft_bits` is honoured, and `draft_dtype` and `draft_window` arrive."""
    target, folder = target_folder(tmp_path / "tiny"), checkpoints.v1(tmp_path / "draft")
    model, tokenizer, draft = load(
        str(target),
        draft=str(folder),
        draft_bits=4,
        draft_group_size=32,
        draft_dtype="bfloat16",
        draft_window=7,
        dtype="float32",
        blas="off",
    )
    assert len(packed(draft)) == 14 and draft.dtype == mx.bfloat16
    responses = list(stream_generate(model, tokenizer, prompt_of(20), max_tokens=20, draft_model=draft, mode="dflash"))
    assert [response.token for response in responses] == reference("llama", prompt_of(20), 20)
    context = draft.make_context()
    assert context.window == 7 and context.slides
    for options in (dict(draft_bits=3), dict(draft_group_size=8), dict(draft_dtype="float16"), dict(draft_window=0)):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
            load(str(target), draft=str(folder), **options)
