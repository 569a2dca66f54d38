"""Quantised targets and drafts in the decode loop, on the reference and on the kernel itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from dflash_mlx.accept import make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import Session, decode
from dflash_mlx.kernels.choice import STOCK, Kernels, references, through
from dflash_mlx.kernels.operation import Case, Launch, MetalKernel, Operation
from dflash_mlx.kernels.view import view_of
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.proposers.cases import cases_of_pair
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.targets import target_for
from dflash_mlx.targets.dense import DenseTarget
from tests.conftest import special_draft, tokens_of
from tests.families import BY_NAME, SCRIPTS, ScriptedProposer, build, prompt_of
from tests.kernels.checks import runner

PROMPT = prompt_of(21)
ROWS = 264  # of the vocabulary: a multiple of 8, so that the kernel takes the head
OWN = 72  # of a draft's own head


@lru_cache(maxsize=16)
def quantised(name: str, dtype: mx.Dtype, bits: int, group: int, **changes: object) -> nn.Module:
    """A tiny target of this family, every layer of it quantised that can be."""
    family = BY_NAME[name]
    model = build(replace(family, config={**family.config, **changes}), dtype)
    nn.quantize(
        model,
        group,
        bits,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % group == 0,
    )
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_only_products_that_see_blocks_are_raced(name: str):
    """A race takes seconds: a vision tower sees none, nor does an embedding that is no head."""
    model = copy.copy(quantised(name, mx.bfloat16, 4, 32, vocab_size=ROWS))
    tower = nn.Linear(64, 40).to_quantized(32, 4)
    tower.set_dtype(mx.bfloat16)
    shell = Shell(model, tower)
    kernels = references()
    draft = special_draft({}, num_target_layers=4, vocab_size=ROWS)
    raced = cases_of_pair(DenseTarget(view_of(shell, kernels)), draft, kernels)
    sizes = [(size["n"], size["k"]) for size in (dict(case.sizes) for case in raced if case.operation == "qmm_small_m")]
    assert (64, 64) in sizes and (40, 64) not in sizes
    assert sizes.count((ROWS, 64)) == 3, "the head, by classes of rows"
    if name == "llama":
        shell.language_model.lm_head = nn.Linear(64, ROWS, bias=False)
        raced = cases_of_pair(DenseTarget(view_of(shell, kernels)), draft, kernels)
        assert ROWS not in [dict(case.sizes)["n"] for case in raced if case.operation == "qmm_small_m"]


class Shell(nn.Module):
    """A language model beside a part that sees pictures."""

    def __init__(self, model: nn.Module, tower: nn.Module) -> None:
        super().__init__()
        self.language_model, self.vision_tower = model, tower


def plain(model: nn.Module, count: int) -> tuple[list[int], float]:
    """mlx_lm's greedy tokens, and the smallest distance between the two best log-probabilities on the way."""
    tokens, gaps = [], []
    for token, logprobs in generate_step(mx.array(PROMPT), model, max_tokens=count):
        tokens.append(token)
        best = mx.sort(logprobs.astype(mx.float32))[-2:]
        gaps.append((best[1] - best[0]).item())
    assert len(set(tokens)) >= count // 3, "the baseline repeats itself"
    return tokens, min(gaps)


def speculative(model: nn.Module, kernels: Kernels, truth: Sequence[int], script: str, block_size: int) -> list[int]:
    target = target_for(model, kernels)
    proposer = ScriptedProposer(truth, SCRIPTS[script])
    decider = make_decider(SamplingPolicy(), (), Draws(0))
    session = Session(target, TargetCache(target.make_entries(), 0), proposer, decider, FixedBlock(block_size))
    return tokens_of(decode(session, PROMPT, max_tokens=len(truth)))


@pytest.mark.parametrize("dtype, bits, group", [(mx.float32, 4, 32), (mx.bfloat16, 8, 64)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "qwen3_5", "gemma3_text"])
def test_quantised_targets_give_plain_tokens_with_references_swapped_in(name, dtype, bits, group) -> None:
    """The operation stands where the layer stood, so any difference is a mistake in the wiring."""
    model = quantised(name, dtype, bits, group)
    truth, _ = plain(model, 60)
    for script in ("mixed", "wide"):
        assert speculative(model, references(), truth, script, 16) == truth


@pytest.mark.parametrize("name, bits, group", [("llama-tied", 4, 32), ("qwen2", 8, 64)])
def test_a_quantised_target_gives_plain_tokens_through_the_kernel(name, bits, group) -> None:
    """The kernel rounds otherwise than MLX, by far less than the distance between any two tokens here."""
    launched: dict[str, int] = {}

    def run(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        launched[kernel.name] = launched.get(kernel.name, 0) + 1
        return runner()(kernel, launch)

    model = quantised(name, mx.float32, bits, group, vocab_size=ROWS, num_hidden_layers=2)
    truth, gap = plain(model, 18)
    assert gap > 1e-3, "a near-tie: choose another seed"
    assert speculative(model, through(run), truth, "mixed", 6) == truth
    per_block = 7 * 2 + 1  # linear layers of two layers, and the head
    assert launched["dflash_qmm_small_m"] >= 3 * per_block
    assert launched["dflash_qmm_small_m"] % per_block == 0


def test_every_linear_layer_of_a_quantised_draft_runs_on_the_kernel() -> None:
    """A layer left out would read its weights row by row; one called otherwise would draft otherwise."""
    draft = special_draft(dict(draft_vocab_size=OWN, own_embedding=True), intermediate_size=128)
    nn.quantize(draft, 32, 4, class_predicate=lambda _, m: type(m) is nn.Linear)
    target = target_for(build(BY_NAME["llama"]))
    features = mx.random.normal((1, 9, 2 * 64), key=mx.random.key(2))
    launched: list[tuple[int, ...]] = []

    def run(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        if kernel.name == "dflash_qmm_small_m":
            launched.append(launch.shapes[0])
        return runner()(kernel, launch)

    def only(operation: Operation, case: Case) -> str | None:
        return None if operation.name == "qmm_small_m" else "not here"

    hidden, tokens = [], []
    for kernels in (STOCK, references(), Kernels(True, only, run)):
        proposer = BlockProposer(draft, target, draft.make_context(), kernels=kernels)
        proposer.observe(features)
        proposal = proposer.propose(7, 5, 10)
        hidden.append(draft.denoise(features[:, :6, :64], proposer.context, kernels))
        tokens.append(proposal.tokens.tolist())
    assert mx.array_equal(hidden[0], hidden[1])
    assert mx.allclose(hidden[0], hidden[2], rtol=1e-4, atol=1e-4)
    assert tokens[0] == tokens[1] == tokens[2]
    context = [(9, 64), *[(9, 32)] * 2 * 2]  # fc; keys and values of two layers
    block = [(6, 64), (6, 32), (6, 32), (6, 64), (6, 128), (6, 128), (6, 64)]  # q, k, v, o, gate, up, down
    assert launched == context + block * 2 + [(5, OWN)] + block * 2
    wanted = {(size["n"], size["k"]) for size in (dict(case.sizes) for case in draft.cases())}
    assert wanted == {(64, 128), (32, 64), (64, 64), (128, 64), (OWN, 64)}
