"""Write the README's tables from the committed results, between their markers; a test checks that they agree.

python -m bench.report [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"


def demo_table(result: dict[str, Any]) -> str:
    """Per category and in all: identity, acceptance, and speed-ups on both clocks."""
    machine, settings, total = result["machine"], result["settings"], result["all"]
    lines = [
        "| prompts | n | same tokens | tokens per cycle | drafts accepted | `dflash`, with prefill "
        "| generation only | `auto`, with prefill | generation only |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in [*result["categories"].items(), ("**all**", total)]:
        dflash, auto = row["dflash"], row["auto"]
        lines.append(
            f"| {name} | {row['prompts']} | {row['identical']} of {row['prompts']} "
            f"| {row['mean_acceptance_length']:.2f} | {row['draft_acceptance_rate']:.0%} "
            f"| {dflash['speedup_request']:.2f}x | {dflash['speedup_decode']:.2f}x "
            f"| {auto['speedup_request']:.2f}x | {auto['speedup_decode']:.2f}x |"
        )
    lines += [
        "",
        "Times of `--mode plain` divided by those of `--mode dflash` and of the default, `--mode auto`. "
        f"Single prompts range from {total['dflash']['min']:.2f}x to {total['dflash']['max']:.2f}x with `dflash` and "
        f"from {total['auto']['min']:.2f}x to {total['auto']['max']:.2f}x with `auto`. "
        f"Block {settings['block_size']}, greedy, "
        f"at most {settings['tokens']} tokens, target in {settings['target_dtype']}; {machine['chip']}, "
        f"{machine['cores']} cores, {machine['system']}, mlx {machine['mlx']}, {machine['date']}. {machine['blas']} "
        f"Order per prompt: {settings['order']}. `{result['command']}`, "
        "[bench/results/demo.json](bench/results/demo.json).",
    ]
    return "\n".join(lines)


def overhead_table(result: dict[str, Any]) -> str:
    """The loop's own cost beside mlx_lm's, on a dense and on a hybrid model."""
    compared = result["schema"] != "dflash-overhead-2"  # the first without pipelined cycles
    lines = [
        "| random model | mlx_lm, steps/s | ours without drafts | cycles of block 4, all rejected | all accepted "
        "| rollback, share of a cycle that rejects all |" + " pipelined over simple cycles, with a draft |" * compared,
        "|---|---|---|---|---|---|" + "---|" * compared,
    ]
    names = {"dense": "dense, 2 layers", "hybrid": "hybrid, 3 gated-delta layers + 1"}
    for name, row in result["models"].items():
        rate = row["median_per_second"]
        lines.append(
            f"| {names[name]} | {rate['mlx_lm']:.0f} | {rate['plain']:.0f} ({row['ratio_plain']:.2f}) "
            f"| {rate['block of 4']:.0f} ({row['ratio_cycle']:.2f}) "
            f"| {rate['block of 4, kept']:.0f} ({row['ratio_cycle_kept']:.2f}) | {row['rollback_share_of_cycle']:.0%} |"
            + (f" {row['ratio_pipelined']:.2f}x |" if compared else "")
        )
    machine, runs = result["machine"], len(next(iter(result["models"].values()))["per_second"]["plain"])
    lines += [
        "",
        "Models so small that little but the loop is left; in brackets the share of mlx_lm's steps per second. Medians "
        f"of {runs} runs in one process; {machine['chip']}, {machine['cores']} cores, {machine['system']}, mlx "
        f"{machine['mlx']}, {machine['date']}. `{result['command']}`, "
        "[bench/results/overhead.json](bench/results/overhead.json).",
    ]
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {"demo": demo_table, "overhead": overhead_table}


def render(text: str) -> str:
    """The README's text with every block made anew."""
    for name, make in BLOCKS.items():
        block = make(json.loads((RESULTS / f"{name}.json").read_text()))
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
        match = pattern.search(text)
        if not match:
            raise SystemExit(f"README.md has no markers <!-- {name}:begin --> and <!-- {name}:end -->.")
        text = f"{text[: match.start()]}{match[1]}{block}\n{match[2]}{text[match.end() :]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    path = ROOT / "README.md"
    old = path.read_text()
    new = render(old)
    if "--check" in (sys.argv[1:] if argv is None else argv):
        print("README tables agree." if new == old else "README tables differ: run python -m bench.report")
        return int(new != old)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
