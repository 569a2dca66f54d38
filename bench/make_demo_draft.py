"""Quantise a bf16 draft folder into the form that ships as `dflash_mlx/demo/draft`.

    python bench/make_demo_draft.py DRAFT_FOLDER OUTPUT_FOLDER

Matrices become 8 bits in groups of 64 (`.weight`, `.scales`, `.biases`, scales in the weights' dtype); norms
stay. Names are those of the z-lab checkpoint; config.json gains `quantization`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import mlx.core as mx
import numpy as np

BITS = 8
GROUP_SIZE = 64


def quantise(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Pack every matrix [out, in]; vectors (norms) are returned as they are."""
    packed: dict[str, mx.array] = {}
    for name, value in weights.items():
        if value.ndim != 2:
            packed[name] = value
            continue
        module = name.removesuffix(".weight")
        parts = mx.quantize(value, group_size=GROUP_SIZE, bits=BITS)
        packed |= {f"{module}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts, strict=True)}
    return packed


def worst_error(weights: dict[str, mx.array], packed: dict[str, mx.array]) -> float:
    """Largest |dequantised - original| in units of the group's step; 0.5 is rounding alone."""
    worst = 0.0
    for name, value in weights.items():
        if value.ndim == 2:
            module = name.removesuffix(".weight")
            parts = (packed[f"{module}.{kind}"] for kind in ("weight", "scales", "biases"))
            weight, scales, biases = parts
            back = mx.dequantize(
                weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=GROUP_SIZE, bits=BITS
            )
            step = mx.repeat(mx.abs(scales.astype(mx.float32)), GROUP_SIZE, axis=1)
            worst = max(worst, float(np.array(mx.max(mx.abs(back - value.astype(mx.float32)) / step))))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="draft folder with config.json and model.safetensors")
    parser.add_argument("output", type=Path, help="folder to write config.json and model.safetensors to")
    args = parser.parse_args()
    weights = mx.load(str(args.source / "model.safetensors"))
    assert isinstance(weights, dict)
    packed = quantise(weights)
    args.output.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(args.output / "model.safetensors"), packed, metadata={"format": "mlx"})
    config = json.loads((args.source / "config.json").read_text(encoding="utf-8"))
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": BITS}
    (args.output / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    size = (args.output / "model.safetensors").stat().st_size
    print(f"{size} bytes; worst error {worst_error(weights, packed):.2f} steps")


if __name__ == "__main__":
    main()
