"""The embedded pair: plain, dflash (a block every cycle) and auto (rests where drafts do not pay), identity checked.

    python -m bench.demo                      all prompts, 128 tokens each, half an hour on two cores
    python -m bench.demo --prompts 4 --tokens 64 --out demo.json

The arms are this project's own loop in one process, in the order A B C C B A per prompt after a warm-up of each that
is discarded; request time includes prefill.
Tokens are compared by `dflash_mlx.divergence`: a near-tie is reported with its margin, and a bug fails the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ARMS = ("plain", "dflash", "auto")
ORDER = (*ARMS, *reversed(ARMS))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--prompts", type=int, help="only the first n of every category mixed (default: all)")
    made.add_argument("--category", help="only the prompts of this one")
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--block-size", type=int, help="default: the draft's choice for this machine")
    made.add_argument("--draft-vocabulary", choices=["auto", "full"], default="auto", help="full: propose every token")
    made.add_argument("--blas", choices=["auto", "off"], default="auto")
    made.add_argument("--dtype")
    made.add_argument("--gguf")
    made.add_argument("--out", type=Path, help="write the JSON here; the README's is bench/results/demo.json")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    result = run(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(summary(result)))
    return int(any(row.get("divergence") == "bug" for row in result["prompts"]))


def run(args: argparse.Namespace) -> dict[str, Any]:
    from bench import machine
    from dflash_mlx import load

    tell = lambda message, share: print(message, file=sys.stderr) if share is None else None  # noqa: E731
    wanted = dict(blas=args.blas, dtype=args.dtype, gguf=args.gguf, draft_vocabulary=args.draft_vocabulary)
    pair = load("demo", draft="auto", **wanted, progress=tell)
    card = machine.card()
    prompts = choose(args.prompts, args.category)
    for arm in ARMS:  # warm-up, discarded
        ask(pair, prompts[0]["prompt"], arm, 16, args.block_size)
    rows = []
    for number, item in enumerate(prompts, 1):
        trials = [ask(pair, item["prompt"], arm, args.tokens, args.block_size) for arm in ORDER]
        row = measured(item, trials) | same_tokens(pair, item["prompt"], [trial["tokens"] for trial in trials])
        rows.append(row)
        done = f"{number}/{len(prompts)} {row['category']}"
        print(f"{done}: dflash {row['speedup_dflash']:.2f}, auto {row['speedup_auto']:.2f}", file=sys.stderr)
    return {
        "schema": "dflash-demo-2",
        "command": command(args),
        "machine": card,
        "settings": {
            "tokens": args.tokens,
            "order": " ".join(ORDER),
            "block_size": rows[0]["block_size"],
            "draft_vocabulary": pair[2].reduced_size,
            "temperature": 0,
            "target_dtype": str(pair[0].model.norm.weight.dtype).removeprefix("mlx.core."),
        },
        "prompts": rows,
        "categories": {name: pool([r for r in rows if r["category"] == name]) for name in categories(rows)},
        "all": pool(rows),
    }


def command(args: argparse.Namespace) -> str:
    """What to type to repeat this, without where the result goes."""
    given = {k: v for k, v in vars(args).items() if k not in ("out", "gguf") and v != parser().get_default(k)}
    return " ".join(["python -m bench.demo", *(f"--{k.replace('_', '-')} {v}" for k, v in given.items())])


def choose(count: int | None, category: str | None) -> list[dict[str, str]]:
    """Every prompt (of a category), or `count` of them taken round-robin from the categories."""
    prompts = [json.loads(line) for line in (HERE / "prompts" / "demo.jsonl").read_text().splitlines()]
    prompts = [item for item in prompts if category in (None, item["category"])]
    if count is None:
        return prompts
    seen: Counter[str] = Counter()
    ranked = []
    for item in prompts:
        ranked.append((seen[item["category"]], item))
        seen[item["category"]] += 1
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])][:count]


def ask(pair: Any, prompt: str, arm: str, tokens: int, block_size: int | None) -> dict[str, Any]:
    """One request, timed from the call to its last response."""
    from dflash_mlx import stream_generate
    from dflash_mlx.cli import chat_ids

    model, tokenizer, draft = pair
    ids = chat_ids(tokenizer, prompt, None, raw=False)
    start = time.perf_counter()
    blocks = {"plain": None, "dflash": block_size or draft.block_size, "auto": None}
    responses = list(stream_generate(model, tokenizer, ids, tokens, draft, mode=arm, block_size=blocks[arm]))
    seconds = time.perf_counter() - start
    last = responses[-1]
    return {
        "arm": arm,
        "request_s": seconds,
        "decode_s": last.timings.decode_s,
        "tokens": [r.token for r in responses],
        "stats": last.stats,
        "block_size": last.block_size,
    }


def same_tokens(pair: Any, prompt: str, answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Whether all answers are the first one. If not, of the worst difference: the index of the token, the gap in
    log-probability there as `margin`, and whether that is a "near-tie" or a "bug"."""
    from dflash_mlx import compare
    from dflash_mlx.cli import chat_ids
    from dflash_mlx.generate import encode

    model, tokenizer, _ = pair
    ids = encode(tokenizer, chat_ids(tokenizer, prompt, None, raw=False))
    expected, *others = dict.fromkeys(tuple(answer) for answer in answers)
    if not others:
        return {"identical": True, "diverges_at": None}
    found = [compare(model, ids, expected, other) for other in others]
    worst = min(found, key=lambda each: (each.kind != "bug", each.index))
    print(f"{worst.kind}: {worst.explanation}", file=sys.stderr)
    return {"identical": False, "diverges_at": worst.index, "margin": worst.gap, "divergence": worst.kind}


def measured(item: dict[str, str], trials: list[dict[str, Any]]) -> dict[str, Any]:
    """One prompt's row: times of the arms, speed-ups over plain, acceptance."""
    request = {arm: [t["request_s"] for t in trials if t["arm"] == arm] for arm in ARMS}
    decode = {arm: [t["decode_s"] for t in trials if t["arm"] == arm] for arm in ARMS}
    drafted = next(t for t in trials if t["arm"] == "dflash")
    stats, auto = drafted["stats"], next(t for t in trials if t["arm"] == "auto")["stats"]
    return {
        "category": item["category"],
        "prompt": item["prompt"],
        "generation_tokens": len(trials[0]["tokens"]),
        "request_s": request,
        "decode_s": decode,
        "speedup_dflash": sum(request["plain"]) / sum(request["dflash"]),
        "speedup_auto": sum(request["plain"]) / sum(request["auto"]),
        "block_size": drafted["block_size"],
        "cycles": stats.cycles,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "plain_share_auto": auto.plain_steps / auto.cycles if auto.cycles else None,
    }


def categories(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["category"] for row in rows))


def pool(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pooled over prompts: total-time speed-ups on both clocks, and the field's acceptance figures."""
    total = {key: {arm: sum(sum(row[key][arm]) for row in rows) for arm in ARMS} for key in ("request_s", "decode_s")}
    cycles, accepted = sum(r["cycles"] for r in rows), sum(r["accepted"] for r in rows)
    drafted = sum(r["drafted"] for r in rows)
    result: dict[str, Any] = {
        "prompts": len(rows),
        "identical": sum(row["identical"] for row in rows),
        "mean_acceptance_length": 1 + accepted / cycles if cycles else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
    }
    for arm in ARMS[1:]:
        single = [row[f"speedup_{arm}"] for row in rows]
        result[arm] = {
            "speedup_request": total["request_s"]["plain"] / total["request_s"][arm],
            "speedup_decode": total["decode_s"]["plain"] / total["decode_s"][arm],
            "median": float(np.median(single)),
            "min": min(single),
            "max": max(single),
        }
    return result


def summary(result: dict[str, Any]) -> list[str]:
    """The table for a terminal; `bench.report` makes the README's from the same JSON."""
    lines = [
        f"{'category':10s} {'n':>3s} {'same':>5s} {'tokens/cycle':>13s} {'dflash':>7s} {'auto':>7s}  (request time)"
    ]
    for name, row in [*result["categories"].items(), ("all", result["all"])]:
        lines.append(
            f"{name:10s} {row['prompts']:3d} {row['identical']:5d} {row['mean_acceptance_length'] or 0:13.2f} "
            f"{row['dflash']['speedup_request']:6.2f}x {row['auto']['speedup_request']:6.2f}x"
        )
    whole = result["all"]
    lines.append(
        f"request-time ratio to plain: dflash {1 / whole['dflash']['speedup_request']:.3f}, "
        f"auto {1 / whole['auto']['speedup_request']:.3f}"
    )
    return lines


if __name__ == "__main__":
    sys.exit(main())
