"""What a recipe and a target make of each other, before anything is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from dflash_mlx.config import FULL, SLIDING, DraftConfig
from dflash_mlx.draft.checkpoint import check_sizes
from dflash_mlx.errors import IncompatiblePair
from dflash_mlx.targets import target_for
from dflash_mlx.training.architecture import config_json, draft_config, settled, spread_taps
from dflash_mlx.training.mask_token import find_mask_token
from dflash_mlx.training.recipe import Recipe, RecipeError
from dflash_mlx.training.target_facts import rope_of
from tests import checkpoints
from tests.families import VOCAB, tiny

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5-shell", "gemma3_text", "gemma4", "muse_glimmer", "glm4")
SMALL = Recipe(layers=2, block_size=8)


def special_tokenizer(names: list[str], template: str = "", **roles: str) -> TokenizerWrapper:
    """Ids from 0: the special tokens, then one letter."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(BPE(vocab={name: index for index, name in enumerate([*names, "a"])}, merges=[]))
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, **roles)
    wrapped.chat_template = template
    return TokenizerWrapper(wrapped, BPEStreamingDetokenizer)


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (24, 5, (1, 6, 11, 16, 21)),
        (30, 5, (1, 8, 14, 20, 27)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (64, 8, (1, 10, 18, 27, 35, 44, 52, 61)),
        (32, 1, (16,)),
    ],
)
def test_taps_are_spread_as_in_published_drafts(layers: int, count: int, taps: tuple[int, ...]) -> None:
    """A draft would be trained on other layers than those of its kind, off by one for instance."""
    assert spread_taps(layers, count) == taps


@pytest.mark.parametrize("layers", range(1, 12))
def test_shallow_targets_have_fewer_taps(layers: int) -> None:
    """A layer read twice, or one that is not there."""
    taps = spread_taps(layers)
    assert 1 <= len(set(taps)) == len(taps) <= 5
    assert all(0 <= tap < layers for tap in taps)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", [{}, {"window": 16, "full": 1}, {"second": True, "rank": 8, "window": 16}])
def test_a_config_that_is_written_reads_as_the_same(name: str, shape: dict, tokenizer: TokenizerWrapper) -> None:
    """A trained draft would load as another model, or be refused for its own target."""
    target = target_for(tiny(name))
    config = draft_config(target, tokenizer, SMALL.changed(**shape))
    written = json.loads(json.dumps(config_json(config)))
    read = DraftConfig.from_dict(written)
    assert read == config
    assert not read.unread
    check_sizes(read, "draft", target.spec, name)


def test_every_key_of_a_config_is_written(tokenizer: TokenizerWrapper) -> None:
    """One that is left out would fall back to a default when the draft is loaded."""
    config = replace(
        draft_config(target_for(tiny("llama")), tokenizer, SMALL),
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        rope_traditional=True,
        causal=True,
        attention_bias=True,
        input_embedding_scale=3.5,
        output_multiplier=0.25,
        final_logit_softcapping=20.0,
        quantization={"group_size": 32, "bits": 4},
        draft_vocab_size=100,
        runtime_block_size=4,
        context_window=64,
    )
    assert DraftConfig.from_dict(json.loads(json.dumps(config_json(config)))) == config


def test_a_draft_has_the_sizes_of_its_target(tokenizer: TokenizerWrapper) -> None:
    """The target's layers would not fit into it."""
    config = draft_config(target_for(tiny("qwen3")), tokenizer, SMALL.changed(window=32, full=1))
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 128, VOCAB)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 1000.0, 2048)
    assert (config.layer_types, config.sliding_window) == ((SLIDING, FULL), 32)
    assert (config.num_layers, config.block_size, config.num_target_layers) == (2, 8, 4)
    assert config.mask_token_id == 256


def test_scales_and_caps_of_the_target_are_the_drafts_too(tokenizer: TokenizerWrapper) -> None:
    """It shares the head, so without them it would learn to undo what the target does to its logits."""
    gemma, muse = (draft_config(target_for(tiny(name)), tokenizer, SMALL) for name in ("gemma4", "muse_glimmer"))
    assert (gemma.final_logit_softcapping, gemma.input_embedding_scale) == (30.0, 1.0)
    assert (muse.final_logit_softcapping, muse.output_multiplier) == (20.0, pytest.approx(26**-0.5))
    assert muse.input_embedding_scale > 1.5  # its target norms embeddings, the draft's rows are raw


def test_the_rope_is_the_targets_where_a_draft_can_have_it() -> None:
    """Copied keys would be turned by other angles."""
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    llama = SimpleNamespace(rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **scaling})
    assert rope_of(llama) == (500000.0, {"rope_type": "llama3", **scaling})
    longrope = SimpleNamespace(rope_theta=10000.0, rope_scaling={"type": "longrope", "long_factor": [1.0]})
    assert rope_of(longrope) == (10000.0, None)
    kinds = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4},
    }
    assert rope_of(SimpleNamespace(rope_parameters=kinds)) == (1e6, None)
    assert rope_of(SimpleNamespace()) == (10000.0, None)


def test_taps_that_the_target_does_not_have_are_refused(tokenizer: TokenizerWrapper) -> None:
    """It would fail in the middle of a run, or read nothing."""
    with pytest.raises(RecipeError, match=r"`taps` have to be in 0..3, the layers of tiny/llama .* got 4\."):
        draft_config(target_for(tiny("llama")), tokenizer, SMALL.changed(taps=(1, 4)), "tiny/llama")


def test_more_candidates_than_tokens_are_refused(tokenizer: TokenizerWrapper) -> None:
    with pytest.raises(RecipeError, match=r"`candidates` has to be at most 257 .* got 300"):
        draft_config(target_for(tiny("llama")), tokenizer, SMALL.changed(second=True, candidates=300))


def test_a_padded_embedding_has_a_row_for_the_mask() -> None:
    """As in z-lab's drafts of Qwen3: the first id past the tokenizer's last."""
    padded = special_tokenizer(["<eos>", "<mask>"], eos_token="<eos>")
    assert find_mask_token(padded, rows=8) == 3


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["<eos>", "<|im_start|>", "<repo_name>", "<empty_output>", "<file>"], 3),  # says what it is for
        (["<eos>", "<mask>", "<unused0>", "<unused1>"], 1),
        (["<eos>", "<unused0>", "<unused1>"], 2),
        (["<eos>", "<repo_name>", "<|im_start|>"], 1),
    ],
)
def test_without_padding_the_mask_is_a_special_token_that_no_chat_has(names: list[str], expected: int) -> None:
    """A token of the template would stand for itself and for what is to be guessed."""
    template = "<|im_start|>{{ messages }}"
    tokenizer = special_tokenizer(names, template, eos_token="<eos>")
    assert find_mask_token(tokenizer, rows=len(names) + 1) == expected


def test_no_mask_token_is_an_error_that_says_what_to_do() -> None:
    """Guessing one that the text has would spoil the draft silently."""
    tokenizer = special_tokenizer(["<eos>", "<|im_start|>"], "<|im_start|>", eos_token="<eos>")
    with pytest.raises(RecipeError, match=r"all 3 rows .* give its id as `mask_token_id`"):
        find_mask_token(tokenizer, rows=3)
    assert find_mask_token(tokenizer, rows=3, asked=2) == 2
    with pytest.raises(RecipeError, match=r"`mask_token_id` has to be in 0..2 .* got 3"):
        find_mask_token(tokenizer, rows=3, asked=3)


def test_a_draft_to_begin_with_keeps_its_own_sizes(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Its weights would not fit, or mean something else."""
    folder = checkpoints.v1(tmp_path / "draft", layer_types=[SLIDING, FULL], sliding_window=8)
    recipe = Recipe(initial=str(folder))
    config = draft_config(target_for(tiny("llama")), tokenizer, recipe)
    assert (config.num_layers, config.intermediate_size, config.target_layer_ids) == (2, 96, (0, 2))
    assert (config.layer_types, config.sliding_window, config.block_size) == ((SLIDING, FULL), 8, 16)
    trained = settled(recipe, config)
    assert (trained.layers, trained.taps, trained.window, trained.full) == (2, (0, 2), 8, 1)
    assert draft_config(target_for(tiny("llama")), tokenizer, trained) == config


@pytest.mark.parametrize("second", [False, True])
def test_a_plain_draft_takes_over_the_vocabulary_of_a_target_with_more_tokens(
    second: bool, tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    """A fine-tune may add tokens: they could not be proposed, or had no row in the codebooks of DFlash 2."""
    folder = checkpoints.v1(tmp_path / "draft", vocab_size=250, dflash_config={"mask_token_id": 249})
    recipe = Recipe(initial=str(folder), second=second, rank=8, candidates=6)
    assert draft_config(target_for(tiny("llama")), tokenizer, recipe).vocab_size == 257


def test_the_block_of_a_draft_may_shrink(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    folder = checkpoints.v1(tmp_path / "draft", dflash_config={"runtime_block_size": 8})
    config = draft_config(target_for(tiny("llama")), tokenizer, Recipe(initial=str(folder), block_size=6))
    assert (config.block_size, config.runtime_block_size) == (6, 6)


@pytest.mark.parametrize(("asked", "made"), [(0, 32), (16, 16), (32, 32)])
def test_a_draft_keeps_a_block_longer_than_the_default_unless_another_is_asked_for(
    asked: int, made: int, tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    """The default is what nobody asked for: half of what the draft can do would be thrown away for it."""
    recipe = Recipe(initial=str(checkpoints.v1(tmp_path / "draft", block_size=32)), block_size=asked)
    config = draft_config(target_for(tiny("llama")), tokenizer, recipe)
    assert config.block_size == made == settled(recipe, config).block_size
    assert draft_config(target_for(tiny("llama")), tokenizer, Recipe()).block_size == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, r"`layers` 3, and the draft .* has 2\. .* Leave `layers` out, set it to 2, or begin"),
        ({"taps": (1, 2)}, r"`taps` \[1, 2\], and the draft .* has \[0, 2\]"),
        ({"window": 32}, r"`window` 32, .* has 0"),
        ({"mask_token_id": 7}, r"`mask_token_id` 7, .* has 256"),
        ({"block_size": 32}, r"`block_size` 32, .* has 16\. .* set it to 16 or less"),
    ],
)
def test_what_the_draft_to_begin_with_is_not_is_named(
    changes: dict, message: str, tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    """The recipe would say one thing and the draft be another."""
    folder = checkpoints.v1(tmp_path / "draft")
    with pytest.raises(RecipeError, match=message):
        draft_config(target_for(tiny("llama")), tokenizer, Recipe(initial=str(folder)).changed(**changes))


def test_a_second_draft_stays_one(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """As v1 it would run without its convolutions."""
    target, folder = target_for(tiny("llama")), checkpoints.dflash2(tmp_path / "draft")
    recipe = Recipe(initial=str(folder))
    config = draft_config(target, tokenizer, recipe)
    assert config.selector is not None and config.selector.rank == 8 and config.causal is False
    assert settled(recipe, config).second
    with pytest.raises(RecipeError, match=r"`vocabulary` 100, .* DFlash 2"):
        draft_config(target, tokenizer, recipe.changed(vocabulary=100))
    with pytest.raises(RecipeError, match=r"`rank` 16, .* has 8"):
        draft_config(target, tokenizer, recipe.changed(second=True, rank=16))


def test_a_draft_of_another_target_or_with_a_head_of_its_own_is_refused(
    tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    """It would be trained towards logits that are not its own."""
    deep = checkpoints.v1(tmp_path / "deep", num_target_layers=30)
    with pytest.raises(IncompatiblePair, match="number of target layers is 30"):
        draft_config(target_for(tiny("llama")), tokenizer, Recipe(initial=str(deep)))
    small = checkpoints.speculators(tmp_path / "small", kept=range(100))
    with pytest.raises(RecipeError, match="a head of its own, of 100 tokens"):
        draft_config(target_for(tiny("llama")), tokenizer, Recipe(initial=str(small)))
