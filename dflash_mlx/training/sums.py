"""Sums over the steps that a line of the log is about, and the means that it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def added(window: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of two mappings, entry by entry."""

    def add(name: str, value: Any) -> Any:
        was = window.get(name)
        if was is None:
            return value
        return [a + b for a, b in zip(was, value, strict=True)] if isinstance(value, list) else was + value

    return {name: add(name, value) for name, value in more.items()}


def means(window: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says of the sums of some steps; nothing but nulls if none of them counted."""
    if not window:
        return {"loss": None, "kl": None, "accuracy": None, "grad_norm": None}
    weight = window["weight"] or 1.0
    accuracy = [right / count if count else None for right, count in zip(window["right"], window["count"], strict=True)]
    return {
        "loss": window["loss"] / weight,
        "kl": window["kl"] / weight,
        "accuracy": accuracy,
        "grad_norm": window["norm"] / window["steps"],
    }
