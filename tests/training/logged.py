"""Records as a training logs them, made up: losses fall, accuracies and acceptance rise."""

from __future__ import annotations

from typing import Any

CATEGORIES = ("code", "chat")


def start(step: int = 0, steps: int = 400) -> dict[str, Any]:
    return {"kind": "start", "step": step, "steps": steps, "target": "acme/[bold]tiny$1$"}


def step(number: int, positions: int = 3, **changes: Any) -> dict[str, Any]:
    made = {
        "kind": "step",
        "step": number,
        "epoch": number / 100,
        "loss": 6 - number / 100,
        "kl": 1.0,
        "accuracy": [number / 1000 / (1 + k) for k in range(positions)],
        "grad_norm": 0.75,
        "lr": 6e-4,
        "blocks": number * 64,
        "seconds": number * 2.0,
    }
    return made | changes


def evaluation(number: int, rate: float, best: bool, positions: int = 3) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": number,
        "accuracy": [0.5 / (1 + k) for k in range(positions)],
        "expected_length": rate,
        "tokens_per_cycle": rate,
        "categories": {
            name: {"prompts": 2, "tokens": 64, "cycles": 30, "tokens_per_cycle": rate + 0.25 - 0.5 * i}
            for i, name in enumerate(CATEGORIES)
        },
        "best": best,
        "seconds": 5.0,
    }


def run() -> list[dict[str, Any]]:
    """300 of 400 steps, evaluated at 100 (1.50), 200 (2.11, the best) and 300 (2.02)."""
    records = [start()]
    for number in range(1, 301):
        records.append(step(number))
        if number % 100 == 0:
            records.append(evaluation(number, {100: 1.50, 200: 2.11, 300: 2.02}[number], number < 300))
    return records
