"""Tiny random targets of real architectures: one row per family, and the generic tests apply to it.

Weights are widened so that greedy text does not settle into a loop; `reference` asserts that.
"""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step

VOCAB = 257


@dataclass(frozen=True)
class Family:
    """module: mlx_lm.models file; config: what its ModelArgs need; window: of its sliding layers.

    dtypes: what MLX runs here (its CPU gather-matmul of a mixture of experts takes float32 only).
    rounding: per dtype, by how much at most the logits of blocks may differ from those of single rows; where it is not
        given they are the same bits. A family has it where the algorithm of a layer depends on the width.
    quantised: bits and group size of every layer that can be quantised; None leaves all as they are.
    """

    name: str
    module: str
    config: dict
    window: int | None = None
    dtypes: tuple[mx.Dtype, ...] = (mx.float32, mx.bfloat16)
    rounding: Mapping[mx.Dtype, float] = field(default_factory=dict)
    quantised: tuple[int, int] | None = None


_BASE = dict(
    hidden_size=64,
    intermediate_size=128,
    vocab_size=VOCAB,
    rms_norm_eps=1e-5,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=1000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
_HEAD = dict(head_dim=16)
_MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
    moe_intermediate_size=64,
    norm_topk_prob=True,
)

FAMILIES = (
    Family("llama", "llama", dict(_BASE, model_type="llama")),
    Family("llama-tied", "llama", dict(_BASE, model_type="llama", tie_word_embeddings=True)),
    Family(
        "llama-sliding",
        "llama",
        dict(
            _BASE,
            model_type="llama",
            layer_types=["full_attention", "sliding_attention"] * 2,
            sliding_window=16,
        ),
        window=16,
    ),
    Family("qwen2", "qwen2", dict(_BASE, model_type="qwen2")),
    Family("qwen3", "qwen3", {**_BASE, **_HEAD, "model_type": "qwen3"}),
    Family("qwen3_moe", "qwen3_moe", {**_BASE, **_HEAD, **_MOE, "model_type": "qwen3_moe"}, dtypes=(mx.float32,)),
)
_HYBRID = dict(
    {**_BASE, **_HEAD},
    full_attention_interval=4,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    rope_parameters={"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "type": "default"},
)
FAMILIES += (
    Family("qwen3_5", "qwen3_5", {**_HYBRID, "model_type": "qwen3_5"}),
    Family(
        "qwen3_5-shell",
        "qwen3_5",
        {"model_type": "qwen3_5", "text_config": {**_HYBRID, "model_type": "qwen3_5_text", "num_hidden_layers": 5}},
    ),
)
_SHARED = dict(shared_expert_intermediate_size=64)
_GEMMA = {**_BASE, **_HEAD, "sliding_window": 16, "sliding_window_pattern": 2, "model_type": "gemma3_text"}
_GEMMA4 = {
    **_GEMMA,
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
}
_GEMMA4_DENSE = {**_GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
_GPT_OSS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16, rope_scaling=None)
_LFM2 = dict(
    block_dim=64,
    block_ff_dim=128,
    block_multiple_of=32,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=False,
    norm_eps=1e-5,
    conv_bias=False,
    conv_L_cache=3,
    full_attn_idxs=[1, 3],
)
FAMILIES += (
    Family(
        "qwen3_next",
        "qwen3_next",
        {**_HYBRID, **_MOE, **_SHARED, "model_type": "qwen3_next", "partial_rotary_factor": 0.5, "rope_scaling": None},
        dtypes=(mx.float32,),
    ),
    Family(
        "qwen3_5_moe",
        "qwen3_5_moe",
        {**_HYBRID, **_MOE, **_SHARED, "model_type": "qwen3_5_moe"},
        dtypes=(mx.float32,),
    ),
    Family("gemma3_text", "gemma3_text", _GEMMA, window=16),
    Family(
        "gpt_oss",
        "gpt_oss",
        {**_BASE, **_HEAD, **_GPT_OSS, "model_type": "gpt_oss"},
        window=16,
        dtypes=(mx.float32,),
    ),
    Family("gemma4_text", "gemma4_text", _GEMMA4, window=16),
    Family("gemma4", "gemma4", {"model_type": "gemma4", "vocab_size": VOCAB, "text_config": _GEMMA4_DENSE}, window=16),
    Family("lfm2", "lfm2", {**_BASE, **_LFM2, "model_type": "lfm2"}),
)
_LFM2_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
_LLAMA4 = dict(intermediate_size_mlp=128, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True)
_MAMBA = dict(mamba_num_heads=4, mamba_head_dim=16, mamba_proj_bias=False, ssm_state_size=16, conv_kernel=4, n_groups=2)
_NEMOTRON = {
    **_BASE,
    **_HEAD,
    **_MAMBA,
    "model_type": "nemotron_h",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": list("M-M*-M"),
}
_NEMOTRON_MOE = {
    **_NEMOTRON,
    "hybrid_override_pattern": list("MEM*EM-"),
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# mlx_lm's Mamba-2 sums over the rows of a block in one matrix product, and from row to row through the state. Measured:
# one block of 2 to 16 rows 8e-6 in float32 and 0.2 in bfloat16, over 120 tokens 4e-5 and 0.6, of logits up to 9.
_MAMBA_ROUNDING = {mx.float32: 1e-4, mx.bfloat16: 1.0}
FAMILIES += (
    Family(
        "lfm2_moe",
        "lfm2_moe",
        {**_BASE, **_LFM2, **_LFM2_MOE, "model_type": "lfm2_moe", "use_expert_bias": True, "num_dense_layers": 1},
        dtypes=(mx.float32,),
    ),
    Family("llama4_text", "llama4_text", {**_BASE, **_HEAD, **_LLAMA4, "model_type": "llama4_text"}),
    Family(
        "muse_glimmer",
        "muse_glimmer",
        {**_BASE, **_HEAD, "model_type": "muse_glimmer", "sliding_window": 16, "num_hidden_layers": 5},
        window=16,
    ),
    Family("nemotron_h", "nemotron_h", _NEMOTRON, rounding=_MAMBA_ROUNDING),
    Family("nemotron_h-moe", "nemotron_h", _NEMOTRON_MOE, dtypes=(mx.float32,), rounding=_MAMBA_ROUNDING),
)
_TEXT = {**_BASE, "model_type": "llama"}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
# No adapter has their name: the generic one serves them, or their text part's.
PROBED = (
    Family("olmo2", "olmo2", {**_BASE, "model_type": "olmo2"}),
    Family(
        "glm4", "glm4", {**_BASE, **_HEAD, "model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5}
    ),
    Family("smollm3", "smollm3", {**_BASE, "model_type": "smollm3"}),
    Family("phi3", "phi3", {**_BASE, "model_type": "phi3"}),
    Family("seed_oss", "seed_oss", {**_BASE, **_HEAD, "model_type": "seed_oss"}),
    Family("ernie4_5", "ernie4_5", {**_BASE, **_HEAD, "model_type": "ernie4_5", "use_bias": False}),
    Family("starcoder2", "starcoder2", {**_BASE, "model_type": "starcoder2", "tie_word_embeddings": True}),
    Family("internlm2", "internlm2", {**_BASE, "model_type": "internlm2", "bias": False}),
    Family("exaone", "exaone", {**_BASE, "model_type": "exaone", "num_layers": 4, "layer_norm_epsilon": 1e-5}),
    Family("qwen2_moe", "qwen2_moe", {**_BASE, **_EXPERTS, "model_type": "qwen2_moe"}, dtypes=(mx.float32,)),
    Family("mixtral", "mixtral", {**_BASE, "model_type": "mixtral", "num_local_experts": 4}, dtypes=(mx.float32,)),
    Family("mistral3", "mistral3", {"model_type": "mistral3", "text_config": _TEXT}),
    Family(
        "qwen3_vl", "qwen3_vl", {"model_type": "qwen3_vl", "text_config": {**_BASE, **_HEAD, "model_type": "qwen3"}}
    ),
    Family("gemma3", "gemma3", {"model_type": "gemma3", "vocab_size": VOCAB, "text_config": _GEMMA}, window=16),
    Family("lfm2-vl", "lfm2-vl", {"model_type": "lfm2-vl", "text_config": {**_BASE, **_LFM2, "model_type": "lfm2"}}),
)
# Whose quantised layers `qmm_small_m` stands for: dense, gated delta, experts.
QUANTISED = tuple(
    replace(family, name=f"{family.name}-4bit", quantised=(4, 32))
    for family in FAMILIES
    if family.name in ("llama", "qwen3_5", "qwen3_moe")
)
BY_NAME = {family.name: family for family in FAMILIES + PROBED + QUANTISED}


def cases(families: Iterable[Family], rounding: float = 1e9) -> list:
    """Parameters (name, dtype); those that round no more than that."""
    return [
        pytest.param(family.name, dtype, id=f"{family.name}-{str(dtype).removeprefix('mlx.core.')}")
        for family in families
        for dtype in family.dtypes
        if family.rounding.get(dtype, 0) <= rounding
    ]


EVERY = cases(FAMILIES)
# Whose greedy text does not depend on widths; coarser rounding decides near-ties.
SAME_TOKENS = cases(FAMILIES + QUANTISED, 1e-3)


def build(family: Family, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """A fresh model with deterministic weights."""
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(family.config)))  # shells write into theirs
    model.update(tree_map_with_path(lambda key, a: a * 4 if a.ndim >= 2 else a, model.parameters()))
    model.set_dtype(dtype)
    if family.quantised is not None:
        bits, group = family.quantised
        fits = lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0  # noqa: E731
        nn.quantize(model, group, bits, class_predicate=fits)
    model.eval()
    mx.eval(model.parameters())
    return model


@lru_cache(maxsize=128)  # the same object every time: caches belong to it
def tiny(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The shared instance; tests do not change it."""
    return build(BY_NAME[name], dtype)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(length)]


@lru_cache(maxsize=256)
def _reference(name: str, dtype: mx.Dtype, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    steps = generate_step(mx.array(prompt), tiny(name, dtype), max_tokens=count)
    return tuple(token for token, _ in steps)


def reference(name: str, prompt: Sequence[int], count: int, dtype: mx.Dtype = mx.float32) -> list[int]:
    """Greedy tokens of mlx_lm's own loop; long ones must not be a short loop, or parity would prove little."""
    tokens = list(_reference(name, dtype, tuple(prompt), count))
    if count >= 60:
        assert len(set(tokens)) >= 15, f"{name}: the baseline repeats itself ({len(set(tokens))} distinct of {count})"
    return tokens


Depth = int | str
Script = Sequence[Depth]


class ScriptedProposer:
    """Knows the true continuation and makes its first mistake at a scripted depth of each cycle.

    truth: the target's own tokens after the prompt. script: per cycle the index of the first wrong draft, "all"
    for none, "empty" for no proposal at all.
    """

    def __init__(self, truth: Sequence[int], script: Script, taps: tuple[int, ...] = (), vocab: int = VOCAB) -> None:
        self.truth, self.script, self.taps, self.vocab = list(truth), list(script), taps, vocab
        self.cycle = 0
        self.offset: int | None = None  # position of truth[0]
        self.observed: list[mx.array] = []
        self._drafted = False  # ahead, for cycle - 1
        self._unsettled: mx.array | None = None

    def propose(self, anchor: int, limit: int, position: int):
        from dflash_mlx.proposal import Proposal

        if self.offset is None:
            self.offset = position - 1
        depth = self.next_depth(again=self._drafted)
        self._drafted = False
        start = position - self.offset
        tokens = [] if depth == "empty" else self.truth[start : start + limit]
        if isinstance(depth, int) and depth < len(tokens):
            tokens[depth] = (tokens[depth] + 1) % self.vocab
        return Proposal(mx.array(tokens, dtype=mx.int32))

    def next_depth(self, again: bool) -> Depth:
        """Of the next cycle; again: of the same one, because what was drafted ahead was dropped."""
        self.cycle += not again
        return self.script[(self.cycle - 1) % len(self.script)]

    def propose_after(self, features, count, anchor, limit: int, position: int):
        """The same without knowing the count; behind the end of the truth come zeros."""
        from dflash_mlx.proposal import Proposal

        assert self._unsettled is None
        self._unsettled, self._drafted = features if features is not None else mx.zeros((1, 99, 0)), True
        depth = self.next_depth(again=False)
        if depth == "empty":
            return Proposal(mx.array([], dtype=mx.int32))
        assert self.offset is not None
        truth = mx.array(self.truth + [0] * 2 * limit, mx.int32)
        tokens = truth[position + count - self.offset + mx.arange(limit)]
        wrong = mx.arange(limit) == (depth if isinstance(depth, int) else -1)
        return Proposal(mx.where(wrong, (tokens + 1) % self.vocab, tokens))

    def settle(self, kept: int) -> None:
        if self._unsettled is not None and kept:
            self.observe(self._unsettled[:, :kept])
        self._unsettled = None

    def observe(self, features) -> None:
        if features is not None:
            self.observed.append(features)

    def trim_to(self, length: int) -> None:
        if self.observed:
            self.observed = [mx.concatenate(self.observed, axis=1)[:, :length]]

    def flush(self) -> None:
        mx.async_eval(self.observed)

    def evaluate(self) -> None:
        mx.eval(self.observed)


SCRIPTS: dict[str, Script] = {
    "none": [0],
    "all": ["all"],
    "one": [1],
    "mixed": [2, 0, 3],
    "all-none": ["all", 0],
    "wide": [1, "all", 2, "empty", 5, 0, 14, "empty"],
}
