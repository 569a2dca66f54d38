"""The draft's positions and its head through `qk_norm_rope` and `lm_head_topk`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.draft.model import DraftModel
from dflash_mlx.kernels.choice import STOCK, Kernels, references, through
from dflash_mlx.kernels.operation import Case, Operation
from dflash_mlx.kernels.qk_norm_rope import Heads
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.proposers.cases import cases_of_pair
from dflash_mlx.proposers.head import best_of_head, head_cases
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.targets import Target, target_for
from tests.conftest import DFLASH2, OWN_PARTS, special_draft
from tests.families import BY_NAME, build, tiny
from tests.generating import stream
from tests.kernels.checks import runner, same_bits
from tests.test_draft import VARIANTS, YARN, data

DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # parts and config
    "v1": ({}, {}),
    "yarn": ({}, dict(rope_scaling=YARN)),
    "sliding": ({}, VARIANTS["mixed"]),
    "selector": (DFLASH2, {}),
    "own head": (OWN_PARTS, {}),
    "soft cap": (dict(final_logit_softcapping=5.0), {}),
}
ROWS = 6


def made(name: str, **more: Any) -> DraftModel:
    """Attention is sharp and weighs much, so that every row has a token of its own, by its position."""
    parts, config = DRAFTS[name]
    draft = special_draft(parts, **config, **more)
    for layer in draft.layers:
        layer.self_attn.q_norm.weight = layer.self_attn.q_norm.weight * 6
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 30
    return draft


def proposed(draft: DraftModel, target: Target, kernels: Kernels, *sampling: Any, count: int = ROWS) -> mx.array:
    """[count] tokens after nine positions of context."""
    context = draft.make_context()
    draft.extend(context, mx.array(data(9)[0])[None])
    return BlockProposer(draft, target, context, *sampling, kernels=kernels).propose(7, count, 10).tokens


def only(*names: str) -> Kernels:
    """These operations on their kernels, the others on their references."""

    def decide(operation: Operation, case: Case) -> str | None:
        return None if operation.name in names else "not asked for"

    return Kernels(True, decide, runner())


@pytest.mark.parametrize("name", DRAFTS)
def test_with_references_a_draft_proposes_what_it_proposes(name: str):
    """Else switching kernels on would change the acceptance of a draft before any kernel runs."""
    draft = made(name)
    plain = proposed(draft, target_for(tiny("llama")), STOCK)
    kernels = references()
    again = proposed(draft, target_for(tiny("llama"), kernels), kernels)
    assert again.tolist() == plain.tolist() and len(set(plain.tolist())) > 2
    assert {"qk_norm_rope", "lm_head_topk"} <= {case.operation for case in kernels.reasons}


@pytest.mark.parametrize("name", ["v1", "yarn", "selector", "own head", "soft cap"])
def test_with_the_kernels_a_draft_proposes_the_same(name: str):
    """A wrong position or id would cost acceptance, and nothing else would show it."""
    draft = made(name)
    plain = proposed(draft, target_for(tiny("llama")), STOCK)
    kernels = only("qk_norm_rope", "lm_head_topk")
    assert proposed(draft, target_for(tiny("llama"), kernels), kernels).tolist() == plain.tolist()
    assert {case.operation for case, reason in kernels.reasons.items() if reason is None} == {
        "qk_norm_rope",
        "lm_head_topk",
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_quantised_head_of_the_target_is_read_by_the_kernel(name: str, bits: int):
    """The usual pair: the draft would run on the largest matrix of the model as before, or on wrong weights."""
    model = build(BY_NAME[name])
    nn.quantize(model, 32, bits, class_predicate=lambda path, m: hasattr(m, "to_quantized"))
    draft, kernels = made("v1"), only("lm_head_topk")
    plain = proposed(draft, target_for(model), STOCK)
    assert proposed(draft, target_for(model, kernels), kernels).tolist() == plain.tolist()
    (case,) = (case for case, reason in kernels.reasons.items() if reason is None)
    assert dict(case.sizes)["bits"] == bits
    assert case in head_cases(draft, target_for(model, kernels), kernels)


def test_positions_on_the_device_are_the_same_as_on_the_host():
    """The pipelined cycle knows them only there."""
    draft = special_draft({}, rope_scaling=YARN)
    attention = draft.layers[0].self_attn
    x = mx.array(data(9, 5)[1])[None]
    for kernels in (STOCK, references(), only("qk_norm_rope")):
        host = attention.keys_values(x, 13, kernels)
        device = attention.keys_values(x, mx.array([13], mx.int32), kernels)
        same_bits(host[0], device[0], "keys")
        assert np.allclose(np.array(host[0]), np.array(attention.keys_values(x, 13)[0]), atol=1e-5)


def test_what_only_the_kernel_needs_is_not_made_for_every_call(monkeypatch: pytest.MonkeyPatch):
    """A pair that runs one kernel would pay for the closed ones, per layer and cycle."""

    class Asked(Kernels):
        def run(self, operation: Operation, *arguments: Any, **options: Any) -> Any:
            asked.append(arguments)
            return super().run(operation, *arguments, **options)

    asked: list[tuple[Any, ...]] = []
    attention = special_draft({}, rope_scaling=YARN).layers[0].self_attn
    monkeypatch.setattr("dflash_mlx.draft.model.rotation_by", lambda rope: pytest.fail("made again"))
    for _ in range(2):
        attention.keys_values(mx.ones((1, 5, 64)), 13, Asked(True, lambda operation, case: "closed"))
    first, second = (call[0] for call in asked if isinstance(call[0], Heads))
    assert first.positions == second.positions == 13 and type(first.positions) is int
    assert first.rotation is second.rotation


def test_the_selector_has_the_same_candidates():
    """Another candidate, and the walk would leave the path that the draft was trained for."""
    draft = special_draft(DFLASH2)
    draft.known_tokens = 200
    kernels = only("lm_head_topk")
    target = target_for(tiny("llama"), kernels)
    hidden = mx.random.normal((ROWS, 64), key=mx.random.key(1))
    logits = target.head(hidden[None])[0][:, :200]
    candidates = best_of_head(hidden, draft, target, kernels)
    assert candidates is not None
    order = np.sort(np.argsort(-np.array(logits), axis=1)[:, :6], axis=1)
    assert candidates.ids.tolist() == order.tolist()
    assert np.allclose(np.array(candidates.logits), np.take_along_axis(np.array(logits), order, 1), atol=1e-5)


def test_what_needs_all_logits_gets_them():
    """A draft that samples hands over q; one that multiplies its logits may tie others; one row is MLX's own matter."""
    kernels = only("lm_head_topk")
    target = target_for(tiny("llama"), kernels)
    sampling = (SamplingPolicy(1.0), Draws(3))
    proposed(special_draft({}), target, kernels, *sampling)
    proposed(special_draft(dict(output_multiplier=0.5)), target, kernels)
    proposed(special_draft({}), target, kernels, count=1)
    assert "lm_head_topk" not in {case.operation for case, reason in kernels.reasons.items()}


def test_all_kernels_of_the_draft_run_together():
    """Their layouts meet: heads from one, attention in the other."""
    draft, kernels = made("v1", head_dim=64), through(runner())
    plain = proposed(draft, target_for(tiny("llama")), STOCK)
    assert proposed(draft, target_for(tiny("llama"), kernels), kernels).tolist() == plain.tolist()
    opened = {case.operation for case, reason in kernels.reasons.items() if reason is None}
    assert {"qk_norm_rope", "lm_head_topk", "sdpa_rows"} <= opened


@pytest.mark.parametrize("parts", [{}, DFLASH2], ids=["v1", "selector"])
def test_everything_that_is_asked_for_was_raced(parts: dict[str, Any], tokenizer: Any):
    """A case that no one races stays closed on every machine."""
    draft, kernels, model = special_draft(parts), references(), tiny("llama")
    list(stream("llama", tokenizer, draft_model=draft, kernels=kernels, max_tokens=30, block_size=6))
    asked = set(kernels.reasons)
    assert {"qk_norm_rope", "lm_head_topk", "accept"} <= {case.operation for case in asked}
    assert asked <= set(cases_of_pair(target_for(model, kernels), draft, kernels))
