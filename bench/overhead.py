"""What the decode loop costs beside mlx_lm's own, on a model so small that little else is left.

    python -m bench.overhead

Cycles per second of this project's loop without drafts (K = 0, one token per cycle, so a cycle is a step) and with a
scripted proposer, against steps per second of mlx_lm's `generate_step`, in one process, order A B C C B A, medians.
Both loops keep one step in flight while the caller handles the last token, ours where there are no drafts to wait for.
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="A B C C B A each (default 6)")
    parser.add_argument("--out", type=Path, help="write the JSON here; the README's is bench/results/overhead.json")
    args = parser.parse_args(argv)
    from bench import machine

    arms = make_arms()
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for name in arms:
        steps_per_second(arms[name])  # warm-up
    for _ in range(args.rounds):
        for name in [*arms, *reversed(arms)]:
            rates[name].append(steps_per_second(arms[name]))
    median = {name: float(np.median(values)) for name, values in rates.items()}
    result = {
        "schema": "dflash-overhead-1",
        "command": "python -m bench.overhead",
        "machine": machine.card(),
        "tokens": TOKENS,
        "per_second": rates,
        "median_per_second": median,
        "ratio_plain": median["plain"] / median["mlx_lm"],
        "ratio_cycle": median["block of 4"] / median["mlx_lm"],
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, values in rates.items():
        print(
            f"{name:12s} {median[name]:8.0f} per second (min {min(values):.0f}, max {max(values):.0f}, n {len(values)})"
        )
    print(f"plain cycles / mlx_lm steps: {result['ratio_plain']:.2f}")
    print(f"cycles of block 4 / mlx_lm steps: {result['ratio_cycle']:.2f}")
    return 0


def make_arms() -> dict[str, Callable[[], Iterator[Any]]]:
    """name -> a fresh run whose items are steps or cycles."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models import llama

    from dflash_mlx.accept import make_decider
    from dflash_mlx.blocksize import FixedBlock
    from dflash_mlx.cache import TargetCache
    from dflash_mlx.decode import Session, decode
    from dflash_mlx.proposal import Proposal
    from dflash_mlx.proposers import NullProposer, Proposer
    from dflash_mlx.sampling import Draws, SamplingPolicy
    from dflash_mlx.targets import target_for

    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs("llama", 64, 2, 128, 4, 1e-5, 256, head_dim=16, num_key_value_heads=2))
    model.eval()
    mx.eval(model.parameters())
    target, prompt = target_for(model), [1, 2, 3, 4]

    class Constant(NullProposer):
        """Three drafts that are never right: every cycle rolls back."""

        def propose(self, anchor: int, limit: int, position: int) -> Proposal:
            return Proposal(mx.full((min(limit, 3),), (anchor + 1) % 256, dtype=mx.int32))

    def ours(proposer: Proposer, block_size: int) -> Iterator[Any]:
        cache = TargetCache(target.make_entries(), 0)
        decider = make_decider(SamplingPolicy(), (), Draws(0))
        return decode(Session(target, cache, proposer, decider, FixedBlock(block_size)), prompt, max_tokens=TOKENS)

    return {
        "mlx_lm": lambda: generate_step(mx.array(prompt), model, max_tokens=TOKENS),
        "plain": lambda: ours(NullProposer(), 1),
        "block of 4": lambda: ours(Constant(), 4),
    }


def steps_per_second(arm: Callable[[], Iterator[Any]]) -> float:
    """After the first item, so that prefill is left out."""
    items = arm()
    next(items)
    start = time.perf_counter()
    count = sum(1 for _ in items)
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
