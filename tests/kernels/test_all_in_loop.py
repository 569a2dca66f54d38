"""All kernels at once, in the whole pipeline: verification, acceptance, context and draft, against mlx_lm's own loop.

Every launch runs on Metal or in the simulator. What a kernel did not take is counted too: a wiring that falls back to
MLX gives the right tokens, and nothing else would show it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from dflash_mlx import compare, make_prompt_cache, make_sampler, stream_generate
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.decode import Commit, Session, decode
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import quantize
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.operation import Launch, MetalKernel, Operation
from dflash_mlx.kernels.registry import OPERATIONS
from tests.conftest import DFLASH2, session_over, special_draft, tokens_of
from tests.families import BY_NAME, build, prompt_of
from tests.kernels.checks import runner
from tests.test_pipelined import PROMPT, Helped

VOCAB = 264  # a multiple of 8, so that `qmm_small_m` takes the head
BLOCK = 5
COUNT = 14
MARGIN = 0.02  # log-probability by which every token of a baseline leads
ROUNDING = 1e-4  # of log-probabilities, at most; measured: 3e-5
SIZES = {  # heads, key heads and widths that the kernels take
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 32,
    "mlp_only_layers": [0],
}
GATED_DELTA = {"gdn_verify", "gdn_prework"}
# What adds up or replays what another launch of the same operation left is not counted.
SECOND = {"dflash_sdpa_combine", "dflash_qmm_split_sum", "dflash_gdn_commit", "dflash_topk_merge"}
OWNERS = {kernel.name: name for name, operation in OPERATIONS.items() for kernel in operation.kernels}


@dataclass
class Watched(Kernels):
    """Every kernel open; counts launches by name, and notes what did not go to its kernel, and why."""

    ran: Counter[str] = field(default_factory=Counter)
    missed: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        execute = runner()

        def run(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
            self.ran[kernel.name] += 1
            return execute(kernel, launch)

        super().__init__(True, lambda operation, case: None, run)

    @property
    def launched(self) -> Counter[str]:
        """How often each operation ran."""
        counts = Counter[str]()
        for name, count in self.ran.items():
            counts[OWNERS[name]] += 0 if name in SECOND else count
        return counts

    def closed(self, operation: Operation, *arguments: Any, **options: Any) -> str | None:
        reason = super().closed(operation, *arguments, **options)
        if reason is not None:
            self.missed.add((operation.name, reason))
        return reason


@lru_cache
def target(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    family = BY_NAME[name]
    return build(replace(family, config={**family.config, **SIZES}), dtype)


@lru_cache
def draft(kind: str, dtype: mx.Dtype = mx.float32) -> DraftModel:
    """A sliding layer, whose window is shorter than the prompt, and a full one; its linear layers in 4 bits."""
    model = special_draft(
        DFLASH2 if kind == "dflash2" else {},
        vocab_size=VOCAB,
        num_target_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=512,  # long enough for `qmm_small_m` to add up slices
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        dflash_config={"target_layer_ids": [0, 1]},
    )
    quantize(model, 4, 32)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


@dataclass(frozen=True)
class Plain:
    """mlx_lm's greedy answer to a prompt; rows: [COUNT, V] log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    rows: mx.array

    @property
    def is_clear(self) -> bool:
        """Whether no token is near a tie, and they are no short loop."""
        best = mx.sort(self.rows, axis=-1)[:, -2:]
        return (best[:, 1] - best[:, 0]).min().item() > MARGIN and len(set(self.tokens)) > COUNT // 2


@lru_cache
def plain(name: str) -> Plain:
    """An answer that rounding cannot change."""
    for seed in range(1, 20):
        prompt = prompt_of(len(PROMPT), seed)
        tokens, rows = zip(*generate_step(mx.array(prompt), target(name), max_tokens=COUNT), strict=True)
        answer = Plain(prompt, list(tokens), mx.stack(rows))
        if answer.is_clear:
            return answer
    raise AssertionError(f"{name}: every answer has a near-tie")


def answered(name: str, kind: str, kernels: Kernels, pipelined: bool) -> tuple[list[Commit], Session]:
    """COUNT tokens; the real draft runs, and the truth up to some depth is put in the place of what it says."""
    truth = plain(name)
    session = session_over(target(name), None, BLOCK, pipelined, kernels)
    session.schedule, session.proposer = FixedBlock(BLOCK), Helped(draft(kind), session, truth.tokens, kernels)
    return list(decode(session, truth.prompt, max_tokens=COUNT)), session


PAIRS = [
    ("llama-4bit", "v1", False),
    ("llama-4bit", "dflash2", True),
    ("qwen3_5-4bit", "v1", True),
    ("qwen3_5-4bit", "dflash2", False),
    ("qwen3_moe-4bit", "v1", True),
    ("qwen3_next", "v1", True),
    ("qwen3", "dflash2", False),
]


@pytest.mark.parametrize(
    ("name", "kind", "pipelined"), PAIRS, ids=lambda v: {True: "pipelined", False: "simple"}.get(v, v)
)
def test_with_every_kernel_at_work_a_pair_says_what_mlx_lm_says(name: str, kind: str, pipelined: bool) -> None:
    """Each kernel alone may be right and two of them wrong together: layouts, dtypes and counts meet here."""
    kernels = Watched()
    commits, session = answered(name, kind, kernels, pipelined)
    truth = plain(name)
    assert [token for commit in commits for token in commit.tokens] == truth.tokens
    rows = mx.stack([row for commit in commits for row in commit.log_probs])
    assert mx.abs(rows - truth.rows).max().item() < ROUNDING
    assert 0 < session.stats.accepted < session.stats.drafted, "a script without rejections, or with nothing else"
    check_launches(kernels, session, sum(commit.drafted == BLOCK - 1 for commit in commits))


def check_launches(kernels: Watched, session: Session, blocks: int) -> None:
    """Nothing fell back, and every operation ran as often as `blocks` whole cycles need it."""
    assert not kernels.missed
    model = session.target.model  # as mlx_lm made it
    attention, deltas = (sum(name in layer for layer in model.layers) for name in ("self_attn", "linear_attn"))
    linears = [module for module in model.modules() if type(module) is nn.QuantizedLinear]
    quantised = sum(len(linear.weight) % 8 == 0 for linear in linears)  # but for the smallest
    assert attention
    least = {
        "accept": 1,
        "lm_head_topk": 1,
        "sdpa_rows": attention + 2,
        "qk_norm_rope": 2,
        "qmm_small_m": quantised + 2 * 7,
        "gdn_verify": deltas,
        "gdn_prework": deltas,
    }
    assert set(kernels.launched) == {name for name, count in least.items() if count}
    assert blocks >= 2
    for name, count in least.items():
        assert kernels.launched[name] >= blocks * count, name


SAMPLERS = {"greedy": {}, "seeded": dict(sampler=make_sampler(1.0, seed=3), rule="match")}


@pytest.mark.parametrize(("name", "how"), [("qwen3_5-4bit", "greedy"), ("llama-4bit", "seeded")])
def test_a_conversation_on_kernels_is_the_one_without(name: str, how: str, tokenizer) -> None:
    """Between turns a cache is cut back and kept: tapes, buffers and contexts that kernels left are read by others."""
    kernels = Watched()
    ours = dict(draft_model=draft("v1"), mode="dflash", block_size=BLOCK, pipelined=True, kernels=kernels)
    assert turns(name, tokenizer, **ours, **SAMPLERS[how]) == turns(name, tokenizer, **SAMPLERS[how])
    assert not kernels.missed
    assert set(OPERATIONS) - set(kernels.launched) == (set() if name == "qwen3_5-4bit" else GATED_DELTA)
    unused = {kernel for kernel in OWNERS.keys() - kernels.ran.keys() if OWNERS[kernel] in kernels.launched}
    assert unused == {"dflash_lm_head_topk_lse", "dflash_topk_merge_lse"}, "nobody asks for a sum of exponentials"


def turns(name: str, tokenizer, **request: Any) -> list[list[int]]:
    """Answers to a prompt and, with a token of each taken back, to what follows."""
    model, said, answers = target(name), plain(name).prompt, list[list[int]]()
    cache = make_prompt_cache(model, request.get("draft_model"))
    for new in ([], [7, 8, 9], [5]):
        said = [*said[: len(said) - bool(new)], *new]
        rest = said[cache.reuse(said) :]
        responses = stream_generate(model, tokenizer, rest, 6, prompt_cache=cache, **request)
        answers.append([response.token for response in responses])
        said = said + answers[-1]
    return answers


@pytest.mark.parametrize(("name", "seed"), [("llama-4bit", 2), ("qwen3_5-4bit", 6)])
def test_in_bfloat16_kernels_change_a_token_only_where_their_rounding_decides(name: str, seed: int) -> None:
    """MLX's CPU rounds every step to bfloat16 and kernels round results, so answers part at near-ties, and only there.

    Told apart by `compare`, which measures with the same kernels.
    """
    model, prompt, kernels = target(name, mx.bfloat16), prompt_of(len(PROMPT), seed), Watched()
    expected = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=COUNT)]
    session = session_over(model, None, BLOCK, True, kernels)
    session.schedule = FixedBlock(BLOCK)
    session.proposer = Helped(draft("v1", mx.bfloat16), session, expected, kernels)
    got = tokens_of(decode(session, prompt, max_tokens=COUNT))
    assert not kernels.missed
    found = compare(model, prompt, expected, got, kernels=kernels)
    assert found.kind == "near-tie" or (mx.metal.is_available() and found.kind == "identical"), found
