"""What the tests of generation share: a tiny pair, scripted drafts, a target that says what it is told."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_mlx import stream_generate
from dflash_mlx.blocksize import Costs
from tests.conftest import tiny_draft
from tests.families import SCRIPTS, ScriptedProposer, prompt_of, tiny

PROMPT = prompt_of(21)
DRAFT = tiny_draft()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch):
    """Replace the draft's proposer by a scripted one, so that drafts are accepted to scripted depths."""

    def use(truth, script="mixed"):
        def make(draft, target, context, *sampling):
            proposer = ScriptedProposer(truth, SCRIPTS[script], (0, 2))
            extend, observe, trim_to = draft.extend, proposer.observe, proposer.trim_to

            def both(features):
                observe(features)
                extend(context, features)

            def cut(length):
                trim_to(length)
                if length < context.length:
                    context.drop(context.length - length)

            proposer.observe, proposer.trim_to = both, cut
            return proposer

        monkeypatch.setattr("dflash_mlx.request.BlockProposer", make)

    return use


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where speculation may pay, so that `auto` adapts."""
    monkeypatch.setattr("dflash_mlx.fallback._why_not_on_cpu", lambda dtype: None)


def know(costs: Costs, seconds: dict[int, float]) -> None:
    """As if these had been measured, by number of drafts."""
    for drafts, cost in seconds.items():
        for _ in range(2):  # the first is not believed
            costs.update(drafts, cost, 0)


def stream(name, tokenizer, prompt=PROMPT, **kwargs):
    kwargs.setdefault("draft_model", DRAFT)
    if kwargs["draft_model"] is not None:
        kwargs.setdefault("mode", "dflash")
    return stream_generate(tiny(name), tokenizer, prompt, **kwargs)


TEXT = "Příliš žluťoučký kůň. 日本語のテキスト 🦊🦊 konec! "


def text_ids(tokenizer, text: str, offset: int) -> list[int]:
    return tokenizer.encode("x" * offset + text, add_special_tokens=False)


def speak(monkeypatch: pytest.MonkeyPatch, scripted, ids: list[int], prompt_length: int, script: str) -> None:
    """Make the target say `ids`: the decider's greedy choice is looked up by absolute position."""
    from dflash_mlx import accept

    table = mx.array([0] * prompt_length + ids + [0] * 64, dtype=mx.int32)

    def choose(policy, draws, logits, position):
        return table[position : position + logits.shape[0]]

    monkeypatch.setattr(accept, "_choose", choose)
    scripted(ids, script)
