"""Attention kernels inside decoding: the same tokens as mlx_lm's loop, and nothing of a context is copied."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache

from dflash_mlx.accept import make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import Session, decode
from dflash_mlx.draft.context import FullLayer
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.kernels import sdpa_rows
from dflash_mlx.kernels.choice import STOCK, Kernels, references, through
from dflash_mlx.kernels.modules.attention import RowsAttention, swap
from dflash_mlx.kernels.operation import Arrays, Launch, MetalKernel, Operation, Runner
from dflash_mlx.proposers import Proposer
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.targets import Target, target_for
from tests.conftest import tiny_draft, tokens_of
from tests.families import BY_NAME, SCRIPTS, Family, ScriptedProposer, build, cases, prompt_of, reference, tiny
from tests.kernels.checks import runner, same_bits

SWAPPED = ("llama", "llama-tied", "llama-sliding", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5")
PROMPT = prompt_of(21)


class Counting(Kernels):
    """Counts what is run, by operation."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels.wired, kernels.decide, kernels.runner)
        self.ran: dict[str, int] = {}

    def run(self, operation: Operation, *arguments: Any, **options: Any) -> Arrays:
        self.ran[operation.name] = self.ran.get(operation.name, 0) + 1
        return super().run(operation, *arguments, **options)


class Recording:
    """A runner that keeps what it was given."""

    def __init__(self, run: Runner) -> None:
        self.run, self.launches = run, list[tuple[MetalKernel, Launch]]()

    def __call__(self, kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        self.launches.append((kernel, launch))
        return self.run(kernel, launch)

    @property
    def attention(self) -> list[Launch]:
        return [launch for kernel, launch in self.launches if kernel is sdpa_rows.PARTS]


def session(target: Target, proposer: Proposer, block_size: int = 4) -> Session:
    decider = make_decider(SamplingPolicy(), (), Draws(0))
    return Session(target, TargetCache(target.make_entries(), 0), proposer, decider, FixedBlock(block_size))


def decoded(target: Target, proposer: Proposer, count: int, block_size: int = 4) -> list[int]:
    return tokens_of(decode(session(target, proposer, block_size), PROMPT, max_tokens=count))[:count]


@pytest.mark.parametrize(("name", "dtype"), cases(BY_NAME[name] for name in SWAPPED))
def test_with_the_reference_in_its_layers_a_model_says_what_it_says(name: str, dtype: mx.Dtype):
    """The module around the operation projects, norms, rotates, appends and gates as mlx_lm's; a slip changes text."""
    truth, kernels = reference(name, PROMPT, 60, dtype), Counting(references())
    target = target_for(tiny(name, dtype), kernels)
    assert decoded(target, ScriptedProposer(truth, SCRIPTS["mixed"]), 60) == truth
    layers = sum(isinstance(module, RowsAttention) for module in target.inner.modules())  # type: ignore[attr-defined]
    assert layers and kernels.ran["sdpa_rows"] > 10


def wide(name: str) -> nn.Module:
    """A tiny model of the family with heads that the kernel takes."""
    family = BY_NAME[name]
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_hidden_layers=2)
    return build(Family("wide", family.module, {**family.config, **heads, "full_attention_interval": 2}))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5"])
def test_with_the_kernel_in_its_layers_a_model_says_what_it_says(name: str):
    """The kernel reads a cache that holds rejected rows behind its end, at lengths that grow by what was accepted.

    In float32: MLX's CPU attention rounds every step to bfloat16, the kernel only the result.
    """
    model = wide(name)
    truth = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=16)]
    run = Recording(runner())
    assert decoded(target_for(model, through(run)), ScriptedProposer(truth, SCRIPTS["mixed"]), 16) == truth
    assert len(run.attention) >= 5 and len(set(truth)) >= 8


WIDE_DRAFT = dict(head_dim=64, num_attention_heads=2, num_key_value_heads=1)
DRAFTS = {
    "full": {},
    "causal": {"dflash_config": {"causal": True}},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
}


def features(rows: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, rows, 128), key=mx.random.key(seed))


def block(rows: int = 5) -> mx.array:
    return mx.random.normal((1, rows, 64), key=mx.random.key(9))


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("ahead", [None, 0, 2], ids=["settled", "none-of-4", "2-of-4"])
def test_a_draft_sees_the_same_context_through_the_kernel(kind: str, window: int | None, ahead: int | None):
    """Wherever its rows lie in the buffer, how many of them hold, and while only the device knows which."""
    draft = tiny_draft(**WIDE_DRAFT, **DRAFTS[kind])
    draft.context_window = window
    stock, kernel, swapped = (_denoised(draft, k, ahead) for k in (STOCK, through(runner()), references()))
    assert mx.allclose(stock, kernel, atol=2e-5).item()
    same_bits(stock, swapped, kind)


def _denoised(draft: DraftModel, kernels: Kernels, ahead: int | None) -> mx.array:
    context = draft.make_context()
    draft.extend(context, features(19))
    if ahead is not None:
        draft.extend(context, features(4, seed=1), mx.array([ahead], mx.int32))
    return draft.denoise(block(), context, kernels)


def test_a_draft_without_context_falls_back_to_its_block():
    """A draft that joins late has nothing to attend to but its own rows."""
    draft = tiny_draft(**WIDE_DRAFT)
    stock, kernel = (draft.denoise(block(), draft.make_context(7), k) for k in (STOCK, through(runner())))
    assert mx.allclose(stock, kernel, atol=2e-5).item()


def test_a_drafts_context_is_neither_copied_nor_written(monkeypatch: pytest.MonkeyPatch):
    """With a copy of the context per layer and block, long contexts cost more than the attention itself."""
    draft, run = tiny_draft(**WIDE_DRAFT), Recording(runner())
    context = draft.make_context()
    draft.extend(context, features(19))
    mx.eval(context.arrays)
    monkeypatch.setattr(FullLayer, "with_block", lambda *rows: pytest.fail("the block was written behind the context"))
    mx.eval(draft.denoise(block(), context, through(run)))
    assert len(run.attention) == len(context.layers)
    assert not sdpa_rows.PARTS.contiguous  # else MLX would copy a view
    for launch, layer in zip(run.attention, context.layers, strict=True):
        assert [id(array) for array in launch.inputs[1:3]] == [id(array) for array in layer.arrays]
        assert launch.inputs[3].shape[2] == 5  # the block's own keys alone


def test_a_targets_cache_is_read_where_it_is():
    """Its buffers go to the kernel whole; the rows before the block are counted, not cut out."""
    run = Recording(runner())
    layer = swap(_attention(wide("llama")), through(run))
    assert isinstance(layer, RowsAttention)
    cache = KVCache()
    layer(block(30), "causal", cache)
    assert not run.launches  # a prompt
    layer(block(5), "causal", cache)
    (launch,) = run.attention
    assert launch.inputs[1] is cache.keys and launch.inputs[2] is cache.values
    assert launch.inputs[6].tolist() == [30] and launch.inputs[3].shape[2] == 5


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5"])
def test_what_is_not_a_simple_block_goes_through_mlx_lms_module(name: str):
    """Single rows are what plain decoding computes; a mask, a ring or a batch has rules that the kernel has not."""
    original = _attention(wide(name))
    ours = swap(original, through(lambda *launch: pytest.fail("a kernel ran")))
    assert ours is not None
    mask = mx.ones((5, 5), dtype=mx.bool_)
    quantised = lambda: KVCache().to_quantized(64, 8)  # noqa: E731
    calls = {
        "one row": (block(1), None, KVCache),
        "a prompt": (block(18), "causal", KVCache),
        "a mask": (block(), mask, KVCache),
        "no cache": (block(), "causal", lambda: None),
        "a ring": (block(), mask, lambda: RotatingKVCache(16)),
        "a quantised cache": (block(), "causal", quantised),
        "a batch": (mx.concatenate([block(), block()]), "causal", KVCache),
    }
    for what, (x, seen, cache) in calls.items():
        same_bits(ours(x, seen, cache()), original(x, seen, cache()), what)


def test_only_classes_that_are_known_are_swapped():
    """A subclass may attend otherwise."""

    class Other(type(tiny("llama").layers[0].self_attn)):  # type: ignore[misc]
        pass

    other = Other.__new__(Other)
    assert swap(other, references()) is None
    assert swap(nn.Linear(4, 4), references()) is None


@pytest.mark.parametrize("window", [None, 100, 4096])
def test_a_context_of_any_length_is_of_a_class_that_is_raced(window: int | None):
    """A case that no one races is closed without a word: long contexts, where it helps most, would be on stock."""
    raced = sdpa_rows.cases_of(mx.bfloat16, 128, 8, 2, window=window)
    asked = [
        sdpa_rows.case_of(mx.bfloat16, 128, 8, 2, capacity, window=window)
        for capacity in (0, 1024, 1025, 16384, 16385, 131072, 1 << 20)
    ]
    assert set(asked) <= set(raced)
    if window is None:
        classes = [dict(case.sizes)["capacity"] for case in asked]
        assert classes == [1024, 1024, 4096, 16384, 16384, 16384, 16384]


def test_target_and_draft_run_on_kernels_together():
    """A whole cycle as on a GPU: the draft's blocks in full view, the target's causal."""
    model = wide("llama")
    truth = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=8)]
    run = Recording(runner())
    kernels = through(run)
    target, draft = (
        target_for(model, kernels),
        tiny_draft(**WIDE_DRAFT, num_target_layers=2, dflash_config={"target_layer_ids": [0, 1]}),
    )
    proposer = BlockProposer(draft, target, draft.make_context(), kernels=kernels)
    assert decoded(target, proposer, 8) == truth
    modes = {dict(launch.template)["MODE"] for launch in run.attention}
    assert modes == {0, 1}


def _attention(model: nn.Module) -> nn.Module:
    return next(layer.self_attn for layer in target_for(model).layers if "self_attn" in layer)  # type: ignore[attr-defined]
