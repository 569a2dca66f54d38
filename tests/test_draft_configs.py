"""A draft's config.json: every spelling of one draft reads alike, nothing is guessed, the rest is refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.config import FULL, SLIDING, Convolution, DraftConfig, Selector
from dflash_mlx.draft.checkpoint import expected_shapes
from dflash_mlx.errors import CheckpointError
from tests.checkpoints import dflash2_config, speculators_config, v1_config
from tests.families import VOCAB

BASES = {
    "v1": v1_config(),
    "dflash2": dflash2_config(),
    "speculators": speculators_config(),
    "speculators dflash2": speculators_config(dflash2=True),
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096.0}
PARTS = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=6)


def without(base: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A copy without these keys; "a.b" is b inside a."""
    config = copy.deepcopy(dict(base))
    for key in keys:
        outer, _, inner = key.rpartition(".")
        (config[outer] if outer else config).pop(inner)
    return config


# One draft, spelled in every way


@st.composite
def drafts(draw: st.DrawFn, second: bool = False) -> DraftConfig:
    """What a config may describe; small enough to check by eye, not to be built."""
    layers, taps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ids = tuple(draw(st.lists(st.integers(0, 40), min_size=taps, max_size=taps, unique=True)))
    kinds = tuple(draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=layers, max_size=layers)))
    block = draw(st.sampled_from([8, 10, 16]))
    heads, kv_heads = draw(st.sampled_from([(4, 4), (8, 2)]))
    yarn = draw(st.sampled_from([None, YARN, YARN | {"truncate": False, "attention_factor": 1.5}]))
    return DraftConfig(
        hidden_size=64,
        num_layers=layers,
        intermediate_size=96,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64 // heads, 32])),
        vocab_size=257,
        rms_norm_eps=1e-6,
        rope_theta=draw(st.sampled_from([1e4, 1e6, 1e7])),
        rope_scaling=yarn,
        rope_traditional=draw(st.booleans()),
        max_position_embeddings=4096,
        layer_types=kinds,
        sliding_window=draw(st.integers(2, 4096)) if SLIDING in kinds else None,
        causal=draw(st.sampled_from([None, True, False])),
        attention_bias=draw(st.booleans()),
        block_size=block,
        mask_token_id=draw(st.integers(0, 256)),
        target_layer_ids=ids,
        num_target_layers=draw(st.sampled_from([max(ids) + 1, 48])),
        input_embedding_scale=draw(st.sampled_from([1.0, 0.5])),
        output_multiplier=draw(st.sampled_from([1.0, 0.2])),
        final_logit_softcapping=draw(st.sampled_from([None, 30.0])),
        runtime_block_size=draw(st.sampled_from([None, 2, block])),
        context_window=draw(st.sampled_from([None, 512])),
        convolution=Convolution(2, 16) if second else None,
        selector=Selector(8, 6) if second else None,
    )


IGNORED = {
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_window_layers": 3,
    "mask_token": "<|MASK|>",
    "something_new": [1, {"a": None}],
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
}


def rope_spelling(draw: st.DrawFn, config: DraftConfig) -> dict[str, Any]:
    theta = {"rope_theta": int(config.rope_theta) if draw(st.booleans()) else config.rope_theta}
    scaling = dict(config.rope_scaling or {"rope_type": draw(st.sampled_from(["default", "mrope"]))})
    old = dict(scaling)
    if draw(st.booleans()):
        old["type"] = old.pop("rope_type")
    if draw(st.booleans()):
        scaling |= {"partial_rotary_factor": 0.25, "mscale": 1.0}
    return draw(
        st.sampled_from(
            [
                {"rope_parameters": scaling | theta},
                {"rope_parameters": scaling | theta, **theta},
                {"rope_scaling": old, **theta},
                {"rope_scaling": old, "rope_parameters": scaling | theta},
                {"rope_parameters": {SLIDING: scaling | theta, FULL: scaling | theta}},
                {**theta} if config.rope_scaling is None else {"rope_scaling": old, **theta},
            ]
        )
    )


def defaults_of(config: DraftConfig) -> dict[str, Any]:
    """Keys that may be left out, with the value that they have then."""
    return {
        "num_key_value_heads": config.num_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "attention_bias": False,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "layer_types": [FULL] * config.num_layers,
        "rope_is_neox_style": True,
        "num_target_layers": max(config.target_layer_ids) + 1,
    }


def body_of(config: DraftConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_is_neox_style": not config.rope_traditional,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "attention_bias": config.attention_bias,
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
        "num_target_layers": config.num_target_layers,
    }


def placed(draw: st.DrawFn, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict, dict]:
    """Every value in one of two places or in both, as null in the other, or left out if it is the default."""
    inner: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    for key, value in values.items():
        ways = [0, 1, 2, 3] + ([4, 5] if key in defaults and defaults[key] == value else [])
        way = draw(st.sampled_from(ways))
        if way in (0, 2, 3):
            inner[key] = value
        if way in (1, 2):
            outer[key] = value
        if way in (3, 5):
            outer[key] = None
    return inner, outer


def spelled_by_zlab(draw: st.DrawFn, config: DraftConfig) -> dict[str, Any]:
    values = body_of(config) | {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "runtime_block_size": config.runtime_block_size,
        "draft_window_size": config.context_window,
    }
    causal = draw(st.sampled_from(["is_causal", "causal"]))
    values[causal] = config.causal
    optional = {"block_size": 16, "runtime_block_size": None, "draft_window_size": None, causal: None}
    if config.causal is False and set(config.layer_types) == {SLIDING} and draw(st.booleans()):
        values |= {"use_swa": True, causal: draw(st.sampled_from([None, False])), "layer_types": None}
        if draw(st.booleans()):
            values["swa_window_size"] = values.pop("sliding_window")
        if draw(st.booleans()):
            values["layer_types"] = [draw(st.sampled_from([FULL, SLIDING]))] * config.num_layers
    if draw(st.booleans()):
        values["is_neox_style"] = values.pop("rope_is_neox_style")
    if config.convolution:
        values |= PARTS
    nested, top = placed(draw, values, defaults_of(config) | optional)
    top |= rope_spelling(draw, config)
    top["architectures"] = ["DFlash2DraftModel" if config.convolution else "DFlashDraftModel"]
    extras = draw(st.sets(st.sampled_from(sorted(IGNORED))))
    return top | {key: IGNORED[key] for key in extras} | {"dflash_config": nested}


def spelled_by_speculators(draw: st.DrawFn, config: DraftConfig) -> dict[str, Any]:
    decoder, top = placed(draw, body_of(config), defaults_of(config))
    decoder |= rope_spelling(draw, config)
    kind = "dflash2" if config.convolution else "dflash"
    own = {
        "speculators_model_type": kind,
        "architectures": ["DFlash2DraftModel" if config.convolution else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [each + 1 for each in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sliding_window_non_causal": config.causal is False,
        "transformer_layer_config": decoder,
    }
    defaults = {"block_size": 8, "sliding_window_non_causal": kind == "dflash2"}
    for key, value in defaults.items():
        if own[key] == value and draw(st.booleans()):
            own[key] = draw(st.sampled_from([None]))
    own |= {key: value for key, value in PARTS.items() if config.convolution}
    for key, value in {"draft_vocab_size": 257, "target_hidden_size": 64, "sample_from_anchor": False}.items():
        if draw(st.booleans()):
            own[key] = value
    return top | own


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_spelling_of_a_z_lab_draft_reads_alike(data: st.DataObject) -> None:
    """A key that is looked for in one place only would be taken for missing, or replaced by a default."""
    config = data.draw(drafts(second=data.draw(st.booleans())))
    read = DraftConfig.from_dict(data.draw(st.composite(spelled_by_zlab)(config)))
    assert read == config
    assert read.unread == ()  # no key of a published spelling is told as unknown


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_spelling_of_a_speculators_draft_reads_alike(data: st.DataObject) -> None:
    """Layer ids are one less than the file's, and blocks of sliding layers look both ways only where it says so."""
    config = data.draw(drafts(second=data.draw(st.booleans())))
    config = replace(config, runtime_block_size=None, context_window=None)
    config = replace(config, causal=False if config.causal is False else None)
    spelling = data.draw(st.composite(spelled_by_speculators)(config))
    assert DraftConfig.from_dict(spelling) == config


# What a file may say that it should not

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 10**400, math.nan, math.inf, -0.0, "", "16", FULL, "yarn"])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "rope_theta", FULL]), inner),
    max_leaves=6,
)
OPTIONAL = [
    "architectures",
    "dflash_config",
    "transformer_layer_config",
    "speculators_model_type",
    "speculators_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "is_causal",
    "causal",
    "use_swa",
    "swa_window_size",
    "runtime_block_size",
    "draft_window_size",
    "rope_is_neox_style",
    "is_neox_style",
    "final_logit_softcapping",
    "input_embedding_scale",
    "output_multiplier",
    "quantization",
    "quantization_config",
    "draft_vocab_size",
    "selector_vocab_size",
    "projector_type",
    "target_hidden_size",
    "num_target_layers",
    "sliding_window",
    "layer_types",
    "hidden_act",
    "block_size",
    "markov_rank",
    "sample_from_anchor",
    "model_type",
    "logit_scale",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "attention_out_bias",
    "attention_value_scale",
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_value_of_any_key_ends_in_anything_but_a_config_or_an_explanation(data: st.DataObject) -> None:
    """A number as text, a list as a number, `true` as 1, NaN: a TypeError would reach the user as a traceback."""
    config = copy.deepcopy(BASES[data.draw(st.sampled_from(sorted(BASES)))])
    for _ in range(data.draw(st.integers(1, 3))):
        tables = [config] + [table for table in config.values() if isinstance(table, dict)]
        table = data.draw(st.sampled_from(tables))
        table[data.draw(st.sampled_from(sorted({*table, *OPTIONAL})))] = data.draw(JSON)
    try:
        read = DraftConfig.from_dict(config)
        expected_shapes(read)
    except CheckpointError as error:
        assert len(str(error)) < 2000
    else:
        assert all(type(index) is int for index in read.target_layer_ids)
        assert all(type(getattr(read, name)) is int for name in ("hidden_size", "block_size", "mask_token_id"))
        assert type(read.rope_theta) is float


@pytest.mark.parametrize("value", [True, "16", 16.0, [16], {"a": 1}, 2**40, -1])
@pytest.mark.parametrize("key", ["hidden_size", "block_size", "mask_token_id", "num_hidden_layers", "head_dim"])
def test_what_is_no_integer_is_named_with_what_was_found(key: str, value: object) -> None:
    config = v1_config(**({"dflash_config": {key: value}} if key == "mask_token_id" else {key: value}))
    with pytest.raises(CheckpointError, match=f"`{key}` has to be an integer, .*got .*Correct the config.json"):
        DraftConfig.from_dict(config)


# What is not guessed, and what is

MISSING = [
    *((key, v1_config(), key) for key in ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps")),
    *((key, v1_config(), key) for key in ("num_attention_heads", "intermediate_size", "rope_theta")),
    *((key, v1_config(), f"dflash_config.{key}") for key in ("target_layer_ids", "mask_token_id")),
    ("rope_theta", dflash2_config(), "rope_parameters"),
    ("aux_hidden_state_layer_ids", speculators_config(), "aux_hidden_state_layer_ids"),
    ("mask_token_id", speculators_config(), "mask_token_id"),
    ("hidden_size", speculators_config(), "transformer_layer_config.hidden_size"),
]


@pytest.mark.parametrize(("name", "config", "path"), MISSING, ids=[f"{name}-{path}" for name, _, path in MISSING])
def test_what_cannot_be_guessed_is_named_when_it_is_missing(name: str, config: dict, path: str) -> None:
    """A guess of the right length loads, and ruins acceptance without a word."""
    with pytest.raises(CheckpointError, match=f"`{name}` is missing .*Get the config.json from"):
        DraftConfig.from_dict(without(config, path))


def test_defaults_of_keys_that_older_files_do_not_have() -> None:
    bare = without(v1_config(), "block_size", "layer_types", "num_target_layers", "use_sliding_window", "rope_scaling")
    read = DraftConfig.from_dict(bare)
    assert (read.block_size, read.layer_types, read.num_target_layers) == (16, (FULL, FULL), 3)
    assert (read.causal, read.rope_scaling, read.rope_traditional, read.attention_bias) == (None, None, False, False)
    assert (read.input_embedding_scale, read.output_multiplier, read.final_logit_softcapping) == (1.0, 1.0, None)
    assert (read.draft_vocab_size, read.own_embedding) == (None, False)
    assert (read.runtime_block_size, read.context_window) == (None, None)
    read = DraftConfig.from_dict(without(speculators_config(), "block_size", "sliding_window_non_causal"))
    assert (read.block_size, read.causal, read.target_layer_ids, read.verifier) == (8, None, (0, 2), "tiny/llama")
    read = DraftConfig.from_dict(without(speculators_config(dflash2=True), "sliding_window_non_causal"))
    assert read.causal is False


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, False]),
        ({"dflash_config": {"causal": False}}, [False, False]),
        ({"dflash_config": {"causal": False}, "is_causal": True}, [True, True]),
        ({"is_causal": False}, [False, False]),
        ({"dflash_config": {"use_swa": True}, "layer_types": [FULL] * 2}, [False, False]),
        ({"dflash_config": {"use_swa": True}, "layer_types": [SLIDING] * 2, "is_causal": True}, [True, True]),
    ],
)
def test_a_block_looks_ahead_as_the_checkpoints_precedence_says(changes: dict, expected: list[bool]) -> None:
    """`is_causal`, then `causal`, then `use_swa`, then the kind of layer: sliding is causal, full is not."""
    config = DraftConfig.from_dict(v1_config(**({"layer_types": [SLIDING, FULL], "sliding_window": 8} | changes)))
    assert [config.is_causal(0), config.is_causal(1)] == expected


def test_use_swa_makes_every_layer_slide_whatever_its_window_is_called() -> None:
    for name in ("swa_window_size", "sliding_window"):
        config = DraftConfig.from_dict(v1_config(dflash_config={"use_swa": True, name: 48}))
        assert (config.layer_types, config.sliding_window) == ((SLIDING, SLIDING), 48)


@pytest.mark.parametrize("alias", ["qwen3", "qwen3_moe", "gemma4_text", "kimi_k2", "speculator_model", None])
def test_the_family_that_a_config_names_does_not_matter(alias: str | None) -> None:
    """Drafts of every family are the same small decoder; names change with every converter."""
    for base in BASES.values():
        assert DraftConfig.from_dict(base | {"model_type": alias}) == DraftConfig.from_dict(base)


def test_a_reduced_vocabulary_is_read_and_a_full_one_shares_the_head() -> None:
    assert DraftConfig.from_dict(speculators_config(draft_vocab_size=64)).draft_vocab_size == 64
    assert DraftConfig.from_dict(speculators_config()).draft_vocab_size is None
    assert DraftConfig.from_dict(v1_config(draft_vocab_size=64)).draft_vocab_size == 64


def test_a_rope_of_each_kind_of_layer_follows_speculators() -> None:
    """It trains every layer with the rope of the sliding ones."""
    ropes = {SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6}}
    config = speculators_config(transformer_layer_config={"rope_parameters": ropes})
    assert DraftConfig.from_dict(config).rope_theta == 1e4


V1, V2 = v1_config(), dflash2_config()
REFUSED = {
    # two places that disagree
    "block size": (
        v1_config(dflash_config={"block_size": 8}),
        "`block_size` is 8 in `dflash_config` and .* is 16 at the top level",
    ),
    "mask": (v1_config(mask_token_id=3), "`mask_token_id` is 256 in `dflash_config` and .* is 3 at the top level"),
    "rope base": (
        v1_config(rope_parameters={"rope_theta": 5e6}),
        "`rope_theta` is 5000000.0 in `rope_parameters` and .* 10000.0 at the",
    ),
    "rope scaling": (
        v1_config(rope_parameters=YARN, rope_scaling=YARN | {"factor": 4.0}),
        "`rope_parameters` scales by .*8.0.* and `rope_scaling` by .*4.0",
    ),
    "layer ropes": (
        without(v1_config(rope_parameters={SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6}}), "rope_theta"),
        "rotates sliding and full layers differently",
    ),
    "windows": (
        v1_config(sliding_window=16, dflash_config={"use_swa": True, "swa_window_size": 32}),
        "`swa_window_size` is 32 in `dflash_config` and `sliding_window` is 16 at the top level",
    ),
    "neox": (
        v1_config(rope_is_neox_style=True, is_neox_style=False),
        "`rope_is_neox_style` is True .* and `is_neox_style` is False",
    ),
    # impossible values
    "tap": (
        v1_config(dflash_config={"target_layer_ids": [0, 4]}),
        r"`target_layer_ids` \[0, 4\] have to be in 0\.\.3 \(ids count from 0, so 4",
    ),
    "negative tap": (
        v1_config(dflash_config={"target_layer_ids": [-1, 2]}),
        r"has to be a list of integers, 0 or more, got \[-1, 2\]",
    ),
    "no taps": (
        v1_config(dflash_config={"target_layer_ids": []}),
        r"has to be a list of integers, 0 or more, got \[\]",
    ),
    "layer count": (v1_config(layer_types=[FULL]), "`layer_types` names 1 layers, `num_hidden_layers` is 2"),
    "layer type": (v1_config(layer_types=[FULL, "linear_attention"]), "unknown layer type 'linear_attention'"),
    "no window": (v1_config(layer_types=[SLIDING] * 2), "sliding layers need `sliding_window` of 2 or more, got None"),
    "window of 1": (
        v1_config(layer_types=[SLIDING] * 2, sliding_window=1),
        "`sliding_window` has to be an integer, 2 or more, got 1",
    ),
    "swa and full": (
        v1_config(layer_types=[SLIDING, FULL], sliding_window=8, use_swa=True),
        "`use_swa` says that every layer slides, and `layer_types` names full ones",
    ),
    "block of 1": (v1_config(block_size=1), "`block_size` has to be an integer, 2 or more, got 1"),
    "runtime block": (v1_config(runtime_block_size=17), r"`runtime_block_size` has to be in 2\.\.16 .*got 17"),
    "runtime block of 1": (v1_config(runtime_block_size=1), r"`runtime_block_size` has to be in 2\.\.16 .*got 1"),
    "context window": (v1_config(draft_window_size=0), "`draft_window_size` has to be an integer, 1 or more, got 0"),
    "heads": (v1_config(num_key_value_heads=3), "4 attention heads cannot share 3 key/value heads"),
    "odd head": (v1_config(head_dim=15), "`head_dim` has to be even"),
    "activation": (
        v1_config(hidden_act="gelu_pytorch_tanh"),
        "`hidden_act` has to be 'silu', .*got 'gelu_pytorch_tanh'",
    ),
    "theta": (v1_config(rope_theta=1), "`rope_theta` has to be above 1, got 1.0"),
    "eps": (v1_config(rms_norm_eps=0), "`rms_norm_eps` has to be a number above 0, got 0"),
    "NaN": (v1_config(output_multiplier=math.nan), "`output_multiplier` has to be a number above 0, got nan"),
    "infinity": (v1_config(rms_norm_eps=math.inf), "`rms_norm_eps` has to be a number above 0, got inf"),
    "no float": (v1_config(rms_norm_eps=10**400), "`rms_norm_eps` has to be a number above 0, got 1000"),
    "softcap": (v1_config(final_logit_softcapping=-1), "`final_logit_softcapping` has to be a number above 0, got -1"),
    "flag": (v1_config(is_causal=1), "`is_causal` has to be true or false, got 1"),
    "table": (v1_config() | {"dflash_config": [1]}, r"`dflash_config` has to be an object, got \[1\]"),
    "yarn": (
        v1_config(rope_scaling={"type": "yarn", "factor": 8.0}),
        "is not usable: `original_max_position_embeddings` is missing",
    ),
    "yarn by 0": (v1_config(rope_scaling=YARN | {"factor": 0}), "`factor` has to be a number above 0, got 0"),
    "rope kind": (
        v1_config(rope_scaling={"type": "longrope", "factor": 8.0}),
        "its type is longrope, known are linear, llama3, yarn",
    ),
    "rope kinds": (v1_config(rope_scaling=YARN | {"type": "linear"}), "its type is linear and yarn"),
    "vocabulary": (v1_config(draft_vocab_size=258), r"`draft_vocab_size` has to be an integer, in 1\.\.257, got 258"),
    # DFlash 2
    **{
        f"DFlash 2 without {key}": (
            without(V2, f"dflash_config.{key}"),
            f"a DFlash 2 draft without `{key}`. It cannot be run as DFlash v1",
        )
        for key in PARTS
    },
    "top_k of 0": (dflash2_config(dflash_config={"selector_top_k": 0}), "a DFlash 2 draft without `selector_top_k`"),
    "top_k": (
        dflash2_config(dflash_config={"selector_top_k": 258}),
        "`selector_top_k` 258 is more than the 257 tokens",
    ),
    "group": (
        dflash2_config(dflash_config={"conv_group_size": 24}),
        "`conv_group_size` 24 has to divide `hidden_size` 64",
    ),
    "parts of DFlash 2": (
        v1_config(dflash_config=PARTS),
        r"`conv_kernel_size` belongs to DFlash 2, and `architectures` does not say",
    ),
    "no architecture": (
        without(V2, "architectures"),
        r"`conv_kernel_size` belongs to DFlash 2, and `architectures` does not say",
    ),
    "reduced DFlash 2": (dflash2_config(draft_vocab_size=64), "DFlash 2 needs the full vocabulary"),
    # scales and parts of other architectures
    **{
        f"{key} {where}": (
            base,
            rf"`{key}` is {value!r}, which changes what the draft computes, .* as if it were '?{ours}'?\.",
        )
        for key, value, ours in (
            ("logit_scale", 0.0625, "1"),
            ("logits_scaling", 8, "1"),
            ("residual_multiplier", 0.22, "1"),
            ("embedding_multiplier", 12, "1"),
            ("embedding_scale", 8, "1"),
            ("attention_multiplier", 1.0, "0.25"),
            ("query_pre_attn_scalar", 256, "16"),
            ("attn_logit_softcapping", 50.0, "0"),
            ("mlp_bias", True, "False"),
            ("attention_out_bias", True, "False"),
            ("attention_sinks", True, "False"),
            ("attention_mode", "mla", "gqa"),
        )
        for where, base in (
            ("at the top", v1_config(**{key: value})),
            ("inside", v1_config(dflash_config={key: value})),
            ("in speculators", speculators_config(transformer_layer_config={key: value})),
        )
    },
    "codebooks": (dflash2_config(selector_vocab_size=64), "`selector_vocab_size` is 64 and `vocab_size` 257"),
    # speculators
    "id 0": (speculators_config(aux_hidden_state_layer_ids=[0, 2]), r"\[0, 2\] holds 0, .* its ids count from 1"),
    "wider features": (
        speculators_config(target_hidden_size=128),
        "`target_hidden_size` is 128 and the draft's `hidden_size` 64",
    ),
    "contradiction": (
        speculators_config(architectures=["DFlash2DraftModel"]),
        "`speculators_model_type` is 'dflash' and .*contradict",
    ),
    "reduced dflash2": (speculators_config(dflash2=True, draft_vocab_size=64), "DFlash 2 needs the full vocabulary"),
    "kind": (speculators_config(speculators_model_type="mlp"), "a speculators checkpoint of the kind 'mlp'"),
    "anchor": (speculators_config(sample_from_anchor=True), "a DSpark draft .*`sample_from_anchor` is True"),
    # other architectures
    "Markov": (v1_config(dflash_config={"markov_rank": 64}), "a DFlash hybrid with a Markov head"),
    "confidence": (v1_config(dflash_config={"enable_confidence_head": True}), "a DSpark draft"),
    "DSpark": (speculators_config(speculators_model_type="dspark"), "a DSpark draft"),
    "Domino": (v1_config(dflash_config={"projector_type": "domino"}), "a Domino draft"),
    "projector": (v1_config(dflash_config={"projector_type": "spiral"}), "a 'spiral' projector"),
    "MiMo sinks": (v1_config(dflash_config={"attention_sink_bias": True}), "a MiMo-style draft"),
    "MiMo values": (v1_config(dflash_config={"attention_value_scale": 0.612}), "a MiMo-style draft"),
    "MiMo flag": (v1_config(dflash_config={"attention_value_scale": True}), "a MiMo-style draft"),
    "Laguna": (v1_config(architectures=["DFlashLagunaForCausalLM"]), "a Laguna draft"),
    "Muse": (v1_config(architectures=["MuseGlimmerAssistantModel"]), "a Muse Glimmer assistant"),
    "EAGLE": (v1_config(architectures=["LlamaForCausalLMEagle"]), "an EAGLE head"),
    "EAGLE-3": (
        speculators_config(speculators_model_type="eagle3", architectures=["Eagle3Speculator"]),
        "an EAGLE head",
    ),
    "MTP": (v1_config(architectures=["Qwen3NextMTP"]), "a multi-token-prediction head"),
    "Medusa": (v1_config(architectures=["MedusaModel"]), "a Medusa head"),
    "FP8": (
        v1_config(quantization_config={"quant_method": "fp8"}),
        "quantised for another runtime .*`quant_method` is 'fp8'",
    ),
    "NVFP4": (
        v1_config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "quantised for another runtime",
    ),
    "compressed": (
        speculators_config(quantization_config={"quant_method": "compressed-tensors"}),
        "quantised for another runtime",
    ),
    "residual": (speculators_config(dflash_context_residual=True), "a DFlash draft with additional parts"),
    "experts": (speculators_config(dflash2=True, draft_ffn_type="moe"), "a DFlash draft with a mixture of experts"),
    "language model": (
        v1_config(architectures=["LlamaForCausalLM"]),
        r"`architectures` is \['LlamaForCausalLM'\].*ordinary language model",
    ),
}
STEP = r"(Correct|Get|Fetch|Choose|Download)\b"  # every message ends with what to do


NEUTRAL = {
    "logit_scale": 1.0,
    "logits_scaling": 1,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "embedding_scale": 1,
    "attention_multiplier": 0.25,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": None,
    "mlp_bias": False,
    "attention_out_bias": False,
    "attention_sinks": False,
    "attention_mode": "gqa",
    "attention_value_scale": 1.0,
    "attention_sink_bias": False,
}


@pytest.mark.parametrize("name", sorted(BASES))
def test_keys_of_other_architectures_may_say_that_nothing_changes(name: str) -> None:
    """Converters write every key that they know; a draft is not refused for one that says nothing."""
    plain = BASES[name]
    inner = "dflash_config" if "dflash_config" in plain else "transformer_layer_config"
    for config in (plain | NEUTRAL, plain | {inner: plain[inner] | NEUTRAL}):
        read = DraftConfig.from_dict(config)
        assert read == DraftConfig.from_dict(plain)
        assert read.unread == ()


def test_keys_that_nothing_reads_are_kept_by_name_unless_they_are_known_to_be_harmless() -> None:
    """An unknown scale would be ignored in silence, and a note about every training key would be read by no one."""
    training = {"num_anchors": 4096, "loss_decay_gamma": 7.0, "selector_loss_alpha": 1.0, "mask_token": "<|MASK|>"}
    known = training | {"markov_rank": 0, "swa_window_size": 9, "selector_vocab_size": VOCAB, "nothing": None}
    strange = {"anything_new": [1], "rope_theta": 5e6, "num_anchors_scale": 2}
    config = v1_config(dflash_config=known | strange)
    assert DraftConfig.from_dict(config).unread == ("anything_new", "rope_theta", "num_anchors_scale")
    assert DraftConfig.from_dict(config) == DraftConfig.from_dict(v1_config())


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_would_cost_acceptance_is_refused_by_name(config: dict, message: str) -> None:
    """Each of these loads in a lenient reader, writes correct text and accepts little."""
    with pytest.raises(CheckpointError, match=f"(?s){message}.*{STEP}"):
        DraftConfig.from_dict(config)


# The published drafts


def published(
    layers: int, hidden: int, inner: int, heads: str, taps: int, vocab: int, dim: int = 128, second: bool = False
) -> DraftConfig:
    queries, keys = map(int, heads.split("/"))
    sizes: dict[str, Any] = dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        head_dim=dim,
        vocab_size=vocab,
        num_target_layers=64,
        layer_types=[FULL] * layers,
    )
    nested: dict[str, Any] = {"target_layer_ids": list(range(1, taps + 1)), "mask_token_id": vocab - 1}
    if not second:
        return DraftConfig.from_dict(v1_config(**sizes, dflash_config=nested))
    parts = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16, num_target_layers=64)
    return DraftConfig.from_dict(dflash2_config(**sizes, dflash_config=nested | parts))


# (draft, its sizes, tensors, GiB of its safetensors as published, parameters where they are known)
QWEN3, QWEN35, GEMMA, GPT_OSS = 151936, 248320, 262144, 201088
PUBLISHED = [
    ("z-lab/Qwen3-4B-DFlash-b16", (5, 2560, 9728, "32/8", 5, QWEN3), 58, "1.00", 537_427_200),
    ("z-lab/Qwen3-8B-DFlash-b16", (5, 4096, 12288, "32/8", 5, QWEN3), 58, "1.95", 1_048_626_432),
    ("z-lab/Qwen3-Coder-30B-A3B-DFlash", (8, 2048, 6144, "32/4", 5, QWEN3), 91, "0.88", 473_995_264),
    ("z-lab/Qwen3-Coder-Next-DFlash", (8, 2048, 6144, "32/4", 5, QWEN3), 91, "0.88", None),
    ("z-lab/Qwen3.5-4B-DFlash", (6, 2560, 9216, "32/8", 8, QWEN35), 69, "1.18", None),
    ("z-lab/Qwen3.5-9B-DFlash", (6, 4096, 12288, "32/8", 8, QWEN35), 69, "2.41", 1_291_904_512),
    ("z-lab/Qwen3.5-27B-DFlash", (6, 5120, 17408, "32/8", 8, QWEN35), 69, "3.96", None),
    ("z-lab/Qwen3.5-35B-A3B-DFlash", (6, 2048, 6144, "32/8", 8, QWEN35), 69, "0.72", None),
    ("z-lab/Qwen3.5-122B-A10B-DFlash", (6, 3072, 9216, "32/8", 8, QWEN35), 69, "1.44", None),
    ("z-lab/Qwen3.6-27B-DFlash", (5, 5120, 17408, "32/8", 5, QWEN35), 58, "3.22", 1_730_213_120),
    ("z-lab/Qwen3.6-35B-A3B-DFlash", (6, 2048, 6144, "32/8", 8, QWEN35), 69, "0.72", None),
    ("z-lab/Qwen3.8-27B-DFlash2", (5, 5120, 17408, "32/8", 5, QWEN35, 128, True), 81, "3.58", 1_924_404_480),
    ("z-lab/gemma-4-31B-it-DFlash", (5, 5376, 10752, "64/8", 6, GEMMA), 58, "2.86", 1_535_967_488),
    ("z-lab/gemma-4-26B-A4B-it-DFlash", (5, 2816, 5632, "32/8", 6, GEMMA), 58, "0.80", None),
    ("z-lab/gpt-oss-20b-DFlash", (8, 2880, 7680, "64/8", 5, GPT_OSS, 64), 91, "1.46", None),
    ("z-lab/gpt-oss-120b-DFlash", (8, 2880, 7680, "64/8", 5, GPT_OSS, 64), 91, "1.46", None),
    ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", (5, 4096, 12288, "32/8", 5, 128256), 58, "1.95", None),
    ("z-lab/Kimi-K2.5-DFlash", (6, 7168, 18432, "64/8", 6, 163840), 69, "6.48", None),
    # as first published; the repositories were filled again later, with the shapes above
    ("z-lab/Qwen3.5-4B-DFlash, first", (5, 2560, 9728, "32/8", 5, QWEN35), 58, "1.00", 537_427_200),
    ("z-lab/Qwen3.5-9B-DFlash, first", (5, 4096, 12288, "32/8", 5, QWEN35), 58, "1.95", 1_048_626_432),
    ("z-lab/Qwen3.5-27B-DFlash, first", (5, 5120, 17408, "32/8", 5, QWEN35), 58, "3.22", 1_730_213_120),
    ("z-lab/Qwen3.6-35B-A3B-DFlash, first", (8, 2048, 6144, "32/4", 5, QWEN35), 91, "0.88", 473_995_264),
]


@pytest.mark.parametrize(
    ("sizes", "tensors", "gib", "parameters"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_a_published_draft_has_the_tensors_and_the_size_that_its_file_has(
    sizes: tuple, tensors: int, gib: str, parameters: int | None
) -> None:
    """Computed from the config alone, in bfloat16; a part too many or too few would show in the second digit."""
    shapes = expected_shapes(published(*sizes))
    count = sum(math.prod(shape) for shape in shapes.values())
    assert (len(shapes), f"{count * 2 / 2**30:.2f}") == (tensors, gib)
    assert parameters in (None, count)


def file_of(second: bool = False, **keys: Any) -> dict[str, Any]:
    """A config.json with what the published ones have in common."""
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "use_cache": True,
        **keys,
    }


SECOND = dict(conv_group_size=16, conv_kernel_size=2, selector_rank=256, selector_top_k=16)
# What the files hold, and what that has to be read as. The two DFlash 2 ones are whole; of the others this is what
# other runtimes quote in their tests.
AS_PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z-lab/Muse-Glimmer-30B-DFlash2": (
        file_of(
            True,
            bos_token_id=200000,
            is_causal=False,
            dflash_config=SECOND
            | dict(
                block_size=16,
                final_logit_softcapping=20.0,
                mask_token_id=201818,
                output_multiplier=0.19611613513818404,
                target_layer_ids=[1, 13, 25, 37, 49],
            ),
            eos_token_id=200001,
            hidden_size=6656,
            intermediate_size=19968,
            layer_types=[SLIDING] * 5,
            max_position_embeddings=131072,
            max_window_layers=5,
            num_attention_heads=32,
            num_hidden_layers=5,
            num_target_layers=52,
            pad_token_id=200018,
            rms_norm_eps=1e-05,
            rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
            sliding_window=2048,
            transformers_version="5.15.0",
            use_cache=False,
            use_sliding_window=True,
            vocab_size=202048,
        ),
        dict(
            hidden_size=6656,
            num_layers=5,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=202048,
            rms_norm_eps=1e-05,
            rope_theta=500000.0,
            layer_types=(SLIDING,) * 5,
            sliding_window=2048,
            causal=False,
            block_size=16,
            mask_token_id=201818,
            target_layer_ids=(1, 13, 25, 37, 49),
            num_target_layers=52,
            input_embedding_scale=1.0,
            output_multiplier=0.19611613513818404,
            final_logit_softcapping=20.0,
            convolution=Convolution(2, 16),
            selector=Selector(256, 16),
        ),
    ),
    "z-lab/Qwen3.8-27B-DFlash2": (
        file_of(
            True,
            bos_token_id=None,
            is_causal=False,
            dflash_config=SECOND | dict(block_size=8, mask_token_id=248070, target_layer_ids=[5, 19, 33, 47, 61]),
            eos_token_id=248044,
            hidden_size=5120,
            intermediate_size=17408,
            layer_types=[SLIDING] * 5,
            max_position_embeddings=262144,
            max_window_layers=5,
            num_attention_heads=32,
            num_hidden_layers=5,
            num_target_layers=64,
            pad_token_id=248044,
            rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
            sliding_window=2048,
            transformers_version="5.15.0",
            use_sliding_window=True,
            vocab_size=248320,
        ),
        dict(
            hidden_size=5120,
            rope_theta=1e7,
            layer_types=(SLIDING,) * 5,
            causal=False,
            block_size=8,
            mask_token_id=248070,
            target_layer_ids=(5, 19, 33, 47, 61),
            num_target_layers=64,
            output_multiplier=1.0,
            final_logit_softcapping=None,
            selector=Selector(256, 16),
        ),
    ),
    "z-lab/gemma-4-31B-it-DFlash": (
        file_of(
            block_size=16,
            dflash_config=dict(mask_token_id=4, target_layer_ids=[1, 12, 23, 35, 46, 57]),
            final_logit_softcapping=30.0,
            hidden_size=5376,
            intermediate_size=10752,
            layer_types=[SLIDING] * 4 + [FULL],
            max_position_embeddings=262144,
            num_attention_heads=64,
            num_hidden_layers=5,
            num_target_layers=60,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=2048,
            tie_word_embeddings=True,
            use_sliding_window=True,
            vocab_size=262144,
        ),
        dict(
            hidden_size=5376,
            num_heads=64,
            rope_theta=1e6,
            rope_scaling=None,
            layer_types=(SLIDING,) * 4 + (FULL,),
            causal=None,
            block_size=16,
            mask_token_id=4,
            final_logit_softcapping=30.0,
            selector=None,
        ),
    ),
    "z-lab/gpt-oss-20b-DFlash": (
        file_of(
            attention_bias=True,
            block_size=8,
            bos_token_id=199998,
            dflash_config=dict(mask_token_id=200000, target_layer_ids=[1, 6, 11, 16, 21]),
            eos_token_id=200002,
            head_dim=64,
            hidden_size=2880,
            initial_context_length=4096,
            intermediate_size=7680,
            max_position_embeddings=131072,
            model_type="gpt_oss",
            num_attention_heads=64,
            num_hidden_layers=8,
            rms_norm_eps=1e-5,
            rope_theta=150000,
            vocab_size=201088,
        ),
        dict(
            head_dim=64,
            attention_bias=True,
            rope_theta=150000.0,
            layer_types=(FULL,) * 8,
            block_size=8,
            mask_token_id=200000,
            num_target_layers=22,
        ),
    ),
}


@pytest.mark.parametrize(("file", "facts"), AS_PUBLISHED.values(), ids=AS_PUBLISHED.keys())
def test_a_published_config_is_read_as_what_it_is(file: dict[str, Any], facts: dict[str, Any]) -> None:
    """No key of it is refused or unknown, and none is read from another place than where it stands."""
    read = DraftConfig.from_dict(file)
    assert {name: getattr(read, name) for name in facts} == facts
    assert read.unread == ()
