"""Results of other programs, with their definitions converted into this package's, so that like stands beside like.

    dflash-mlx       bstnxbt's benchmark results (JSON): acceptance_ratio is A/N there, tokens_per_cycle N/R
    z-lab            what z-lab's benchmark prints (text): lengths meaned over requests, rates of mean times
    llama.cpp        responses of its server, or of one like it, with `timings` (JSON, or JSON lines)
    dflash-bench     a record of this package
    neutral          JSON of anybody, which names the definition of each of its numbers (README.md here)

Nothing is guessed: a number whose definition does not lead to one of ours stays as it was called, and is not compared.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dflash_mlx.files import whole_file

from . import record as records
from .form import BenchError, plain
from .peers import Number, Peer, of_length, of_share, own, peer_table
from .served import of_response
from .tables import rich_group

KIND = "dflash-peer"
SCHEMA = 1
MEANINGS = {
    "generated/(last-first)": "mlx_lm_tps",
    "(generated-1)/(last-first)": "decode_tps",
    "generated/(last-request)": "request_tps",
    "1+accepted/cycles": "mean_acceptance_length",
    "accepted/drafted": "draft_acceptance_rate",
    "accepted/generated": "accepted_share",
    "(first-request)": "ttft_s",
    "max memory": "peak_memory_gb",
}
"""Definitions that the neutral form may name, and what each is here. accepted/generated counts tokens of cycles."""


def read_peers(file: Path) -> list[Peer]:
    """Every arm of a file, whose format is seen by its content.

    Raises:
        BenchError: none of the formats above.
    """
    text = file.read_text("utf-8", "replace")
    rows = _json_rows(text)
    if rows is None and "Average Acceptance length:" in text:
        return _zlab(file.name, text)
    first = rows[0] if rows else None
    if isinstance(first, dict):
        if first.get("kind") == records.KIND:
            return own(file.name, records.from_json(first))
        if first.get("kind") == KIND:
            return _neutral(file.name, first)
        if isinstance(first.get("runs"), list) and isinstance(first.get("config"), dict):
            return _dflash_mlx(file.name, first)
        if rows and all(isinstance(row, dict) and isinstance(row.get("timings"), dict) for row in rows):
            return [_timings(file.name, rows)]
    raise BenchError(
        f"{file} is of no format that is known here, and a number is worth nothing without its definition. Write it as "
        f"JSON with `kind`: {KIND!r}, which names the definitions (bench/README.md)."
    )


def _json_rows(text: str) -> list[Any] | None:
    """The value of a JSON file in a list, or those of JSON lines; None if it is neither."""
    try:
        value = json.loads(text)
        return value if isinstance(value, list) else [value]
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return None


def _dflash_mlx(file: str, value: Mapping[str, Any]) -> list[Peer]:
    """Medians over its runs. Its rates are tokens over time without prefill: the first token counts, as in mlx_lm."""
    config, hardware = value["config"], value.get("hardware") or {}
    conditions = _texts(hardware, "chip", "memory_gb", "mlx_version")
    conditions |= _texts(config, "target_model", "draft_model", "max_new_tokens", "prompt_tokens", "block_tokens")
    conditions["prompts"] = f"1, {len(value['runs'])} runs"
    drafts = config["block_tokens"] - 1 if isinstance(config.get("block_tokens"), int) else None
    made = []
    for arm in ("baseline", "dflash"):
        runs = [run[arm] for run in value["runs"] if isinstance(run, dict) and isinstance(run.get(arm), dict)]
        if not runs:
            continue
        numbers: dict[str, Number] = {}
        if (rate := _median(runs, "generation_tps")) is not None:
            numbers["mlx_lm_tps"] = Number(rate, f"generation_tps {rate:.2f}", "tokens over time without prefill")
        if (wait := _median(runs, "ttft_ms")) is not None:
            numbers["ttft_s"] = Number(wait / 1e3, f"ttft_ms {wait:.1f}", "/1000")
        if (peak := _median(runs, "peak_memory_gb")) is not None:
            numbers["peak_memory_gb"] = Number(peak, f"peak_memory_gb {peak:.2f}")
        if (ratio := _median(runs, "acceptance_ratio")) is not None:
            numbers |= of_share(ratio, f"acceptance_ratio {ratio:.4f}, accepted/generated", drafts)
        elif (length := _median(runs, "tokens_per_cycle")) is not None:
            numbers |= of_length(length, f"tokens_per_cycle {length:.2f}", drafts=drafts)
        made.append(Peer("dflash-mlx", file, arm, conditions, numbers))
    if not made:
        raise BenchError(f"{file} has no runs with numbers in them. Nothing can be shown: take a finished result.")
    return made


_ZLAB = {
    "Baseline throughput": "baseline",
    "DFlash throughput": "dflash",
}


def _zlab(file: str, text: str) -> list[Peer]:
    """Its throughput is 1 over the mean time per token; its length the mean of requests, over all their cycles."""
    rates = {arm: _printed(text, name) for name, arm in _ZLAB.items()}
    length = _printed(text, "Average Acceptance length")
    made = []
    for arm, rate in rates.items():
        if rate is None:
            continue
        peer = Peer("z-lab", file, arm, {"mean": "of requests"}, {}, {"1/mean time per token (tokens/s)": rate})
        if arm == "dflash" and length is not None:
            peer.numbers.update(of_length(length, f"Average Acceptance length {length:.2f}", "mean of requests"))
        made.append(peer)
    if not made:
        raise BenchError(f"{file} has none of the rates that z-lab's benchmark prints. Give all that it printed.")
    return made


def _printed(text: str, name: str) -> float | None:
    found = re.search(rf"^{re.escape(name)}:\s*([\d.,]*\d)", text, re.M)
    return float(found[1].replace(",", "")) if found else None


def _timings(file: str, rows: Sequence[Mapping[str, Any]]) -> Peer:
    """Sums over responses. predicted_ms begins with the first token, which predicted_n counts."""
    timings = [row["timings"] for row in rows]
    tokens, millis = _sum(timings, "predicted_n"), _sum(timings, "predicted_ms")
    waits = _sum(timings, "prompt_ms")
    numbers: dict[str, Number] = {}
    if tokens and millis:
        numbers["mlx_lm_tps"] = Number(tokens / millis * 1e3, f"predicted_n {tokens:g} / predicted_ms {millis:.0f}")
    if tokens and millis and waits is not None:
        theirs = f"predicted_n {tokens:g} / (prompt_ms {waits:.0f} + predicted_ms {millis:.0f})"
        numbers["request_tps"] = Number(tokens / (millis + waits) * 1e3, theirs, "prompt and answer added")
    said = [found for row in rows if (found := of_response([row], row["timings"].get("predicted_n") or 0)) is not None]
    if said:
        cycles, accepted = sum(each.cycles for each in said), sum(each.accepted for each in said)
        drafted = sum(each.drafted or 0 for each in said)
        counts = f"draft_n {drafted}, accepted {accepted}, cycles {cycles}"
        numbers |= of_length(1 + accepted / cycles, counts, said[0].definition)
        numbers["draft_acceptance_rate"] = Number(accepted / drafted, counts, said[0].definition)
    return Peer("llama.cpp", file, "server", {"responses": str(len(rows))}, numbers)


def _neutral(file: str, value: Mapping[str, Any]) -> list[Peer]:
    if not isinstance(value.get("schema"), int) or not 1 <= value["schema"] <= SCHEMA:
        raise BenchError(
            f"{file} has schema {value.get('schema')!r}, and this version reads 1 to {SCHEMA}. What it does not know "
            "it would show wrongly: use a newer version."
        )
    try:
        source, conditions = str(value["source"]), {k: str(v) for k, v in (value.get("conditions") or {}).items()}
        made = [
            _neutral_arm(Peer(source, file, str(arm["name"]), conditions), arm["numbers"], arm.get("drafts_per_cycle"))
            for arm in value["arms"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise BenchError(
            f"{file} has not the form of {KIND!r} ({type(error).__name__}: {error}), so its numbers have no meaning "
            "here. bench/README.md shows one."
        ) from error
    return made


def _neutral_arm(peer: Peer, numbers: Mapping[str, Any], drafts: int | None) -> Peer:
    """Converted where the definition is known; what follows from others does not replace what was given."""
    derived: dict[str, Number] = {}
    for name, each in numbers.items():
        value, definition = float(each["value"]), each["definition"]
        theirs, ours = f"{name} {value:g}", MEANINGS.get(definition)
        if ours is None:
            peer.other[f"{name} ({definition})"] = value
            continue
        peer.numbers[ours] = Number(value, theirs)
        if ours == "accepted_share":
            derived |= of_share(value, theirs, drafts)
        elif ours == "mean_acceptance_length":
            derived |= of_length(value, theirs, drafts=drafts)
    peer.numbers.update({name: found for name, found in derived.items() if name not in peer.numbers})
    return peer


def to_json(peers: Sequence[Peer]) -> list[dict[str, Any]]:
    return [plain(peer) for peer in peers]


def import_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does."""
    from dflash_mlx.cli import guarded

    made = argparse.ArgumentParser(
        prog="dflash-metal bench import", description="Results of other programs, with definitions converted."
    )
    made.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results; our records are shown beside them")
    made.add_argument("--json", action="store_true", help="print numbers, originals and conversions as JSON")
    made.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    made.add_argument("--out", type=Path, metavar="FILE", help="write what --json prints")
    args = made.parse_args(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    peers = [peer for file in args.files for peer in read_peers(file)]
    text = json.dumps(to_json(peers), ensure_ascii=False, allow_nan=False, indent=1)
    if args.out is not None:
        with whole_file(args.out) as part:
            part.write_text(text + "\n", "utf-8")
    if args.json:
        print(text)
    elif args.markdown:
        print(peer_table(peers).markdown())
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(rich_group([peer_table(peers)], [], console.width))
    return 0


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(run[name]) for run in runs if isinstance(run.get(name), int | float)]
    return median(values) if values else None


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row.get(name) for row in rows]
    known = [float(value) for value in values if isinstance(value, int | float)]
    return sum(known) if len(known) == len(rows) else None


def _texts(value: Mapping[str, Any], *names: str) -> dict[str, str]:
    return {name: str(value[name]) for name in names if value.get(name) is not None}


if __name__ == "__main__":
    raise SystemExit(import_main())
