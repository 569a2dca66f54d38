"""Quantise a bf16 draft folder as `dflash_mlx/demo/draft` is: the layers' matrices in 8 bits, groups of 64.

    python -m bench.make_demo_draft DRAFT_FOLDER OUTPUT_FOLDER

`dflash-metal convert --bits 8` does the same; this one adds by how much a weight has moved. (The draft that ships has
its fusion packed too: it was made before fusions stayed wide.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.convert import Recipe, convert_draft
from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.model import DraftModel

RECIPE = Recipe(bits=8, group_size=64)


def worst_error(original: DraftModel, packed: DraftModel) -> float:
    """Largest |dequantised - original| in units of the group's step; 0.5 is rounding alone."""
    worst, wide = 0.0, dict(original.named_modules())
    for path, module in packed.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            scales = module.scales.astype(mx.float32)
            biases = None if module.biases is None else module.biases.astype(mx.float32)
            back = mx.dequantize(module.weight, scales, biases, group_size=module.group_size, bits=module.bits)
            step = mx.repeat(mx.abs(scales), module.group_size, axis=1)
            off = mx.abs(back - wide[path].weight.astype(mx.float32)) / step
            worst = max(worst, float(np.array(mx.max(off))))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="draft folder with config.json and model.safetensors")
    parser.add_argument("output", type=Path, help="folder to make")
    args = parser.parse_args()
    convert_draft(args.source, args.output, RECIPE, lambda message, share: print(message))
    size = (args.output / "model.safetensors").stat().st_size
    worst = worst_error(load_draft(args.source), load_draft(args.output))
    print(f"{size} bytes; worst error {worst:.2f} steps")


if __name__ == "__main__":
    main()
