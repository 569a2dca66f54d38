"""Write the tables of the README and of the pages from what is committed, between their markers; a test compares.

python -m bench.report [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import chat_page, demo_page
from .record import load

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
TRAINING = ROOT / "bench" / "demo-draft"
RUNS = ("first", "second")
"""Of the demo draft: each begins with the draft of the one before it."""


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


def training_table(runs: Sequence[Sequence[dict[str, Any]]]) -> str:
    """How the demo draft got better: every evaluation of every run, with the blocks and the time until then."""
    lines = [
        "| run, step | blocks | hours of training | first token right | tokens per cycle, code | all |",
        "|---|---|---|---|---|---|",
    ]
    blocks, seconds = 0, 0.0
    for name, records in zip(RUNS, runs, strict=True):
        steps = [record for record in records if record["kind"] == "step"]
        for record in _evaluations(records):
            done = [each for each in steps if each["step"] <= record["step"]][-1]
            lines.append(
                f"| {name}, {record['step']} | {blocks + done['blocks']:,} "
                f"| {(seconds + done['seconds']) / 3600:.1f} | {record['accuracy'][0]:.0%} "
                f"| {record['categories']['code']['tokens_per_cycle']:.2f} | {record['tokens_per_cycle']:.2f} |"
            )
        blocks, seconds = blocks + steps[-1]["blocks"], seconds + steps[-1]["seconds"]
    starts = [next(record for record in records if record["kind"] == "start") for records in runs]
    prompts = sum(each["prompts"] for each in _evaluations(runs[-1])[-1]["categories"].values())
    answers = " and then ".join(f"{start['answers']:,}" for start in starts)
    lines += [
        "",
        f"The demo draft: {starts[-1]['parameters'] / 1e6:.1f} million parameters for a target of 135 million, "
        f"{answers} answers, blocks of {starts[-1]['block_size']}, on {prompts} answers on topics that "
        "it never saw. Hours are of one thread of a machine that did other work too. "
        "The rate falls from step to step, which the last rows of a run show; the second begins with the draft of the "
        "first, with more answers. "
        "[bench/demo-draft](../bench/demo-draft/README.md) has the recipes, the answers and the logs.",
    ]
    return "\n".join(lines)


def _evaluations(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "evaluation"]


def result(name: str) -> dict[str, Any]:
    """A committed result."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def logs() -> list[list[dict[str, Any]]]:
    """Of the demo draft's trainings."""
    return [[json.loads(line) for line in (TRAINING / run / "log.jsonl").read_text().splitlines()] for run in RUNS]


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "demo": lambda: demo_page.table(load(RESULTS / "demo.json")),
        "overhead": lambda: overhead_table(result("overhead")),
        "tour": lambda: chat_page.gallery(chat_page.tour(), ROOT / "README.md", chat_page.README),
    },
    "docs/chat.md": {
        "tour": lambda: chat_page.gallery(chat_page.tour(), ROOT / "docs" / "chat.md"),
        "keys": chat_page.keys,
        "commands": chat_page.commands,
    },
    "docs/training.md": {"demo-training": lambda: training_table(logs())},
}


def render(page: str, text: str) -> str:
    """A page's text with every block made anew."""
    for name, make in PAGES[page].items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
        match = pattern.search(text)
        if not match:
            raise SystemExit(f"{page} has no markers <!-- {name}:begin --> and <!-- {name}:end -->.")
        text = f"{text[: match.start()]}{match[1]}{make()}\n{match[2]}{text[match.end() :]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    check, differs = "--check" in (sys.argv[1:] if argv is None else argv), False
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        new = render(page, old)
        if new == old:
            continue
        differs = True
        if check:
            print(f"Tables of {page} differ: run python -m bench.report")
        else:
            path.write_text(new)
    if not check:
        demo_page.draw(load(RESULTS / "demo.json"), RESULTS)
    if check and not differs:
        print("The tables agree.")
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
