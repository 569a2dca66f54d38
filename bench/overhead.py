"""What the decode loop costs beside mlx_lm's own, on models so small that little else is left.

    python -m bench.overhead

Two models: a dense one of two layers, and a hybrid of three gated-delta layers and one attention layer. For each, in
one process, in turn and then in reverse turn (A B .. F F .. B A), medians of:

    mlx_lm             steps per second of its `generate_step`
    plain              our cycles without drafts (one token per cycle, so a cycle is a step)
    block of 4         cycles with three drafts, all rejected: every cycle rolls back
    block of 4, kept   cycles with three drafts, all accepted: no cycle rolls back
    draft, simple      cycles with a real draft of two layers and three drafts, of which 0 to 3 are accepted
    draft, pipelined   the same cycles, whose next draft is submitted before the verdict is read

The two blocks of 4 run forwards of the same width and differ in what a rejection costs: on the dense model an offset is
set back, on the hybrid the recurrent layers replay the kept row. Both loops keep one step in flight while the caller
handles the last token, ours where there are no drafts to wait for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 400
MODELS = ("dense", "hybrid")
Arm = Callable[[], Iterator[Any]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="A B .. F F .. B A each (default 6)")
    parser.add_argument("--out", type=Path, help="write the JSON here; the README's is bench/results/overhead.json")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds has to be 1 or more, got {args.rounds}")
    from . import machine

    result: dict[str, Any] = {
        "schema": "dflash-overhead-3",
        "command": "python -m bench.overhead",
        "machine": machine.card(),
        "tokens": TOKENS,
        "models": {name: measure(make_model(name), args.rounds) for name in MODELS},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in MODELS:
        show(name, result["models"][name])
    return 0


def measure(model: Any, rounds: int) -> dict[str, Any]:
    """Rates of all arms of one model, and what follows from their medians."""
    arms = make_arms(model)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for name in arms:
        per_second(arms[name])  # warm-up
    for _ in range(rounds):
        for name in [*arms, *reversed(arms)]:
            rates[name].append(per_second(arms[name]))
    median = {name: float(np.median(values)) for name, values in rates.items()}
    rejected, kept = 1 / median["block of 4"], 1 / median["block of 4, kept"]
    return {
        "per_second": rates,
        "median_per_second": median,
        "ratio_plain": median["plain"] / median["mlx_lm"],
        "ratio_cycle": median["block of 4"] / median["mlx_lm"],
        "ratio_cycle_kept": median["block of 4, kept"] / median["mlx_lm"],
        "rollback_share_of_cycle": (rejected - kept) / rejected,
        "ratio_pipelined": median["draft, pipelined"] / median["draft, simple"],
    }


def show(name: str, row: dict[str, Any]) -> None:
    print(name)
    for arm, values in row["per_second"].items():
        median = row["median_per_second"][arm]
        spread = f"(min {min(values):.0f}, max {max(values):.0f}, n {len(values)})"
        print(f"  {arm:17s} {median:8.0f} per second {spread}, {median / row['median_per_second']['mlx_lm']:.2f}")
    print(f"  of a cycle that rejects all, rollback is {row['rollback_share_of_cycle']:.0%}")
    print(f"  pipelined cycles per second over simple ones with the same draft: {row['ratio_pipelined']:.2f}")


def make_model(name: str) -> Any:
    import mlx.core as mx
    from mlx_lm.models import llama, qwen3_5

    mx.random.seed(0)
    model: Any
    if name == "dense":
        model = llama.Model(llama.ModelArgs("llama", 64, 2, 128, 4, 1e-5, 256, head_dim=16, num_key_value_heads=2))
    else:
        text = {
            "model_type": "qwen3_5_text",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "vocab_size": 256,
            "max_position_embeddings": 2048,
            "full_attention_interval": 4,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "type": "default"},
        }
        model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": text}))
    model.eval()
    mx.eval(model.parameters())
    return model


def make_draft(model: Any) -> Any:
    """A random draft of two layers for one of the models."""
    import mlx.core as mx

    from dflash_mlx.config import DraftConfig
    from dflash_mlx.draft.model import DraftModel
    from dflash_mlx.targets import target_for

    spec = target_for(model).spec
    config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": 2,
        "intermediate_size": 2 * spec.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "num_target_layers": spec.n_layers,
        "block_size": 4,
        "dflash_config": {"target_layer_ids": [0, spec.n_layers - 1], "mask_token_id": spec.vocab_size - 1},
    }
    mx.random.seed(1)
    draft = DraftModel(DraftConfig.from_dict(config))
    draft.eval()
    mx.eval(draft.parameters())
    return draft


def make_arms(model: Any) -> dict[str, Arm]:
    """name -> a fresh run whose items are steps or cycles."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from dflash_mlx.accept import make_decider
    from dflash_mlx.blocksize import FixedBlock
    from dflash_mlx.cache import TargetCache
    from dflash_mlx.decode import Session, decode
    from dflash_mlx.proposal import Proposal
    from dflash_mlx.proposers import NullProposer, Proposer
    from dflash_mlx.proposers.block import BlockProposer
    from dflash_mlx.sampling import Draws, Position, SamplingPolicy
    from dflash_mlx.targets import target_for

    target, prompt = target_for(model), [1, 2, 3, 4]
    steps = generate_step(mx.array(prompt), model, max_tokens=4 * TOKENS)
    truth = [token for token, _ in steps]

    class Known(NullProposer):
        """Three drafts: the target's own tokens, or those with the first one made wrong."""

        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.wrong = wrong

        def propose(self, anchor: int, limit: int, position: int) -> Proposal:
            start = position - len(prompt)
            tokens = truth[start : start + min(limit, 3)]
            if self.wrong and tokens:
                tokens[0] = (tokens[0] + 1) % 256
            return Proposal(mx.array(tokens, dtype=mx.int32))

    draft = make_draft(model)
    told = mx.array([0] * len(prompt) + truth, mx.int32)

    class Helped(BlockProposer):
        """The draft runs, and what it says is replaced by the target's own tokens up to 0 to 3 of them."""

        def _draft(self, anchor: mx.array, limit: int, position: Position) -> Proposal:
            own, place = super()._draft(anchor, limit, position).tokens, mx.array(position).reshape(1)
            right = told[place + mx.arange(limit)]
            return Proposal(mx.where(mx.arange(limit) < place % 4, right, (right + 1 + 0 * own) % 256))

    def ours(proposer: Proposer, block_size: int, tokens: int, pipelined: bool = False) -> Iterator[Any]:
        cache = TargetCache(target.make_entries(), 0)
        decider = make_decider(SamplingPolicy(), (), Draws(0))
        session = Session(target, cache, proposer, decider, FixedBlock(block_size), pipelined=pipelined)
        return decode(session, prompt, max_tokens=tokens)

    def drafting(pipelined: bool) -> Iterator[Any]:
        return ours(Helped(draft, target, draft.make_context()), 4, TOKENS, pipelined)

    return {
        "mlx_lm": lambda: generate_step(mx.array(prompt), model, max_tokens=TOKENS),
        "plain": lambda: ours(NullProposer(), 1, TOKENS),
        "block of 4": lambda: ours(Known(wrong=True), 4, TOKENS),
        "block of 4, kept": lambda: ours(Known(wrong=False), 4, TOKENS),
        "draft, simple": lambda: drafting(False),
        "draft, pipelined": lambda: drafting(True),
    }


def per_second(arm: Arm) -> float:
    """Items after the first, so that prefill is left out."""
    items = arm()
    next(items)
    start = time.perf_counter()
    count = sum(1 for _ in items)
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
