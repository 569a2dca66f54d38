"""The kernels of the gated delta layers at work in decoding: mlx_lm's tokens, whatever was accepted."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.accept import make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import Session, decode
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.operation import Launch, MetalKernel
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.targets import target_for
from tests.conftest import tokens_of
from tests.families import BY_NAME, SCRIPTS, ScriptedProposer, build, prompt_of
from tests.kernels.checks import runner

PROMPT = prompt_of(12)
COUNT = 24
SIZES = dict(linear_key_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=2, linear_value_head_dim=16)
TARGETS = [("qwen3_5", mx.float32), ("qwen3_5", mx.bfloat16), ("qwen3_next", mx.float32)]


class Counted:
    """A runner that keeps the names of what it launched."""

    def __init__(self) -> None:
        self.run, self.names = runner(), []

    def __call__(self, kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        self.names.append(kernel.name)
        return self.run(kernel, launch)


def gated_delta_only(run: Counted) -> Kernels:
    return Kernels(True, lambda operation, case: None if operation.name.startswith("gdn_") else "not here", run)


@pytest.fixture(scope="module", params=TARGETS, ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('mlx.core.')}")
def target(request: pytest.FixtureRequest):
    """A tiny hybrid whose key heads have the kernel's size, and its own greedy tokens."""
    name, dtype = request.param
    family = BY_NAME[name]
    model = build(dataclasses.replace(family, config={**family.config, **SIZES}), dtype)
    truth = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=COUNT)]
    assert len(set(truth)) > 8
    return model, truth


@pytest.mark.parametrize("script", ["mixed", "wide"])
def test_decoding_through_the_kernels_gives_mlx_lms_tokens(target, script: str) -> None:
    """A count that is read on the device and a state that is replayed late are as good as a rollback."""
    model, truth = target
    run = Counted()
    adapter = target_for(model, gated_delta_only(run))
    cache = TargetCache(adapter.make_entries(), 0)
    decider = make_decider(SamplingPolicy(), (), Draws(0))
    session = Session(adapter, cache, ScriptedProposer(truth, SCRIPTS[script]), decider, FixedBlock(4))
    assert tokens_of(decode(session, PROMPT, max_tokens=COUNT)) == truth
    launched = {name: run.names.count(name) for name in run.names}
    assert launched["dflash_gdn_verify"] == launched["dflash_gdn_prework"] >= 3 * 4
    assert cache.length == len(PROMPT) + COUNT - 1


def test_the_state_after_a_block_is_the_state_after_its_kept_rows(target) -> None:
    """Of mlx_lm's module, as float32 sums in another order allow; and a flush gives what the next block starts from."""
    model, _ = target
    adapter = target_for(model, gated_delta_only(Counted()))
    cache, oracle = TargetCache(adapter.make_entries(), 0), make_prompt_cache(model)
    for ids, keep in (([PROMPT], len(PROMPT)), ([[3, 1, 4, 1, 5]], 2), ([[9, 2, 6]], 3), ([[5]], 1)):
        cache.begin(len(ids[0]))
        mx.eval(adapter.forward(mx.array(ids), cache).hidden)
        cache.commit(keep)
        model(mx.array([ids[0][:keep]]), cache=oracle)
    cache.evaluate()
    first, theirs = cache.entries[0], oracle[0]
    scale = mx.abs(theirs[1]).max().item()
    tolerance = 1e-5 if theirs[0].dtype == mx.float32 else 3e-2
    assert mx.array_equal(first[0], theirs[0])  # the convolution's window is never computed, only moved
    assert mx.abs(first[1] - theirs[1]).max().item() <= tolerance * scale
